"""Routing services that redirect."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

REDIRECTING, SERVICE = "saf/dialogs/redirecting.py", "saf/routing_service.py"
ENDPOINTS, SIGNER = "saf/dialogs/endpoints.py", "saf/signing/signer.py"
SET_BACK, CHOICES = "saf/dialogs/set_back.py", "saf/routing/route_choices.py"
RECEIVING = "migrations/baseline/sql_receive.sql"
SPEAKING = "migrations/baseline/sql_dialogs.sql"

TESTS = "contract/test_redirecting_service.py"
DIRECTLY = f"{TESTS}::test_the_target_gets_the_dialog_and_after_its_answer_the_router_gets_nothing"
KEPT = f"{TESTS}::test_the_resolution_is_kept_while_messages_may_come_by_the_router"
FROM_SQL = f"{TESTS}::test_either_end_may_be_received_from_sql"
OTHER_KEY = f"{TESTS}::test_a_router_that_gives_another_key_gets_all_messages"
UNRESOLVED = (
    f"{TESTS}::test_the_initiator_hears_that_its_dialog_cannot_be_resolved_and_another_may_answer"
)
ONCE = f"{TESTS}::test_a_message_is_redirected_once"
MODE = f"{TESTS}::test_the_mode_of_a_router_with_open_dialogs_does_not_change"
REPAIR = f"{TESTS}::test_a_repair_takes_no_message_that_was_passed_on_for_a_target_of_the_router"
FORGOTTEN = (
    "contract/test_routing_service_set_back.py::"
    "test_a_hub_that_redirects_and_has_forgotten_a_dialog_learns_of_it_again_or_says_so"
)

MUTANTS: list[Mutant] = [
    mutant(
        "a redirected initiator addresses no broker",
        REDIRECTING,
        "SET far_service = r.service, far_broker = r.broker",
        "SET far_service = r.service",
        DIRECTLY,
    ),
    mutant(
        "any service that answers redirects a dialog",
        REDIRECTING,
        "AND c.far_service = a.router AND",
        "AND",
        f"{TESTS}::test_only_the_router_that_was_addressed_redirects",
    ),
    mutant(
        "the router does not hear that no more messages come",
        REDIRECTING,
        'FROM known\n"""',
        'FROM known WHERE false\n"""',
        DIRECTLY,
        KEPT,
    ),
    mutant(
        "a resolution is kept after the dialog has gone its own way",
        REDIRECTING,
        "if one.message_type in (END, ERROR, DIRECT):",
        "if one.message_type in (END, ERROR):",
        KEPT,
    ),
    mutant(
        "a resolution is kept after the dialog has ended",
        REDIRECTING,
        "if one.message_type in (END, ERROR, DIRECT):",
        "if one.message_type == DIRECT:",
        f"{TESTS}::test_after_the_end_by_the_router_its_resolution_is_forgotten_like_others",
    ),
    mutant(
        "a resolution is kept beyond the lifetime",
        REDIRECTING,
        'return "infinity" if ends is None else ends.isoformat()',
        'return "infinity"',
        KEPT,
    ),
    mutant(
        "a resolution is forgotten while a dialog is silent",
        CHOICES,
        'unused="coalesce(kept_until < now(), true)"',
        'unused="true"',
        KEPT,
    ),
    mutant(
        "a router that gives another key is left out",
        REDIRECTING,
        "return redirected_by(message) if keeps_key else None",
        "return redirected_by(message)",
        OTHER_KEY,
    ),
    mutant(
        "an error of an unresolved dialog goes to the broker before",
        REDIRECTING,
        '"broker": sent_from(message),',
        '"broker": message.source,',
        ONCE,
    ),
    mutant(
        "a hub that was set back says nothing about dialogs it has forgotten",
        REDIRECTING,
        "if not of_broker(raw, SET_BACK)[0]:",
        "if True:",
        FORGOTTEN,
    ),
    mutant(
        "a message whose first one is missing fails its dialog",
        REDIRECTING,
        "if not of_broker(raw, SET_BACK)[0]:",
        "if False:",
        f"{TESTS}::test_a_message_whose_first_one_is_missing_is_a_dead_letter_until_that_has_come",
    ),
    mutant(
        "nobody hears that a dialog cannot be resolved",
        SERVICE,
        "redirecting.tell(work.raw, message, self.subscription, error)",
        "pass",
        UNRESOLVED,
    ),
    mutant(
        "a message is redirected again and again",
        SERVICE,
        "if before is not None:",
        "if False:",
        ONCE,
    ),
    mutant(
        "a router redirects dialogs that it has begun to forward",
        SERVICE,
        "others = forwards if mode == REDIRECT else redirects",
        "others = 0 if mode == REDIRECT else redirects",
        MODE,
    ),
    mutant(
        "a router forwards dialogs that it has begun to redirect",
        SERVICE,
        "others = forwards if mode == REDIRECT else redirects",
        "others = forwards if mode == REDIRECT else 0",
        MODE,
    ),
    mutant(
        "the lifetime of a redirected dialog begins at the hub",
        SERVICE,
        ', "created_at": "timestamptz"}',
        "}",
        f"{TESTS}::test_the_lifetime_counts_from_the_beginning",
    ),
    mutant(
        "a signature covers what a routing service writes",
        SIGNER,
        "CLAIMED_FROM, LINEAGE, REDIRECTED}",
        "CLAIMED_FROM, LINEAGE}",
        f"{TESTS}::test_signatures_of_both_ends_are_verified_though_the_router_has_no_key",
    ),
    mutant(
        "a message that was passed on is a target to a repair",
        SET_BACK,
        "AND NOT EXISTS (SELECT FROM saf.resolved_conversation r\n",
        "AND NOT EXISTS (SELECT FROM saf.resolved_conversation r WHERE false AND\n",
        f"{TESTS}::test_a_repair_takes_no_message_that_was_passed_on_by_a_router_of_a_file",
    ),
    mutant(
        "a target that SQL begins does not know its router",
        RECEIVING,
        "IF m.key = m.conversation_id::text AND m.headers ? 'saf-redirected' THEN",
        "IF false THEN",
        FROM_SQL,
    ),
    mutant(
        "a target that answers from SQL does not name its router",
        SPEAKING,
        "WHEN e.send_sequence = 1 AND to_jsonb(e) ->> 'redirected_by' IS NOT NULL",
        "WHEN false",
        FROM_SQL,
    ),
    mutant(
        "an initiator that receives from SQL stays with the router",
        RECEIVING,
        "            PERFORM saf.go_direct(e, m);\n",
        "",
        FROM_SQL,
    ),
]
