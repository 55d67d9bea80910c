"""Signing: a target rejects messages that were altered on their way, or sent by others.

`saf.signing.signer` has the keys, defines which bytes a signature covers, and signs;
`saf.signing.verifier` verifies. HTTP requests are signed as a whole: `saf.signing.webhook`.
"""
