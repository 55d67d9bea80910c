"""``make audit``: known vulnerabilities of the packages that are installed here.

Exit 1 if there is one. What cannot be looked up, because the index here answers no such questions,
is counted and said; it is no vulnerability, and no proof that there is none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

AUDIT = ("-m", "pip_audit", "--skip-editable", "--format", "json", "--progress-spinner", "off")


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What is known of the packages."""

    vulnerable: Sequence[str]
    """A line for each vulnerability: package, version, id, and what mends it."""
    looked_up: int
    unknown: Sequence[str]
    """Packages of which nobody could be asked."""

    @classmethod
    def of(cls, packages: Sequence[dict[str, Any]]) -> Audited:
        """What pip-audit says, without saf itself, which it skips."""
        asked = [one for one in packages if "vulns" in one]
        unknown = [one["name"] for one in packages if "not found" in one.get("skip_reason", "")]
        vulnerable = [
            f"{one['name']} {one['version']}: {known['id']}, mended in "
            f"{', '.join(known['fix_versions']) or 'no version yet'}"
            for one in asked
            for known in one["vulns"]
        ]
        return cls(vulnerable=vulnerable, looked_up=len(asked), unknown=unknown)

    def lines(self) -> list[str]:
        """What to print."""
        said = [*self.vulnerable, f"{self.looked_up} packages were looked up"]
        if self.unknown:
            said.append(
                f"NOT LOOKED UP: {len(self.unknown)} packages, such as {self.unknown[0]}: the "
                "package index here has no advisories. Run `make audit` where it has them"
            )
        return said


def main() -> int:
    """Ask, print, and say whether something is vulnerable."""
    done = subprocess.run([sys.executable, *AUDIT], capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        # it ends with a traceback where no connection is to be had
        print(f"NOT LOOKED UP: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
        return 0
    audited = Audited.of(json.loads(done.stdout)["dependencies"])
    print("\n".join(audited.lines()))
    return bool(audited.vulnerable)


if __name__ == "__main__":
    raise SystemExit(main())
