"""``[signing]`` of saf.toml: the key that an application signs with, and the keys that it knows.

    [signing]
    key_id = "shop-2026"
    algorithm = "ed25519"
    secret_file = "/run/secrets/shop-2026.pem"       # or secret = "${SHOP_SIGNING_KEY}"

    [signing.keys.shop-2026]
    algorithm = "ed25519"
    public_key_file = "/etc/saf/shop-2026.pub"
    from_services = ["shop"]

A sender needs the first table, and a receiver the others. Forwarders need neither, so they check
only the names of the settings. Secrets are `pydantic.SecretStr`: nothing that prints settings shows
them, and no error quotes a value given in their place.
"""

from __future__ import annotations

from pathlib import Path

import pydantic
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from saf.errors import MissingExtra, UsageError
from saf.signing.signer import HMAC, Algorithm, Key, Signer
from saf.signing.verifier import Keys


class _Table(BaseModel):
    # a wrong value may be a secret in the wrong place
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class VerifyingKey(_Table):
    """A key that senders sign with, under the name that both sides know."""

    algorithm: Algorithm
    """Algorithm of the key."""
    secret: SecretStr | None = None
    """For HMAC: the secret, in base64, as `${NAME}`."""
    secret_file: Path | None = None
    """Alternatively, a file with the secret."""
    public_key: str | None = None
    """For Ed25519: the public key, as PEM or in base64."""
    public_key_file: Path | None = None
    """Alternatively, a file with the public key."""
    from_services: tuple[str, ...] | None = None
    """Services that the key's owner may send as. Default: any."""

    @pydantic.model_validator(mode="after")
    def _has_one_key(self) -> VerifyingKey:
        names = ("secret", "secret_file", "public_key", "public_key_file")
        given = [name for name in names if getattr(self, name) is not None]
        right = names[:2] if self.algorithm == HMAC else names[2:]
        if len(given) != 1 or given[0] not in right:
            raise ValueError(f"a key for {self.algorithm} has either {' or '.join(right)}")
        return self

    def key(self) -> Key:
        """Return the key. Raises a UsageError if it is invalid."""
        text, file = self.secret, self.secret_file
        if self.algorithm == HMAC:
            material = _material(text, file, "secret_file")
        else:
            public = None if self.public_key is None else SecretStr(self.public_key)
            material = _material(public, self.public_key_file, "public_key_file")
        return Key(self.algorithm, material, from_services=self.from_services)


class Signing(_Table):
    """Key that an application signs with; forwarders do not read it. See security.md."""

    key_id: str | None = Field(default=None, min_length=1)
    """Name of the key; receivers know it by this name."""
    algorithm: Algorithm | None = None
    """Algorithm of the key."""
    secret: SecretStr | None = None
    """The secret for HMAC, in base64, or the private key for Ed25519, as `${NAME}`."""
    secret_file: Path | None = None
    """Alternatively, a file with the secret or the private key."""
    redirected_from: tuple[str, ...] = ()
    """Routers whose messages a receiver accepts although they were sent to another service."""
    keys: dict[str, VerifyingKey] = Field(default_factory=dict)
    """Keys that a receiver verifies with, by their names."""

    def signer(self) -> Signer:
        """Return the signer.

        Raises:
            UsageError: a setting is missing, or the key is invalid.
        """
        missing = [name for name in ("key_id", "algorithm") if getattr(self, name) is None]
        if (self.secret is None) == (self.secret_file is None):
            missing.append("either secret or secret_file")
        if self.key_id is None or self.algorithm is None or missing:
            raise UsageError(f"to sign, [signing] has {' and '.join(missing)}")
        return Signer(
            self.key_id, self.algorithm, _material(self.secret, self.secret_file, "secret_file")
        )

    def known(self) -> Keys:
        """Return the keys that a receiver verifies with.

        Raises:
            UsageError: keys are missing, or one is invalid.
        """
        if not self.keys:
            raise UsageError("to verify, there is a table [signing.keys.NAME] for each key")
        known: dict[str, Key] = {}
        for key_id, key in self.keys.items():
            try:
                known[key_id] = key.key()
            except MissingExtra:
                raise
            except UsageError as error:
                raise UsageError(f"signing.keys.{key_id}: {error}") from None
        return Keys(known, redirected_from=self.redirected_from)


def _material(text: SecretStr | None, file: Path | None, setting: str) -> str | bytes:
    if text is not None:
        return text.get_secret_value()
    assert file is not None  # noqa: S101 - one of the two is set
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{setting}: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{setting}: {file} is not text") from None
