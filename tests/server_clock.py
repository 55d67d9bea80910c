"""A server with a clock of its own, which jumps while it runs.

A library that is loaded before the server's own says what time it is: as many seconds ahead of the
machine's clock as a file says. Nothing else is moved, so PostgreSQL's timeouts fire, as long after
a jump as they would on a machine whose clock was set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any
from unittest.mock import patch

from saf.broker.embedded import EmbeddedServer

CLOCK = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *ahead;

__attribute__((constructor)) static void begin(void) {
    ahead = mmap(0, sizeof *ahead, PROT_READ, MAP_SHARED, open(getenv("CLOCK"), O_RDONLY), 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += *ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now) *now = at.tv_sec;
    return at.tv_sec;
}
"""


class ClockedServer(EmbeddedServer):
    """An embedded server whose clock can be set; without gcc, it has the machine's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ahead = 0
        folder = self.data_dir.with_name(f"{self.data_dir.name}-clock")
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        self._library, self._file = folder / "clock.so", folder / "ahead"
        if compiler := shutil.which("gcc"):
            command = [compiler, "-shared", "-fPIC", "-xc", "-", "-o", str(self._library)]
            subprocess.run(command, input=CLOCK.encode(), check=True)
            self.set_clock(0)

    @property
    def has_clock(self) -> bool:
        """Whether it has a clock of its own."""
        return self._library.exists()

    def set_clock(self, seconds: int) -> None:
        """Let the clock jump to as many seconds ahead of the machine's; negative: behind."""
        self.ahead = seconds
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    def _run(self, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        own = {"LD_PRELOAD": str(self._library), "CLOCK": str(self._file)}
        with patch.dict(os.environ, own if self.has_clock else {}):
            return super()._run(*arguments, **options)
