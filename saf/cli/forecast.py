"""``saf forward --explain``: what a run would do now."""

from __future__ import annotations

import json

from saf.cli import parked
from saf.cli.brokers import Round, chosen
from saf.cli.console import echo
from saf.cli.listing import Listing
from saf.config import Settings
from saf.operating.forecast import forecast
from saf.operating.wording import at, counted


def explain(settings: Settings, *, as_json: bool) -> None:
    """Print what a run would do at each source."""
    default, declared = settings.forwarder.default_destination, settings.declared
    round_ = Round(chosen(settings, None))
    found = round_.visit("forecast", lambda connection, _: forecast(connection, default, declared))
    if as_json:
        rows = [{"broker": name, **result.as_dict()} for name, result in found.items()]
        echo(json.dumps({"brokers": rows, "errors": round_.errors()}))
        round_.finish(say=False)
        return
    listing = Listing(
        "broker", "messages", "service", "to broker", "goes to", "oldest", below="how"
    )
    for name, result in found.items():
        for group in result.going:
            about = "" if result.exact else "about "
            since = at(group.oldest) if group.oldest else ""
            listing.add(
                name, f"{about}{group.messages:,}", group.service, group.to_broker or "",
                ", ".join(group.way.destinations) or "nowhere", since, below=group.way.how,
            )  # fmt: skip
    listing.show()
    by_route = Listing("broker", "messages", "route")
    for name, result in found.items():
        for route, messages in result.by_route().items():
            by_route.add(name, f"{messages:,}", route)
    if any(result.by_route() for result in found.values()):
        by_route.show()
    if any(result.lanes for result in found.values()):
        parked.listing({name: result.waiting for name, result in found.items()}).show()
    for name, result in found.items():
        due = sum(lane.due for lane in result.lanes)
        if result.waiting.lanes:
            echo(
                f"{name}: {counted(result.waiting.messages, 'message')} parked in "
                f"{counted(result.waiting.lanes, 'lane')}, {due} to be tried first"
            )
    round_.finish(say=True)
