"""Plants a bug in whatever Python process starts with this folder in its path.

Python imports a module of this name at its start. `tests.crash.bugs.with_bug` puts it there.
"""

import os

import pytest

from tests.crash import bugs

getattr(bugs, os.environ["CRASH_BUG"])(pytest.MonkeyPatch())
