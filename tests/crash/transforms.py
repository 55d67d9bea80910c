"""Transforms in rounds: what saf.toml says of them, and what has to arrive.

Forwarders change the messages of some services by `tests.crash.made`: they leave out some, split
others, and write into the rest what they have drawn. What has to arrive of what the application has
sent is said here, in plain Python. All rows of a message are stored together. What is drawn for it
is drawn once, so it is the same in all of them, also where the message is stored again. Only what a
set-back lets come again may be drawn anew, and left out once more.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import psycopg

from tests.crash.checker import ARRIVED, DEAD, Verdict, check
from tests.crash.past import Message, Past, life, message

FUNCTIONS = {"orders": "joined", "audit": "drawn", "metrics": "computed", "events": "drawn"}
"""Of each service, the function that its transform is, if it has one."""
NOT_DRAWN = "-"
TWICE_FROM = "8"

# What is made by chance is made once, and never again
WATCH = """
CREATE TABLE drawn (id bigint, number int, body bytea);
CREATE FUNCTION note_drawn() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.drawn VALUES (NEW.id, NEW.number, NEW.body); RETURN NULL; END $$;
CREATE TRIGGER watched AFTER INSERT ON saf.kept_result FOR EACH ROW EXECUTE FUNCTION note_drawn();
"""
LEFT_OUT = """
SELECT coalesce(sum(d.messages), 0)::bigint
FROM saf.dropped d JOIN saf.subscription s USING (subscription_id)
WHERE s.log = 'outbox' AND d.reason = 'left_out'
"""
DRAWN = "SELECT convert_from(body, 'UTF8') FROM drawn WHERE body IS NOT NULL"


def tables(services: Collection[str]) -> str:
    """What saf.toml says of them."""
    lines = []
    for service in services:
        function = FUNCTIONS[service]
        lines += ["[[transforms]]", f"service = {json.dumps(service)}"]
        lines += [f'function = "tests.crash.made:{function}"']
        lines += ["deterministic = false"] * (function == "drawn")
    return "".join(f"{line}\n" for line in lines)


def watch(connection: psycopg.Connection[Any]) -> None:
    """Let an application's database remember what was ever kept of what was drawn."""
    connection.execute(WATCH)


def check_made(
    source: str,
    stores: Iterable[str],
    qualities: Mapping[str, str],
    services: Collection[str],
    past: Past | None = None,
) -> Verdict:
    """As `check`, where messages of ``services`` are transformed."""
    past = past or Past()
    anew = {*past.again, *past.out_of_turn}
    arrived: list[str] = []
    wrong: list[tuple[Message, str]] = []
    for store in stores:
        with psycopg.connect(store) as connection:
            bodies = [body for (body,) in connection.execute(ARRIVED).fetchall()]
        whole, not_whole = undone(bodies, services, anew)
        arrived += whole
        wrong += not_whole
    verdict = check(source, [], qualities, arrived, past)
    with psycopg.connect(source) as connection:
        drawn = again([body for (body,) in connection.execute(DRAWN).fetchall()])
        wrong += [(one, why) for one, why in drawn if one not in anew]
        dead = {message(body) for body, _ in connection.execute(DEAD).fetchall()}
        ((counted,),) = connection.execute(LEFT_OUT).fetchall()
    sent = life(source)
    absent = {
        one
        for one, known in (past.forgotten | sent).items()
        if known.service in services and is_left_out(one) and not known.poison
    }
    verdict.lost = [one for one in verdict.lost if one not in absent]
    due = len((absent & sent.keys()) - dead)
    if counted < due or (counted > due and not past.went_back):
        verdict.dropped_wrongly.append((source, "left_out", counted, due))
    there = {message(body) for body in arrived}
    verdict.unexpected += wrong + [(one, "is not left out") for one in sorted(absent & there)]
    return verdict


def is_left_out(one: Message) -> bool:
    """Whether nothing is made of a message that is not poison."""
    return one[1] % 7 == 0


def undone(
    bodies: Iterable[str], services: Collection[str], anew: Collection[Message] = ()
) -> tuple[list[str], list[tuple[Message, str]]]:
    """Bodies as if nothing had been transformed, and what was not made as it has to be.

    What is drawn may be drawn ``anew`` for some messages.

    >>> undone(["a-0 5 t 0 2 - x", "b-0 1 u x", "a-0 5 t 1 2 - x"], {"a"})
    (['a-0 5 t 0 2 - x', 'b-0 1 u x'], [])
    >>> undone(["a-0 5 t 0 2 - x", "a-0 1 u"], {"a"})
    (['a-0 5 t 0 2 - x'], [(('a-0', 1, 'u'), 'is as sent'), (('a-0', 5, 't'), 'is there in part')])
    """
    whole: list[str] = []
    parts: dict[Message, Counter[int]] = defaultdict(Counter)
    draws: dict[Message, set[str]] = defaultdict(set)
    wrong: dict[tuple[Message, str], None] = {}
    for body in bodies:
        one, words = message(body), body.split()
        if one[0].partition("-")[0] not in services:
            whole.append(body)
        elif len(words) < 6 or not words[3].isdecimal():
            wrong[one, "is as sent"] = None
        else:
            part, draw = int(words[3]), words[5]
            parts[one][part] += 1
            draws[one].add(draw)
            whole += [body] * (part == 0)
            if part and parts[one][part] > parts[one][part - 1]:
                wrong[one, "is in no order"] = None
    for one, counts in parts.items():
        draw, *others = sorted(draws[one])
        if one in anew and draw != NOT_DRAWN:
            continue
        if others:
            wrong[one, "was made otherwise the second time"] = None
        elif set(counts) != set(range(_rows(one, draw))) or len({*counts.values()}) > 1:
            wrong[one, "is there in part"] = None
    return whole, list(wrong)


def again(drawn: Iterable[str]) -> list[tuple[Message, str]]:
    """Messages that something was made of more than once, by the rows that were made.

    >>> again(["a-0 1 t 0 1 7f x", "a-0 2 u 0 1 7e x", "a-0 1 t 0 1 7c x"])
    [(('a-0', 1, 't'), 'was made twice')]
    """
    parts = Counter((message(body), body.split()[3]) for body in drawn)
    twice = dict.fromkeys(one for (one, _), count in parts.items() if count > 1)
    return [(one, "was made twice") for one in twice]


def _rows(one: Message, draw: str) -> int:
    """How many rows are made of a message."""
    twice = one[1] % 5 == 0 if draw == NOT_DRAWN else draw >= TWICE_FROM
    return 1 + twice
