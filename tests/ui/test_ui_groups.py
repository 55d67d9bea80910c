"""Failure groups in the browser, over HTTP: listed, opened, retried and discarded as a whole."""

from __future__ import annotations

import html
import re

import pytest

from saf.config import Settings
from saf.database import Dsn, fetch
from saf.errors import HIDDEN
from saf.setaside.failure_groups import failure_groups
from saf.setaside.selection import ParkedMessages
from saf.ui.pages import set_aside
from tests.dashboard import VIEW, Dashboard, Visitor, dashboard, finished
from tests.pipeline import connect

LETTER = """
INSERT INTO saf.dead_letter (subscription_id, destination, shard, id, reason, error, to_service,
                             key, body)
SELECT subscription_id, 'mom', 0, 1, 'rejected', %s, 'billing', %s, ''
FROM saf.subscription WHERE log = 'outbox' AND name = 'forwarder'
"""
ERRORS = {
    "a": "order 1 has <no> price DETAIL: a s3cr3t",
    "b": "order 2 has <no> price DETAIL: s3cr3t b",
    "c": "the address is not known DETAIL: s3cr3t",
}
WAITING = """
INSERT INTO saf.subscription (name, log) VALUES ('reader', 'inbox');
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, error, next_attempt_at)
SELECT subscription_id, '', 'key', subject, 7, 'KeyError: ' || error, now() + interval '1 h'
FROM saf.subscription, (VALUES ('A-1', '''x'''), ('A-2', '''y'''), ('A-3', 'none'))
                       AS v (subject, error) WHERE name = 'reader';
INSERT INTO saf.parked
    (subscription_id, kind, subject, shard, id, batch, position, to_service, key, body)
SELECT subscription_id, 'key', subject, 7, 7, 1, 7, 's', subject, ''
FROM saf.subscription, (VALUES ('A-1'), ('A-2'), ('A-3')) AS v (subject) WHERE name = 'reader';
"""
CHOSEN = r'name="id" value="([^"]+)"'
ROW = re.compile(r'<th scope="row" class="n"[^>]*><a href="([^"]+)"[^>]*>(\d+)</a>')


@pytest.fixture
def letters(app: Dsn) -> None:
    with connect(app) as connection:
        for key, error in ERRORS.items():
            connection.execute(LETTER, [error, key])


def links(visitor: Visitor, page: str) -> list[tuple[str, str]]:
    """The links of the groups on a page, and their numbers of messages."""
    return [(html.unescape(link), count) for link, count in ROW.findall(visitor.get(page).text)]


def keys(app: Dsn) -> list[str]:
    with connect(app) as connection:
        return [key for (key,) in fetch(connection, "SELECT key FROM saf.dead_letter ORDER BY 1")]


def fields(page: str, action: str) -> dict[str, str]:
    """The hidden fields of the first form for an action on a page."""
    form = page[page.index(f'action="{action}"') :].partition("</form>")[0]
    return dict(re.findall(r'name="(\w+)" value="([^"]*)"', form))


@pytest.mark.usefixtures("letters")
def test_a_row_leads_to_the_messages_of_its_group(there: Dashboard) -> None:
    visitor = there.client()
    page = visitor.get("/dead/groups").text
    assert "order … has &lt;no&gt; price" in page
    (link, count), (_, one) = links(visitor, "/dead/groups")
    assert (count, one) == ("2", "1")
    assert link.startswith("/dead?broker=shop&group=")
    assert len(re.findall(CHOSEN, visitor.get(link).text)) == 2
    assert '"/dead/groups' in visitor.get("/dead").text


@pytest.mark.usefixtures("letters")
def test_a_filter_without_groups_says_so(there: Dashboard) -> None:
    page = there.client().get("/dead/groups", params={"service": "mail"}).text
    assert "No group matches the filter." in page
    assert "No message waits for an operator." not in page


@pytest.mark.usefixtures("letters")
def test_what_a_list_hides_is_hidden_in_a_group(there: Dashboard) -> None:
    visitor = there.client()
    assert HIDDEN in visitor.get("/dead").text
    for page in ("/dead", "/dead/groups"):
        assert "s3cr3t" not in visitor.get(page).text


@pytest.mark.usefixtures("letters")
def test_a_group_is_discarded_after_a_confirmation(there: Dashboard, app: Dsn) -> None:
    visitor = there.client()
    form = fields(visitor.get("/dead/groups").text, "/dead/confirm")
    page = visitor.form("/dead/groups", "/dead/confirm", {**form, "action": "discard"})
    assert "Discard <strong>2 messages</strong>" in page.text
    assert keys(app) == ["a", "b", "c"], "nothing is done yet"
    job = visitor.form("/dead", "/dead/decide", fields(page.text, "/dead/decide"))
    assert "2 messages" in finished(visitor, job.url.path)
    assert keys(app) == ["c"]


@pytest.mark.usefixtures("letters")
def test_of_a_large_backlog_the_page_says_what_it_has_grouped_and_decides_about_that(
    there: Dashboard, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_aside, "GROUPED", 2)
    visitor = there.client()
    page = visitor.get("/dead/groups").text
    assert "shop: only the 2 dead letters that were set aside last" in re.sub("</?bdi>", "", page)
    assert [count for _, count in links(visitor, "/dead/groups")] == ["1", "1"]
    (link,) = [link for link, _ in links(visitor, "/dead/groups")][1:]
    shown = visitor.get(link).text
    assert len(re.findall(CHOSEN, shown)) == 1
    newest = visitor.get(f"{link}&newest=yes").text
    assert re.findall(CHOSEN, newest) == re.findall(CHOSEN, shown)
    form = fields(shown, "/dead/confirm") | {"matching": "yes", "action": "discard"}
    confirm = visitor.form("/dead", "/dead/confirm", form)
    job = visitor.form("/dead", "/dead/decide", fields(confirm.text, "/dead/decide"))
    finished(visitor, job.url.path)
    assert keys(app) == ["a", "c"], "the older one of the group was not grouped"


def test_a_group_of_parked_messages_is_retried_now(there: Dashboard, mom: Dsn) -> None:
    with connect(mom) as connection:
        connection.execute(WAITING)
        group = failure_groups(connection, ParkedMessages()).shown[0]
        assert group.messages == 2
        visitor = there.client()
        page = visitor.get("/parked/messages/groups").text
        assert "KeyError: …" in page
        link = html.unescape(re.findall(r'href="(/parked/confirm[^"]+)"', page)[0])
        confirm = visitor.get(link).text
        assert "2 lanes" in confirm
        visitor.form(link, "/parked/retry", fields(confirm, "/parked/retry"))
        query = "SELECT subject FROM saf.backoff WHERE next_attempt_at <= now() ORDER BY 1"
        assert fetch(connection, query) == [("A-1",), ("A-2",)]


@pytest.mark.usefixtures("letters")
def test_who_may_only_look_gets_no_buttons(given: Settings) -> None:
    with dashboard(given) as running:
        page = running.client(token=VIEW).get("/dead/groups").text
    assert "order … has" in page
    assert "/dead/confirm" not in page


@pytest.mark.parametrize("page", ["/dead", "/dead/groups", "/parked", "/parked/messages"])
def test_a_value_that_is_no_id_of_a_group_is_named(there: Dashboard, page: str) -> None:
    answer = there.client().get(page, params={"group": "<b>"})
    assert answer.status_code == 400
    assert "&lt;b&gt;" in answer.text
    assert "is not a failure group" in answer.text
