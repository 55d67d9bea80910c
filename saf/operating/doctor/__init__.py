"""The doctor: problems, present or coming, with their causes and cures.

Each check is a small function that runs one query at one database, and yields its findings, if any.
`examine` runs all checks for every broker and destination. Nothing is written.

    error      a promise is broken, or messages wait for an operator
    warning    it works, but not for long; or the check could not run
    ok         examined without findings

The finding `not_checked` lists checks that a lock has blocked, as an error, or that the role may
not make, as a warning. A check that fails otherwise, e.g. because a table is missing, is an error.
The other checks continue. A cure acts only at the database of its
finding, except for `saf rebase`, which repairs everything that was set back.
PostgreSQL shows the age of another user's session only to members of pg_read_all_stats. Of a query,
only the part before its first literal is shown.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from uuid import UUID

import psycopg

from saf.config import Settings
from saf.database import HAS_SCHEMA, LOST, Dsn, Meaning, meaning, reason_of, sqlstates
from saf.database.sqlstates import SILENT
from saf.errors import (
    ConfigurationError,
    MemberMissing,
    Refused,
    SafError,
    SameBroker,
    Unavailable,
)
from saf.operating import sources
from saf.operating.doctor import broker, captures, messages, server
from saf.operating.doctor import schedules as of_schedules
from saf.operating.doctor.patient import LOGIN, REACHABLE, Check, Finding, Limits, Patient
from saf.operating.places import Candidate, Listing, ask_all, memory, missing
from saf.operating.repair.new_id import Place, place

__all__ = ["REACHABLE", "Finding", "Limits", "examine"]

SERVER: tuple[Check, ...] = (
    server.primary,
    server.settings,
    server.synchronous_commit,
    server.connections,
    server.encryption,
    server.clock_skew,
    server.sight,
)
"""Checks for any database."""

FIT: tuple[Check, ...] = (broker.schema, broker.rows)
"""Checks that must succeed; otherwise the following ones mean nothing."""

BROKER: tuple[Check, ...] = (
    broker.rights,
    broker.policies,
    broker.publications,
    broker.search_path,
    broker.constraints,
    broker.restored,
    broker.forged,
    broker.forgers,
    server.long_transactions,
    server.prepared_transactions,
    broker.outbox_left_lying,
    broker.inbox_left_lying,
    broker.unheard,
    broker.no_handler,
    broker.endpoints,
    broker.pauses,
    broker.fair,
    broker.dead_letters,
    broker.dialogs_set_back,
    messages.dialogs_open_for_long,
    messages.dialogs_expired,
    messages.dialogs_blocked,
    messages.held,
    messages.refused,
    messages.dropped,
    messages.misaddressed,
    of_schedules.schedules,
    captures.captures,
    captures.backfills,
)
"""Checks that need the schema."""

RESTORE = (
    "restore the missing objects of schema saf from a backup: `saf migrate` does not create them "
    "again"
)


def examine(
    config: Settings,
    *,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    clock: Callable[[], float] = time.time,
    watch: Callable[[str], object] = str,
) -> list[Finding]:
    """Run all checks of every broker and destination. Reads only.

    ``watch`` is called with each place before its checks.

    A database that does not answer is a finding of the check `REACHABLE`; one that rejects the
    login, of the check `LOGIN`.
    """
    of_source, of_store = _of_source(config), (*BROKER, broker.parked_by(config))
    databases = [("broker", name, item.dsn, of_source) for name, item in config.brokers.items()]
    databases += [
        ("destination", name, dsn, of_store)
        for name, item in config.destinations.items()
        if (dsn := item.broker())
    ]
    found: list[Finding] = []
    patients: list[Patient] = []
    with ExitStack() as stack:
        for kind, name, dsn, checks in databases:
            where = f"{kind} {name!r}"
            watch(where)
            try:
                connection = stack.enter_context(dsn.connect(role="doctor", autocommit=True))
            except Unavailable as error:
                found.append(_not_let_in(where, error, dsn))
                continue
            except ConfigurationError as error:
                found.append(_pooled(where, error))
                continue
            found.append(Finding(check=REACHABLE, where=where, severity="ok"))
            patient = Patient(
                name=name, where=where, connection=connection, limits=limits, clock=clock
            )
            patients.append(patient)
            found += _examined(patient, dsn, checks)
        found += _disagreements(patients)
        places = [
            (patient.where, patient.name, item) for patient in patients for item in _place(patient)
        ]
    fleets = [*_fleets(config, limits, clock, places, watch)]
    elsewhere = [*_elsewhere(config, watch), *_sources(config, watch)]
    return [*found, *elsewhere, *fleets, *_copies(places)]


def _of_source(config: Settings) -> tuple[Check, ...]:
    """Return the checks of a database whose outbox is forwarded."""
    by_config = (
        broker.parked_by,
        messages.routes_by,
        messages.local_by,
        messages.dialogs_by,
        messages.given_early_by,
        broker.set_back_by,
    )
    return (*BROKER, *(check(config) for check in by_config))


def _elsewhere(config: Settings, watch: Callable[[str], object]) -> Iterator[Finding]:
    """Yield findings of the kinds themselves about destinations that are not brokers."""
    for name, destination in config.destinations.items():
        if destination.broker() is not None:
            continue
        where = f"destination {name!r}"
        watch(where)
        try:
            problems = [*destination.problems(name)]
            more = destination.guarantee(name).more
        except Refused as error:
            reason = destination.redact(error.reason)
            yield Finding(check=LOGIN, where=where, severity="error", what=reason, cure=error.cure)
            continue
        except Unavailable as error:
            to_do = (
                f"make it reachable, or correct [destinations.{name}] in saf.toml; messages wait"
            )
            yield _unreachable(where, destination.redact(error.reason), to_do)
            continue
        except Exception as error:
            to_do = "fix the cause; until then its messages wait at their sources"
            reason = destination.redact(str(error) or type(error).__name__)
            yield Finding(
                check="destination", where=where, severity="error", what=reason, cure=to_do
            )
            continue
        yield Finding(check=REACHABLE, where=where, severity="ok")
        for what, to_do in problems:
            yield Finding(check="destination", where=where, severity="error", what=what, cure=to_do)
        for what, to_do in more:
            yield Finding(check="promise", where=where, severity="warning", what=what, cure=to_do)


def _sources(config: Settings, watch: Callable[[str], object]) -> Iterator[Finding]:
    """Yield findings about sources: their brokers, and what their topics have lost."""
    for name in config.sources:
        where = f"source {name!r}"
        watch(where)
        try:
            problems = [*sources.examine(config, name)]
        except Refused as error:
            yield Finding(
                check=LOGIN, where=where, severity="error", what=error.reason, cure=error.cure
            )
            continue
        except Unavailable as error:
            to_do = f"make it reachable, or correct [sources.{name}] in saf.toml; messages wait"
            yield _unreachable(where, error.reason, to_do)
            continue
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            to_do = "fix the cause; until then its messages wait at their broker"
            yield Finding(check="source", where=where, severity="error", what=reason, cure=to_do)
            continue
        yield Finding(check=REACHABLE, where=where, severity="ok")
        for what, to_do in problems:
            yield Finding(check="source", where=where, severity="error", what=what, cure=to_do)


def _missing(config: Settings, listing: Listing) -> Iterator[Finding]:
    """Yield findings for fleet members that forwarders have met, but that are no longer listed."""
    registry = memory(config)
    asked = {*config.fleets} - listing.unlisted
    if registry is None or not asked:
        return
    try:
        known = registry.known(asked)
    except (SafError, psycopg.Error):
        return  # the store's own examination reports this
    for member in missing(known, listing.brokers):
        error = MemberMissing(member.fleet, member.name, closed=member.name in listing.closed)
        cure = shlex.join(("saf", "fleet", "forget", member.name))
        yield Finding(
            check="fleet_member",
            where=f"fleet {member.fleet!r}",
            severity="error",
            what=str(error),
            cure=f"bring it back; or, if it is gone for good, {cure}",
        )


def _place(patient: Patient) -> Iterator[Place]:
    """Yield the identity of a patient's broker and database, if it answers."""
    try:
        yield place(patient.connection)
    except (psycopg.Error, ValueError):
        return  # its own examination reports this


def _copies(places: Iterable[tuple[str, str, Place]]) -> Iterator[Finding]:
    """Yield findings for databases that have another database's broker_id."""
    originals: dict[UUID, tuple[str, str, Place]] = {}
    found: set[tuple[int, int]] = set()
    for where, name, identity in sorted(places, key=lambda known: known[2].database):
        _, original, first = originals.setdefault(identity.broker_id, (where, name, identity))
        if identity.database == first.database or identity.database in found:
            continue
        found.add(identity.database)
        error = SameBroker(name, original, identity.broker_id)
        cure = shlex.join(("saf", "broker", "new-id", "--broker", name))
        yield Finding(check="broker_id", where=where, severity="error", what=str(error), cure=cure)


def _fleets(
    config: Settings,
    limits: Limits,
    clock: Callable[[], float],
    places: list[tuple[str, str, Place]],
    watch: Callable[[str], object],
) -> Iterator[Finding]:
    """Examine the brokers of fleets one by one: they may be too many for simultaneous connections.

    Append each broker's identity and database to ``places``.
    """
    listing = ask_all(config.fleets)
    for name, error in listing.problems:
        where = f"fleet {name!r}"
        if isinstance(error, Unavailable):
            yield _not_let_in(where, error, config.fleets[name].dsn)
        else:
            to_do = "fix its row or its query; the other members are forwarded"
            yield Finding(check="fleet", where=where, severity="error", what=str(error), cure=to_do)
    yield from _missing(config, listing)
    for number, (name, member) in enumerate(listing.brokers.items(), 1):
        where = f"broker {name!r}"
        watch(f"{where}, {number:,} of {len(listing.brokers):,} in fleets")
        try:
            with member.dsn.connect(role="doctor", autocommit=True) as connection:
                patient = Patient(
                    name=name, where=where, connection=connection, limits=limits, clock=clock
                )
                if isinstance(member, Candidate) and patient.ask(HAS_SCHEMA) == [(False,)]:
                    continue
                yield Finding(check=REACHABLE, where=where, severity="ok")
                yield from _examined(patient, member.dsn, _of_source(config))
                places += [(where, name, identity) for identity in _place(patient)]
        except Unavailable as error:
            yield _not_let_in(where, error, member.dsn)
        except ConfigurationError as error:
            yield _pooled(where, error)


def _pooled(where: str, error: ConfigurationError) -> Finding:
    to_do = "name the server itself in saf.toml, and the pooler where messages are sent or received"
    return Finding(check="direct", where=where, severity="error", what=str(error), cure=to_do)


def cure(dsn: Dsn) -> str:
    """Return the cure for a database that could not be connected to."""
    return sqlstates.cure(dsn.for_role("doctor"), dsn.origin)


def _not_let_in(where: str, error: Unavailable, dsn: Dsn) -> Finding:
    """Return the finding for a database that does not answer, or that rejects the login."""
    if not isinstance(error, Refused):
        return _unreachable(where, error.reason, cure(dsn))
    return Finding(check=LOGIN, where=where, severity="error", what=error.reason, cure=error.cure)


def _unreachable(where: str, reason: str, to_do: str = "") -> Finding:
    return Finding(
        check=REACHABLE,
        where=where,
        severity="error",
        what=reason,
        cure=to_do or SILENT.format(dsn="its address in saf.toml"),
    )


@dataclass(kw_only=True)
class Unmade:
    """Checks that could not be made, and why."""

    blocked: list[str] = field(default_factory=list)
    """Checks that a lock has kept from reading."""
    holders: list[Finding] = field(default_factory=list)
    """Findings of `server.locks` at the first of these checks."""
    denied: dict[str, str] = field(default_factory=dict)
    """Checks that the role may not make, with the server's messages."""

    def findings(self, patient: Patient) -> Iterator[Finding]:
        """Yield one finding for each reason."""
        where = patient.where
        if self.blocked:
            yield from self.holders
            yield Finding(
                check="not_checked",
                where=where,
                severity="error",
                what=f"not checked because of a lock: {', '.join(self.blocked)}",
                cure="end the transaction that the line above names; then run the doctor again"
                if self.holders
                else "run the doctor again: the lock is gone",
            )
        if self.denied:
            checks, messages = (
                ", ".join(self.denied),
                "; ".join(dict.fromkeys(self.denied.values())),
            )
            yield Finding(
                check="not_checked",
                where=where,
                severity="warning",
                what=f"not checked because of missing rights: {checks} ({messages})",
                cure=f"run the doctor as an operator: as the owner, {patient.grant('operator')}",
            )


# A lock that one check has waited for blocks the others too
WAIT_BRIEFLY = "SET lock_timeout = '100ms'"


def _examined(patient: Patient, dsn: Dsn, checks: tuple[Check, ...]) -> Iterator[Finding]:
    unmade = Unmade()
    try:
        yield from _checked(patient, checks, unmade)
        if not unmade.blocked:
            yield from _made(server.locks, patient, unmade)
        yield from unmade.findings(patient)
    except LOST as error:
        yield _unreachable(patient.where, dsn.reason(error))


def _checked(patient: Patient, checks: tuple[Check, ...], unmade: Unmade) -> Iterator[Finding]:
    for check in SERVER:
        yield from _made(check, patient, unmade)
    for check in FIT:
        fit = list(_made(check, patient, unmade))
        yield from fit
        if unmade.blocked or any(finding.severity == "error" for finding in fit):
            return
    for check in checks:
        yield from _made(check, patient, unmade)


def _made(check: Check, patient: Patient, unmade: Unmade) -> Iterator[Finding]:
    name, where = check.__name__, patient.where
    is_ok = True
    try:
        for severity, what, to_do in check(patient):
            is_ok = False
            yield Finding(check=name, where=where, severity=severity, what=what, cure=to_do)
    except psycopg.errors.LockNotAvailable:
        if not unmade.blocked:
            unmade.holders = [
                Finding(check="locks", where=where, severity=severity, what=what, cure=to_do)
                for severity, what, to_do in server.locks(patient, blocked=True)
            ]
            patient.connection.execute(WAIT_BRIEFLY)
        unmade.blocked.append(name)
    except psycopg.errors.InsufficientPrivilege as error:
        unmade.denied[name] = reason_of(error)
    except psycopg.errors.QueryCanceled as error:
        yield Finding(
            check=name,
            where=where,
            severity="error",
            what=f"could not check: {reason_of(error)}",
            cure="run the doctor again when the server has less to do",
        )
    except LOST:
        raise
    except psycopg.Error as error:
        incomplete = meaning(error.sqlstate) is Meaning.INCOMPLETE
        yield Finding(
            check=name,
            where=where,
            severity="error",
            what=f"could not check: {reason_of(error)}",
            cure=RESTORE if incomplete else "fix the cause; then run the doctor again",
        )
    else:
        if is_ok:
            yield Finding(check=name, where=where, severity="ok")


def _disagreements(patients: list[Patient]) -> Iterator[Finding]:
    """Find problems that no single database can know: two clocks that disagree."""
    clocks = []
    for patient in patients:
        try:
            clocks.append((patient, *server.skew_of(patient)))
        except psycopg.Error:
            continue  # its connection was lost, and its own examination reports this
    for (first, ahead, blur), (other, behind, more_blur) in combinations(clocks, 2):
        seconds = abs(ahead - behind)
        if seconds - blur - more_blur > first.limits.skew_seconds:
            yield Finding(
                check="clocks_agree",
                where=f"{first.where} and {other.where}",
                severity="warning",
                what=f"their clocks differ by {seconds:.0f} s: their ranges of time differ",
                cure="let both follow the same time servers (NTP)",
            )
