"""Script that stores a step at a Redis server, all or nothing, and the keys of a destination there.

The script, `STORE`, changes something only if the marks are still those that the caller has read.
It compares texts, so the rules of marks exist in Python only (`saf.destinations.places`). The
server runs nothing else at the same time. It writes the script's changes to its append-only file,
and to its replicas, as one transaction: after a crash, a restart or a failover, all changes exist,
or none.

Whatever could fail halfway is checked first: a key that is not a stream. The right to write marks
is used before the first message: one mark is written unchanged. So a step that fails has moved no
mark, and stored nothing.

All keys of a destination have one hash tag:

    {saf}:TOPIC              a stream of messages
    {saf}/identity           the destination's identity
    {saf}/marks/SOURCE       a hash of one source's marks: a field for each shard and lane, with a
                             value in the form of `saf.destinations.marks.written`
    {saf}/streams/SOURCE     a set of the streams that messages of one source went to
    {saf}/waited             nothing; written before a wait for replicas
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from saf.destinations.marks import Place

STORED, MOVED = 1, 0
"""Answers: the step is stored; another process has moved the marks."""

NO_STREAM = "SAFNOSTREAM"
"""Code of the error for a key that is not a stream; the key follows."""

DENIED = "SAFDENIED"
"""Code of the error for a command that this user has no right to use; the command follows."""

MOST_FIELDS = 2_000
"""Most fields of a message: Lua passes on about 8,000 values at a time."""

# KEYS    the marks of the source, the set of its streams, and then the streams
# ARGV    PLACES, and for each place its field and expected value
#         MOVED, and for each place that moves its field and new value
#         SHAPES, and for each shape of messages: FIELDS, and for each field its name, and ``?`` if
#         each message has a value of its own, or ``=`` and the value of all
#         and then for each message: its stream, its shape, and its values
STORE = """
local at, doing = 1, ''
local function following()
  at = at + 1
  return ARGV[at - 1]
end
local function call(command, ...)
  doing = command
  return redis.call(command, ...)
end

local function store()
  for _ = 1, tonumber(following()) do
    local field, expected = following(), following()
    if (call('HGET', KEYS[1], field) or '') ~= expected then return 0 end
  end
  for number = 3, #KEYS do
    local type = call('TYPE', KEYS[number]).ok
    if type ~= 'stream' and type ~= 'none' then
      return redis.error_reply('SAFNOSTREAM ' .. KEYS[number] .. ' is a ' .. type)
    end
  end
  for number = 3, #KEYS do call('SADD', KEYS[2], KEYS[number]) end
  local moved = {}
  for number = 1, tonumber(following()) do
    moved[number] = {following(), following()}
  end
  if moved[1] then
    call('HSET', KEYS[1], moved[1][1], call('HGET', KEYS[1], moved[1][1]) or '')
  end

  local shapes = {}
  for number = 1, tonumber(following()) do
    local entry, own = {'XADD', '', '*'}, {}
    for _ = 1, tonumber(following()) do
      entry[#entry + 1] = following()
      local said = following()
      entry[#entry + 1] = string.sub(said, 2)
      if said == '?' then own[#own + 1] = #entry end
    end
    shapes[number] = {entry, own}
  end
  doing = 'XADD'
  local last, xadd, unpack = #ARGV, redis.call, unpack
  while at <= last do
    local key, shape = KEYS[ARGV[at] + 2], shapes[tonumber(ARGV[at + 1])]
    at = at + 2
    local entry, own = shape[1], shape[2]
    entry[2] = key
    for number = 1, #own do entry[own[number]] = ARGV[at + number - 1] end
    at = at + #own
    xadd(unpack(entry))
  end

  for _, one in ipairs(moved) do call('HSET', KEYS[1], one[1], one[2]) end
  return 1
end

local fine, answer = pcall(store)
if fine then return answer end
local said = type(answer) == 'table' and answer.err or tostring(answer)
if string.sub(said, 1, 4) == 'ERR ' then said = 'SAFDENIED ' .. doing .. ': ' .. said end
return redis.error_reply(said)
"""


def stream(tag: str, topic: str) -> str:
    """Return the key of a topic's stream."""
    return f"{{{tag}}}:{topic}"


def identity(tag: str) -> str:
    """Return the key of the destination's identity."""
    return f"{{{tag}}}/identity"


def marks(tag: str, source: UUID | str) -> str:
    """Return the key of a source's marks."""
    return f"{{{tag}}}/marks/{source}"


def streams(tag: str, source: UUID | str) -> str:
    """Return the key of the set of a source's streams."""
    return f"{{{tag}}}/streams/{source}"


def waited(tag: str) -> str:
    """Return the key that is written before a wait for replicas."""
    return f"{{{tag}}}/waited"


def field(place: Place) -> str:
    """Return the field of a place.

    >>> field(("retry", 7))
    '7:retry'
    """
    lane, shard = place
    return f"{shard}:{lane}"


def place(name: str) -> Place:
    """Return the place of a field.

    >>> place("7:route:x:y")
    ('route:x:y', 7)
    """
    shard, _, lane = name.partition(":")
    return lane, int(shard)


def texts(fields: Mapping[bytes, bytes]) -> dict[Place, str]:
    """Return the written marks of places, from the fields of a source's marks."""
    return {place(name.decode()): value.decode() for name, value in fields.items()}
