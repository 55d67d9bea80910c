r"""A folder of files of JSON lines, filled a chunk at a time, exactly once.

    saf.json                       the folder's identity, created once
    SOURCE/000000000001.jsonl      the messages of one source, a file for each chunk; file names and
    SOURCE/000000000002.jsonl      lines give the order of each key
    .saf/SOURCE.json               the state of a source: its marks, and the number of its last file
    .saf/SOURCE.lock               locked by the forwarder that writes
    .saf/SOURCE-2.tmp              a file that is being written, with its future number

A chunk is stored by one rename, which puts a new SOURCE.json in place; the file is only ever
replaced as a whole. Before the rename, the messages are in a durable file that readers do not see.
After it, that file gets its name. If this process is killed in between, the next process that gets
the lock names the file, because the marks in SOURCE.json show that the chunk is stored. So a killed
process leaves a whole chunk, or none of the chunk, and a file never changes once it has its name.

A stopped process keeps its lock, and others wait ``lock_seconds`` for it. If it continues after
others have written, it reads their marks and is fenced. A damaged saf.json or SOURCE.json is
refused: an operator must restore it.

A line is one message, written by Arrow, without Python code per message:

    {"source": "…", "shard": 7, "message_id": "…", "to_service": "billing", "key": "order 7",
     "headers": {"content-type": "application/json"}, "body": "{\"order\": 7}",
     "created_at": "2026-01-31T12:00:00.000001Z"}

The names are those of a message's columns; NULL columns are left out. ``source`` is the broker_id
of the source, ``shard`` the key's shard there. A UTF-8 body is a text in ``body``; any other body
is in ``body_base64``. Only if a chunk contains such a body, Python checks its bodies one by one.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.columns import MESSAGE
from saf.destinations import Chunk, Reading, Refusal, Stored
from saf.destinations.jsonl import (
    INSIDE,
    State,
    known_of,
    make_identity,
    read_identity,
    read_state,
)
from saf.destinations.marks import NOTHING, Mark, Place
from saf.destinations.places import guarded, judged, refuse
from saf.destinations.tables import HELD, Held, TableReading
from saf.destinations.texts import TEXT, in_quotes, moments, quoted, uuids, whole
from saf.errors import CannotReadBack, Rejected, Unavailable
from saf.failpoints import fail_point
from saf.log.disk import make_folder, sync, unavailable_if_lost, write

if TYPE_CHECKING:
    from saf.destinations.jsonl import Jsonl

POLL_SECONDS = 0.02
"""Pause between attempts to get a lock."""


class Folder:
    """A folder as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Jsonl) -> None:
        self.what = f"destination {name!r}"
        self.settings = settings
        self.path = settings.folder

    def identity(self) -> UUID:
        """Return the identity in the folder's saf.json; an empty folder becomes a destination."""
        return make_identity(self.what, self.path)

    def connect(self) -> None:
        """Ensure that the folder is writable."""
        self.identity()

    def look(self) -> None:
        """Raise the same errors as `connect`, without writing."""
        with unavailable_if_lost(self.what):
            os.scandir(self.path).close()
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied", str(self.path))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        """Store a chunk; see `saf.destinations.Destination`."""
        identity = self.identity()
        with unavailable_if_lost(self.what), self._locked(chunk.source) as state:
            epochs, marks = self._places(state, chunk)
            verdict = judged(self.what, identity, chunk, epochs, marks, exactly_once=exactly_once)
            own = dict(chunk.batch.epochs)
            new = State(
                number=state.number,
                marks={**state.marks, **marks, **verdict.moved},
                epochs=state.epochs | {(lane, shard): own[shard] for lane, shard in marks},
            )
            self._commit(chunk.source, new, verdict.rows if verdict.wrong is None else None, state)
        if verdict.wrong:
            return verdict.wrong
        dropped = chunk.rows.num_rows - verdict.rows.num_rows
        return Stored(messages=verdict.rows.num_rows, dropped=dropped, marks=verdict.moved)

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored; see `Destination.marks`."""
        self.identity()
        with unavailable_if_lost(self.what), self._locked(chunk.source) as state:
            epochs, marks = self._places(state, chunk)
            refuse(self.what, chunk, epochs, marks)
            return marks

    def _places(self, state: State, chunk: Chunk) -> tuple[dict[Place, int], dict[Place, Mark]]:
        places = guarded(chunk)
        return (
            {place: state.epochs.get(place, 0) for place in places},
            {place: state.marks.get(place, NOTHING) for place in places},
        )

    def _commit(self, source: UUID, new: State, rows: pa.Table | None, old: State) -> None:
        """Store the marks of a source and, in the same step, the messages that they cover."""
        inside = self.path / INSIDE
        if rows is not None and rows.num_rows:
            new.number += 1
            folder = self.path / str(source)
            if new.number == 1 or not folder.exists():
                make_folder(folder)
            write(draft_of(self.path, source, new.number), self._content(rows, source))
        elif new == old:
            return
        write(inside / f"{source}.new", new.as_bytes())
        sync(inside)
        fail_point("mom_insert")
        (inside / f"{source}.new").rename(inside / f"{source}.json")
        sync(inside)
        fail_point("mom_commit")
        self._publish(source, new)

    def _content(self, rows: pa.Table, source: UUID) -> memoryview:
        written = lines(rows, source)
        limit = self.settings.max_line_bytes
        if limit is not None and pc.max(pc.binary_length(written)).as_py() > limit:
            raise Rejected(self.what, f"a line has more than max_line_bytes ({limit:,})")
        return content(written)

    def _publish(self, source: UUID, state: State) -> None:
        """Name the last file of a source, unless it has its name."""
        draft, final = (path_of(self.path, source, state.number) for path_of in (draft_of, file_of))
        if draft.exists():
            draft.rename(final)
            sync(final.parent)
            sync(draft.parent)

    @contextmanager
    def _locked(self, source: UUID) -> Iterator[State]:
        """Yield the state of a source, protected from changes by other processes.

        Raises:
            Unavailable: another process holds the lock for longer than ``lock_seconds``.
        """
        with (self.path / INSIDE / f"{source}.lock").open("wb") as lock:
            self._wait_for(lock.fileno())
            state = read_state(self.what, self.path, source)
            self._publish(source, state)
            yield state

    def _wait_for(self, lock: int) -> None:
        until = time.monotonic() + self.settings.lock_seconds
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Unavailable(
                        self.what, "another forwarder holds its lock", hangs=True
                    ) from None
            time.sleep(POLL_SECONDS)


def draft_of(folder: Path, source: UUID, number: int) -> Path:
    """Return the path of a source's file with this number, before the file has its name."""
    return folder / INSIDE / f"{source}-{number}.tmp"


def file_of(folder: Path, source: UUID, number: int) -> Path:
    """Return the path of a source's file with this number, once the file has its name."""
    return folder / str(source) / f"{number:012}.jsonl"


def lines(rows: pa.Table, source: UUID) -> pa.Array:
    """Return a line for each message, ending with a newline."""
    rows = rows.combine_chunks()
    parts = [_scalar(f'{{"source":"{source}","shard":'), rows["shard"].cast(TEXT)]
    for column in MESSAGE:
        values = whole(rows[column.name])
        if values.null_count == len(values):
            continue
        if column.name == "body":
            parts += _body(values)
        else:
            parts.append(_field(column.name, WRITTEN[column.type](values)))
    return whole(_join(*parts, _scalar("}\n")))


def content(written: pa.Array) -> memoryview:
    """Return the concatenated bytes of lines, without copying them."""
    offsets = np.frombuffer(written.buffers()[1], np.int64)
    first, last = offsets[written.offset], offsets[written.offset + len(written)]
    return memoryview(written.buffers()[2])[first:last]


def _body(values: pa.Array) -> list[pa.Array]:
    values = values.cast(pa.large_binary())
    try:
        return [_field("body", quoted(values.cast(TEXT)))]
    except pa.ArrowInvalid:  # some are not UTF-8
        texts = [_as_text(body) for body in values.to_pylist()]
    encoded = [
        None if text is not None else base64.b64encode(body).decode()
        for text, body in zip(texts, values.to_pylist(), strict=True)
    ]
    return [
        _field("body", quoted(pa.array(texts, TEXT))),
        _field("body_base64", quoted(pa.array(encoded, TEXT))),
    ]


def _as_text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _field(name: str, written: pa.Array) -> pa.Array:
    """Return a field of each line, preceded by a comma; null where the value is null."""
    return pc.binary_join_element_wise(_scalar(f',"{name}":'), written, _scalar(""))


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(TEXT)


WRITTEN: dict[str, Callable[[pa.Array], pa.Array]] = {
    "uuid": lambda values: in_quotes(uuids(values)),
    "text": lambda values: quoted(values.cast(TEXT)),
    "boolean": _plain,
    "bigint": _plain,
    "jsonb": _plain,
    "timestamptz": lambda values: in_quotes(moments(values)),
}
"""Function that writes a column's values, by the column's type in PostgreSQL."""


def _join(*parts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(
        *parts, _scalar(""), null_handling="replace", null_replacement=""
    )


def _scalar(text: str) -> pa.Scalar:
    return pa.scalar(text, TEXT)


@contextmanager
def read(name: str, settings: Jsonl) -> Iterator[Reading]:
    """Open all files of all sources for reading.

    Raises:
        CannotReadBack: some files are gone.
    """
    destination, folder = f"destination {name!r}", settings.folder
    identity = read_identity(destination, folder)
    with unavailable_if_lost(destination):
        for state in sorted((folder / INSIDE).glob("*.json")):
            _files(name, folder, UUID(state.stem))
    yield TableReading(
        name=name,
        is_=identity,
        read=cache(lambda source: _held(name, folder, source)),
        knows=lambda source: known_of(destination, folder, source),
    )


def _files(name: str, folder: Path, source: UUID) -> list[Path]:
    """Return the files of a source. The last one may not have its name yet."""
    last = read_state(f"destination {name!r}", folder, source).number
    files = [file_of(folder, source, number) for number in range(1, last + 1)]
    if files and (draft := draft_of(folder, source, last)).exists():
        files[-1] = draft
    missing = [file for file in files if not file.exists()]
    if missing:
        raise CannotReadBack(
            name, f"{len(missing):,} of its files are gone, such as {missing[0].name} of {source}"
        )
    return files


def _held(name: str, folder: Path, source: UUID) -> pa.Table:
    with unavailable_if_lost(f"destination {name!r}"):
        tables = [_table(file) for file in _files(name, folder, source)]
    return pa.concat_tables([HELD.empty_table(), *tables])


def _table(file: Path) -> pa.Table:
    """Return the messages of a file."""
    held = Held()
    with file.open("rb") as lines:
        for line in lines:
            message = json.loads(line)
            to_broker = message.get("to_broker")
            held.add(
                {
                    **message,
                    "message_id": UUID(message["message_id"]).bytes,
                    "to_broker": to_broker and UUID(to_broker).bytes,
                    "key": message.get("key"),
                    "created_at": datetime.fromisoformat(message["created_at"]),
                }
            )
    return held.table()
