"""Columns: many records of a topic as messages, by Arrow, a column at a time.

Records with the same header names in the same order are alike, as those of one writer usually are.
`table` returns the same as `saf.sources.decoding.Decoder.table`, which reads record by record. Here
Python only collects the values of each header; Arrow and NumPy decode, check and write them. A
header with one value for all records is read once.

What cannot be decided for a whole column is left to the decoder: records with header names that few
others have, events inside bodies, messages of dialogs, and each single record with a value that is
not text, is too large or is not written as saf writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations.mapping import CONTENT_TYPE, EVENT_SOURCE, Column
from saf.destinations.texts import BYTES, DASHES, TEXT, quoted
from saf.log.columns import MOMENT
from saf.message import (
    CLAIMED_FROM,
    FIRST_MOMENT,
    LAST_DAY,
    MAX_HEADERS,
    MAX_KEY,
    MAX_NAME,
    VERIFIED_FROM,
)
from saf.sources import Record
from saf.sources.decoding import (
    OUR_NAMES,
    SCHEMA,
    SENT_BY,
    Decoder,
    as_json,
    form_of,
    is_event,
)

FEW = 32
"""Fewer records that are alike are decoded one by one, which takes less time."""
UNREADABLE = ("\x00",)
"""Stands for the header names of records that cannot be read."""
MOST_BYTES = 1 << 30
"""Most bytes of a header's values: Arrow could not keep more in one array of strings."""
NO_ID = "00000000-0000-0000-0000-000000000000"
NO_MOMENT = "1970-01-01T00:00:00.000000Z"
NO_DIGIT = 255
DIGITS = np.full(256, NO_DIGIT, np.uint8)
"""Value of each hexadecimal digit; `NO_DIGIT` for any other byte."""
for _place, _digit in enumerate(b"0123456789abcdef"):
    DIGITS[[_digit, ord(chr(_digit).upper())]] = _place

Mask = npt.NDArray[np.bool_]


def table(decoder: Decoder, shard: int, records: Sequence[Record]) -> pa.Table:
    """Return records as a table with the columns `SCHEMA`, in their order."""
    if len(records) < FEW:
        return decoder.table(shard, records)
    forms: dict[tuple[str, ...], list[int]] = {}
    for place, record in enumerate(records):
        names = (*record.headers,) if record.problem is None else UNREADABLE
        forms.setdefault(names, []).append(place)
    parts: list[pa.Table] = []
    order: list[int] = []
    others = forms.pop(UNREADABLE, [])
    for names, places in forms.items():
        if len(places) < FEW:
            others += places
            continue
        alike = _Alike(decoder, shard, names, [records[place] for place in places])
        parts.append(alike.decoded())
        order += [place for place, odd in zip(places, alike.odd, strict=True) if not odd]
        others += [place for place, odd in zip(places, alike.odd, strict=True) if odd]
    if others:
        others.sort()
        parts.append(decoder.table(shard, [records[place] for place in others]))
        order += others
    found = pa.concat_tables(parts)
    if len(parts) > 1:
        found = found.take(np.argsort(order))
    return found.combine_chunks()


class _Alike:
    """Records with the same header names, as columns.

    Attributes:
        odd: True for each record that the decoder must read by itself; its values here are of no
            meaning.
    """

    def __init__(
        self, decoder: Decoder, shard: int, names: tuple[str, ...], records: Sequence[Record]
    ) -> None:
        self.decoder = decoder
        self.shard = shard
        self.records = records
        self.odd: Mask = np.zeros(len(records), np.bool_)
        self.headers: dict[str, Column] = {}
        values = zip(*[record.headers.values() for record in records], strict=True)
        for name, column in zip(names, values, strict=True):
            self.headers[name] = self._column(column)
        if any("\x00" in name for name in names) or {VERIFIED_FROM, CLAIMED_FROM} <= {*names}:
            self.odd[:] = True
        if VERIFIED_FROM in self.headers:  # a topic's claim about a sender is not verified
            self.headers = {
                CLAIMED_FROM if name == VERIFIED_FROM else name: column
                for name, column in self.headers.items()
            }
        if (kind := self.headers.get(CONTENT_TYPE)) is not None:
            self._each(kind, lambda text: None if is_event(text) else text)

    def decoded(self) -> pa.Table:
        """Return the records that are not odd as a table with the columns `SCHEMA`."""
        form = form_of(self.headers, self.decoder.prefix)
        columns = self._others() if form is None or self.odd.all() else self._own(form)
        body = pa.array([record.body for record in self.records], BYTES)
        self._leave(np.asarray(pc.greater(pc.binary_length(body), self.decoder.max_bytes)))
        self._bounded(columns.get("message_type"), MAX_NAME)
        self._bounded(columns["to_service"], MAX_NAME)
        self._bounded(columns.get("key"), MAX_KEY)
        self._bounded(columns["headers"], MAX_HEADERS)
        columns |= {
            "body": body,
            "batch": pa.array([record.position[0] for record in self.records], pa.int64()),
            "id": pa.array([record.position[1] for record in self.records], pa.int64()),
            "shard": pa.repeat(pa.scalar(self.shard, pa.int16()), len(self.records)),
        }
        if self.odd.all():
            return SCHEMA.empty_table()
        found = pa.table([self._typed(columns.get(one.name), one) for one in SCHEMA], schema=SCHEMA)
        return found.filter(pa.array(~self.odd)) if self.odd.any() else found

    def _own(self, form: str) -> dict[str, Column | None]:
        """Return the columns of messages that saf wrote."""
        decoder, called = self.decoder, OUR_NAMES[form]
        prefix = "" if form == "saf" else decoder.prefix
        said = {column: self.headers.get(prefix + name) for column, name in called.items()}
        source, service, kind = said["source"], said["to_service"], said["message_type"]
        assert source is not None  # noqa: S101 - of this form
        if said["conversation_id"] is not None or SENT_BY in self.headers:
            self.odd[:] = True
        own = {
            name: column for name, column in self.headers.items() if not decoder.is_saf_header(name)
        }
        own[SENT_BY] = self._each(source, _sender)
        to_service: Column = decoder.service
        if decoder.named_services and service is not None:
            to_service = self._each(service, lambda text: text or decoder.service)
        if form != "saf" and kind is not None and service is not None:
            # a message without a type has its service as the event's type
            kind = pc.if_else(pc.equal(self._array(kind), self._array(service)), None, kind)
        created_at = self._moments(said["created_at"])
        return {
            "message_id": self._ids(said["message_id"]),
            "from_service": said["from_service"],
            "to_service": to_service,
            "key": said["key"],
            "message_type": kind,
            "headers": self._json(own),
            "created_at": self._added_at() if created_at is None else created_at,
            "deliver_at": self._moments(said["deliver_at"]),
            "expires_at": self._moments(said["expires_at"]),
        }

    def _others(self) -> dict[str, Column | None]:
        """Return the columns of other writers' messages."""
        decoder = self.decoder
        ids = [decoder.id_of(self.shard, record) for record in self.records]
        return {
            "message_id": pa.array(ids, pa.binary()),
            "to_service": decoder.service,
            "key": self._keys(),
            "message_type": self.headers.get(f"{decoder.prefix}type"),
            "headers": self._json(self.headers),
            "created_at": self._added_at(),
        }

    def _keys(self) -> Column | None:
        """Return the keys of other writers' messages."""
        if self.decoder.key_header is not None:
            return self.headers.get(self.decoder.key_header)
        keys = [record.key for record in self.records]
        if keys.count(None) == len(keys):
            return self.headers.get(f"{self.decoder.prefix}partitionkey")
        # a key that is missing is empty here, and so its record is odd
        return self._column([key or b"" for key in keys])

    def _added_at(self) -> pa.Array:
        now = datetime.now(UTC)
        return pa.array([record.created_at or now for record in self.records], MOMENT)

    def _column(self, values: Sequence[bytes]) -> Column:
        """Return the values of a header; one that is not text is odd, and empty here."""
        first = values[0]
        if first == values[-1] and values.count(first) == len(values):
            if _is_text(first):
                return first.decode()
            self.odd[:] = True
            return ""
        if sum(map(len, values)) > MOST_BYTES:
            self.odd[:] = True
            return ""
        raw = pa.array(values, BYTES)
        try:
            text = raw.cast(TEXT)
        except pa.ArrowInvalid:
            text = None
        if text is not None and np.frombuffer(raw.buffers()[2], np.uint8).all():
            return text
        sound = [_is_text(value) for value in values]
        self._leave(~np.array(sound))
        kept = [value if one else b"" for value, one in zip(values, sound, strict=True)]
        return pa.array(kept, BYTES).cast(TEXT)

    def _each(self, column: Column, change: Callable[[str], str | None]) -> Column:
        """Change each distinct text; one that ``change`` returns None for is odd."""
        if isinstance(column, str):
            if (changed := change(column)) is not None:
                return changed
            self.odd[:] = True
            return column
        encoded = column.dictionary_encode()
        texts = pa.array([change(text) for text in encoded.dictionary.to_pylist()], TEXT)
        found = texts.take(encoded.indices)
        if found.null_count:
            self._leave(np.asarray(found.is_null()))
            found = found.fill_null("")
        return found

    def _ids(self, column: Column | None) -> pa.Array:
        """Return UUIDs, which are odd unless they are written with their four dashes."""
        if column is None:
            self.odd[:] = True
            column = NO_ID
        text = self._sized(column, NO_ID)
        digits = _square(text, len(NO_ID))
        dashes = (digits[:, DASHES] == ord("-")).all(axis=1)
        halves = DIGITS[np.delete(digits, DASHES, axis=1)]
        self._leave(~dashes | (halves == NO_DIGIT).any(axis=1))
        raw = halves[:, ::2] << 4 | halves[:, 1::2]
        return pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), len(text), [None, pa.py_buffer(np.ascontiguousarray(raw))]
        )

    def _moments(self, column: Column | None) -> pa.Array | None:
        """Return times, which are odd unless they are written as saf writes them."""
        if column is None:
            return None
        text = self._sized(column, NO_MOMENT)
        try:
            found = text.cast(MOMENT)
        except pa.ArrowInvalid:
            self.odd[:] = True
            return pa.array([FIRST_MOMENT] * len(text), MOMENT)
        early, late = pc.less(found, FIRST_MOMENT), pc.greater_equal(found, LAST_DAY)
        self._leave(np.asarray(pc.or_(early, late)))
        return found

    def _sized(self, column: Column, other: str) -> pa.Array:
        """Return texts; one of another length than ``other`` is odd, and replaced by it."""
        text = self._array(column)
        right = pc.equal(pc.binary_length(text), len(other))
        if not pc.all(right).as_py():
            self._leave(~np.asarray(right))
            text = pc.if_else(right, text, pa.scalar(other, TEXT))
        return text

    def _json(self, headers: Mapping[str, Column]) -> Column:
        """Return headers as JSON objects, written as the decoder writes them."""
        if all(isinstance(column, str) for column in headers.values()):
            return as_json(headers)
        parts: list[pa.Array | str] = []
        before = "{"
        for name, column in headers.items():
            parts.append(f"{before}{as_json(name)}: ")
            parts.append(as_json(column) if isinstance(column, str) else quoted(column))
            before = ", "
        return pc.binary_join_element_wise(
            *(pa.scalar(one, TEXT) if isinstance(one, str) else one for one in (*parts, "}", ""))
        )

    def _bounded(self, column: Column | None, most: int) -> None:
        """Leave texts that are empty or too long to the decoder, which names the problem."""
        if isinstance(column, str):
            if not 0 < len(column.encode()) <= most:
                self.odd[:] = True
        elif column is not None:
            sizes = np.asarray(pc.fill_null(pc.binary_length(column), 1))
            self._leave((sizes == 0) | (sizes > most))

    def _leave(self, odd: Mask) -> None:
        """Leave records to the decoder."""
        self.odd |= odd

    def _array(self, column: Column) -> pa.Array:
        if isinstance(column, str):
            return pa.repeat(pa.scalar(column, TEXT), len(self.records))
        return column

    def _typed(self, column: Column | None, field: pa.Field) -> pa.Array:
        if column is None:
            return pa.nulls(len(self.records), field.type)
        return self._array(column).cast(field.type)


def _sender(source: str) -> str | None:
    """Return the id of the broker that sent a message; None if the source does not name one."""
    sender = source.removeprefix(EVENT_SOURCE)
    try:
        UUID(sender)
    except ValueError:
        return None
    return sender


def _is_text(value: bytes) -> bool:
    r"""Return whether a header's value is text that PostgreSQL takes.

    >>> _is_text(b"a"), _is_text(b"\xff"), _is_text(b"\x00")
    (True, False, False)
    """
    try:
        return "\x00" not in value.decode()
    except UnicodeDecodeError:
        return False


def _square(texts: pa.Array, size: int) -> npt.NDArray[np.uint8]:
    """Return texts of one size in bytes as rows of bytes."""
    _, ends, data = texts.buffers()
    first = int(np.frombuffer(ends, np.int64)[texts.offset])
    return np.frombuffer(data, np.uint8)[first:][: len(texts) * size].reshape(-1, size)
