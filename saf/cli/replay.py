"""``saf replay``: send again the messages that destinations have lost."""

from __future__ import annotations

from saf.cli.brokers import (
    AsJson,
    Config,
    DryRun,
    Name,
    Round,
    Since,
    Until,
    Why,
    chosen,
    routes_of,
)
from saf.config import Broker, load
from saf.operating.repair.send_again import Sent, send_again
from saf.operating.wording import counted


def command(
    *,
    config: Config = None,
    broker: Name = None,
    since: Since = None,
    until: Until = None,
    why: Why = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send again messages that `saf reconcile` reports lost.

    They go before everything newer, whatever the cause of the loss. A destination that was set back
    may continue afterwards. The next run of the forwarder delivers the messages, each once, even if
    you run this twice.
    """
    settings = load(config)
    round_ = Round(chosen(settings, broker))

    def again(name: str, source: Broker) -> Sent:
        sent = send_again(
            name,
            source.dsn,
            settings.destinations,
            routes_of(settings),
            since=since,
            until=until,
            retention_seconds=settings.purge.retention_seconds,
            why=why,
            dry_run=dry_run,
            only_if_set_back=False,
        )
        assert sent is not None  # noqa: S101 - asked for in any case
        return sent

    done = round_.each(again)
    answer = {
        "message_ids": {name: texts(sent) for name, sent in done.items()},
        "set_back": {name: sent.set_back for name, sent in done.items()},
        "blind": {name: sent.blind for name, sent in done.items()},
        "left_out": {name: left_out(sent) for name, sent in done.items()},
    }
    lines = (f"{name}: {in_words(sent, dry_run=dry_run)}" for name, sent in done.items())
    round_.say(answer, lines, as_json=as_json)


def texts(sent: Sent) -> dict[str, list[str]]:
    """Return the ids of messages to be sent again, by destination, for JSON."""
    return {where: [str(id_) for id_ in ids] for where, ids in sent.by_destination.items()}


def left_out(sent: Sent) -> dict[str, object]:
    """Return messages that may be lost but are not sent again, for JSON."""
    return {
        "not_compared": sent.not_compared
        and [moment and moment.isoformat() for moment in sent.not_compared],
        "unrouted": sent.unrouted,
        "uncertain": dict(sent.uncertain),
        "unread": dict(sent.unread),
    }


def in_words(sent: Sent, *, dry_run: bool = False) -> str:
    """Return the messages to be sent again, in words."""
    counts = [
        f"{len(ids):,} for {where or 'a router'}" for where, ids in sent.by_destination.items()
    ]
    verb = "would be sent again" if dry_run else "to be sent again by the next run"
    default = "nothing sent again" if sent.unrouted else "nothing lost"
    words = f"{', '.join(counts)} {verb}" if counts else default
    if sent.unrouted:
        words += (
            f"; {counted(sent.unrouted, 'message')} more lost, and not sent again, because no "
            "route matches: add one, and run saf replay"
        )
    if sent.set_back and not dry_run:
        words += f"; {', '.join(sent.set_back)} had been set back, and may continue"
    if sent.blind:
        words += (
            f"; {', '.join(sent.blind)} cannot be read back: all messages sent there since then "
            "are sent again, and those still there arrive twice"
        )
    if sent.not_compared:
        since, until = sent.not_compared
        when = f"between {since.isoformat()} and" if since else "before"
        words += (
            f"; messages sent {when} {until.isoformat()} were not compared, and may be lost: they "
            "may have been purged; if not, run saf replay with an earlier --since"
        )
    for name, count in sent.uncertain.items():
        copies = f"{counted(count, 'copy', 'copies')} of topics"
        words += (
            f"; {counted(count, 'message') if name in sent.blind else copies} may be lost at "
            f"{name}, and not sent again: it is not known whether it had them"
        )
    for name, why in sent.unread.items():
        words += f"; nothing to {name}, which was not compared: {why}"
    return words
