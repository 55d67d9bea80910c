"""Signing: what a signature covers, whose it has to be, and what shows no key."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

SIGNER = "saf/signing/signer.py"
VERIFIER, WEBHOOK = "saf/signing/verifier.py", "saf/signing/webhook.py"
SIGNING, DIALOGS = "contract/test_signing.py", "contract/test_signed_dialogs.py"
SIGNATURES, DOCTESTS = "unit/test_signatures.py", "unit/test_doctests.py"
RECEIVED = "contract/test_webhook_inbox.py"
ALTERED = f"{SIGNING}::test_each_part_of_a_message_that_is_altered_between_makes_it_a_dead_letter"

MUTANTS: list[Mutant] = [
    mutant(
        "a name is not told from a longer one with its beginning",
        SIGNER,
        'written.append(b"s%d:%s" % (len(name), name))',
        'written.append(b"s:%s" % name)',
        DOCTESTS,
    ),
    mutant(
        "a body may be exchanged",
        VERIFIER,
        '"body": body_sha256 or sha256(message.body),',
        '"body": body_sha256 or sha256(b""),',
        f"{SIGNING}::test_what_was_not_altered_arrives_whoever_sends_it_by_whatever_way",
    ),
    mutant(
        "a signature is right whatever it is",
        VERIFIER,
        "if key.verifies(signature, signed_bytes(facts)):",
        "if key:",
        ALTERED,
    ),
    mutant(
        "the owner of a key speaks for any service",
        VERIFIER,
        "if key.from_services is not None and key.from_services.isdisjoint(speakers):",
        "if key.from_services is None and message.from_service is None:",
        f"{SIGNING}::test_the_owner_of_a_key_speaks_only_for_its_services",
    ),
    mutant(
        "a message to another broker is taken",
        VERIFIER,
        "if message.to_broker not in (None, self.broker):",
        "if message.to_broker is self:",
        f"{SIGNING}::test_a_message_to_one_broker_is_not_taken_by_another",
    ),
    mutant(
        "a message to another service is taken",
        VERIFIER,
        "if to != message.service and to not in self.trust.keys.redirected_from:",
        "if to is None:",
        f"{SIGNING}::test_a_message_to_one_service_is_not_taken_by_another",
    ),
    mutant(
        "what is unsigned is taken though it has to be signed",
        VERIFIER,
        "return unproven if self.trust.required and unproven else signed_by",
        "return signed_by",
        f"{SIGNING}::test_a_removed_signature_makes_a_message_unsigned",
    ),
    mutant(
        "what has expired is brought back on its way",
        VERIFIER,
        "if message.parked_id is None and int(signed) < now:",
        "if int(signed) < 0:",
        f"{SIGNING}::test_a_message_that_has_expired_is_not_brought_back_on_its_way",
    ),
    mutant(
        "a signature that was given is kept",
        SIGNER,
        "headers = covered(read_headers(row.headers))",
        "headers = read_headers(row.headers)",
        f"{SIGNATURES}::test_a_signature_that_was_given_is_not_kept",
    ),
    mutant(
        "a signature makes headers too large",
        SIGNER,
        "        check_headers(text)\n",
        "",
        f"{SIGNATURES}::test_headers_that_the_signature_would_make_too_large_are_refused",
    ),
    mutant(
        "a secret is as short as one likes",
        SIGNER,
        "if secret is None or len(secret) < KEY_BYTES:",
        "if secret is None:",
        f"{SIGNATURES}::test_what_is_no_key_is_refused_without_being_shown",
    ),
    mutant(
        "a webhook is good for ever",
        WEBHOOK,
        "if abs(difference) > tolerance_seconds:",
        "if difference < -tolerance_seconds:",
        f"{RECEIVED}::test_what_is_not_accepted_is_answered_with_the_reason",
    ),
    mutant(
        "a webhook's body is not signed",
        WEBHOOK,
        "    signed.update(body)\n",
        "",
        DOCTESTS,
    ),
]
