"""Which destinations have lost a copy of a message, and which may have got one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from saf.destinations import Entry
from saf.destinations.marks import MAIN, Known, Mark
from saf.operating.repair.reconcile import Unread, _judged
from saf.operating.repair.reconcile.copies import Copies, Lacking
from saf.operating.repair.reconcile.outcome import Range
from saf.operating.repair.send_again import Blind, _gap
from saf.operating.repair.set_back import SetBack
from saf.routing.matching import Route, Router, Routes

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
MOM, ERP = Route(service="news", destination="mom"), Route(service="news", destination="erp")
TOPIC = Routes(routes=(MOM, ERP), topics=frozenset({"news"}))
ALONE = Routes(routes=(MOM,), topics=frozenset({"news"}))


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def entry(state: str, where: str = "", **more: Any) -> Entry:
    given: dict[str, Any] = {
        "message_id": UUID(int=1).bytes,
        "shard": 7,
        "id": 70,
        "service": "news",
        "broker": None,
        "key": "k",
        "created_at": NOON,
    } | more
    return Entry(state=state, where=where, **given)


def copies(
    lacking: Lacking, *, earlier: Routes | None = None, until: datetime | None = None
) -> Copies:
    """The destination ``erp`` was set back."""
    return Copies(
        routes=TOPIC if earlier is None else ALONE,
        earlier=[] if earlier is None else [(earlier, until)],
        destinations={"erp": lacking},
        topics=frozenset({"news"}),
    )


LACKS = Lacking(shards={7: NOON}, begun={"news": NOON})


# What a destination that was set back has lost


def test_a_copy_is_lost_where_the_destination_is_set_back_in_the_messages_shard() -> None:
    sent = entry("complete")
    assert copies(LACKS).lost([sent, entry("stored", "mom")]).at == ("erp",)
    assert copies(LACKS).lost([sent, entry("stored", "erp")]).at == ()
    for state in ("erp", ""):
        assert copies(LACKS).lost([sent, entry("set_aside", state)]).at == ()
    other_shard = Lacking(shards={8: NOON}, begun={"news": NOON})
    assert copies(other_shard).lost([sent]).at == ()


@pytest.mark.parametrize(("begun", "at"), [(0, ("erp",)), (1, ())])
def test_a_destination_had_what_was_created_since_it_began_to_get_the_topic(
    begun: float, at: tuple[str, ...]
) -> None:
    lacking = Lacking(shards={7: NOON}, begun={"news": after(begun)})
    lost = copies(lacking).lost([entry("complete")])
    assert lost.at == at
    assert lost.uncertain == (() if at else ("erp",))


@pytest.mark.parametrize(("given_up", "at"), [(-1, ()), (0, ("erp",)), (1, ("erp",))])
def test_what_was_given_up_before_the_lower_mark_was_opened_is_not_lost(
    given_up: float, at: tuple[str, ...]
) -> None:
    discarded = entry("discarded", created_at=after(given_up))
    assert copies(LACKS).lost([entry("complete"), discarded]).at == at
    of_nothing = Lacking(shards={7: None}, begun={"news": NOON})
    assert copies(of_nothing).lost([entry("complete"), discarded]).at == ("erp",)


@pytest.mark.parametrize(
    ("until", "uncertain"), [(None, ("erp",)), (after(1), ("erp",)), (NOON, ()), (after(-1), ())]
)
def test_routes_that_were_replaced_before_a_message_was_created_say_nothing_of_it(
    until: datetime | None, uncertain: tuple[str, ...]
) -> None:
    lost = copies(LACKS, earlier=TOPIC, until=until).lost([entry("complete")])
    assert (lost.at, lost.uncertain) == ((), uncertain)


def test_what_the_source_has_not_sent_or_is_for_no_topic_is_lost_nowhere() -> None:
    assert copies(LACKS).lost([entry("pending")]).at == ()
    assert copies(LACKS).lost([entry("complete", service="billing")]).at == ()


def test_what_no_destination_has_is_lost_and_is_not_uncertain_as_well() -> None:
    late = Lacking(shards={7: NOON}, begun={"news": after(1)})
    everywhere = Unread(destinations=frozenset())
    for stored, kinds in ((), ["lost"]), ((entry("stored", "mom"),), ["uncertain"]):
        rows = [entry("complete"), *stored]
        found = _judged(rows, frozenset({"news"}), copies(late), everywhere)
        assert [one.kind for one in found] == kinds


def test_a_difference_has_the_address_at_which_it_shows() -> None:
    """A router led the message to the topic: one destination has it twice, and one has lost it."""
    rows = [entry("complete", service="orders"), *[entry("stored", "mom")] * 2]
    nothing = Unread(destinations=frozenset())
    found = _judged(rows, frozenset({"news"}), copies(LACKS), nothing)
    assert [(one.kind, one.service) for one in found] == [("duplicate", "orders"), ("lost", "news")]


def test_routes_that_led_there_once_are_enough_for_a_message_to_be_there() -> None:
    for routes, may_have in (([TOPIC, ALONE], True), ([ALONE, TOPIC], True), ([ALONE], False)):
        unread = Unread(destinations=frozenset({"erp"}), routes=routes)
        assert unread.may_have(entry("complete")) == may_have


@pytest.mark.parametrize(
    ("backup", "gap"),
    [(None, (None, NOON)), (after(-1), (after(-1), NOON)), (NOON, None), (after(1), None)],
)
def test_what_was_not_compared_lies_between_the_backup_and_what_was(
    backup: datetime | None, gap: tuple[datetime | None, datetime] | None
) -> None:
    place = (MAIN, 7)
    marks = {place: Mark(batch=1, position=1, opened_at=backup)} if backup else {}
    known = {"erp": Known(destination=UUID(int=2), marks=marks, epochs={})}
    behind = {"erp": SetBack(behind=frozenset({place}))}
    assert _gap(Range(since=NOON), known, behind, None) == gap
    assert _gap(Range(), known, behind, None) is None, "everything was compared"


# What destinations that cannot be read back may have


def blind(entries: list[Entry], destinations: tuple[str, ...] = ("mom",), **more: Any) -> Blind:
    routes = more.get("routes", TOPIC)
    found = Blind(destinations=destinations)
    found.add(entries, routes, Unread(destinations=frozenset(destinations), routes=[routes]))
    return found


def test_a_message_that_is_complete_goes_again_and_one_that_is_pending_does_not() -> None:
    assert blind([entry("complete")]).messages == [(7, 70)]
    assert blind([entry("pending")]) == Blind(destinations=("mom",))
    assert blind([entry("complete")], ("other",)).messages == []


def test_a_copy_goes_again_to_destinations_for_which_it_is_not_set_aside() -> None:
    aside = entry("aside")
    (copy,) = blind([aside, entry("set_aside", "erp")]).copies
    assert (copy.destinations, copy.shard, copy.id) == (("mom",), 7, 70)
    assert blind([aside, entry("set_aside", "mom")]).copies == []
    assert blind([aside, entry("set_aside", "")]).copies == [], "no destination has got it"
    elsewhere = [aside, entry("set_aside", "mom", shard=8), entry("set_aside", "mom", id=71)]
    assert len(blind(elsewhere).copies) == 1, "another message of the same id"
    assert len(blind([entry("set_aside", "erp"), aside]).copies) == 1, "in whatever order"


def test_what_a_router_has_sent_goes_again_unless_it_is_set_aside_everywhere() -> None:
    router = Router(service="news", kind="sql", expression="'news'")
    routed = Routes(routes=TOPIC.routes, topics=TOPIC.topics, routers=(router,))
    rows = [entry("aside"), entry("set_aside", "erp")]
    found = blind(rows, ("mom", "erp"), routes=routed)
    assert (found.messages, found.copies) == ([(7, 70)], [])
    assert blind(rows, ("erp",), routes=routed) == Blind(destinations=("erp",))


def test_the_only_destination_has_not_got_what_is_set_aside() -> None:
    assert blind([entry("aside"), entry("set_aside", "mom")], routes=ALONE).copies == []
    assert blind([entry("aside")], routes=ALONE).copies == []


def test_of_what_was_discarded_nobody_knows_whether_it_was_there() -> None:
    found = blind([entry("aside"), entry("discarded")], ("mom", "erp"))
    assert (found.copies, dict(found.uncertain)) == ([], {"mom": 1, "erp": 1})
