"""The dashboard: who gets in, what is hidden, and decisions about many."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

ACCESS, PAGES, BULK = "ui/test_ui_access.py", "ui/test_ui_pages.py", "contract/test_bulk.py"
DECIDED = "contract/test_decide_parked.py"
LOOKS = "unit/test_stretches.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a form needs no CSRF token",
        "saf/ui/application.py",
        'if not site.access.right_csrf(visitor, form.get("csrf", [""])[-1]):',
        "if not form:",
        f"{ACCESS}::test_a_form_without_the_sessions_own_csrf_token_does_nothing",
    ),
    mutant(
        "who may view may operate",
        "saf/ui/application.py",
        "    if not visitor.operates:\n",
        "    if not visitor.name:\n",
        f"{ACCESS}::test_who_may_view_cannot_operate",
    ),
    mutant(
        "a login keeps the session that the browser came with",
        "saf/ui/application.py",
        "            site.access.logout(request)\n            number",
        "            number",
        f"{ACCESS}::test_a_second_login_and_a_logout_end_the_session_before",
    ),
    mutant(
        "anybody is believed to be the reverse proxy",
        "saf/ui/access.py",
        "self._ui.user_header is None or not self._from_proxy(request)",
        "self._ui.user_header is None",
        f"{ACCESS}::test_a_proxys_user_is_believed_from_the_proxy_alone",
    ),
    mutant(
        "a login leads to another site",
        "saf/ui/application.py",
        'if wanted.startswith("//") or "\\\\" in wanted or urlsplit(wanted).netloc:',
        "if len(wanted) > 1000:",
        f"{ACCESS}::test_a_login_leads_nowhere_but_into_the_dashboard",
    ),
    mutant(
        "what dies after the count is decided about too",
        "saf/ui/choosing.py",
        "counted[name] = broker, replace(which, through=through[name])",
        "counted[name] = broker, which",
        f"{PAGES}::test_what_dies_between_the_count_and_the_decision_is_left_alone",
    ),
    mutant(
        "values of headers are shown that are to be hidden",
        "saf/ui/redaction.py",
        "HIDDEN if self._is_hidden(name) else shown(_text(value))",
        "shown(_text(value))",
        f"{PAGES}::test_bodies_are_hidden_unless_they_are_allowed_and_redaction_applies_everywhere",
    ),
    mutant(
        "a decision about many does not end where it began",
        "saf/operating/bulk.py",
        "chosen = chosen.until_now(connection)",
        "chosen.until_now(connection)",
        f"{BULK}::test_what_dies_after_the_decision_is_not_touched",
    ),
    mutant(
        "a receiver's dead letter is redirected",
        "saf/setaside/dead.py",
        "WHEN s.log = 'inbox' AND %(to)s::text IS NOT NULL THEN 'arrived'",
        "WHEN s.log = 'inbox' AND %(to)s::text = '' THEN 'arrived'",
        f"{BULK}::test_a_receivers_dead_letter_is_not_redirected",
    ),
    mutant(
        "a person decides about parked messages that a forwarder has in hand",
        "saf/engine/releasing.py",
        "with self.source_session.in_hand(destination):",
        "if destination:",
        f"{DECIDED}::test_nobody_decides_about_what_a_forwarder_has_in_hand",
    ),
    mutant(
        "a task that has lost its session goes on with what it has read",
        "saf/engine/parked_lanes.py",
        "if self.source_session.let_slip():",
        "if self.source_session.let_slip() and self.over:",
        f"{DECIDED}::test_a_task_that_loses_its_session_leaves_alone_what_was_decided_meanwhile",
    ),
    mutant(
        "what the open batch has set aside is discarded",
        "saf/setaside/parked_messages.py",
        'WHEN {OF_BATCH.format(one="p", at="parked_at")} THEN \'batch\'',
        'WHEN {OF_BATCH.format(one="p", at="parked_at")} THEN NULL',
        f"{DECIDED}::test_what_the_open_batch_has_set_aside_beyond_its_position_stays",
    ),
    mutant(
        "what a receiver has in hand is discarded",
        "saf/operating/decide_parked.py",
        "for shard, is_owned in fetch(connection, CLAIM, claimed):",
        "for shard, is_owned in [(one, False) for one in shards[subscription_id]]:",
        f"{DECIDED}::test_nobody_decides_about_what_a_receiver_has_in_hand",
    ),
    mutant(
        "a key that a member may have in memory is discarded",
        "saf/setaside/parked_messages.py",
        "AND b.next_attempt_at > clock_timestamp() + make_interval(secs => {REST_SECONDS}))",
        ")",
        f"{DECIDED}::test_of_a_members_shards_only_keys_that_rest_are_decided_about",
    ),
    mutant(
        "a lane goes in which a member may be about to park",
        "saf/operating/decide_parked.py",
        'if log == "outbox" or (subscription_id, shard) not in owned:',
        "if shard is not None:",
        f"{DECIDED}::test_of_a_members_shards_only_keys_that_rest_are_decided_about",
    ),
    mutant(
        "a dialog goes on without a message that was given up where it had arrived",
        "saf/operating/decide_parked.py",
        "            if rows.arrived:\n",
        "            if rows.arrived and not rows:\n",
        f"{DECIDED}::test_a_dialog_fails_at_both_ends_if_a_message_is_given_up_where_it_had_arrived",
    ),
    mutant(
        "a list does not say that it has not looked at everything",
        "saf/operating/outbox.py",
        "before=looked.before",
        "before=looked.before if looked.rows else None",
        f"{PAGES}::test_messages_that_are_rare_are_looked_for_further_on",
    ),
    mutant(
        "the next look leaves a transaction out",
        "saf/operating/stretches.py",
        "place=txid, before=sent_at",
        "place=str(int(txid) + 1), before=sent_at",
        f"{LOOKS}::test_looks_that_follow_each_other_find_everything_once_and_come_to_an_end",
    ),
    mutant(
        "a look whose time is over has looked at nothing",
        "saf/operating/stretches.py",
        "if width and now >= until:",
        "if now >= until:",
        f"{LOOKS}::test_looks_that_follow_each_other_find_everything_once_and_come_to_an_end",
    ),
    mutant(
        "all messages of a lane are counted for a page",
        "saf/ui/pages/parked.py",
        "after=after, most=MOST",
        "offset=_first(visit)",
        "ui/test_ui_parked.py"
        "::test_of_a_lane_no_more_messages_are_counted_than_a_page_has_time_for",
    ),
    mutant(
        "tokens may be guessed for ever",
        "saf/ui/application.py",
        "            attempts.wrong(address, time.monotonic())\n",
        "",
        f"{ACCESS}::test_who_is_wrong_too_often_is_not_listened_to_and_others_are",
    ),
    mutant(
        "whoever guesses says where he is",
        "saf/ui/access.py",
        'return said[-1].rpartition(",")[2].strip()  # what the nearest proxy has seen',
        'return said[0].partition(",")[0].strip()',
        f"{ACCESS}::test_what_a_visitor_says_before_the_proxy_is_not_where_they_are",
    ),
    mutant(
        "another host may set the cookie of a session",
        "saf/ui/access.py",
        "if not self.secure(request):",
        "if request:",
        f"{ACCESS}::test_by_https_the_cookie_is_one_that_no_other_host_can_set",
    ),
    mutant(
        "each address of a customer is listened to by itself",
        "saf/ui/attempts.py",
        "ipaddress.ip_network((ip, OF_A_CUSTOMER), strict=False)",
        "ip",
        "unit/test_doctests.py",
    ),
    mutant(
        "addresses that were wrong are remembered without bound",
        "saf/ui/attempts.py",
        "while len(self._wrong) >= MOST_ADDRESSES:",
        "while len(self._wrong) < 0:",
        f"{ACCESS}::test_wrong_tokens_are_remembered_for_a_bounded_number_of_addresses",
    ),
    mutant(
        "nobody learns who was refused at the login",
        "saf/ui/application.py",
        '            log.warning("login_refused", person=shown(name), address=shown(address))\n',
        "",
        f"{ACCESS}::test_who_logs_in_and_out_and_who_is_refused_is_logged_and_no_token",
    ),
]
