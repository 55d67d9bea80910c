"""docs/capture.md: its commands and its code, as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from saf.database import Dsn, fetch
from saf.operating.plans.file import read
from tests.pages import blocks, page, prepared, shell, unmarked_shells
from tests.pipeline import bodies, connect

pytestmark = pytest.mark.full

PAGE = page("capture.md")


def code(kind: str) -> str:
    (text,) = blocks(PAGE, kind)
    return text


def test_the_commands_work_and_the_messages_are_as_shown(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    folder = prepared(tmp_path, app, mom)
    with connect(app) as connection:
        connection.execute(code("tables"))
        said = shell(code("add"), folder, app, mom)
        assert "CREATE OR REPLACE TRIGGER" in said
        connection.execute(code("changes"))
        shown = re.findall(r"^\| `(orders\.\w+)` \| `(\d)` \| `(.*)` \|$", PAGE, re.MULTILINE)
        assert len(shown) == 3
        assert shown == fetch(
            connection,
            "SELECT message_type, key, convert_from(body, 'UTF8') FROM saf.outbox ORDER BY id",
        )
        shell("saf forward", folder, app, mom)
        assert len(bodies(mom)) == 3
        assert re.search(r"orders +\d+ +done +2", shell(code("backfill"), folder, app, mom))
        said = shell(code("decide"), folder, app, mom)
        assert "and then it was paused" in said
        assert "done; 2 messages in all" in said
        shell(code("alter").replace("saf doctor", "saf doctor || true"), folder, app, mom)
        assert "captures" not in shell("saf doctor || true", folder, app, mom)
        connection.execute("UPDATE orders SET total = 1")
        shell(code("remove"), folder, app, mom)
        ((left,),) = fetch(
            connection,
            "SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal "
            "AND tgrelid = 'orders'::regclass",
        )
        assert left == 0


def test_the_plan_is_one(tmp_path: Path) -> None:
    (plan,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "plan.toml").write_text(plan)
    entries = read(tmp_path / "plan.toml").brokers["shop"].entries()
    assert [*entries["captures"]] == [("public.orders",)]


def test_no_command_of_the_page_is_left_out() -> None:
    assert unmarked_shells(PAGE) == []
