"""A destination that keeps all that it has in a folder, and is set back to a copy of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.crash import set_backs
from tests.crash.past import message, unsettled
from tests.crash.plan import QUALITIES, Fault
from tests.crash.site import Site


class FolderSite(Site):
    """With such a destination. A subclass says where it is."""

    @property
    def kept(self) -> Path:
        """Its folder."""
        raise NotImplementedError

    @property
    def copy(self) -> Path:
        """Where a copy of the folder is, if there is one."""
        return self.folder / "copy"

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Nobody writes into the folder meanwhile."""
        yield

    def forget_copy(self) -> None:
        """As before the first round."""
        shutil.rmtree(self.copy, ignore_errors=True)


def back_up(round_: Any, _: Fault) -> None:
    """A copy of its folder is taken, while nobody stores."""
    set_backs.have_begun(round_)
    with round_.at_rest(), round_.site.untouched():
        round_.site.forget_copy()
        shutil.copytree(round_.site.kept, round_.site.copy)
        set_backs.have_copied(round_)


def set_back(round_: Any, fault: Fault) -> None:
    """Its folder is what it was; nobody is told."""
    site = round_.site
    if not site.copy.exists():
        back_up(round_, fault)
    set_backs.have_gone_on(round_)
    with round_.at_rest():
        had = {message(body) for body in site.arrived()}
        with site.untouched():
            site.kept.rename(site.folder / f"was-{time.monotonic_ns()}")
            site.copy.rename(site.kept)
        lost = had - {message(body) for body in site.arrived()}
        unanswered = unsettled(round_.app.conninfo)
    round_.past.destination_goes_back(lost)
    # nobody knows of what no answer had come for, and nobody waits for one at most once
    known = [
        one for one in lost - unanswered if QUALITIES[one[0].partition("-")[0]] != "at_most_once"
    ]
    if known:
        set_backs.expect_a_refusal(round_, f"the destination had lost {len(known)} messages")
    set_backs.repair(round_)
