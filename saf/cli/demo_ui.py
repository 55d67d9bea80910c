"""The dashboard of a demo: it shows the running demo, and stays when the demo is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console

from saf.cli import ui
from saf.config import Settings


@contextmanager
def shown(settings: Settings, console: Console, port: int) -> Iterator[None]:
    """Serve the dashboard while a block runs, and then until Ctrl-C or SIGTERM."""
    server, listening, notes = ui.prepared(settings, host="127.0.0.1", port=port, write=True)
    for line in notes:
        console.print(line, soft_wrap=True)
    thread = threading.Thread(target=server.run, args=([listening],), name="saf-demo-ui")
    thread.start()
    try:
        yield
        console.print("the dashboard stays until Ctrl-C", soft_wrap=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    finally:
        server.end()
        thread.join()
