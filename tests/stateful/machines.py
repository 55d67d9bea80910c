"""All machines, by name."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis.stateful import RuleBasedStateMachine

from tests.stateful.archiving import Archiving
from tests.stateful.aside import SettingAside
from tests.stateful.dialogs import Dialogs
from tests.stateful.dialogs_set_back import DialogsSetBack
from tests.stateful.forwarding import Forwarding
from tests.stateful.receiving import Receiving
from tests.stateful.set_back import SetBacks
from tests.stateful.site import Site
from tests.stateful.streaming import Streaming

MACHINES: dict[str, Callable[[Site], Callable[[], RuleBasedStateMachine]]] = {
    "forwarding": Forwarding.on,
    "aside": SettingAside.on,
    "receiving": Receiving.on,
    "dialogs": Dialogs.on,
    "dialogs_set_back": DialogsSetBack.on,
    "set_back": SetBacks.on,
    "streaming": Streaming.on,
    "archiving": Archiving.on,
}
