"""Signing: a target refuses what was altered between the sender and itself, or sent by others.

`saf.signing.form` says what a signature covers, and as which bytes; `saf.signing.keys` has the
algorithms; `saf.signing.signer` signs, and `saf.signing.verifier` verifies. Requests of HTTP are
signed as a whole: `saf.signing.webhook`.
"""
