"""What the other end of a dialog writes: how it begins, fragments, lineages, comparisons."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from uuid import UUID

from hypothesis import strategies as st

from saf.dialogs.arrival import is_harmless
from saf.dialogs.assembly import is_fragment, whole
from saf.dialogs.dialog import split
from saf.dialogs.facts import LARGEST, fork, incarnation, read_lineage, said_by
from saf.dialogs.introduction import introduction
from saf.dialogs.passing import _error
from saf.dialogs.set_back import _lineage, _standing
from saf.dialogs.statements import COMPARE, END, ERROR, TIMER
from saf.errors import UnreadableHeaders
from saf.message import FIRST_DAY, FRAGMENT, HELLO, LAST_DAY, LINEAGE, WHOLE
from saf.received import Received
from tests.fuzz.messages import message
from tests.fuzz.target import Target, documents, encoded, values

NAMES = ("contract", "version", "broker", "lifetime_seconds", "fragments", "bytes", "part")
PARTS = st.sampled_from([HELLO, WHOLE, FRAGMENT, LINEAGE])
HEADERS = st.dictionaries(PARTS, values(st.sampled_from(NAMES)), max_size=4).map(json.dumps)
FAR = [f'{{"{WHOLE}": {{"fragments": {number}, "bytes": 1}}}}' for number in ("1e999", "NaN")]
TYPES = [COMPARE, END, ERROR, TIMER, "order", None]


def said(headers: str | None = None, body: bytes = b"", kind: str | None = None) -> Received:
    """A message of a dialog."""
    return message(
        headers,
        body,
        from_initiator=True,
        sequence=4,
        conversation_id=UUID(int=7),
        message_type=kind,
    )


def begin(headers: str) -> None:
    """Whatever its headers say, it is known what a message is."""
    one = said(headers)
    with suppress(UnreadableHeaders):
        is_fragment(one)
        assert all(isinstance(number, int) for number in whole(one) or ())
        assert all(len(pair) == 2 for pair in _lineage(one))
        hello = introduction(one)
        if hello.problem is None:
            assert hello.version is None or 0 < hello.version < 2**31
            assert hello.expires_at is None or FIRST_DAY <= hello.expires_at < LAST_DAY
        else:
            hello.problem.encode()


def cut(given: tuple[bytes, int]) -> None:
    """A body is the same when its fragments are put together, and the last one says how many."""
    body, size = given
    pieces = list(split(io.BytesIO(body), size))
    assert b"".join(piece for piece, _ in pieces) == body
    *before, (last, headers) = pieces
    assert all(is_fragment(said(json.dumps(one), piece)) for piece, one in before)
    assert not is_fragment(said(json.dumps(headers), last))
    assert whole(said(json.dumps(headers), last)) == ((len(pieces), len(body)) if before else None)


def follow(given: tuple[object, object, int]) -> None:
    """What is read of a lineage is one, and any two can be compared."""
    one, other = read_lineage(given[0]), read_lineage(given[1])
    assert read_lineage(json.loads(json.dumps(one))) == one
    for lineage in (one, other):
        assert 0 <= incarnation(lineage) <= LARGEST
        assert said_by(lineage, given[2]) in {0, *(number for number, _ in lineage)}
    at = fork(one, other)
    assert (at is None) == (one == other)
    if at is not None:
        assert said_by(one, at) == said_by(other, at)


def understand(given: tuple[str | None, bytes]) -> None:
    """A comparison or an Error whose body nobody can read says nothing."""
    kind, body = given
    one = said("{}", body, kind)
    received, asks = _standing(one)
    assert isinstance(received, int)
    assert isinstance(asks, bool)
    code, text, original = _error(one)
    assert -(2**31) <= code < 2**31
    assert isinstance(original, dict)
    text.encode()
    assert isinstance(is_harmless(one), bool)


pairs = st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 9)).map(list), max_size=4)
lineages = st.lists(st.integers(1, 9), unique=True, max_size=4).flatmap(
    lambda numbers: st.lists(
        st.integers(0, 9), min_size=len(numbers), max_size=len(numbers), unique=True
    ).map(lambda after: [list(p) for p in zip(sorted(numbers), sorted(after), strict=True)])
)
foreign = lineages | pairs | values(st.text(max_size=4))

TARGETS = (
    Target(
        name="dialog headers",
        given=HEADERS | documents(HELLO, WHOLE, FRAGMENT, LINEAGE, *NAMES),
        check=begin,
        found=tuple(FAR),
    ),
    Target(
        name="fragments", given=st.tuples(st.binary(max_size=60), st.integers(1, 20)), check=cut
    ),
    Target(
        name="lineage",
        given=st.tuples(foreign, foreign, st.integers(0, 12)),
        check=follow,
    ),
    Target(
        name="dialog body",
        given=st.tuples(
            st.sampled_from(TYPES),
            encoded(documents("received", "answer", "code", "text", "original")),
        ),
        check=understand,
    ),
)
