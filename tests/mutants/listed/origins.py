"""Origins: what a routing service cannot do with the signatures that it passes on."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

ORIGIN, VERIFIER = "saf/signing/origin.py", "saf/signing/verifier.py"
PASSING, SERVICE = "saf/dialogs/passing.py", "saf/routing_service.py"
DIALOG, ARRIVAL, RECEIVED = "saf/dialogs/dialog.py", "saf/dialogs/arrival.py", "saf/received.py"
TESTS = "contract/test_origins.py"
BOTH = f"{TESTS}::test_both_ends_of_a_dialog_verify_each_other_behind_a_routing_service"
PLAIN = (
    f"{TESTS}::test_messages_outside_of_dialogs_have_their_senders_signature_whatever_is_in_them"
)
ALTERED = (
    f"{TESTS}::test_each_part_that_is_altered_behind_the_routing_service_makes_it_a_dead_letter"
)
AGAIN = f"{TESTS}::test_a_message_is_not_said_again_in_its_dialog_or_in_a_second_one"
CHAIN = f"{TESTS}::test_a_chain_of_routing_services_passes_the_first_signature_on"
LARGE = f"{TESTS}::test_a_large_body_is_verified_as_a_whole"
ERRORS = (
    f"{TESTS}::test_an_applications_error_is_verified_with_the_text_that_routers_have_made_of_it"
)
OF_SAF = f"{TESTS}::test_errors_of_saf_itself_are_taken_though_nobody_has_signed_them"
LISTENING = f"{TESTS}::test_a_further_subscription_gets_no_fragment_that_it_cannot_verify"
CLOSING = f"{TESTS}::test_an_end_that_its_router_says_closes_only_an_end_that_has_ended"

MUTANTS: list[Mutant] = [
    mutant(
        "an envelope is good in any dialog",
        ORIGIN,
        "if passed(first, routers) != last:",
        "if passed(first, routers) is None:",
        AGAIN,
    ),
    mutant(
        "an envelope is good at any number of its dialog",
        ORIGIN,
        "if message.message_type != ERROR and self.sequence != str(message.sequence):",
        "if self.sequence is None:",
        AGAIN,
    ),
    mutant(
        "an envelope is good for any id",
        ORIGIN,
        "if passed(self.message_id, self.routers) != message.message_id:",
        "if self.message_id is None:",
        ALTERED,
    ),
    mutant(
        "the name of the sender is the router's choice",
        ORIGIN,
        "if message.from_service != self.from_service:",
        "if self.routers is None:",
        ALTERED,
    ),
    mutant(
        "a dialog is begun with any contract",
        ORIGIN,
        'if any(first.get(name) != now.get(name) for name in ("contract", "version")):',
        "if now is None:",
        ALTERED,
    ),
    mutant(
        "a dialog lives as long as its router likes",
        ORIGIN,
        "return both and Decimal(str(lifetime)) <= Decimal(str(longest)) + APART_SECONDS",
        "return both",
        ALTERED,
    ),
    mutant(
        "the text of an Error is the router's choice",
        ORIGIN,
        "if self.error is None or arrived != error_passed_on(self.error, self.routers):",
        "if self.error is None:",
        ERRORS,
    ),
    mutant(
        "a signature of the first sender is right whatever it is",
        VERIFIER,
        '_verifies(key, signature["value"], facts, redirected=redirected):',
        "_verifies:",
        ALTERED,
    ),
    mutant(
        "any router passes messages on",
        VERIFIER,
        "for router in (to, *sealed.routers):",
        "for router in ():",
        f"{TESTS}::test_a_router_that_the_receiver_does_not_name_passes_nothing_on",
    ),
    mutant(
        "only the first router of a chain is named",
        VERIFIER,
        "for router in (to, *sealed.routers):",
        "for router in (to,):",
        CHAIN,
    ),
    mutant(
        "a message that was sent on to another broker is taken",
        VERIFIER,
        "if message.to_broker is not None and message.to_broker != self.broker:",
        "if message.to_broker is self:",
        ALTERED,
    ),
    mutant(
        "any key signs first for any service",
        VERIFIER,
        "if key.from_services is not None and sealed.from_service not in key.from_services:",
        "if key.from_services is None and sealed.from_service is None:",
        f"{TESTS}::test_a_key_speaks_for_the_first_sender_only_if_it_may",
    ),
    mutant(
        "the signature of a router is enough where its sender's is required",
        VERIFIER,
        "if self.trust.of_origin and (lacks_origin or origin):",
        "if self.trust.of_origin and origin:",
        f"{TESTS}::test_without_an_envelope_a_message_is_refused_though_its_router_signs_it",
    ),
    mutant(
        "a router may leave an envelope out",
        VERIFIER,
        "                lacks_origin = NO_ORIGIN\n",
        "                lacks_origin = None\n",
        f"{TESTS}::test_without_an_envelope_a_message_is_refused_though_its_router_signs_it",
    ),
    mutant(
        "a further subscription gets unverified fragments",
        VERIFIER,
        "part = assembles and is_fragment(message, headers)",
        "part = is_fragment(message, headers)",
        LISTENING,
    ),
    mutant(
        "the key of a routing service does not speak for its messages",
        VERIFIER,
        "speakers = {message.from_service, *(origin.routers[-1:] if origin else ())}",
        "speakers = {message.from_service}",
        PLAIN,
    ),
    mutant(
        "an End that claims to be a fragment needs no origin",
        ORIGIN,
        "message.from_initiator is not None and message.sequence is not None and not of_saf",
        "message.from_initiator is not None and message.sequence is not None",
        f"{TESTS}::test_an_end_or_an_error_is_no_fragment",
    ),
    mutant(
        "a large body is verified by its last fragment alone",
        ARRIVAL,
        "if message.signed_body is not None and message.sha256 != message.signed_body:",
        "if message.signed_body is not None and message.sha256 is None:",
        f"{TESTS}::test_a_large_body_that_its_router_has_altered_is_refused_whichever_part",
    ),
    mutant(
        "a large body needs no hash",
        VERIFIER,
        "if body is None or not assembles:",
        "if not assembles:",
        f"{TESTS}::test_a_body_without_its_hash_is_of_no_known_origin",
    ),
    mutant(
        "a hash is one of the first fragment",
        DIALOG,
        "            whole.update(following)\n",
        "            whole.update(b'')\n",
        LARGE,
    ),
    mutant(
        "each fragment has an envelope, and none fits",
        DIALOG,
        "if name != ORIGIN}",
        "if name}",
        LISTENING,
    ),
    mutant(
        "a trace is added to signed headers",
        PASSING,
        "exactly=sealed is not None,",
        "exactly=False,",
        f"{TESTS}::test_a_trace_of_the_routing_service_is_not_added_to_what_was_signed",
    ),
    mutant(
        "the second dialog has an id of its own",
        PASSING,
        '"conversation_id": derived if signed else uuid4(),',
        '"conversation_id": uuid4(),',
        BOTH,
    ),
    mutant(
        "unsigned dialogs have ids that others can compute",
        PASSING,
        '"conversation_id": derived if signed else uuid4(),',
        '"conversation_id": derived,',
        f"{TESTS}::test_what_nobody_has_signed_is_passed_on_as_ever",
    ),
    mutant(
        "a large body is cut again",
        PASSING,
        "fragment_bytes=fragment_bytes,",
        "fragment_bytes=FRAGMENT_BYTES,",
        LARGE,
    ),
    mutant(
        "an End is passed on without its signature",
        PASSING,
        "other.end_as(conn, sealed)",
        "other.end_as(conn, None)",
        BOTH,
    ),
    mutant(
        "a later router of a chain drops the envelope",
        ORIGIN,
        'return {**before, "by": [*routers, router]} if isinstance(routers, list) else None',
        "return None",
        CHAIN,
    ),
    mutant(
        "an Error of saf that was passed on is refused",
        ARRIVAL,
        "return kind == ERROR and (not more or _is_original(more, code))",
        "return kind == ERROR and not more",
        OF_SAF,
    ),
    mutant(
        "an unsigned End of a router ends an open dialog",
        "saf/dialogs/endpoints.py",
        "WHERE c.ended_here",
        "WHERE true",
        CLOSING,
    ),
    mutant(
        "an end stays open after its own End, behind a router",
        "saf/receiving/delivery.py",
        "        for message in hook().closing(raw, found):\n            del found[message]\n",
        "        hook().closing(raw, found)\n",
        CLOSING,
    ),
    mutant(
        "a key that the router has chosen passes for the sender's",
        SERVICE,
        "if is_signed(message) and to.key == message.key:",
        "if is_signed(message):",
        f"{TESTS}::test_a_router_that_gives_another_key_passes_no_signature_on",
    ),
    mutant(
        "a message in fragments loses its origin when they are put together",
        RECEIVED,
        "        if other._passed_on is not None:\n",
        "        if other._passed_on is None:\n",
        LARGE,
    ),
]
