"""Link to a NATS server: a destination's connection, and the state that saf keeps at the server.

The state is a stream with messages, their marks and the destination's identity. `Link` creates the
stream if it does not exist, and changes no settings of an existing stream. The stream's subjects:

    TOPIC                                    messages; see `saf.destinations.nats.subject_of`
    saf-marks.STREAM.SOURCE.SHARD.LANE       the mark of a place: the last message counts
    saf-marks.STREAM.identity                the destination's identity

A lane's name is in hexadecimal, because a subject cannot contain every character; ``-`` is the
destination's own lane.

An error of JetStream is recognised by its code, and one of the protocol by its words, which the
protocol defines. If a later attempt may succeed, it is `Unavailable`: no answer, no leader, no
room. If an operator must fix something, it is `Refused`: the login, a right, a stream that cannot
keep marks.

`Link.guarantee` returns the promise of the settings of the server and its stream: what a crash may
take back. A batch is stored all or nothing, so a loss takes the marks back with the messages. It is
noticed at the next contact, and `saf rebase` sends the lost messages again. There is one exception:
a power failure in the middle of a batch, at a server without replicas.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, UUID, uuid5

from nats.aio.msg import Msg
from nats.errors import Error

from saf.destinations.marks import ABSENT, MAIN, Known, Place, known_of
from saf.destinations.nats import pattern
from saf.destinations.nats.connection import Connection, Message, NoResponders
from saf.destinations.queues import ENOUGH, kept_by
from saf.destinations.settings import Guarantee, rights, unusable
from saf.errors import Refused, SafError, Unavailable

if TYPE_CHECKING:
    from saf.destinations.nats import Nats

OWN = "-"
OLDEST = (2, 12)
"""Oldest supported version; since then, a stream stores batches all or nothing."""

WRONG_SEQUENCE = frozenset({10071, 10164})
"""Codes for a mark that another process has moved."""
NO_MESSAGE, NO_STREAM, STREAM_THERE = 10037, 10059, 10058
TO_MEND = {
    10174: "set its allow_atomic",
    10199: "let the server take batches of 1,000 messages, by jetstream.limits.batch.max_msgs",
    10039: "let JetStream be on for this account",
    10076: "let JetStream be on at this server",
}
"""The operator's action for an error of JetStream, by its code."""
LOGINS = ("authorization", "authentication", "user authentication", "account authentic")
RIGHTS = "permissions violation"

STORED, TTL, ROLLUP = "saf-stored", "Nats-TTL", "Nats-Rollup"
"""Headers of marks. The first has the number of a shard's messages that were ever stored. The other
two make the stream keep the last mark of a place, and no earlier marks."""
COUNT = re.compile(rb"\r\n%b: *(\d+)\r\n" % STORED.encode())
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
"""Header with the number of a subject's last message; if it differs, nothing is stored."""


class JetStreamError(Exception):
    """JetStream has answered with an error."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("description", error)))
        self.code = int(error.get("err_code", 0))


class Api:
    """A connection to a server, and to JetStream's answers about a stream."""

    def __init__(self, what: str, settings: Nats) -> None:
        self.what = what
        self.settings = settings
        self.connection = Connection(what, settings)

    def ask(self, what: str, **request: Any) -> dict[str, Any]:
        """Return JetStream's answer about the stream.

        Raises:
            JetStreamError: the answer is an error.
        """
        subject = f"$JS.API.{what}.{self.settings.stream}"
        return answered(
            self.connection.request(subject, json.dumps(request).encode() if request else b"")
        )

    def stream(self) -> dict[str, Any] | None:
        """Return JetStream's information about the stream; None if it does not exist."""
        try:
            return self.ask("STREAM.INFO")
        except JetStreamError as error:
            if error.code == NO_STREAM:
                return None
            raise

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class Link(Api):
    """A destination's connection to its server, and to its stream."""

    def __init__(self, name: str, settings: Nats) -> None:
        super().__init__(f"destination {name!r}", settings)
        self._config: dict[str, Any] | None = None

    # The stream

    def make(self) -> None:
        """Create the stream."""
        settings = self.settings
        try:
            self.ask(
                "STREAM.CREATE",
                name=settings.stream,
                description="messages that saf has forwarded, and its marks",
                subjects=[pattern(settings.topic), all_marks(settings.stream)],
                retention="limits",
                storage="file",
                discard="new",
                num_replicas=settings.replicas,
                allow_atomic=True,
                allow_direct=True,
                allow_msg_ttl=True,
                allow_rollup_hdrs=True,
                max_msgs=-1,
                max_bytes=-1,
            )
        except JetStreamError as error:
            if error.code != STREAM_THERE:
                raise

    def look(self) -> dict[str, Any] | None:
        """Raise if messages must not be stored here; return the stream's settings, if it exists.

        Raises:
            Refused: the server is too old, or the stream would lose marks.
        """
        version = self.connection.version
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise unusable(self.what, f"its version is {version}", "upgrade it to 2.12 or newer")
        info = self.stream()
        if info is None:
            return None
        config: dict[str, Any] = info["config"]
        for reason, cure in self._wrong(config):
            raise unusable(f"{self.what}, stream {self.settings.stream!r},", reason, cure)
        return config

    def _wrong(self, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        marks = all_marks(self.settings.stream)
        if config.get("mirror") or config.get("subject_transform") or config.get("sealed"):
            yield "is a mirror, is sealed, or renames subjects", "choose another stream"
        if not config.get("allow_atomic"):
            yield "takes no batches", "set its allow_atomic"
        if not any(takes(pattern, marks) for pattern in config["subjects"]):
            yield f"does not take its marks, {marks}", "add that to its subjects"
        if config.get("retention") == "interest":
            yield "keeps only what somebody waits for, and no marks", "let its retention be limits"
        if config.get("max_age") and not config.get("allow_msg_ttl"):
            yield "forgets its marks by max_age", "set its allow_msg_ttl, so that marks stay"
        limits = [name for name in ("max_msgs", "max_bytes") if config.get(name, -1) > 0]
        if limits and config.get("discard") != "new":
            yield f"forgets the oldest, marks too, by {limits[0]}", "let its discard be new"

    def config(self) -> dict[str, Any]:
        """Return the stream's settings; create it if it does not exist."""
        config = self.look()
        if config is None:
            self.make()
            config = self.look()
            assert config is not None  # noqa: S101 - just created
        self._config = config
        return config

    # Its contents

    def last(self, named: Sequence[str]) -> list[tuple[str, int, int]]:
        """Return the last message of each subject: its body, sequence and count.

        Asks the stream's leader, because other servers may not have the latest message yet.
        """
        subject = f"$JS.API.STREAM.MSG.GET.{self.settings.stream}"
        requests = [Message(subject, json.dumps({"last_by_subj": name}).encode()) for name in named]
        rows = []
        for answer in self.connection.requests(requests):
            try:
                message = answered(answer)["message"]
            except JetStreamError as error:
                if error.code not in (NO_MESSAGE, NO_STREAM):
                    raise
                rows.append((ABSENT, 0, 0))
                continue
            stored = COUNT.search(base64.b64decode(message.get("hdrs", "")))
            text = base64.b64decode(message.get("data", "")).decode()
            rows.append((text, int(message["seq"]), int(stored[1]) if stored else 0))
        return rows

    def identity(self) -> UUID:
        """Return the destination's identity, or its future one; write nothing.

        A stream without an identity gets one computed from its address. So a server that has lost
        everything is not taken for a new one: it is the same one, without its acknowledged data.
        """
        ((text, _, _),) = self.last([identity_subject(self.settings.stream)])
        if text:
            return UUID(text)
        return uuid5(NAMESPACE_URL, f"{self.settings.server}#{self.settings.stream}")

    def make_identity(self) -> UUID:
        """Return the identity, after storing it; it stays when the stream's data is moved."""
        identity = self.identity()
        headers = {EXPECTED: "0", **self.kept()}
        subject = identity_subject(self.settings.stream)
        try:
            answered(self.connection.request(subject, str(identity).encode(), headers))
        except JetStreamError as error:
            if error.code not in WRONG_SEQUENCE:
                raise
        return self.identity()

    def kept(self) -> dict[str, str]:
        """Return the headers that preserve a mark, as far as the stream allows them."""
        config = self._config or {}
        kept = {TTL: "never"} if config.get("allow_msg_ttl") else {}
        return kept | ({ROLLUP: "sub"} if config.get("allow_rollup_hdrs") else {})

    def known(self, source: UUID) -> Known:
        """Return all marks of a source."""
        names = self._subjects(marks_subject(self.settings.stream, source))
        texts = {
            place_of(name): text for name, (text, _, _) in zip(names, self.last(names), strict=True)
        }
        return known_of(self.identity(), texts)

    def sources(self) -> list[UUID]:
        """Return the sources that have marks."""
        names = self._subjects(all_marks(self.settings.stream))
        return sorted({source for source in map(source_of, names) if source is not None})

    def _subjects(self, pattern: str) -> list[str]:
        """Return the subjects of a pattern that have messages in the stream."""
        names: list[str] = []
        while True:
            try:
                info = self.ask("STREAM.INFO", subjects_filter=pattern, offset=len(names))
            except JetStreamError as error:
                if error.code != NO_STREAM:
                    raise
                return names
            page = info["state"].get("subjects") or {}
            names += page
            if not page or len(names) >= int(info.get("total", 0)):
                return names

    def guarantee(self) -> Guarantee:
        """Return the server's promise with its current settings."""
        config = self.look()
        settings = self.settings
        server = f"NATS {self.connection.version}, {settings.server}, stream {settings.stream}"
        quality = settings.quality.replace("_", " ")
        if config is None:
            return Guarantee(
                server=f"{server}, which is made at the first message", promise=quality
            )
        findings: list[tuple[str, str]] = []
        replicas = int(config.get("num_replicas", 1))
        if config.get("storage") == "memory":
            findings.append(
                ("it keeps messages in memory, so a restart loses them", "storage = file")
            )
        if replicas == 1:
            findings.append(
                (
                    "a loss of power may lose messages acknowledged since the server last synced "
                    "its files, and keep a part of the batch that it was storing, which is then "
                    "stored twice",
                    "replicas = 3 in a cluster; or sync_interval: always, for acknowledged "
                    "messages",
                )
            )
        elif replicas < ENOUGH:
            findings.append(("two servers work only together", "replicas = 3"))
        if not config.get("allow_rollup_hdrs"):
            findings.append(("its marks pile up", "allow_rollup_hdrs"))
        if not config.get("allow_direct"):
            findings.append(("saf reconcile cannot read it back", "allow_direct"))
        kept = kept_by(replicas)
        return Guarantee(
            server=server,
            promise=f"{quality}; {kept}; a loss is detected, and saf rebase repeats the messages",
            more=tuple(findings),
        )


def takes(wanted: str, given: str) -> bool:
    """Return True if a pattern covers a subject, or all subjects of another pattern.

    >>> takes("orders.*", "orders.a"), takes("orders.*", "orders.a.b")
    (True, False)
    >>> takes("orders.>", "orders.*"), takes("orders.*", "orders.>")
    (True, False)
    """
    tokens, target = wanted.split("."), given.split(".")
    for place, word in enumerate(tokens):
        if word == ">":
            return len(target) > place
        if place >= len(target) or target[place] == ">" or word not in ("*", target[place]):
            return False
    return len(tokens) == len(target)


def all_marks(stream: str) -> str:
    """Return the pattern of all marks."""
    return f"saf-marks.{stream}.>"


def identity_subject(stream: str) -> str:
    """Return the subject of the destination's identity."""
    return f"saf-marks.{stream}.identity"


def marks_subject(stream: str, source: UUID | str) -> str:
    """Return the pattern of a source's marks."""
    return f"saf-marks.{stream}.{source}.>"


def mark_subject(stream: str, source: UUID, place: Place) -> str:
    """Return the subject of a place's mark.

    >>> mark_subject("SAF", UUID(int=7), ("retry", 3))
    'saf-marks.SAF.00000000-0000-0000-0000-000000000007.3.7265747279'
    """
    lane, shard = place
    return f"saf-marks.{stream}.{source}.{shard}.{lane.encode().hex() or OWN}"


def source_of(name: str) -> UUID | None:
    """Return the source of a mark's subject; None for another subject.

    >>> source_of(mark_subject("SAF", UUID(int=7), ("retry", 3)))
    UUID('00000000-0000-0000-0000-000000000007')
    >>> source_of(identity_subject("SAF"))
    """
    _, _, source, *place = name.split(".")
    return UUID(source) if place else None


def place_of(name: str) -> Place:
    """Return the place of a mark's subject.

    >>> place_of(mark_subject("SAF", UUID(int=7), ("retry", 3)))
    ('retry', 3)
    """
    shard, lane = name.split(".")[-2:]
    return MAIN if lane == OWN else bytes.fromhex(lane).decode(), int(shard)


def answered(answer: Msg) -> dict[str, Any]:
    """Parse an answer of JetStream.

    Raises:
        JetStreamError: the answer is an error.
    """
    reply: dict[str, Any] = json.loads(answer.data)
    if "error" in reply:
        raise JetStreamError(reply["error"])
    return reply


@contextmanager
def errors(what: str, settings: Nats) -> Iterator[None]:
    """Translate the errors of a connection."""
    try:
        yield
    except (Error, NoResponders, JetStreamError, OSError) as error:
        raise translated(what, settings, error) from None


def translated(what: str, settings: Nats, error: Exception) -> SafError:
    """Return saf's error for an error of a connection."""
    reason = settings.redact(str(error).removeprefix("nats: ").strip("'")) or type(error).__name__
    if isinstance(error, Error):
        if reason.lower().startswith(LOGINS):
            return Refused(what, reason, "fix its login in saf.toml")
        if reason.lower().startswith(RIGHTS):
            return Refused(what, reason, rights(what))
    if isinstance(error, NoResponders):
        reason = f"nobody answers to {reason}: JetStream is off there, or has no leader"
    if isinstance(error, JetStreamError) and error.code in TO_MEND:
        return unusable(what, reason, TO_MEND[error.code])
    unavailable = Unavailable(what, f"{settings.server}: {reason}")
    unavailable.hangs = isinstance(error, TimeoutError)
    return unavailable
