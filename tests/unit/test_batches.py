"""Batches of a deep backlog end at cuts, up to the snapshot that the cuts were found for."""

from __future__ import annotations

from saf.receiving.hand import Shard


def closed(cuts: list[str]) -> Shard:
    """A shard in which a batch was closed that was opened up to the first of these cuts."""
    shard = Shard(
        shard=1,
        batch=6,
        done="10:10:",
        open=None,
        position=3,
        allowance=None,
        until=None,
        cuts=cuts,
        epoch=1,
    )
    shard.open_at("12:20:12,17")
    shard.close()
    return shard


def test_the_next_batch_ends_at_the_next_cut_of_the_same_snapshot() -> None:
    """A later snapshot has messages whose ids lie behind those after the cut."""
    shard = closed(["13", "18"])
    assert (shard.batch, shard.done, shard.open) == (8, "12:13:12", "12:18:12,17")
    assert (shard.position, shard.until, shard.cuts) == (0, "12:20:12,17", [])


def test_after_the_last_cut_no_batch_is_open() -> None:
    shard = closed(["13"])
    assert (shard.batch, shard.done, shard.open) == (7, "12:13:12", None)
    assert (shard.position, shard.until, shard.cuts) == (0, None, [])
