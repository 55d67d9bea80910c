"""What `make audit` makes of pip-audit's answer, and that it names what nobody could look up."""

from __future__ import annotations

from tests.audit import Audited

SAFE = {"name": "safe", "version": "1.0", "vulns": []}
BAD = {
    "name": "bad",
    "version": "2.0",
    "vulns": [
        {"id": "PYSEC-1", "fix_versions": ["2.1", "3.0"]},
        {"id": "PYSEC-2", "fix_versions": []},
    ],
}
UNKNOWN = {
    "name": "away",
    "skip_reason": "Dependency not found on PyPI and could not be audited: away (1.0)",
}
OURS = {"name": "saf-outbox", "skip_reason": "distribution marked as editable"}


def test_each_vulnerability_is_named_with_what_mends_it() -> None:
    audited = Audited.of([SAFE, BAD, OURS])
    assert audited.lines() == [
        "bad 2.0: PYSEC-1, mended in 2.1, 3.0",
        "bad 2.0: PYSEC-2, mended in no version yet",
        "2 packages were looked up",
    ]
    assert audited.vulnerable


def test_what_could_not_be_looked_up_is_counted_and_is_no_vulnerability() -> None:
    audited = Audited.of([SAFE, UNKNOWN, OURS])
    assert not audited.vulnerable
    assert audited.looked_up == 1
    assert audited.lines()[-1].startswith("NOT LOOKED UP: 1 packages, such as away")
