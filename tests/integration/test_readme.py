"""The README's commands and code work, and so do the first ones of its next pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import saf.webhooks
from saf.broker.embedded import programs
from saf.broker.services import create_service
from saf.config import load
from saf.database import Dsn
from saf.database.bounds import Bounds
from saf_demo import forwarding
from saf_demo.flights import FLIGHTS
from tests.endpoints import Partner, serving
from tests.needed import needed
from tests.pages import blocks, clone, page
from tests.pipeline import connect
from tests.programs import BIN, INSTALLED, ROOT, activated, configuration, environment, run, url

README = (ROOT / "README.md").read_text()


RATES = ("forwarded_now", "messages_per_second")
"""Counts of the demo that are not faults."""

SENDING, DISPATCH, SETTING_UP = map(page, ("sending.md", "dispatch.md", "setting-up.md"))


def block(kind: str, text: str = README) -> str:
    """The code that the README, or a page, marks to be tested."""
    (code,) = blocks(text, kind)
    return code


def test_it_is_short_and_its_code_fits_into_a_narrow_terminal() -> None:
    assert len(README.splitlines()) <= 200
    code = "".join(re.findall(r"```\w+\n(.*?)```", README, re.DOTALL))
    assert [line for line in code.splitlines() if len(line) > 80] == []


def test_the_demo_prints_what_the_page_shows() -> None:
    title, *rows = block("demo").splitlines()
    counts = [int(re.split(r"\s{2,}", row)[-1].replace(",", "")) for row in rows[1:]]
    sent, rolled_back, arrived, stored, *others = counts
    result = {
        **{
            "sent": sent,
            "rolled_back": rolled_back,
            "forwarded": arrived,
            "stores": {"mom": stored},
        },
        **dict(zip(forwarding.WORDS, others, strict=True)),
    }
    assert title == forwarding.TITLE
    assert [line.rstrip() for line in forwarding.listing(result).lines(None)] == rows
    assert sent == arrived == stored == result["forwarded_now"] == FLIGHTS
    assert {result[name] for name in forwarding.WORDS if name not in RATES} == {0}


def test_the_first_message_takes_twenty_lines_and_is_sent(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("CREATE TABLE orders (number text, total int)")
    code = block("first", SENDING)
    assert len(code.splitlines()) <= 20
    done = run([sys.executable, "-c", code], env={"DATABASE_URL": url(app)})
    assert done.returncode == 0, done.stderr
    with connect(app) as connection:
        sent = connection.execute("SELECT to_service, key, body FROM saf.outbox").fetchall()
    assert sent == [("billing", "A-1", b'{"order":"A-1","total":90}')]


def test_the_plain_insert_is_a_correct_send(app: Dsn) -> None:
    psql = programs(18) / "psql"
    subprocess.run(
        [psql, app.conninfo, "-qc", block("sql", SENDING)], check=True, env=environment()
    )
    with connect(app) as connection:
        sent = connection.execute("SELECT to_service, key, body FROM saf.outbox").fetchall()
    assert sent == [("billing", "A-1", b'{"order": "A-1"}')]


@pytest.mark.slow
def test_it_leads_by_the_letter_from_a_clone_to_a_received_message(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = clone(short_path / "saf", Path(sys.prefix))
    lines = [block(kind).splitlines() for kind in ("shop", "billing", "whole")]
    assert sum(map(len, lines)) <= 42
    for name in ("shop", "billing"):
        (here / f"{name}.py").write_text(block(name))
    script = f"{block('init')}mv ../shop.py ../billing.py .\necho; {block('whole')}"
    done = run(
        ["bash", "-euo", "pipefail", "-c", f"trap 'kill %1 && wait' EXIT\n{script}"],
        env={"HOME": str(short_path), "VIRTUAL_ENV_DISABLE_PROMPT": "1"},
        cwd=here,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    began, _, said = done.stdout.partition("\n\n")
    (first,) = re.findall(r"saf init +# (.*)", block("init"))
    assert first.rstrip(" …") in began
    # "…" stands for what differs from run to run
    promised = re.findall(r"#\s+(.*)", block("whole"))
    pattern = r"\n".join(re.escape(line).replace("…", "(?s:.)*?") for line in promised)
    assert re.fullmatch(pattern, said.strip()), said
    # the page shows the written file without its comments
    for name in ("SHOP_DSN", "MOM_DSN"):
        monkeypatch.setenv(name, f"dbname={name}")
    (short_path / "saf.toml").write_text(block("toml"))
    assert load(here / "try" / "saf.toml") == load(short_path / "saf.toml")


def test_five_lines_lead_from_an_endpoint_to_its_first_signed_webhook(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    needed("openssl", "openssl")
    with connect(mom) as connection:
        create_service(connection, "billing")
    (tmp_path / "shop.py").write_text(block("shop"))
    # the page's partner is on the internet, and this one is not
    near = '\n[dispatch]\nnetworks = ["127.0.0.0/8"]\n'
    (tmp_path / "saf.toml").write_text(block("toml") + near)
    commands = block("webhook", DISPATCH)
    assert len(commands.splitlines()) == 5
    with serving(Partner()) as partner:
        lines = commands.replace("https://billing.example.com/hooks", partner.url)
        done = run(
            ["bash", "-euo", "pipefail", "-c", lines + 'echo "$SAF_ENDPOINT_BILLING"'],
            env={
                "PATH": INSTALLED,
                "SHOP_DSN": app.conninfo,
                "MOM_DSN": mom.conninfo,
            },
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    *_, handled, secret = done.stdout.splitlines()
    assert handled == "billing: handled 1 message"
    (got,) = partner.accepted
    assert saf.webhooks.verify(got.headers, got.body, secret) == got.id
    assert got.body == b'{"order":"A-1","total":90}'


def test_the_operators_commands_work_in_their_order(new_database: object, tmp_path: Path) -> None:
    assert callable(new_database)
    shop, mom = new_database("shop"), new_database("mom")
    (tmp_path / "saf.toml").write_text(block("toml", SETTING_UP))
    done = run(
        ["bash", "-euxc", block("steps", SETTING_UP)],
        env={
            "PATH": INSTALLED,
            "SHOP_DSN": shop.conninfo,
            "MOM_DSN": mom.conninfo,
        },
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_the_commands_of_the_operations_page_work_as_they_stand(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    (tmp_path / "saf.toml").write_text(block("toml"))
    shells = blocks(page("operations.md"), "shell")
    assert len(shells) >= 2
    done = run(
        ["bash", "-euxc", "".join(shells)],
        env={
            "PATH": activated(),
            "SHOP_DSN": app.conninfo,
            "MOM_DSN": mom.conninfo,
        },
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_the_bounds_of_the_operations_page_are_those_that_hold_without_it(tmp_path: Path) -> None:
    text = block("bounds", page("operations.md"))
    file = configuration(tmp_path / "saf.toml", {}, {"mom": Dsn("dbname=mom")})
    file.write_text('[brokers.app]\ndsn = "dbname=app"\n' + file.read_text() + text)
    settings = load(file)
    assert settings.brokers["app"].dsn.bounds == Bounds()
    there = settings.destinations["mom"].broker()
    assert there is not None
    assert there.bounds == Bounds()


def test_the_command_for_who_sends_gives_all_that_a_sender_needs(app: Dsn) -> None:
    said = re.search(r"`saf (grant --role \w+) shop_app --dsn …`", SENDING)
    assert said is not None
    role = f"sender_{app.database}"
    with connect(app) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN")
        done = run([BIN / "saf", *said[1].split(), role], env={"SAF_DSN": app.conninfo})
        assert done.returncode == 0, done.stderr
        connection.execute("CREATE TABLE orders (number text, total int)")
        connection.execute(f"GRANT INSERT ON orders TO {role}")
    as_sender = url(app).replace("//postgres@", f"//{role}@")
    try:
        done = run([sys.executable, "-c", block("first", SENDING)], env={"DATABASE_URL": as_sender})
        assert done.returncode == 0, done.stderr
    finally:
        with connect(app) as connection:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?m)(?:^|`)make (\w+)", README))))
def test_each_make_target_that_is_named_exists(target: str) -> None:
    done = run(["make", "-n", target], cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        *(Path("README.md"), Path("CONTRIBUTING.md"), Path("examples/README.md")),
        *(file.relative_to(ROOT) for file in sorted((ROOT / "docs").rglob("*.md"))),
    ],
    ids=str,
)
def test_each_link_leads_somewhere(name: Path) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (ROOT / name.parent / target).exists(), f"{name} links to {target}"
    # with a suffix or a slash at its end: saf/error is a message type
    for file in re.findall(r"`((?:saf|tests|jobs|docker)/[\w/]*(?:\.\w+|/))`", text):
        assert (ROOT / file).exists(), f"{name} names {file}"
