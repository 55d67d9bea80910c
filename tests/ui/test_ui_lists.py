"""Lists and messages in the browser: found by a part of the key, in either order, never silent."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from functools import partial

import pytest

from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.operating import outbox
from saf.ui.pages import messages
from tests.dashboard import Dashboard, Visitor, finished, message_id
from tests.destinations import NOWHERE, route
from tests.long_lists import DIALOGS
from tests.pipeline import connect, run, send
from tests.ui.dead_letters import LETTER, many
from tests.waits import until

LONG = "relation 'x' does not exist " * 20


def words(page: str) -> str:
    """What a page says, without its markup."""
    return html.unescape(" ".join(re.sub(r"<[^>]+>", "", page).split()))


def answered(visitor: Visitor, address: str) -> bool:
    """Whether the brokers answer in time."""
    return "is not shown" not in visitor.get(address).text


def numbers(visitor: Visitor, address: str, pattern: str) -> list[str]:
    """What a list shows, page after page."""
    found: list[str] = []
    while address:
        until(partial(answered, visitor, address))  # at the first look, a busy machine may be late
        page = visitor.get(address).text
        found += re.findall(pattern, page)
        link = re.search(r'rel="next" href="([^"]+)"', page)
        address = html.unescape(link[1]) if link else ""
    return found


def test_a_part_of_a_key_finds_messages_in_every_list(
    there: Dashboard, app: Dsn, orders: list[str]
) -> None:
    with connect(app) as connection:
        route(connection, "mail", "nowhere")
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) VALUES ('mail', 'A-7', '')"
        )
    run(app, mom=NOWHERE)
    visitor = there.client()
    for path, key, other in (
        ("/dead", "ER 1002", orders[1]),
        ("/outbox?broker=shop", "ER 1002", orders[1]),
        ("/parked/messages", "a-", "order"),
    ):
        page = visitor.get(path, params={"key": key, "broker": "shop"}).text
        rows = page.split("<tbody>")[1]
        assert key.lower() in rows.lower(), path
        assert other not in rows, path
    lanes = visitor.get("/parked", params={"subject_contains": "MAI"}).text.split("<tbody>")[1]
    assert "mail" in lanes
    assert "nothing" not in lanes


def test_a_decision_about_all_that_match_a_part_of_a_key_concerns_no_other(
    there: Dashboard, orders: list[str]
) -> None:
    visitor = there.client()
    form = visitor.counted("discard", {"key": "1002", "matching": "yes"})
    assert form["expected"] == ["1"]
    finished(visitor, visitor.form("/dead", "/dead/decide", form).url.path)
    left = visitor.get("/dead").text
    assert orders[2] not in left
    assert orders[1] in left


def test_the_whole_key_is_looked_for_in_its_shard_alone(there: Dashboard, app: Dsn) -> None:
    with connect(app) as connection:
        for key in ("7", "77"):
            send(connection, "x", key=key)
    visitor, pattern = there.client(), r'data-label="Key"><bdi>(\d+)<'
    assert numbers(visitor, "/outbox?broker=shop&key=7", pattern) == ["7", "77"]
    assert numbers(visitor, "/outbox?broker=shop&key=7&exact=yes", pattern) == ["7"]


def send_many(app: Dsn) -> None:
    """Let some transactions send some messages each."""
    with connect(app) as connection:
        for _ in range(12):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) "
                "SELECT 'billing', 'same', '' FROM generate_series(1, 10)"
            )


def dialogs_many(app: Dsn) -> None:
    """Let there be several pages of dialogs."""
    with connect(app) as connection:
        connection.execute(DIALOGS)


@pytest.mark.parametrize(
    ("path", "pattern", "fill"),
    [
        ("/dead", r'name="id" value="shop:(\d+)"', lambda app: many(app, 120)),
        ("/outbox", r'data-label="Id"><a[^>]+>(\d+)<', send_many),
        ("/outbox?state=pending", r'data-label="Id"><a[^>]+>(\d+)<', send_many),
        ("/outbox?state=dead", r'data-label="Id"><a[^>]+>(\d+)<', lambda app: many(app, 120)),
        ("/dialogs", r"<bdi>(service \d+)<", dialogs_many),
    ],
)
def test_newest_first_is_the_same_list_in_the_opposite_order(
    there: Dashboard, app: Dsn, *, path: str, pattern: str, fill: Callable[[Dsn], None]
) -> None:
    fill(app)
    visitor = there.client()
    address = path + ("&" if "?" in path else "?") + "broker=shop"
    oldest_first = numbers(visitor, address, pattern)
    assert len(oldest_first) == len({*oldest_first}) >= 120
    assert numbers(visitor, f"{address}&newest=yes", pattern) == oldest_first[::-1]


def test_rare_messages_are_looked_for_from_the_newest_on_too(
    there: Dashboard, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "OUTBOX_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(messages, "FURTHER_SECONDS", 0.0)
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.outbox (to_service, key, body) VALUES ('rare', '', '')")
        for number in range(12):
            send(connection, "x", key=f"k{number}")
    visitor, steps = there.client(), 0
    page = visitor.get("/outbox?broker=shop&service=rare&newest=yes").text
    while 'badge idle">pending' not in page:
        assert "Only messages sent after" in page
        (further,) = re.findall(r'href="([^"]+)">Look further<', page)
        page = visitor.get(html.unescape(further)).text
        steps += 1
    assert steps >= 6


def test_a_page_that_would_be_empty_for_lack_of_time_looks_for_longer(
    there: Dashboard, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "OUTBOX_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(messages, "FURTHER_SECONDS", 60.0)
    with connect(app) as connection:
        for number in range(5):
            send(connection, "x", key=f"k{number}")
        connection.execute("INSERT INTO saf.outbox (to_service, key, body) VALUES ('rare', '', '')")
    page = there.client().get("/outbox?broker=shop&service=rare").text
    assert 'badge idle">pending' in page
    assert "Look further" not in page


def test_a_page_whose_statement_takes_too_long_offers_to_wait_for_it(
    there: Dashboard, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "OUTBOX_SECONDS", 0.05)
    slow = "(SELECT pg_sleep(0.1)) IS NOT NULL AND " + outbox.FILTER.strip()
    monkeypatch.setattr(outbox, "PAGE", outbox.PAGE.replace(outbox.FILTER, slow))
    with connect(app) as connection:
        send(connection, "x", key="k")
    visitor = there.client()
    page = visitor.get("/outbox?broker=shop&key=k").text
    assert "This page takes long to read" in page
    assert "--timeout" not in page
    (longer,) = re.findall(r'href="([^"]+)">Look for longer<', page)
    assert 'badge idle">pending' in visitor.get(html.unescape(longer)).text


@pytest.mark.usefixtures("orders")
def test_a_filter_that_matches_nothing_says_how_many_there_are(there: Dashboard, app: Dsn) -> None:
    with connect(app) as connection:
        route(connection, "mail", "nowhere")
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) VALUES ('mail', 'A-7', '')"
        )
        connection.execute(DIALOGS)
    run(app, mom=NOWHERE)
    with connect(app) as connection:
        for _ in range(2):
            send(connection, "x", key="k")
    visitor = there.client()
    until(lambda: 'data-label="Pending">2<' in visitor.get("/").text)
    for address, expected in (
        ("/dead?key=DECL", "4 dead letters, none with key 'DECL'."),
        (
            "/dead?key=DECL&reason=expired&broker=shop",
            "4 dead letters at shop, none with reason 'expired', key 'DECL'.",
        ),
        ("/parked/messages?service=<b>", "1 parked message, none with service '<b>'."),
        ("/parked?subject_contains=DECL", "1 lane, none with service or key 'DECL'."),
        (
            "/parked?waits_for=route&origin=retry",
            "1 lane, none with waits for 'route', origin 'retry'.",
        ),
        ("/outbox?broker=shop&key=DECL", "shop has messages, none with key 'DECL'."),
        ("/dialogs?service=DECL", "100 dialogs and more, none with service 'DECL'."),
        ("/pending?service=DECL", "2 pending messages, none with service 'DECL'."),
    ):
        page = visitor.get(address).text
        assert expected in words(page), address
        assert ">Show all</a>" in page
    assert "No message waits for an operator" in visitor.get("/dead?broker=mom").text
    assert "This outbox has no message" in visitor.get("/outbox?broker=mom").text


def test_before_a_decision_the_messages_are_named_by_number_and_key(
    there: Dashboard, app: Dsn, orders: list[str]
) -> None:
    many(app, 30)
    visitor = there.client()
    page = visitor.form("/dead", "/dead/confirm", {"action": "retry", "matching": "yes"}).text
    rows = re.findall(r'<a href="/message[^"]+">(\d+)</a></th><td><bdi>([^<]*)<', page)
    assert [key for _, key in rows] == [*orders, *["k"] * 6]
    assert "and 24 more" in page
    numbers = visitor.get("/dead").text
    assert all(f'value="shop:{number}"' in numbers for number, _ in rows[:4])


def test_what_was_retried_is_handed_over_and_not_yet_handled_and_its_page_is_a_click_away(
    there: Dashboard, app: Dsn, orders: list[str]
) -> None:
    visitor = there.client()
    for action, said in (("retry", True), ("discard", False)):
        form = visitor.counted(action, {"key": orders[1 if said else 2], "matching": "yes"})
        page = finished(visitor, visitor.form("/dead", "/dead/decide", form).url.path)
        assert ("Handed over, not yet handled." in page) is said
        assert ("Given up for good" in page) is not said
        (link,) = re.findall(r'href="(/message[^"]+)"', page)
        followed = visitor.get(html.unescape(link)).text
        assert message_id(app, orders[1 if said else 2]) in followed
        assert f"{action} by" in words(followed)


def test_a_messages_path_is_in_the_order_of_time(there: Dashboard, app: Dsn, mom: Dsn) -> None:
    with connect(app) as shop, connect(mom) as store:
        create_service(store, "billing")
        send(shop, "x", key="k")
    run(app, mom=mom)
    wanted = message_id(app, "k")
    with connect(mom) as store:
        for minutes in (10, 20, 40):
            store.execute(
                "INSERT INTO saf.attempt (subscription_id, message_id, status, seconds, outcome,"
                " error, at) SELECT subscription_id, %s, 503, 1.5, 'again', 'busy',"
                " now() + make_interval(mins => %s) FROM saf.subscription WHERE name = 'billing'",
                [wanted, minutes],
            )
        store.execute(
            "INSERT INTO saf.audit (audit_at, action, message_ids, why, person)"
            " VALUES (now() + interval '30 min', 'retry', ARRAY[%s::uuid], 'now', 'ann')",
            [wanted],
        )
    page = there.client().get("/message", params={"id": wanted}).text
    steps = [words(one) for one in re.findall(r"<li class=\"step.*?<h2>(.*?)</h2>", page, re.S)]
    assert steps == [
        "Sent at shop forwarded",
        "Stored at mom",
        "billing at mom unread",
        "Tried at mom",
        "retry by ann",
        "Tried at mom",
    ]
    assert page.count(">busy<") == 3


def test_a_long_error_is_folded_and_complete_and_a_short_one_is_not_folded(
    there: Dashboard, app: Dsn
) -> None:
    with connect(app) as connection:
        connection.execute(LETTER.replace("'no'", "%s"), [LONG, 1])
        connection.execute(LETTER, [1])
    page = there.client().get("/dead").text
    (folded,) = re.findall(r'<details class="fold long"[^>]*>(.*?)</details>', page, re.S)
    assert LONG.strip() in html.unescape(folded)
    assert ">no</td>" in page


def test_an_address_without_a_page_is_not_found(there: Dashboard) -> None:
    answer = there.client().get("/nowhere/<b>")
    assert answer.status_code == 404
    assert "Page not found." in answer.text
    assert "<h1>Page not found</h1>" in answer.text
    assert "This was not done" not in answer.text
    assert "<b>" not in answer.text


def test_an_endpoint_that_works_is_up(there: Dashboard, mom: Dsn) -> None:
    with connect(mom) as store:
        store.execute("INSERT INTO saf.subscription (log, name) VALUES ('inbox', 'billing')")
        ((number,),) = fetch(
            store, "SELECT subscription_id FROM saf.subscription WHERE name = 'billing'"
        )
        store.execute(
            "INSERT INTO saf.breaker (subscription_id, endpoint, state) "
            "VALUES (%s, 'erp', 'closed')",
            [number],
        )
    visitor = there.client()
    until(lambda: "erp" in visitor.get("/").text)
    row = words(visitor.get("/").text.split("erp")[1].split("</tr>")[0])
    assert "up" in row
    assert "closed" not in row
