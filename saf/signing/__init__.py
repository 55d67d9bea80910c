"""Signing: a target rejects messages that were altered on their way, or sent by others.

`saf.signing.form` defines which bytes a signature covers; `saf.signing.keys` has the algorithms;
`saf.signing.signer` signs, and `saf.signing.verifier` verifies. HTTP requests are signed as a
whole: `saf.signing.webhook`.
"""
