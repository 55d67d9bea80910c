"""Dialogs: what an end takes, knows, says, forgets."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

FACTS, ASSEMBLY, ENDPOINTS, CONVERSATIONS = (
    "saf/dialogs/facts.py",
    "saf/dialogs/assembly.py",
    "saf/dialogs/endpoints.py",
    "saf/dialogs/conversations.py",
)
GROUPS, ARRIVAL, STATEMENTS = (
    "saf/dialogs/groups.py",
    "saf/dialogs/arrival.py",
    "saf/dialogs/statements.py",
)
ENDS, DIALOGS, ERRORS, FRAGMENTS = (
    "contract/test_dialog_endpoints.py",
    "contract/test_dialogs.py",
    "contract/test_dialog_errors.py",
    "contract/test_dialog_fragments.py",
)
OF_GROUPS = "contract/test_dialog_groups.py"
PARTS = f"{ENDS}::test_a_body_whose_parts_do_not_come_to_what_the_last_one_says_is_an_error"
ANY_ORDER = f"{DIALOGS}::test_a_repeat_is_dropped_and_what_is_ahead_waits_for_what_is_missing"
NOT_WAITED_FOR = f"{DIALOGS}::test_an_error_does_not_wait_for_what_is_missing"
OVERTAKEN = (
    f"{FRAGMENTS}::test_fragments_that_an_error_has_overtaken_are_counted_once_and_not_as_received"
)
SAID_AFTER = (
    f"{DIALOGS}::test_after_this_end_has_ended_nothing_can_be_sent_and_what_comes_is_dropped"
)
LIFETIME = (
    f"{ERRORS}::"
    "test_at_the_end_of_its_lifetime_both_ends_get_an_error_and_operations_fail_until_it_is_ended"
)
FIRST_GIVEN_UP = (
    f"{ERRORS}::test_a_dialog_whose_first_message_was_given_up_fails_at_both_ends_"
    "with_all_that_waits_for_it"
)

SET_BACK = "contract/test_dialogs_set_back.py"

MUTANTS: list[Mutant] = [
    mutant(
        "of a pipe only what comes first is sent",
        "saf/dialogs/dialog.py",
        "body = fill(body, max_bytes + 1)",
        "body = body.read(max_bytes + 1)",
        f"{FRAGMENTS}::test_of_a_pipe_a_monolog_sends_all_in_one_piece",
    ),
    mutant(
        "a code of an error has any size",
        "saf/dialogs/dialog.py",
        "if not 0 < code <= HIGHEST_CODE:",
        "if not 0 < code:",
        f"{DIALOGS}::test_reserved_types_and_codes_are_not_the_applications",
    ),
    mutant(
        "a contract says nothing of the versions of its types",
        "saf/dialogs/contracts.py",
        "type_.version != type_versions.get(type_.name, type_.version)",
        "type_.version < 0",
        f"{ERRORS}::test_a_version_never_changes_and_a_dialog_keeps_the_one_that_it_began_with",
    ),
    mutant(
        "a body that its schema cannot check holds its shard up",
        "saf/dialogs/contracts.py",
        "    except Exception as error:\n",
        "    except KeyError as error:\n",
        f"{ERRORS}::test_a_body_that_its_schema_cannot_check_fails_its_dialog_and_holds_nobody_up",
    ),
    mutant(
        "a schema may refer to what is not there",
        "saf/dialogs/contracts.py",
        "    for inner in resource.subresources():\n",
        "    for inner in ():\n",
        f"{ERRORS}::test_a_message_type_that_cannot_be_is_refused",
    ),
    mutant(
        "a file of text is sent by its characters",
        "saf/dialogs/dialog.py",
        "    if isinstance(pieces[0], str):\n",
        "    if pieces[0] is None:\n",
        f"{FRAGMENTS}::test_a_file_of_text_is_refused_before_any_of_it_is_sent",
    ),
    mutant(
        "an End fails if its dialog was ended in the same delivery",
        ARRIVAL,
        "    with suppress(DialogEnded):\n",
        "    with suppress(KeyError):\n",
        f"{ERRORS}::"
        "test_the_end_of_a_dialog_that_a_handler_has_ended_in_the_same_delivery_fails_nothing",
    ),
    mutant(
        "who listens in ends dialogs of others",
        "saf/receiving/retries.py",
        "    if reader.converses:\n",
        "    if reader.name:\n",
        "contract/test_hostile_receiving.py"
        "::test_who_listens_in_ends_no_dialog_that_has_a_message_which_cannot_be_received",
    ),
    mutant(
        "a dead letter of a dialog stops its key, which other dialogs have as well",
        "saf/receiving/delivery.py",
        "            message.dialog is not None and message.dialog.handle in self._failed\n",
        "            bool(self._failed)\n",
        f"{ERRORS}::test_a_dead_letter_of_a_dialog_takes_nothing_else_of_its_key_with_it",
    ),
    mutant(
        "what comes with a dead letter of its dialog is not counted",
        "saf/receiving/delivery.py",
        "            return Dropped(reason=Reason.ENDED)\n",
        "            return HANDLED\n",
        "contract/test_dialog_errors.py"
        "::test_what_comes_after_a_dead_letter_of_its_dialog_counts_as_dropped_also_if_it_comes_with_it",
    ),
    mutant(
        "an end comes before what was said earlier",
        FACTS,
        "message.sequence > facts.receive_sequence + 1:",
        "message.sequence > facts.receive_sequence + 1 and message.message_type != END:",
        f"{ENDS}::test_an_end_waits_for_what_was_said_before_it",
    ),
    mutant(
        "a repeat is taken",
        FACTS,
        "message.sequence <= facts.receive_sequence:",
        "message.sequence < facts.receive_sequence:",
        ANY_ORDER,
    ),
    mutant(
        "what was sent before a repair counts as known to the other end",
        "saf/dialogs/set_back.py",
        "    return min([endpoint.sent, *(after for _, after in endpoint.lineage[-1:])])\n",
        "    return endpoint.sent\n",
        f"{SET_BACK}::"
        "test_both_ends_name_all_numbers_that_stand_for_two_messages_where_few_were_sent_anew",
    ),
    mutant(
        "an error waits for what is missing",
        FACTS,
        "    if message.message_type == ERROR:\n        # what",
        "    if message.message_type == ERROR and message.sequence == 1:\n        # what",
        NOT_WAITED_FOR,
    ),
    mutant(
        "fragments that an Error has overtaken count as received",
        FACTS,
        "(received if next_ else facts)",
        "received",
        OVERTAKEN,
    ),
    mutant(
        "an Error from the other end hides this end's own Error",
        ARRIVAL,
        "if failed_before and message.message_type == ERROR and message.sequence is None:",
        "if False:",
        f"{ERRORS}::test_an_end_that_has_failed_hears_so_though_the_other_ends_error_comes_with_it",
        f"{SET_BACK}::"
        "test_an_end_hears_that_it_had_failed_when_it_learns_that_the_other_one_was_set_back",
    ),
    mutant(
        "what comes after the end here is handed out",
        FACTS,
        "    wanted = Verdict.DROP if ended_here else Verdict.TAKE\n    received",
        "    wanted = Verdict.TAKE\n    received",
        SAID_AFTER,
    ),
    mutant(
        "what comes after the lifetime is handed out",
        FACTS,
        "    if over:\n",
        "    if over and ended_here:\n",
        f"{ERRORS}::test_a_dialog_that_arrives_after_its_lifetime_is_an_error_there",
    ),
    mutant(
        "a timer that was replaced rings",
        FACTS,
        "if facts.timer != message.message_id or facts.error_code is not None:",
        "if facts.timer is None or facts.error_code is not None:",
        f"{ERRORS}::test_a_timer_is_a_message_to_oneself_and_a_newer_one_replaces_it",
    ),
    mutant(
        "fragments are told by their size only",
        ASSEMBLY,
        "(fragments + 1, size + super().size) == (self.fragments, self.size)",
        "size + super().size == self.size",
        PARTS,
    ),
    mutant(
        "fragments are told by their number only",
        ASSEMBLY,
        "(fragments + 1, size + super().size) == (self.fragments, self.size)",
        "fragments + 1 == self.fragments",
        PARTS,
    ),
    mutant(
        "handled fragments stay",
        ASSEMBLY,
        "        self._raw.execute(FORGET, self._others)\n",
        "        pass\n",
        f"{FRAGMENTS}::test_large_and_small_messages_are_received_in_the_order_of_sending",
    ),
    mutant(
        "an endpoint is not locked",
        ENDPOINTS,
        "FROM {OF_THESE} ORDER BY handle FOR NO KEY UPDATE OF c",
        "FROM {OF_THESE} ORDER BY handle",
        f"{ENDS}::test_a_receiver_waits_for_who_is_ending_the_dialog_and_then_drops_what_came",
    ),
    mutant(
        "a group is not locked",
        ENDPOINTS,
        "ORDER BY group_id FOR NO KEY UPDATE\n",
        "ORDER BY group_id\n",
        f"{ENDS}::test_an_endpoint_and_its_group_are_in_one_hand_until_its_delivery_ends",
    ),
    mutant(
        "an end that was ended here is taken back",
        ENDPOINTS,
        "WHERE c.handle = r.handle AND NOT c.ended_here",
        "WHERE c.handle = r.handle",
        f"{ENDS}::"
        "test_an_end_that_was_ended_here_stays_closed_though_its_last_message_is_tried_again",
    ),
    mutant(
        "a timer that was started is taken back",
        ENDPOINTS,
        "timer = coalesce(c.timer, r.timer), {",
        "timer = r.timer, {",
        f"{ERRORS}::test_a_timer_that_was_started_stays_when_a_later_message_is_set_aside",
    ),
    mutant(
        "a closed conversation is forgotten as its messages are",
        CONVERSATIONS,
        "seconds = max(retention_seconds, KEPT_SECONDS)",
        "seconds = retention_seconds",
        f"{ENDS}::test_a_closed_conversation_is_remembered_for_a_day_whatever_the_retention",
    ),
    mutant(
        "an open conversation is forgotten",
        CONVERSATIONS,
        "WHERE state = 'closed' AND extract",
        "WHERE state IS NOT NULL AND extract",
        f"{ENDS}::test_a_conversation_that_is_open_is_not_forgotten_and_neither_is_a_group_in_use",
    ),
    mutant(
        "fragments of ends that go on are dropped",
        CONVERSATIONS,
        "AND (c.ended_here OR c.error_code IS NOT NULL)",
        "AND (c.ended_here OR true)",
        f"{FRAGMENTS}::test_what_has_come_of_a_body_goes_when_the_conversation_is_over",
    ),
    mutant(
        "conversations are listed whatever their state",
        CONVERSATIONS,
        "OR c.state = ANY (CAST(%(states)s AS text[])))",
        "OR c.state <> ALL (CAST(%(states)s AS text[])))",
        f"{OF_GROUPS}::test_conversations_are_listed_as_they_stand",
    ),
    mutant(
        "two have the state of a group at a time",
        GROUPS,
        "WHERE handle = CAST(%(handle)s AS uuid))\nFOR NO KEY UPDATE",
        "WHERE handle = CAST(%(handle)s AS uuid))",
        f"{ENDS}::test_the_state_of_a_group_is_one_transactions_at_a_time",
    ),
    mutant(
        "a dialog is moved while another one has its group in hand",
        GROUPS,
        "ORDER BY group_id FOR NO KEY UPDATE",
        "ORDER BY group_id",
        f"{ENDS}::test_a_dialog_leaves_a_group_only_when_nobody_has_it_in_hand",
    ),
    mutant(
        "a dialog that is moved to nobody stays where it is",
        GROUPS,
        '"group_id": None if related else uuid4(),',
        '"group_id": None,',
        f"{OF_GROUPS}::test_a_group_has_a_place_for_the_applications_state",
    ),
    mutant(
        "what waited for a dialog that has ended stays",
        ARRIVAL,
        "SELECT parked_id, ended OR message_type",
        "SELECT parked_id, message_type",
        f"{ENDS}::test_what_waited_for_a_message_that_is_missing_goes_when_the_dialog_is_over",
    ),
    mutant(
        "a message that is given up ends nothing",
        ARRIVAL,
        "message.dialog.fail(enter(self.raw), Code.QUARANTINED, text)",
        "text.strip()",
        f"{FRAGMENTS}::test_a_body_that_is_given_up_ends_the_dialog_with_an_error",
    ),
    mutant(
        "a dialog speaks after its lifetime",
        STATEMENTS,
        '\'conversing\') AND NOT {OVER}"""',
        '\'conversing\')"""',
        LIFETIME,
    ),
    mutant(
        "an end is said twice",
        STATEMENTS,
        """    when="NOT ended_here",
    said="send_sequence > 0 AND error_code IS NULL",""",
        """    when="true",
    said="send_sequence > 0 AND error_code IS NULL",""",
        SAID_AFTER,
    ),
    mutant(
        "an error does not introduce its dialog",
        STATEMENTS,
        "(send_sequence = 1 OR error_code IS NOT NULL)",
        "(send_sequence = 1 OR error_code = {Code.SET_BACK:d})",
        FIRST_GIVEN_UP,
        f"{SET_BACK}::"
        "test_a_dialog_that_had_failed_fails_again_at_a_target_that_has_no_memory_of_it",
    ),
    mutant(
        "nobody is told of a dead letter that came with an error",
        ARRIVAL,
        "if message in self.before and (is_error or isinstance(outcome, Parked)):",
        "if message in self.before and isinstance(outcome, Parked):",
        f"{ERRORS}::test_both_ends_are_told_of_a_dead_letter_that_came_with_an_error_of_its_dialog",
    ),
    mutant(
        "an error does not begin a dialog",
        ENDPOINTS,
        "message.message_type not in (COMPARE, ERROR):",
        "message.message_type != COMPARE:",
        FIRST_GIVEN_UP,
    ),
    mutant(
        "a target does not hear of a first message that is given up after the lifetime",
        STATEMENTS,
        "lost.sequence = 1 AND c.error_code =",
        "lost.sequence = 0 AND c.error_code =",
        f"{ERRORS}::"
        "test_a_dialog_whose_first_message_was_given_up_after_its_lifetime_is_over_at_the_target_too",
    ),
    mutant(
        "a dialog without a word said bothers the other end",
        STATEMENTS,
        'HEARD_OF = "(send_sequence > 0 OR NOT is_initiator)"',
        'HEARD_OF = "(true)"',
        f"{DIALOGS}::test_a_dialog_that_ends_before_it_has_sent_anything_bothers_nobody",
    ),
    mutant(
        "a closed end is in another state",
        "migrations/baseline/dialogs.sql",
        "WHEN ended_here AND (ended_there OR error_code IS NOT NULL) THEN 'closed'",
        "WHEN ended_here AND ended_there THEN 'closed'",
        "contract/test_dialog_model.py::"
        "test_the_state_that_the_database_finds_is_that_of_the_table",
    ),
]
