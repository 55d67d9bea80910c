"""Clients of a Kafka cluster: their settings, their waits, and the meaning of their errors.

A client of librdkafka never gives up: it reconnects again and again, and reports this only to a
callback. So each call here waits in short slices, and checks between two slices for reports
(`Voices`). If no broker can be reached, or the login is refused, the call ends immediately; if a
broker accepts the connection but does not answer, after its bound.

If a later attempt may succeed, an error is `Unavailable`; if an operator must fix something,
`Refused`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException

from saf.destinations.kafka import brokers_of
from saf.destinations.settings import rights, unusable
from saf.errors import Refused, SafError, Unavailable

if TYPE_CHECKING:
    from pydantic import SecretStr

    from saf.destinations.kafka import Kafka

SLICE_SECONDS = 0.25
SHORTEST_MS, LONGEST_MS = 1_000, 300_000

NOT_YET = frozenset({
    KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._WAIT_COORD,
    KafkaError.REQUEST_TIMED_OUT, KafkaError.NETWORK_EXCEPTION, KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.LEADER_NOT_AVAILABLE, KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REPLICA_NOT_AVAILABLE, KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR, KafkaError.NOT_CONTROLLER,
})  # fmt: skip
"""Codes after which a repeated call succeeds: a broker has just started, or stopped."""
GONE = frozenset({KafkaError._ALL_BROKERS_DOWN})
LOGIN = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
LOGIN_CURE = "fix username, password and sasl_mechanism in saf.toml"
TOKEN_CURE = "fix sasl_oauthbearer_… in saf.toml, or the token endpoint"  # noqa: S105
FENCED = frozenset({
    KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING, KafkaError.INVALID_TXN_STATE,
    KafkaError.CONCURRENT_TRANSACTIONS, KafkaError._FATAL,
})  # fmt: skip
"""Codes for a client that was fenced, or whose transaction took too long. A client that learns this
before it ends the transaction only reports that something was fatal."""
UNDECIDED = frozenset({KafkaError.UNKNOWN})
"""Codes that leave open whether a transaction has ended: a broker that is asked to end one while
another client begins its name again may answer with them. The marks decide."""
HARMLESS = NOT_YET | GONE | {KafkaError.GROUP_AUTHORIZATION_FAILED}
"""Codes that do not stop a consumer: it uses no group, though the client looks one up."""
RIGHTS = frozenset({
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
})  # fmt: skip
TO_MEND = {
    KafkaError._INVALID_ARG: "fix this destination's settings in saf.toml",
    KafkaError.UNSUPPORTED_SASL_MECHANISM: "let sasl_mechanism be one that the brokers know",
    KafkaError.INVALID_REPLICATION_FACTOR: "lower replicas in saf.toml, or start more brokers",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "let the brokers' transaction.max.timeout.ms be more, "
    "or lower chunk_seconds in [bounds] of saf.toml",
}
"""The operator's action for an error, by its code."""

QUIET = logging.getLogger("saf.destinations.kafka.librdkafka")
"""Replaces the client's logging to stderr; its errors contain what matters."""
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False

T = TypeVar("T")


class Polled(Protocol):
    """A client that reports errors when it is polled."""

    def poll(self, timeout: float = ..., /) -> Any:
        """Run its callbacks."""


class Voices:
    """Errors that the clients of one destination report to callbacks."""

    def __init__(self) -> None:
        self.said: KafkaError | None = None
        self._reason: KafkaError | None = None

    def heard(self, error: KafkaError) -> None:
        """Record an error; it is the reason to show if no broker can be reached."""
        if error.code() in LOGIN:
            self.said = error
        elif error.code() in GONE:
            self.said = self.said or self._reason or error
        else:
            self._reason = error

    def patiently(self, client: Polled, call: Callable[[float], T], seconds: float) -> T:
        """Call ``call`` with a timeout, again after each timeout, and return its result.

        Raises:
            KafkaException: it failed, no broker can be reached, or it took too long.
        """
        self.said = None
        until = time.monotonic() + seconds
        while True:
            try:
                return call(min(SLICE_SECONDS, seconds))
            except KafkaException as error:
                failure = error.args[0]
                if failure.code() not in NOT_YET and not failure.retriable():
                    raise
                client.poll(0.02)
                if self.said is not None:
                    raise KafkaException(self.said) from None
                if time.monotonic() > until:
                    raise


def settings_of(settings: Kafka, voices: Voices) -> dict[str, Any]:
    """Return the settings for all clients of a destination."""
    bounds = settings.bounds
    options: dict[str, Any] = {
        "bootstrap.servers": ",".join(brokers_of(settings.brokers)),
        "client.id": "saf",
        "logger": QUIET,
        "error_cb": voices.heard,
        "security.protocol": settings.security_protocol,
        "sasl.mechanism": settings.sasl_mechanism,
        "sasl.username": settings.username,
        "sasl.password": _secret(settings.password),
        **_by_token(settings),
        "ssl.ca.location": _path(settings.ca_file),
        "ssl.certificate.location": _path(settings.certificate_file),
        "ssl.key.location": _path(settings.key_file),
        "ssl.key.password": _secret(settings.key_password),
        "socket.timeout.ms": milliseconds(bounds.statement_seconds),
        "socket.connection.setup.timeout.ms": milliseconds(bounds.network_seconds),
        "socket.nagle.disable": True,
        "socket.keepalive.enable": True,
        "reconnect.backoff.max.ms": 1_000,
    }
    return {name: value for name, value in options.items() if value is not None}


def _by_token(settings: Kafka) -> dict[str, Any]:
    """Return a client's settings for a login by token."""
    if settings.sasl_mechanism != "OAUTHBEARER":
        return {}
    return {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": _secret(
            settings.sasl_oauthbearer_token_endpoint_url
        ),
        "sasl.oauthbearer.client.id": settings.sasl_oauthbearer_client_id,
        "sasl.oauthbearer.client.secret": _secret(settings.sasl_oauthbearer_client_secret),
        "sasl.oauthbearer.scope": settings.sasl_oauthbearer_scope,
        "sasl.oauthbearer.extensions": settings.sasl_oauthbearer_extensions,
        "https.ca.location": _path(settings.https_ca_file),
    }


def milliseconds(seconds: float) -> int:
    """Return seconds as milliseconds, within the limits of the client's settings."""
    return int(min(max(seconds * 1000, SHORTEST_MS), LONGEST_MS))


@contextmanager
def passing(codes: Collection[int]) -> Iterator[None]:
    """Suppress errors with these codes."""
    try:
        yield
    except KafkaException as error:
        if error.args[0].code() not in codes:
            raise


def translated(what: str, settings: Kafka, error: KafkaError) -> SafError:
    """Return saf's error for an error of a client."""
    reason = settings.redact(error.str()) or error.name()
    code = error.code()
    if code in LOGIN:
        by_token = settings.sasl_mechanism == "OAUTHBEARER"
        return Refused(what, reason, TOKEN_CURE if by_token else LOGIN_CURE)
    if code in RIGHTS:
        return unusable(what, reason, rights(what))
    if code in TO_MEND:
        return unusable(what, reason, TO_MEND[code])
    unavailable = Unavailable(what, f"{settings.brokers}: {reason}")
    unavailable.hangs = code == KafkaError._TIMED_OUT
    return unavailable


def _secret(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _path(file: object) -> str | None:
    return None if file is None else str(file)
