"""Records that are decoded a column at a time become what they become one by one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from uuid import UUID

import pytest

from saf.message import MAX_HEADERS, MAX_KEY, MAX_NAME
from saf.sources import Record, columns
from saf.sources.decoding import REASON, Decoder

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
DECODER = Decoder(source=UUID(int=5), service="billing", prefix="ce_", max_bytes=1000)
COUNT = 3 * columns.FEW

OURS = {
    "saf-id": lambda number: str(UUID(int=number)),
    "saf-source": lambda _: str(UUID(int=8)),
    "saf-shard": lambda number: str(number % 4),
    "saf-service": lambda _: "billing",
    "saf-from": lambda _: "shop",
    "saf-key": lambda number: f"A-{number % 7}",
    "saf-type": lambda number: ("paid", "sent")[number % 2],
    "saf-created-at": lambda number: _text(NOON + timedelta(microseconds=number)),
    "saf-expires-at": lambda _: "2199-01-31T12:00:00.000000Z",
    "content-type": lambda _: "application/json",
    "trace": lambda number: f'"{number}" \\ \n grüezi',
}
EVENTS = {
    "ce_id": OURS["saf-id"],
    "ce_source": lambda _: f"urn:uuid:{UUID(int=8)}",
    "ce_safshard": OURS["saf-shard"],
    "ce_safservice": lambda _: "billing",
    "ce_type": lambda number: ("paid", "billing")[number % 2],
    "ce_partitionkey": OURS["saf-key"],
    "ce_time": OURS["saf-created-at"],
    "ce_specversion": lambda _: "1.0",
    "trace": OURS["trace"],
}
OTHERS = {"order": lambda number: f"B-{number}", "ce_type": lambda _: "x", "note": lambda _: "n"}
FORMS = {"saf": OURS, "cloudevents": EVENTS, "another": OTHERS, "none": {}}

ODD = (
    *(b"", b"\xff", b"\x00", b"a\x00b", "grüezi ☃".encode(), b"x" * (MAX_NAME + 1)),
    *(b"x" * (MAX_KEY + 1), b"0" * 36, b"-" * 36, str(UUID(int=3)).upper().encode()),
    *(UUID(int=3).hex.encode(), f"{{{UUID(int=3)}}}".encode(), f"urn:uuid:{UUID(int=3)}".encode()),
    *(b"00000000-0000-0000-0000-00000000000g", b"00000000-0000-00000-000-000000000007"),
    *(b"2026-01-31T12:00:00+01:00", b"2026-02-30T12:00:00.000000Z", b"2026-01-31 12:00:00.000000Z"),
    *(
        b"0000-01-31T12:00:00.000000Z",
        b"9999-12-31T12:00:00.000000Z",
        b"2026-01-31T12:00:00.0000000",
    ),
    *(b"2026-01-31T24:00:00.000000Z", b"application/cloudevents+json", b'{"a": 1}', b"7"),
)


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def records(form: Mapping[str, object], count: int = COUNT, **more: object) -> list[Record]:
    return [
        Record(
            position=(7, number),
            headers={name: value(number).encode() for name, value in form.items()},  # type: ignore[operator]
            body=b'{"number": %d}' % number,
            created_at=NOON - timedelta(seconds=number),
            **more,  # type: ignore[arg-type]
        )
        for number in range(count)
    ]


def equal(found: Sequence[Record], decoder: Decoder = DECODER) -> None:
    expected = decoder.table(3, found).to_pylist()
    assert columns.table(decoder, 3, found).to_pylist() == expected


def changed(record: Record, **headers: bytes) -> Record:
    return record._replace(headers={**record.headers, **headers})


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_alike_records_become_what_they_become_one_by_one(
    form: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = records(FORMS[form])
    decoder = replace(DECODER, named_services=named)
    equal(found, decoder)
    # and not because they were read one by one
    monkeypatch.setattr(Decoder, "table", None)
    assert columns.table(decoder, 3, found)[REASON].null_count == COUNT


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form, names in FORMS.items() for name in names]
)
def test_an_odd_value_of_some_or_all_is_read_as_it_is_alone(
    form: str, name: str, value: bytes
) -> None:
    found = records(FORMS[form], columns.FEW)
    decoder = replace(DECODER, named_services=True, key_header="order")
    equal([found[0], changed(found[1], **{name: value}), *found[2:]], decoder)
    equal([changed(record, **{name: value}) for record in found], decoder)


def test_headers_that_change_what_others_mean_are_read_as_they_are_alone() -> None:
    for name, value in (
        ("saf-conversation", str(UUID(int=9)).encode()),
        ("saf-sent-by", b"me"),
        ("saf-verified-from", b'{"service": "bank"}'),
        ("saf-claimed-from", b"x"),
        ("zero\x00byte", b"1"),
        ("ce_source", b"urn:uuid:7"),
    ):
        for form in FORMS.values():
            equal([changed(record, **{name: value}) for record in records(form)])
    both = {"saf-claimed-from": b"1", "saf-verified-from": b"2"}
    equal([changed(record, **both) for record in records(OTHERS)])


@pytest.mark.parametrize(
    "key", [None, b"", b"A-1", "ü".encode(), b"\xff", b"a\x00", b"x" * (MAX_KEY + 1)]
)
def test_keys_of_records_are_read_as_they_are_alone(key: bytes | None) -> None:
    for form in FORMS.values():
        equal(records(form, key=key))
        mixed = [one._replace(key=b"K-%d" % one.position[1]) for one in records(form)]
        equal(mixed)
        equal([mixed[0]._replace(key=key), *mixed[1:]])


def test_large_bodies_and_headers_are_dead_letters_between_their_neighbours() -> None:
    found = records(OURS)
    found[4] = found[4]._replace(body=b"x" * 1001)
    found[9] = changed(found[9], trace=b"x" * MAX_HEADERS)
    equal(found)
    dead = [row[REASON] for row in columns.table(DECODER, 3, found).to_pylist()]
    assert [(place, reason) for place, reason in enumerate(dead) if reason] == [
        (4, "over_size"), (9, "undecodable"),
    ]  # fmt: skip


def test_a_body_that_its_kind_could_not_decode_is_a_dead_letter() -> None:
    found = records(OURS)
    found[4] = found[4]._replace(problem="its schema is unknown")
    equal(found)
    equal([one._replace(problem="its schema is unknown") for one in found])
    dead = columns.table(DECODER, 3, found).to_pylist()[4]
    assert (dead["reason"], dead["error"]) == ("undecodable", "its schema is unknown")


def test_records_of_several_writers_stay_in_their_order() -> None:
    chance = random.Random(7)
    found = [*chain.from_iterable(records(form) for form in FORMS.values())]
    few = [changed(one, **{f"header-{one.position[1]}": b"1"}) for one in records(OTHERS, 20)]
    found += few
    chance.shuffle(found)
    found = [one._replace(position=(9, number)) for number, one in enumerate(found)]
    equal(found)
    assert columns.table(DECODER, 3, found)["id"].to_pylist() == [*range(len(found))]


def test_any_mixture_is_read_as_it_is_alone() -> None:
    chance = random.Random(7)
    for _ in range(100):
        found = records(FORMS[chance.choice([*FORMS])], chance.randint(1, 100))
        for _ in range(chance.randint(0, 8)):
            place = chance.randrange(len(found))
            names = [*found[place].headers] or ["x"]
            found[place] = changed(found[place], **{chance.choice(names): chance.choice(ODD)})
        equal(found, replace(DECODER, named_services=chance.random() < 0.5))


def test_a_few_records_of_each_of_two_writers_keep_their_order() -> None:
    names = ("order", "note")
    records = [
        Record(position=(0, number), headers={names[number % 2]: b"1"}, body=b"%d" % number)
        for number in range(2 * (columns.FEW - 2))
    ]
    found = columns.table(DECODER, 0, records)
    assert found["id"].to_pylist() == [record.position[1] for record in records]


def test_records_that_cannot_be_read_are_dead_letters_among_many() -> None:
    records = [
        Record(
            position=(0, number),
            headers={},
            body=b"%d" % number,
            created_at=NOON,
            problem="it is damaged" if number % 2 else None,
        )
        for number in range(COUNT)
    ]
    found = columns.table(DECODER, 0, records)
    assert found["id"].to_pylist() == [*range(COUNT)]
    assert found[REASON].to_pylist() == [None, "undecodable"] * (COUNT // 2)
