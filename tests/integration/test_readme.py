"""The README's commands and code do what it says."""

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
from tests.endpoints import Partner, serving
from tests.needed import needed
from tests.pipeline import connect
from tests.programs import BIN, INSTALLED, ROOT, activated, configuration, environment, run, url

README = (ROOT / "README.md").read_text()


def block(kind: str) -> str:
    """The code that the README marks to be tested."""
    (code,) = re.findall(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    return str(code)


def test_the_first_message_takes_twenty_lines_and_is_sent(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("CREATE TABLE orders (number text, total int)")
    assert len(block("python").splitlines()) <= 20
    done = run([sys.executable, "-c", block("python")], env={"DATABASE_URL": url(app)})
    assert done.returncode == 0, done.stderr
    with connect(app) as connection:
        sent = connection.execute("SELECT to_service, key, body FROM saf.outbox").fetchall()
    assert sent == [("billing", "A-1", b'{"order":"A-1","total":90}')]


def test_the_plain_insert_is_a_correct_send(app: Dsn) -> None:
    psql = programs(18) / "psql"
    subprocess.run([psql, app.conninfo, "-qc", block("sql")], check=True, env=environment())
    with connect(app) as connection:
        sent = connection.execute("SELECT to_service, key, body FROM saf.outbox").fetchall()
    assert sent == [("billing", "A-1", b'{"order": "A-1"}')]


@pytest.mark.slow
def test_the_example_of_40_lines_sends_forwards_and_receives_and_prints_what_it_says(
    new_database: object, tmp_path: Path
) -> None:
    assert callable(new_database)
    databases = {name: new_database(name) for name in ("shop", "mom")}
    lines = [block(kind).splitlines() for kind in ("shop", "billing", "whole")]
    assert sum(map(len, lines)) <= 42
    for name in ("shop", "billing"):
        (tmp_path / f"{name}.py").write_text(block(name))
    (tmp_path / "saf.toml").write_text(block("toml"))
    done = run(
        ["bash", "-euo", "pipefail", "-c", block("whole")],
        env={
            "PATH": INSTALLED,
            **{f"{name.upper()}_DSN": dsn.conninfo for name, dsn in databases.items()},
        },
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    for name, dsn in databases.items():
        said = said.replace(dsn.database, name)
    # "…" stands for what differs from run to run
    promised = re.findall(r"#\s+(.*)", block("whole"))
    pattern = r"\n".join(re.escape(line).replace("…", "(?s:.)*?") for line in promised)
    assert re.fullmatch(pattern, said.strip()), said


def test_five_lines_lead_from_an_endpoint_to_its_first_signed_webhook(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    needed("openssl", "openssl")
    with connect(mom) as connection:
        create_service(connection, "billing")
    (tmp_path / "shop.py").write_text(block("shop"))
    # the README's partner is on the internet, and this one is not
    near = '\n[dispatch]\nnetworks = ["127.0.0.0/8"]\n'
    (tmp_path / "saf.toml").write_text(block("toml") + near)
    assert len(block("webhook").splitlines()) == 5
    with serving(Partner()) as partner:
        lines = block("webhook").replace("https://billing.example.com/hooks", partner.url)
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
    (tmp_path / "saf.toml").write_text(block("toml"))
    done = run(
        ["bash", "-euxc", block("shell")],
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
    page = (ROOT / "docs" / "operations.md").read_text()
    shells = re.findall(r"<!-- test: shell -->\n```sh\n(.*?)```", page, re.DOTALL)
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
    page = (ROOT / "docs" / "operations.md").read_text()
    (text,) = re.findall(r"<!-- test: bounds -->\n```toml\n(.*?)```", page, re.DOTALL)
    file = configuration(tmp_path / "saf.toml", {}, {"mom": Dsn("dbname=mom")})
    file.write_text('[brokers.app]\ndsn = "dbname=app"\n' + file.read_text() + text)
    settings = load(file)
    assert settings.brokers["app"].dsn.bounds == Bounds()
    there = settings.destinations["mom"].broker()
    assert there is not None
    assert there.bounds == Bounds()


def test_the_command_for_who_sends_gives_all_that_a_sender_needs(app: Dsn) -> None:
    said = re.search(r"`saf (grant --role \w+) shop_app`", README)
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
        done = run([sys.executable, "-c", block("python")], env={"DATABASE_URL": as_sender})
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
    "page",
    [
        *(Path("README.md"), Path("CONTRIBUTING.md"), Path("examples/README.md")),
        *(file.relative_to(ROOT) for file in sorted((ROOT / "docs").rglob("*.md"))),
    ],
    ids=str,
)
def test_each_link_leads_somewhere(page: Path) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (ROOT / page.parent / target).exists(), f"{page} links to {target}"
    # with a suffix or a slash at its end: saf/error is a message type
    for file in re.findall(r"`((?:saf|tests|jobs|docker)/[\w/]*(?:\.\w+|/))`", text):
        assert (ROOT / file).exists(), f"{page} names {file}"
