"""Access to the dashboard: who gets in, who may act, and what a browser is told to refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog.testing

import saf.ui
from saf.config import Settings, load
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from saf.ui import access, application
from saf.ui.access import COOKIE
from saf.ui.pages import PAGES
from tests.dashboard import OPERATE, VIEW, Dashboard, dashboard, finished, settings
from tests.pipeline import connect

PATHS = sorted(path.replace("{number}", "1") for path in PAGES)
FORMS = sorted(p.replace("{number}", "1") for p, one in PAGES.items() if one.changes)
OPERATED = sorted(p.replace("{number}", "1") for p, one in PAGES.items() if one.operates)


def test_nobody_sees_or_does_anything_without_a_login(there: Dashboard) -> None:
    stranger = there.client(None)
    for path in [*PATHS, "/live", "/nowhere"]:
        for method in ("GET", "POST"):
            answer = stranger.request(method, path)
            assert answer.status_code in (303, 401, 404, 405), path
            assert answer.headers.get("location", "/login").startswith("/login"), path
            assert "shop" not in answer.text
    assert stranger.get("/dead", headers={"HX-Request": "true"}).status_code == 401


def test_a_wrong_token_is_refused_and_a_right_one_gets_a_session(there: Dashboard) -> None:
    visitor = there.client(None)
    refused = visitor.post("/login", data={"token": VIEW[:-1]})
    assert (refused.status_code, "set-cookie" in refused.headers) == (401, False)
    assert "not the token" in refused.text
    assert visitor.post("/login", data={"token": VIEW}).status_code == 303
    assert "Overview" in visitor.get("/").text


def test_a_login_makes_a_new_session_whatever_cookie_the_browser_had(there: Dashboard) -> None:
    victim = there.client(None)
    victim.cookies.set(COOKIE, "chosen-by-somebody-else")
    answer = victim.post("/login", data={"token": OPERATE})
    assert "chosen-by-somebody-else" not in answer.headers["set-cookie"]
    chosen = {COOKIE: "chosen-by-somebody-else"}
    assert httpx.get(there.url + "/", cookies=chosen).status_code == 303
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert "secure" not in cookie


def test_a_second_login_and_a_logout_end_the_session_before(there: Dashboard) -> None:
    visitor = there.client()
    first = visitor.cookies[COOKIE]
    visitor.post("/login", data={"token": VIEW})
    assert httpx.get(there.url + "/", cookies={COOKIE: first}).status_code == 303
    second = visitor.cookies[COOKIE]
    assert visitor.post("/logout", data={"csrf": "wrong"}).status_code == 403
    assert visitor.post("/logout", data={"csrf": visitor.csrf("/")}).status_code == 303
    assert httpx.get(there.url + "/", cookies={COOKIE: second}).status_code == 303


@pytest.mark.parametrize(
    "wanted", ["//evil.example/", "https://evil.example", "/\\evil.example", "/\t/evil", "x"]
)
def test_a_login_leads_nowhere_but_into_the_dashboard(there: Dashboard, wanted: str) -> None:
    answer = there.client(None).post("/login", data={"token": VIEW, "next": wanted})
    assert answer.headers["location"] == "/"
    shown = there.client(None).get("/login", params={"next": wanted}).text
    assert "evil" not in shown


def test_a_login_leads_back_to_where_one_wanted_to_be(there: Dashboard) -> None:
    visitor = there.client(None)
    answer = visitor.get("/dead?reason=rejected")
    page = visitor.get(answer.headers["location"])
    assert 'value="/dead?reason=rejected"' in page.text
    answer = visitor.post("/login", data={"token": VIEW, "next": "/dead?reason=rejected"})
    assert answer.headers["location"] == "/dead?reason=rejected"


@pytest.mark.parametrize("path", FORMS)
def test_a_form_without_the_sessions_own_csrf_token_does_nothing(
    there: Dashboard, path: str
) -> None:
    visitor, other = there.client(), there.client()
    for csrf in ({}, {"csrf": ""}, {"csrf": other.csrf("/")}):
        assert visitor.post(path, data=csrf).status_code == 403
    right = {"csrf": visitor.csrf("/")}
    elsewhere = {"Sec-Fetch-Site": "cross-site"}
    assert visitor.post(path, data=right, headers=elsewhere).status_code == 403


@pytest.mark.parametrize("path", OPERATED)
def test_who_may_view_cannot_operate(there: Dashboard, path: str) -> None:
    visitor = there.client(VIEW)
    form = {"csrf": visitor.csrf("/"), "action": "discard", "matching": "yes"}
    answer = visitor.post(path, data=form) if path in FORMS else visitor.get(path)
    assert answer.status_code == 403
    assert "this login may view, and not operate" in answer.text


def test_without_write_nobody_can_operate(given: Settings, orders: list[str]) -> None:
    with dashboard(given, write=False) as there:
        visitor = there.client(OPERATE)
        assert 'value="retry"' not in visitor.get("/dead").text
        form = {"csrf": visitor.csrf("/"), "action": "discard", "matching": "yes"}
        answer = visitor.post("/dead/decide", data=form)
        assert answer.status_code == 403
        assert "without --write" in answer.text
        assert orders[0] in visitor.get("/dead").text


def test_every_answer_has_the_headers_that_bind_the_browser(there: Dashboard) -> None:
    visitor = there.client()
    for path in ["/", "/dead", "/login", "/nowhere", "/static/ui.css", "/static/../x", "/jobs/9"]:
        headers = visitor.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
    assert visitor.get("/dead").headers["cache-control"] == "no-store"


def test_an_answer_to_what_failed_unexpectedly_is_bound_too(
    there: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor = there.client()
    monkeypatch.setattr(there.site.jobs, "all", lambda: 1 / 0)
    answer = visitor.get("/jobs")
    assert (answer.status_code, "division" in answer.text) == (500, False)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 19, "x", "-1", "1e3"])
def test_a_job_whose_number_is_none_is_refused(there: Dashboard, number: str) -> None:
    visitor = there.client()
    assert visitor.get(f"/jobs/{number}").status_code == 400
    answer = visitor.form("/", f"/jobs/{number}/cancel", {})
    assert answer.status_code == 400


BY_PROXY = 'user_header = "X-Forwarded-User"\noperators = ["ann"]'


def test_a_proxys_user_is_believed_from_the_proxy_alone(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    file = tmp_path / "saf.toml"
    ann, bob = {"X-Forwarded-User": "ann"}, {"X-Forwarded-User": "bob"}
    with dashboard(settings(file, {"shop": app}, {"mom": mom}, BY_PROXY)) as there:
        visitor = there.client(None)
        assert "operate" in visitor.get("/", headers=ann).text
        assert 'class="badge idle">view' in visitor.get("/", headers=bob).text
        twice = [("X-Forwarded-User", "bob"), ("X-Forwarded-User", "ann")]
        assert visitor.get("/", headers=twice).status_code == 303
        secure = {"X-Forwarded-Proto": "https"}
        cookie = visitor.post("/login", data={"token": VIEW}, headers=secure).headers["set-cookie"]
        assert "secure" in cookie.lower()
    elsewhere = BY_PROXY + '\nproxies = ["192.0.2.0/24"]'
    with dashboard(settings(file, {"shop": app}, {"mom": mom}, elsewhere)) as there:
        assert there.client(None).get("/", headers=ann).status_code == 303


def test_where_a_header_names_the_visitor_only_known_hosts_are_answered(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    file = tmp_path / "saf.toml"
    known = BY_PROXY + '\nhosts = ["saf.Example.com"]'
    with dashboard(settings(file, {"shop": app}, {"mom": mom}, known)) as there:
        visitor = there.client(None)

        def status(host: str, path: str = "/") -> int:
            named = {"X-Forwarded-User": "ann", "Host": host}
            return visitor.get(path, headers=named).status_code

        for host in ("saf.example.com", "SAF.example.com:8400", "localhost:80", "[::1]:8400"):
            assert status(host) == 200, host
        for host in ("evil.example", "evil.example:8400", "saf.example.com.evil.example", "[x"):
            assert status(host) == 421, host
            assert status(host, "/login") == 421, host
        refused = visitor.get("/", headers={"Host": "evil.example"})
        assert "this dashboard is not known as 'evil.example': add it to [ui] hosts" in refused.text
        assert "frame-ancestors 'none'" in refused.headers["content-security-policy"]
    with dashboard(settings(file, {"shop": app}, {"mom": mom})) as there:
        assert there.client(None).get("/login", headers={"Host": "any.example"}).status_code == 200


BY_HTTPS = {"X-Forwarded-Proto": "https"}


def test_by_https_the_cookie_is_one_that_no_other_host_can_set(there: Dashboard) -> None:
    visitor = there.client(None)
    answer = visitor.post("/login", data={"token": VIEW}, headers=BY_HTTPS)
    said = answer.headers["set-cookie"]
    name, _, number = said.partition(";")[0].partition("=")
    assert name == f"__Host-{COOKIE}"
    assert "path=/;" in said.lower()
    assert "secure" in said.lower()
    assert "domain" not in said.lower()
    right = {"Cookie": f"{name}={number}", **BY_HTTPS}
    assert httpx.get(there.url + "/", headers=right).status_code == 200
    tossed = {"Cookie": f"{COOKIE}={number}", **BY_HTTPS}
    assert httpx.get(there.url + "/", headers=tossed).status_code == 303
    csrf = re.search(r'name="csrf" value="(\w+)"', httpx.get(there.url + "/", headers=right).text)
    assert csrf is not None
    gone = httpx.post(there.url + "/logout", headers=right, data={"csrf": csrf[1]})
    assert f"__Host-{COOKIE}=" in gone.headers["set-cookie"]
    assert httpx.get(there.url + "/", headers=right).status_code == 303


def test_who_is_wrong_too_often_is_not_listened_to_and_others_are(
    there: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "WRONG_TOKEN_SECONDS", 0.0)
    here, elsewhere = {"X-Forwarded-For": "192.0.2.7"}, {"X-Forwarded-For": "9.9.9.9, 192.0.2.8"}
    visitor = there.client(None)
    for number in range(access.MOST_WRONG):
        answer = visitor.post("/login", data={"token": f"guess {number}"}, headers=here)
        assert answer.status_code == 401
    answer = visitor.post("/login", data={"token": VIEW}, headers=here)
    assert (answer.status_code, "set-cookie" in answer.headers) == (429, False)
    assert 0 < int(answer.headers["retry-after"]) <= access.WITHIN_SECONDS
    assert visitor.post("/login", data={"token": VIEW}, headers=elsewhere).status_code == 303


def test_what_a_visitor_says_before_the_proxy_is_not_where_they_are(
    there: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "WRONG_TOKEN_SECONDS", 0.0)
    visitor = there.client(None)
    for number in range(access.MOST_WRONG):
        forged = {"X-Forwarded-For": f"198.51.100.{number}, 192.0.2.9"}
        assert visitor.post("/login", data={"token": "x"}, headers=forged).status_code == 401
    again = {"X-Forwarded-For": "203.0.113.1, 192.0.2.9"}
    assert visitor.post("/login", data={"token": "x"}, headers=again).status_code == 429


def test_wrong_tokens_are_remembered_for_a_bounded_number_of_addresses() -> None:
    known = access.Attempts()
    for number in range(access.MOST_ADDRESSES + 10):
        known.wrong(f"address {number}", 0.0)
    assert len(known._wrong) == access.MOST_ADDRESSES


def test_who_logs_in_and_out_and_who_is_refused_is_logged_and_no_token(
    there: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "WRONG_TOKEN_SECONDS", 0.0)
    with structlog.testing.capture_logs() as lines:
        visitor = there.client(None)
        visitor.post("/login", data={"token": "a wrong one", "name": "mallory\x1b[2J"})
        visitor.post("/login", data={"token": VIEW, "name": "ann"})
        csrf = visitor.csrf("/")
        assert visitor.post("/dead/decide", data={"csrf": csrf}).status_code == 403
        assert visitor.post("/logout", data={"csrf": csrf}).status_code == 303
    said = [(line["event"], line["person"]) for line in lines if "person" in line]
    assert said == [
        ("login_refused", "mallory\\x1b[2J"),
        ("login", "ann"),
        ("request_refused", "ann"),
        ("logout", "ann"),
    ]
    assert lines[0]["address"] == "127.0.0.1"
    assert "a wrong one" not in str(lines)
    assert VIEW not in str(lines)


def test_a_csrf_token_of_one_proxys_user_is_not_anothers(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    given = settings(tmp_path / "saf.toml", {"shop": app}, {"mom": mom}, BY_PROXY)
    with dashboard(given) as there:
        visitor = there.client(None)
        visitor.headers["X-Forwarded-User"] = "bob"
        bobs = visitor.csrf("/doctor")
        visitor.headers["X-Forwarded-User"] = "ann"
        answer = visitor.post("/doctor/examine", data={"csrf": bobs})
        assert answer.status_code == 403


def test_who_did_what_is_in_the_audit(there: Dashboard, app: Dsn, orders: list[str]) -> None:
    visitor = there.client(OPERATE, name="Ann\u202e <b>")
    form = visitor.counted("discard", {"matching": "yes"})
    job = visitor.form("/dead", "/dead/decide", {**form, "why": "a test"})
    finished(visitor, job.url.path)
    page = visitor.get("/audit").text
    assert "Ann\\u202e &lt;b&gt;" in page
    with connect(app) as connection:
        rows = fetch(connection, "SELECT person, action, cardinality(message_ids) FROM saf.audit")
    assert rows == [("Ann\u202e <b>", "discard", len(orders))]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('token = "short"', "a token has at least 16 characters"),
        ('tokn = "x"', "unknown setting ui.tokn (did you mean 'token'?)"),
        ('proxies = ["nowhere"]', "ui.proxies"),
        ("bodies = 3", "ui.bodies"),
        ('hosts = ["https://saf.example.com"]', "a host such as saf.example.com, without scheme"),
    ],
)
def test_a_wrong_setting_is_named_and_no_token_is_shown(
    app: Dsn, mom: Dsn, tmp_path: Path, table: str, said: str
) -> None:
    file = tmp_path / "saf.toml"
    settings(file, {"shop": app}, {"mom": mom})
    text = file.read_text().replace(f'token = "{VIEW}"', table if "token" in table else "", 1)
    file.write_text(text if "token" in table else f"{text}\n{table}")
    with pytest.raises(ConfigurationError) as error:
        load(file)
    assert said in str(error.value)
    assert OPERATE not in str(error.value)


def test_a_dashboard_that_nobody_could_log_in_to_is_refused(given: Settings) -> None:
    closed: Any = given.ui.model_copy(update={"token": None, "operate_token": None})
    with pytest.raises(ConfigurationError, match="nobody could log in"):
        saf.ui.app(given.model_copy(update={"ui": closed}))


def test_a_json_path_that_is_none_is_named(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    paths = 'redact_paths = ["$.a[", "$.b"]'
    given = settings(tmp_path / "saf.toml", {"shop": app}, {"mom": mom}, paths)
    with pytest.raises(ConfigurationError, match=r"ui.redact_paths: '\$.a\[' is not a JSON path"):
        saf.ui.app(given)
