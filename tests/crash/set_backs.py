"""Set-backs in a round: a server is what it was at a copy, and nobody is told.

The writers go on at once. The forwarders have to refuse by name, and to write nothing meanwhile
that would be lost or come twice. Then a person does what docs/operations.md says; and does it
again where something is refused still, as when a forwarder had a commit at the old server in hand.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from saf.database import Dsn
from tests.crash.copies import Copies
from tests.crash.past import Message, life, message, stored
from tests.crash.plan import QUALITIES, Fault
from tests.programs import saf

if TYPE_CHECKING:
    from tests.crash.rounds import Round

NOTICED_SECONDS = 15.0
REST_SECONDS = 20.0
BEGUN_SECONDS = 15.0
GONE_ON_SECONDS = 5.0
GONE_ON_BATCHES = 20
COMMAND = "saf rebase"
STILL_AT_WORK = "stop all forwarders and receivers first"

# A copy of what has done nothing yet would show little
BEGUN = "SELECT FROM saf.cursor WHERE batch > 0 LIMIT 1"

# And so would a set-back to a copy after which hardly anything was forwarded
BATCHES = "SELECT coalesce(sum(batch), 0)::bigint FROM saf.cursor"
GONE_ON = "SELECT FROM saf.cursor HAVING sum(batch) >= {}"

# Whose transaction of two phases is that old has nobody who decides any more
UNDECIDED = """
SELECT gid FROM pg_prepared_xacts
WHERE database = current_database() AND prepared < now() - interval '1 second'
"""


class Refusals:
    """What forwarders say that they refuse to do, in a file that all of them append to."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seen = 0
        """How many there were when somebody last did something about it."""
        file.write_text("")

    def all(self) -> list[str]:
        """Each in a line."""
        return self.file.read_text().splitlines()

    def new(self) -> list[str]:
        """Those of which nobody has taken care."""
        return self.all()[self.seen :]


def have_begun(round_: Round) -> None:
    """Wait until there is something worth a copy."""
    round_.wait_for(BEGUN, BEGUN_SECONDS)


def have_copied(round_: Round) -> None:
    """Note how far forwarding was when a copy was taken."""
    with psycopg.connect(round_.app.conninfo) as connection:
        ((round_.batches_copied,),) = connection.execute(BATCHES).fetchall()


def have_gone_on(round_: Round) -> None:
    """Wait until there is something that a set-back takes away."""
    round_.wait_for(GONE_ON.format(round_.batches_copied + GONE_ON_BATCHES), GONE_ON_SECONDS)


def back_up_source(round_: Round, _: Fault) -> None:
    """A copy is taken while all work."""
    _take(round_, round_.site.copies_of_source)


def back_up_mom(round_: Round, _: Fault) -> None:
    """A copy is taken while all work."""
    _take(round_, round_.site.copies_of_mom)


def _take(round_: Round, copies: Copies) -> None:
    have_begun(round_)
    copies.take()
    have_copied(round_)


def set_back_source(round_: Round, _: Fault) -> None:
    """The application's cluster is what it was."""
    _have_a_copy(round_, round_.site.copies_of_source)
    source_goes_back(round_, Copies.set_back, by_dump=False)


def restore_source(round_: Round, _: Fault) -> None:
    """The application's database is a dump in another cluster."""
    _have_a_copy(round_, round_.site.copies_of_source)
    source_goes_back(round_, lambda copies: copies.restore("app"), by_dump=True)


def set_back_mom(round_: Round, _: Fault) -> None:
    """The cluster of the MOM stores is what it was."""
    copies = round_.site.copies_of_mom
    _have_a_copy(round_, copies)
    was = copies.set_back()
    lost = 0
    with copies.running(was) as old, copies.running(_newest(copies)) as copy:
        for name in round_.stores:
            lost += round_.past.store_goes_back(old.dsn(name).conninfo, copy.dsn(name).conninfo)
    if lost:
        expect_a_refusal(round_, f"the MOM stores had lost {lost} messages")
    repair(round_)


def repair(round_: Round) -> None:
    """What a person does who was told to."""
    # without talks the MOM stores send nothing, so they were not set back as sources
    everything_runs = not (round_.past.lives or round_.plan.dialogs)
    with nullcontext() if everything_runs else round_.at_rest():
        rebase(round_)
    if round_.plan.dialogs:
        done = _say(round_, "dialog compare", configure(round_, "person.toml"))
        round_.not_repaired += round_.commands[-1:] * (done.returncode != 0)


def rebase(round_: Round) -> str:
    """Say it until all that is at work has ended; return what it says."""
    file = configure(round_, "person.toml")
    round_.refusals.seen = len(round_.refusals.all())
    until = time.monotonic() + REST_SECONDS
    while True:
        for dsn in round_.brokers.values():
            decide(dsn)
        done = _say(round_, "rebase", file)
        again = done.returncode == 75 or STILL_AT_WORK in done.stderr
        if not again or time.monotonic() > until:
            break
        time.sleep(0.2)
    round_.not_repaired += round_.commands[-1:] * (done.returncode != 0)
    return done.stdout


def _say(round_: Round, command: str, file: Path) -> subprocess.CompletedProcess[str]:
    done = saf(*command.split(), "--config", file)
    round_.commands.append(f"saf {command}: {done.returncode}: {done.stdout}{done.stderr}")
    return done


def decide(dsn: Dsn) -> None:
    """Commit what was prepared by somebody who is gone, and holds locks."""
    with dsn.connect(role="crash", autocommit=True) as connection:
        for (gid,) in connection.execute(UNDECIDED).fetchall():
            try:
                connection.execute(sql.SQL("COMMIT PREPARED {}").format(sql.Literal(gid)))
            except psycopg.errors.UndefinedObject:
                continue  # its writer was there after all


def source_goes_back(round_: Round, go_back: Callable[[Copies], Path], *, by_dump: bool) -> None:
    """Let the application's database go back to its newest copy, and repair it."""
    copies = round_.site.copies_of_source
    was = go_back(copies)
    with copies.running(was) as old, copies.running(_newest(copies)) as copy:
        round_.past.source_goes_back(old.dsn("app").conninfo, copy.dsn("app").conninfo)
    ahead = _ahead(round_) if round_.site.notices else []
    if by_dump:
        expect_a_refusal(round_, "the application's database was in another cluster")
    elif ahead:
        expect_a_refusal(round_, f"the stores had {len(ahead)} messages that it did not know")
    repair(round_)


def _ahead(round_: Round) -> list[Message]:
    """What has arrived, and the application does not know any more."""
    arrived = {message(body) for body in round_.site.arrived()}
    for store in round_.stores.values():
        arrived |= stored(store.conninfo)
    now = life(round_.app.conninfo)
    return [
        one
        for one, known in round_.past.lives[-1].items()
        # of what goes at most once, the numbers of two forwarders' batches may hide it
        if one in arrived and one not in now and QUALITIES[known.service] != "at_most_once"
    ]


def _have_a_copy(round_: Round, copies: Copies) -> None:
    if copies.newest is None:
        _take(round_, copies)
    have_gone_on(round_)


def _newest(copies: Copies) -> Path:
    assert copies.newest is not None
    return copies.newest


def configure(round_: Round, file_name: str) -> Path:
    """A person's saf.toml: every broker, and all destinations of each of them."""
    lines = []
    for name, dsn in round_.brokers.items():
        lines += [f"[brokers.{name}]", f"dsn = {json.dumps(dsn.conninfo)}"]
    places = round_.site.by_proxy(round_.plan)
    for name, dsn in round_.brokers.items():
        is_queue = not isinstance(places.get(name, dsn), Dsn)
        if (name != "app" or round_.plan.dialogs) and not is_queue:
            lines += [f"[destinations.{name}]", f"dsn = {json.dumps(dsn.conninfo)}"]
    for name, there in places.items():
        if not isinstance(there, Dsn):
            given = {"kind": there.kind, **there.model_dump(mode="json", exclude_unset=True)}
            lines += [f"[destinations.{name}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in given.items()]
    file = round_.site.folder / file_name
    file.write_text("\n".join(lines) + "\n")
    return file


def expect_a_refusal(round_: Round, why: str) -> None:
    """Wait for one; without one, what was set back was gone on with."""
    until = time.monotonic() + NOTICED_SECONDS
    while not any(COMMAND in line for line in round_.refusals.new()):
        if time.monotonic() > until:
            if round_.plan.transactions is None:  # else nobody may have sent anything since
                round_.not_refused.append(why)
            return
        time.sleep(0.05)
