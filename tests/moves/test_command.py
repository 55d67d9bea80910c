"""`saf rebase` after a move: its dry run, its changes, and its questions to the operator."""

from __future__ import annotations

from pathlib import Path

from saf.database import fetch
from tests.moves import ways
from tests.moves.conftest import Site
from tests.moves.ways import arrived, burn_beyond, send_numbers
from tests.pages import blocks, page, prepared, shell
from tests.pipeline import connect, run
from tests.programs import configuration, saf

ROWS = "SELECT txid::text, id FROM saf.outbox ORDER BY id"


def test_a_dry_run_says_what_a_repair_would_do_and_changes_nothing(
    site: Site, tmp_path: Path
) -> None:
    burn_beyond(site.old, site.new, 500)
    send_numbers(site.app, *range(6))
    run(site.app, mom=site.mom)
    moved = ways.restored(site.new, ways.dump(site.old, site.app), site.name())
    send_numbers(moved, 6, 7)
    config = configuration(tmp_path / "saf.toml", {"shop": moved}, {"mom": site.mom})
    with connect(moved) as connection:
        before = fetch(connection, ROWS)
        done = saf("rebase", "--dry-run", "--config", config)
        assert (done.returncode, done.stderr) == (0, "")
        assert "would be rebased, 8 rows renumbered; 2 messages written here since" in done.stdout
        assert fetch(connection, ROWS) == before
    done = saf("rebase", "--moved-by", "dump", "--config", config)
    assert (done.returncode, done.stderr.count("--broker")) == (2, 1)
    done = saf("rebase", "--moved-by", "upgrade", "--broker", "shop", "--config", config)
    assert done.returncode == 2
    assert "not by an upgrade alone, which keeps transaction ids" in done.stderr
    done = saf("rebase", "--config", config)
    assert done.returncode == 0, done.stderr
    assert "rebased, 8 rows renumbered" in done.stdout
    run(moved, mom=site.mom)
    assert arrived(site.mom) == list(range(8))


def test_the_commands_of_the_page_make_a_copy_a_broker_of_its_own_and_say_how_it_was_moved(
    site: Site, tmp_path: Path
) -> None:
    copied, told = (blocks(page("moving.md"), kind)[0] for kind in ("copied", "told"))
    copy = ways.template_copy(site.old, site.app, "shop_copy")
    try:
        prepared(tmp_path, site.app, site.mom)
        sources = {"shop": site.app, "shop_copy": copy}
        configuration(tmp_path / "saf.toml", sources, {"mom": site.mom})
        said = shell(copied + told, tmp_path, site.app, site.mom)
    finally:
        ways.drop_database(site.old, "shop_copy")
    assert "shop_copy: now broker" in said
    assert "shop: was not restored, nothing to do" in said
