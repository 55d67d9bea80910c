"""The pages of the dashboard, over HTTP: what they show, what they do, and what they never do."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
import structlog.testing
from starlette.applications import Starlette
from starlette.routing import Mount

import saf.ui
from saf.broker.services import create_service
from saf.config import Settings
from saf.database import Dsn, fetch
from saf.errors import HIDDEN, ConfigurationError
from saf.log import finding
from saf.ui.pages import PAGES, messages
from tests.dashboard import Dashboard, dashboard, finished, message_id, served, settings
from tests.long_lists import DECISIONS, DIALOGS, FOREIGN, LANES
from tests.pipeline import bodies, connect, new_member, run, send
from tests.ui.conftest import ORDER, REFUSE
from tests.ui.dead_letters import LETTER, letters, many, second_chunk_held
from tests.waits import until

WAITING = """
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, next_attempt_at, error,
                         awaits_handler)
SELECT subscription_id, '', kind, subject, shard, next_attempt_at, 'no', awaits_handler
FROM saf.subscription, (VALUES ('key', 'soon', 1, now() + interval '1 h', false),
                               ('key', 'on a word', 1, timestamptz '9999-01-01Z', false),
                               ('key', 'undecided', 1, timestamptz '9999-01-01Z', false),
                               ('key', 'unhandled', 1, timestamptz '9999-01-01Z', true),
                               ('later', '1', NULL, now() + interval '1 h', false)
     ) AS v (kind, subject, shard, next_attempt_at, awaits_handler) WHERE name = 'billing'
"""
AHEAD = """
INSERT INTO saf.parked (subscription_id, kind, subject, shard, id, batch, position, to_service,
                        body)
SELECT subscription_id, 'ahead', 'a dialog', 1, 1, 1, 1, 'billing', ''
FROM saf.subscription WHERE name = 'billing'
"""

READ = sorted(
    path
    for path, one in PAGES.items()
    if not one.changes and "{" not in path and path not in ("/nav", "/dialog")
)


def test_what_is_retried_in_the_browser_arrives(
    there: Dashboard, app: Dsn, mom: Dsn, orders: list[str]
) -> None:
    visitor = there.client()
    form = visitor.counted("retry", {"reason": "rejected", "matching": "yes"})
    assert form["expected"] == ["4"]
    job = visitor.form("/dead", "/dead/decide", form)
    assert "4 messages" in finished(visitor, job.url.path)
    assert letters(app) == 0
    run(app, mom=mom)
    arrived = bodies(mom)
    assert len(arrived) == 12
    assert [json.loads(body)["order"] for body in arrived[-len(orders) :]] == [0, 1, 2, 3]


def test_only_what_was_ticked_is_discarded(there: Dashboard, app: Dsn, orders: list[str]) -> None:
    visitor = there.client()
    shown = re.findall(r'name="id" value="([^"]+)"', visitor.get("/dead").text)
    assert len(shown) == len(orders)
    form = visitor.counted("discard", {"id": shown[1:3]})
    finished(visitor, visitor.form("/dead", "/dead/decide", form).url.path)
    left = re.findall(r'name="id" value="([^"]+)"', visitor.get("/dead").text)
    assert left == [shown[0], shown[3]]
    assert letters(app) == 2


def test_what_dies_between_the_count_and_the_decision_is_left_alone(
    there: Dashboard, app: Dsn, mom: Dsn, orders: list[str]
) -> None:
    visitor = there.client()
    form = visitor.counted("discard", {"matching": "yes"})
    with connect(app) as shop, connect(mom) as store:
        store.execute(REFUSE)
        shop.execute(ORDER, ["late", "{}", '{"amount": -1}'])
    run(app, mom=mom)
    page = finished(visitor, visitor.form("/dead", "/dead/decide", form).url.path)
    assert f"{len(orders)} messages" in page
    assert letters(app) == 1


def test_two_operators_at_once_decide_about_each_message_once(
    there: Dashboard, app: Dsn, orders: list[str]
) -> None:
    ann, bob = there.client(name="ann"), there.client(name="bob")
    forms = [(one, one.counted("retry", {"matching": "yes"})) for one in (ann, bob)]
    jobs = [(one, one.form("/dead", "/dead/decide", form).url.path) for one, form in forms]
    for one, job in jobs:
        finished(one, job)
    with connect(app) as connection:
        rows = fetch(connection, "SELECT cardinality(message_ids) FROM saf.audit")
        ((parked,),) = fetch(connection, "SELECT count(*) FROM saf.parked")
    assert sum(count for (count,) in rows) == parked == len(orders)
    assert (
        "Somebody else may have decided"
        in bob.form("/dead", "/dead/confirm", {"action": "retry", "matching": "yes"}).text
    )


def test_a_job_that_is_stopped_leaves_the_rest_as_it_was(there: Dashboard, app: Dsn) -> None:
    many(app)
    visitor = there.client()
    form = visitor.counted("discard", {"matching": "yes"})
    assert form["expected"] == ["2500"]
    with second_chunk_held(app):
        job = visitor.form("/dead", "/dead/decide", form).url.path
        until(lambda: "1,000 messages of 2,500" in visitor.get(job).text)
        visitor.form(job, f"{job}/cancel", {})
    page = finished(visitor, job)
    assert "cancelled" in page
    assert letters(app) == 500


def test_a_dead_letter_is_redirected_to_a_destination_of_saf_toml_alone(
    app: Dsn, mom: Dsn, other: Dsn, orders: list[str], tmp_path: Path
) -> None:
    given = settings(tmp_path / "saf.toml", {"shop": app}, {"mom": mom, "other": other})
    with dashboard(given) as there:
        visitor = there.client()
        wrong = visitor.form(
            "/dead", "/dead/confirm", {"action": "redirect", "to": "evil", "matching": "yes"}
        )
        assert (wrong.status_code, "redirect where?" in wrong.text) == (400, True)
        form = visitor.counted("redirect", {"to": "other", "matching": "yes"})
        finished(visitor, visitor.form("/dead", "/dead/decide", form).url.path)
    run(app, mom=mom, other=other)
    assert len(bodies(other)) == len(orders)


def test_a_filter_of_dead_letters_is_the_commands(there: Dashboard, orders: list[str]) -> None:
    visitor = there.client()
    assert orders[2] in visitor.get("/dead", params={"error": "AMOUNT_IS"}).text
    assert orders[2] not in visitor.get("/dead", params={"key": orders[1]}).text
    for wrong in ({"reason": "nonsense"}, {"before": "yesterday"}, {"after": "-1"}):
        answer = visitor.get("/dead", params=wrong)
        assert answer.status_code == 400
        assert repr(next(iter(wrong.values()))) in html.unescape(answer.text)


@pytest.mark.parametrize(
    "page", ["/audit", "/dead", "/dialogs", "/outbox", "/parked", "/parked/messages"]
)
def test_a_page_that_goes_on_where_none_has_ended_is_refused(there: Dashboard, page: str) -> None:
    visitor = there.client()
    for after in filter(None, FOREIGN):
        answer = visitor.get(f"{page}?broker=shop&after={quote(after, errors='surrogateescape')}")
        assert (answer.status_code, "no page of " in answer.text) == (400, True), after


def test_dead_letters_come_page_by_page(there: Dashboard, app: Dsn) -> None:
    many(app, 120)
    visitor, page, numbers = there.client(), "/dead?broker=shop", []
    while page:
        text = visitor.get(page).text
        numbers += re.findall(r'name="id" value="shop:(\d+)"', text)
        found = re.search(r'rel="next" href="([^"]+)"', text)
        page = html.unescape(found[1]) if found else ""
    assert len(numbers) == len(set(numbers)) == 120
    assert numbers == sorted(numbers, key=int)


def test_what_waits_is_tried_now_on_an_operators_word_and_audited(
    there: Dashboard, app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        send(connection, "x", key="k")
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES ('billing', 'nowhere')"
        )
    run(app, mom=mom)
    visitor = there.client()
    until(lambda: "billing" in visitor.get("/parked").text)
    due = visitor.form(
        "/", "/parked/retry", {"waits_for": "route", "why": "the route is there now"}
    )
    assert "1 lane to be tried by the next run" in due.text
    page = visitor.get("/audit").text
    assert "retry-now of 1 lanes" in page
    assert "the route is there now" in page


def test_only_lanes_that_would_be_tried_are_counted_before_they_are_retried(
    there: Dashboard, mom: Dsn
) -> None:
    with connect(mom) as store:
        create_service(store, "billing")
        store.execute(WAITING)
        store.execute(AHEAD)
        store.execute(LETTER.replace("'k'", "'undecided'").replace("'outbox'", "'inbox'")
                            .replace("'forwarder'", "'billing'"), [1])  # fmt: skip
    page = there.client().get("/parked/confirm", params={"broker": "mom"}).text
    assert "</bdi></strong>: 2 lanes<" in page
    assert "4 lanes more match, and keep waiting" in page
    of_time = {"broker": "mom", "waits_for": "time"}
    page = there.client().get("/parked/confirm", params=of_time).text
    assert "Nothing waits that could be tried now" in page
    assert "1 lane more match" in page


def test_a_job_that_fails_shows_and_logs_no_row_that_its_database_quotes(
    there: Dashboard, app: Dsn, orders: list[str]
) -> None:
    with connect(app) as connection:
        connection.execute("ALTER TABLE saf.parked ADD CONSTRAINT none CHECK (false) NOT VALID")
    visitor = there.client()
    form = visitor.counted("retry", {"matching": "yes"})
    with structlog.testing.capture_logs() as lines:
        page = finished(visitor, visitor.form("/dead", "/dead/decide", form).url.path)
    said = page + str(lines)
    assert said.count("DETAIL") == said.count(f"DETAIL: {HIDDEN}") == 2
    assert orders[0] not in said
    assert b"4111-1111".hex() not in said


def test_one_message_is_followed_to_its_subscription(
    there: Dashboard, app: Dsn, orders: list[str]
) -> None:
    visitor = there.client()
    dead_one = visitor.get("/message", params={"id": message_id(app, orders[0]), "key": orders[0]})
    assert "Dead letter at" in dead_one.text
    page = visitor.get(
        "/message", params={"id": message_id(app, "order 1007"), "key": "order 1007"}
    )
    for said in ("Sent at", "forwarded", "Stored at", "billing", "unread"):
        assert said in page.text
    unknown = visitor.get("/message", params={"id": "00000000-0000-0000-0000-000000000007"})
    assert "No broker that answers knows" in unknown.text
    assert visitor.get("/message", params={"id": "<script>"}).status_code == 400


def test_a_message_that_is_not_found_in_time_is_looked_for_further_back(
    there: Dashboard, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "STEP_PAGES", 2)
    monkeypatch.setattr(messages, "LOOK_SECONDS", 0.0)
    with connect(app) as connection:
        for number in range(2):
            connection.execute(
                """INSERT INTO saf.outbox (to_service, key, body, created_at)
                   SELECT 'billing', 'k' || n, repeat('x', 1000)::bytea,
                          now() - make_interval(mins => 100 - n)
                   FROM generate_series(%s::int, %s) AS n""",
                [number * 50, number * 50 + 49],
            )
    visitor = there.client()
    page = visitor.get("/message", params={"id": message_id(app, "k3")}).text
    assert "No broker that answers knows" in page
    steps = 0
    while "Sent at" not in page:
        assert "only the messages since" in page
        (further,) = re.findall(r'href="([^"]+)">Look further<', page)
        page = visitor.get(html.unescape(further)).text
        steps += 1
    assert steps > 3
    assert "Not everything was searched" not in page
    exactly = {"broker": "shop", "key": "k3", "exact": "yes"}
    listed = visitor.get("/outbox", params=exactly).text
    (link,) = re.findall(r'href="(/message[^"]+)"', listed)
    assert "Sent at" in visitor.get(html.unescape(link)).text  # the list knows when it was sent
    for wrong in ("[]", "no", '{"shop": 1}', '{"shop": {"outbox": "<b>"}}'):
        params = {"id": message_id(app, "k3"), "from": wrong}
        answer = visitor.get("/message", params=params)
        assert "<b>" not in answer.text
        assert answer.status_code == 400 or "is not a place where" in answer.text


def test_messages_that_are_rare_are_looked_for_further_on(
    there: Dashboard, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "OUTBOX_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(messages, "FURTHER_SECONDS", 0.0)
    with connect(app) as connection:
        for number in range(12):
            send(connection, "x", key=f"k{number}")
        connection.execute("INSERT INTO saf.outbox (to_service, key, body) VALUES ('rare', '', '')")
    visitor = there.client()
    page = visitor.get("/outbox", params={"broker": "shop", "service": "rare"}).text
    steps = 0
    while 'badge idle">pending' not in page:
        assert "None so far" in page
        assert "Only messages sent before" in page
        (further,) = re.findall(r'href="([^"]+)">Look further<', page)
        page = visitor.get(html.unescape(further)).text
        steps += 1
    assert steps >= 6
    assert "Look further" not in page


def test_bodies_are_hidden_unless_they_are_allowed_and_redaction_applies_everywhere(
    app: Dsn, mom: Dsn, orders: list[str], tmp_path: Path
) -> None:
    which = {"id": message_id(app, "order 1007"), "key": "order 1007"}
    failed = {"id": message_id(app, orders[0]), "key": orders[0]}
    file = tmp_path / "saf.toml"
    for more, body in (("", False), ('bodies = true\nredact_paths = ["$.card.number"]', True)):
        with dashboard(settings(file, {"shop": app}, {"mom": mom}, more)) as there:
            visitor = there.client()
            for page in (visitor.get("/message", params=which).text,
                         visitor.get("/message", params=failed).text,
                         visitor.get("/dead").text, visitor.get("/outbox").text):  # fmt: skip
                assert "s3cr3t" not in page
                assert "4111-1111" not in page
                assert b"4111-1111".hex() not in page
            shown = visitor.get("/message", params=which).text
            assert ("&#34;amount&#34;: 49" in shown) is body
            assert HIDDEN in shown
            assert "application/json" in shown


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '" onmouseover="x', "{{7*7}}"])
def test_what_others_have_named_is_shown_as_text(
    there: Dashboard, app: Dsn, mom: Dsn, name: str
) -> None:
    with connect(app) as connection, connect(mom) as store:
        create_service(store, name)
        connection.execute(
            "INSERT INTO saf.outbox (from_service, to_service, key, message_type, headers, body) "
            "VALUES (%s, %s, %s, %s, jsonb_build_object(%s::text, %s::text), %s)",
            [name, name, name, name, name, name, name.encode()],
        )
        new_member(connection, name=name)
        connection.execute(
            LETTER.replace("'no'", "%s").replace("'billing'", "%s").replace("'k'", "%s"),
            [name, name, name, 1],
        )
    visitor = there.client(name=name)
    sent = {"id": message_id(app, name), "key": name}
    pages = [visitor.get(path).text for path in READ if path != "/message"]
    pages.append(visitor.get("/message", params=sent).text)
    pages.append(visitor.get("/routes", params={"service": name}).text)
    for page in pages:
        assert "<script>alert" not in page
        assert 'onmouseover="x' not in page
        assert "49" not in page or "{{7*7}}" in page or name != "{{7*7}}"
    assert html.escape(name).replace("&quot;", "&#34;").replace("&#x27;", "&#39;") in pages[-2]


def test_a_broker_that_is_down_is_shown_as_down_and_holds_up_no_page(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    brokers = {"shop": app, "gone": Dsn("postgresql://x:s3cr3t@127.0.0.1:1/gone")}
    with dashboard(settings(tmp_path / "saf.toml", brokers, {"mom": mom})) as there:
        visitor = there.client()
        until(lambda: 'badge bad">down' in visitor.get("/").text)
        for path in READ:
            page = visitor.get(path)
            assert page.status_code == 200, path
            assert "s3cr3t" not in page.text
        assert "gone" in visitor.get("/dead").text
        assert "is not shown" in visitor.get("/dead").text


def test_a_broker_that_hangs_holds_up_a_page_for_no_longer_than_its_bound(
    there: Dashboard, app: Dsn
) -> None:
    visitor = there.client()
    visitor.get("/")
    with connect(app) as holder, holder.transaction():
        holder.execute("LOCK TABLE saf.dead_letter IN ACCESS EXCLUSIVE MODE")
        began = time.monotonic()
        page = visitor.get("/dead")
        first = time.monotonic() - began
        assert "has not answered" in page.text
        began = time.monotonic()
        assert "is not shown" in visitor.get("/dead").text
        again = time.monotonic() - began
    assert first < 10
    assert again < first
    until(lambda: "is not shown" not in visitor.get("/dead").text)


def test_a_broker_that_comes_back_is_shown_again(there: Dashboard, app: Dsn, mom: Dsn) -> None:
    visitor = there.client()
    assert "is not shown" not in visitor.get("/dead").text
    allow = f'ALTER DATABASE "{app.database}" ALLOW_CONNECTIONS'
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
    with connect(mom) as server:
        server.execute(f"{allow} false".encode())
        server.execute(kill, [app.database])
        until(lambda: "is not shown" in visitor.get("/dead").text)
        server.execute(f"{allow} true".encode())
    until(lambda: "is not shown" not in visitor.get("/dead").text)


def test_a_dashboard_is_mounted_within_another_application(
    given: Settings, orders: list[str]
) -> None:
    inner: Any = saf.ui.app(given, write=True)
    outer = Starlette(routes=[Mount("/ops/saf", inner)])
    with served(outer, inner.state.site, path="/ops/saf") as there:
        away = there.client(None).get("/dead")
        assert away.headers["location"] == "/ops/saf/login?next=%2Fops%2Fsaf%2Fdead"
        visitor = there.client()
        page = visitor.get("/dead").text
        assert orders[0] in page
        for link in re.findall(r'(?:href|src|action|hx-get|sse-connect)="([^"#]+)"', page):
            assert link.startswith("/ops/saf/"), link
        assert visitor.get("/static/ui.css").status_code == 200


def test_the_stream_says_when_there_are_new_figures(there: Dashboard) -> None:
    with there.client().stream("GET", "/live") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        there.site.pulse.look()
        assert next(line for line in lines if line.startswith("event:")) == "event: tick"


@pytest.mark.full
@pytest.mark.slow
def test_a_hundred_brokers_are_shown_in_time(
    new_broker: Callable[[str], Dsn], mom: Dsn, tmp_path: Path
) -> None:
    some = [new_broker(f"app{number}") for number in range(4)]
    for dsn in some:
        with connect(dsn) as connection:
            connection.execute(LETTER, [30])
    brokers = {f"shop {number}": some[number % 4] for number in range(100)}
    with dashboard(settings(tmp_path / "saf.toml", brokers, {"mom": mom})) as there:
        visitor = there.client()
        until(lambda: visitor.get("/").text.count('<th scope="row">') > 100)
        slow = {}

        def all_have_answered(path: str) -> bool:
            began = time.perf_counter()
            page = visitor.get(path)
            slow[path] = time.perf_counter() - began
            return "has not answered" not in page.text

        for path in READ:
            visitor.get(path)
            until(partial(all_have_answered, path))  # at the first look, a busy machine may be late
        assert {path: seconds for path, seconds in slow.items() if seconds > 5} == {}


def test_every_page_is_asked_of_the_broker_by_bounded_statements(there: Dashboard) -> None:
    def bound(connection: psycopg.Connection[Any]) -> str:
        ((found,),) = fetch(connection, "SHOW statement_timeout")
        return str(found)

    assert there.site.brokers.ask(bound).found == {"shop": "2s", "mom": "2s"}


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_a_message_with_a_trace_links_to_where_traces_are_shown(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    context = json.dumps({"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
    with connect(app) as connection:
        connection.execute(ORDER, ["traced", context, "{}"])
        connection.execute(ORDER, ["forged", json.dumps({"traceparent": "00-&quot;-1-01"}), "{}"])
    ui = 'trace_url = "https://traces.example/{trace_id}?a=1&b=2"'
    given = settings(tmp_path / "saf.toml", {"shop": app}, {"mom": mom}, ui)
    with dashboard(given) as there:
        visitor = there.client()
        page = visitor.get("/message", params={"id": message_id(app, "traced")}).text
        assert f'href="https://traces.example/{TRACE}?a=1&amp;b=2"' in page
        page = visitor.get("/message", params={"id": message_id(app, "forged")}).text
        assert "traces.example" not in page
    with pytest.raises(
        ConfigurationError, match=r"ui\.trace_url: .* must contain \{trace_id\} once"
    ):
        settings(tmp_path / "saf.toml", {"shop": app}, {"mom": mom}, 'trace_url = "javascript:1"')


@pytest.mark.usefixtures("orders")
def test_a_message_shows_the_attempts_in_vain_at_an_endpoint(
    there: Dashboard, app: Dsn, mom: Dsn
) -> None:
    wanted = message_id(app, "order 1007")
    with connect(mom) as store:
        store.execute(
            "INSERT INTO saf.attempt (subscription_id, message_id, status, seconds, outcome, error)"
            " SELECT subscription_id, %s, 503, 1.5, 'again', '<b>busy</b>' FROM saf.subscription"
            " WHERE name = 'billing'",
            [wanted],
        )
    page = there.client().get("/message", params={"id": wanted, "key": "order 1007"}).text
    assert "Tried at" in page
    assert "&lt;b&gt;busy&lt;/b&gt;" in page


@pytest.mark.parametrize(
    ("page", "each", "many", "count"),
    [
        ("/dialogs", r"service \d+", DIALOGS, 230),
        ("/parked", r"nobody \d+", LANES, 430),
        ("/audit", r"reason \d+", DECISIONS, 120),
    ],
)
def test_page_after_page_shows_everything_once_and_no_list_is_cut_silently(
    there: Dashboard, app: Dsn, *, page: str, each: str, many: str, count: int
) -> None:
    with connect(app) as connection:
        connection.execute(many)
    visitor = there.client()
    assert f"{page}?broker=shop" in visitor.get(page).text, "a link leads to those not shown"
    seen: set[str] = set()
    address: str | None = f"{page}?broker=shop"
    while address is not None:
        shown = visitor.get(address).text
        here = set(re.findall(each, shown))
        assert here
        assert not here & seen
        seen |= here
        link = re.search(r'rel="next" href="([^"]+)"', shown)
        address = html.unescape(link[1]) if link else None
    assert len(seen) == count
