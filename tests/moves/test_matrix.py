"""The matrix of moves: each way to move, copy or rewrite a database, of a source, a store or both.

In each cell no message is lost or doubled and the order is kept, either immediately, or after a
refusal that names the cure. docs/moving.md has a recipe for each way, and this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from saf.database import Dsn
from tests.moves import ways
from tests.moves.conftest import Site
from tests.moves.scene import PARTS, Home, Part, Reader, Scene, scene
from tests.pipeline import connect

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"

Step = Callable[[Scene], object]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of the next contact."""

    words: str
    """The result in the page's table."""
    refusal: str = ""
    """A pattern of the refusal's text; empty if nothing is refused."""
    cure: Step = lambda _: None
    who: tuple[Reader, ...] = ("forwarder", "receivers")
    """The readers that are refused; receivers only at a store."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to move, copy or rewrite a database."""

    name: str
    """The name in the page's table."""
    move: Step
    outcomes: tuple[Outcome, Outcome, Outcome]
    """For a source, a store, and both."""
    home: Home | None = None
    """The cluster of the moved databases, if they need one of their own."""
    senders_wait: bool = False
    """Whether senders continue only after the cure."""
    in_gate: Part | None = None
    """The part with which the gate also runs the way."""

    @property
    def row(self) -> str:
        """The row of the page's table."""
        return f"| {' | '.join([self.name, *(one.words for one in self.outcomes)])} |"


# --- ways of more than one step


def dumped(moved: Scene, recipe: str) -> None:
    moved.each(lambda broker: ways.recipe(recipe, broker, moved.elsewhere()))


def restored_over(moved: Scene, *options: str) -> None:
    for one in moved.moving:
        into = moved.brokers[one]
        dump = ways.dump(moved.old, into)
        done = ways.attempt(moved.old, "pg_restore", *options, "-d", into.conninfo, given=dump)
        assert (done.returncode == 0) is ("--clean" in options), done.stderr


def without_rows(moved: Scene) -> None:
    moved.back_up()
    moved.each(lambda broker: ways.recipe("follow", broker, moved.elsewhere(), lines=slice(1)))


def truncated(moved: Scene) -> None:
    moved.back_up("--schema=saf")
    moved.each(ways.truncated)


def rows_restored(moved: Scene) -> None:
    for one, dump in moved.dumps.items():
        command = ("pg_restore", "--data-only", "--disable-triggers", "-d")
        ways.tool(moved.old, *command, moved.brokers[one].conninfo, given=dump)
    moved.saf("rebase")


def replicated(moved: Scene, *, busy: bool, sequences: bool) -> None:
    followers = {
        name: ways.follow(broker, moved.elsewhere(), name) for name, broker in moved.named().items()
    }
    if busy:
        moved.work()
    moved.cut_over(followers, sequences=sequences)


def promoted(moved: Scene, *, lags: bool) -> None:
    moved.forward()
    standby = moved.running.enter_context(ways.storage_copy(moved.old, "-R"))
    moved.work()
    moved.forward()
    ways.catch_up(moved.old, standby)
    if lags:
        ways.cut_off(standby)
        known = len(moved.expected)
        moved.work()
        moved.forward()
        if moved.part == "both":  # later messages are gone from both
            del moved.expected[known:]
    ways.promote(standby)
    moved.is_in(standby)


def copied(moved: Scene) -> None:
    moved.is_in(moved.running.enter_context(ways.storage_copy(moved.old)))


def caught_up(moved: Scene, copying: ways.Copying) -> None:
    followers = moved.running.enter_context(copying(moved.old, moved.named()))
    ways.burn(moved.old, 50)  # temporary tables, and whatever else is not replicated
    moved.work()
    moved.cut_over(followers, sequences=True)


def cloned(moved: Scene) -> None:
    moved.each(lambda b: ways.template_copy(moved.old, b, moved.name_there()))


def cloned_beside(moved: Scene) -> None:
    for one in moved.moving:
        copy = ways.template_copy(moved.old, moved.brokers[one], moved.name_there())
        moved.copies[one] = copy


def upgraded(moved: Scene) -> None:
    moved.is_in(moved.running.enter_context(ways.upgraded(moved.old)))


def vacuumed(broker: Dsn) -> None:
    with connect(broker) as connection:
        connection.execute("VACUUM (FULL, FREEZE)")


def clock_set(moved: Scene, seconds: int) -> None:
    ways.set_clock(moved.old, seconds)


# --- the table


def commands(*lines: str) -> dict[str, Any]:
    def cure(moved: Scene) -> None:
        for line in lines:
            moved.saf(line)

    return {"cure": cure}


TWO = r"two databases with one broker_id.*saf broker new-id"
CONTINUES = Outcome(words="continues")
MOVED = Outcome(
    words="refused: `saf rebase`",
    refusal=r"cannot be used as it was restored or moved.*saf rebase",
    **commands("rebase"),
)
SET_BACK = Outcome(
    words="refused: `saf rebase`",
    refusal=r"seems to be restored.*saf rebase",
    who=("forwarder",),
    **commands("rebase"),
)
DOUBLED = Outcome(
    words="receivers are refused: `saf rebase`",
    refusal=MOVED.refusal,
    who=("receivers",),
    **commands("rebase"),
)
EMPTY = Outcome(
    words="refused: restore the rows, `saf rebase`",
    refusal=r"own rows are gone.*restore it from a backup",
    cure=rows_restored,
)
COPY = Outcome(
    words="the copy is refused: `saf broker new-id`",
    refusal=TWO,
    who=("forwarder",),
    **commands("broker new-id --broker shop_copy"),
)
COPY_OF_STORE = Outcome(
    words="continues; `saf broker new-id` for the copy",
    **commands("broker new-id --broker mom_copy"),
)
COPIES = Outcome(
    words=COPY.words,
    refusal=TWO,
    who=("forwarder",),
    **commands("broker new-id --broker shop_copy", "broker new-id --broker mom_copy"),
)


WAYS = (
    Way(
        name="`pg_dump`, `pg_restore` into an empty database",
        move=partial(dumped, recipe="dump"), outcomes=(MOVED,) * 3,
    ),
    Way(
        name="`pg_dump -Fd -j`, `pg_restore -j`",
        move=partial(dumped, recipe="parallel"), outcomes=(MOVED,) * 3,
    ),
    Way(
        name="`pg_restore --clean` over itself",
        move=lambda moved: restored_over(moved, "--clean", "--no-owner"),
        outcomes=(CONTINUES,) * 3, in_gate="both",
    ),
    Way(
        name="`pg_restore` over itself without `--clean`",
        move=lambda moved: restored_over(moved, "--no-owner"), outcomes=(MOVED, DOUBLED, MOVED),
    ),
    Way(
        name="`pg_dump --schema-only`",
        move=without_rows, outcomes=(EMPTY,) * 3, senders_wait=True,
    ),
    *(
        Way(
            name=f"`pg_upgrade` from {version} to 18",
            move=upgraded, outcomes=(MOVED,) * 3, home=partial(ways.cluster, version),
        )
        for version in (15, 16)
    ),
    *(
        Way(
            name=f"logical replication, {'busy' if busy else 'idle'}, "
            f"sequences {'set' if sequences else 'forgotten'}",
            move=partial(replicated, busy=busy, sequences=sequences), outcomes=(MOVED,) * 3,
        )
        for busy in (False, True)
        for sequences in (True, False)
    ),
    Way(name="`pg_basebackup`", move=copied, outcomes=(CONTINUES,) * 3),
    Way(
        name="a standby, promoted",
        move=partial(promoted, lags=False), outcomes=(CONTINUES,) * 3,
    ),
    Way(
        name="a standby, promoted with lag",
        move=partial(promoted, lags=True), outcomes=(SET_BACK, SET_BACK, CONTINUES),
    ),
    Way(
        name="`pg_basebackup`, then logical replication",
        move=partial(caught_up, copying=ways.followed_copy), outcomes=(MOVED,) * 3,
    ),
    Way(
        name="`pg_createsubscriber`",
        move=partial(caught_up, copying=ways.created_subscriber), outcomes=(MOVED,) * 3,
    ),
    Way(
        name="`CREATE DATABASE … TEMPLATE`, instead of the original",
        move=cloned, outcomes=(CONTINUES,) * 3,
    ),
    Way(
        name="`CREATE DATABASE … TEMPLATE`, beside the original",
        move=cloned_beside, outcomes=(COPY, COPY_OF_STORE, COPIES),
    ),
    Way(
        name="`VACUUM (FULL, FREEZE)`",
        move=lambda moved: moved.each(vacuumed), outcomes=(CONTINUES,) * 3, in_gate="both",
    ),
    Way(
        name="`CLUSTER`",
        move=lambda moved: moved.each(ways.clustered), outcomes=(CONTINUES,) * 3,
    ),
    Way(
        name="`pg_repack`",
        move=lambda moved: moved.each(ways.repacked), outcomes=(CONTINUES,) * 3, in_gate="both",
    ),
    Way(
        name="`pg_resetwal`",
        move=lambda moved: ways.reset_wal(moved.old), outcomes=(CONTINUES,) * 3, home=ways.cluster,
    ),
    Way(
        name="`pg_resetwal -e`",
        move=lambda moved: ways.reset_wal(moved.old, "-e", "0"),
        outcomes=(MOVED,) * 3, home=ways.cluster_of_epoch_1,
    ),
    Way(name="`TRUNCATE` of saf's tables", move=truncated, outcomes=(EMPTY,) * 3),
    *(
        Way(
            name=f"the server's clock an hour {where}",
            move=partial(clock_set, seconds=by),
            outcomes=(CONTINUES,) * 3, home=ways.cluster_with_clock,
        )
        for where, by in (("back", -3600), ("ahead", 3600))
    ),
)  # fmt: skip


def cells() -> list[Any]:
    """Each way with each part, immediately and after others have used the clusters."""
    later = [pytest.mark.full, pytest.mark.slow]
    return [
        pytest.param(
            way, part, others,
            id=f"{way.name}-{part}-{'later' if others else 'at-once'}",
            marks=[] if part == way.in_gate and not others else later,
        )
        for way in WAYS for part in PARTS for others in (0, 700)
    ]  # fmt: skip


@pytest.mark.parametrize(("way", "part", "others"), cells())
def test_a_moved_database_loses_and_doubles_nothing_or_is_refused_until_the_named_cure(
    site: Site, tmp_path: Path, way: Way, part: Part, others: int
) -> None:
    outcome = way.outcomes[PARTS.index(part)]
    with scene(site, part, tmp_path, way.home) as moved:
        moved.begin()
        way.move(moved)
        if not way.senders_wait:
            moved.senders_continue(others)
        if outcome.refusal:
            moved.is_refused(outcome.refusal, outcome.who)
        outcome.cure(moved)
        if way.senders_wait:
            moved.senders_continue(others)
        moved.delivers_all()


def test_the_page_has_the_matrix() -> None:
    lines = PAGE.read_text().splitlines()
    first = lines.index("| --- | --- | --- | --- |") + 1
    table = [*takewhile(lambda line: line.startswith("|"), lines[first:])]
    assert table == [way.row for way in WAYS]
