"""Setting aside: destinations that are down, routes and services that come and go, and people.

All that `tests.stateful.forwarding` does goes on meanwhile.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.stateful.forwarding import SERVICE, STORE, Forwarding
from tests.stateful.world import MOM, OTHER, SERVICES, TOPIC

PLAIN = st.sampled_from([name for name in SERVICES if name != TOPIC])
ELSEWHERE = st.sampled_from(((), (MOM,), (OTHER,)))
SOME = st.sampled_from((None, *SERVICES))


class SettingAside(Forwarding):
    """The world around the forwarders changes."""

    @rule(store=STORE)
    def goes_down(self, store: str) -> None:
        """A store does not answer any more."""
        self.world.down.add(store)

    @precondition(lambda self: self.world.down)
    @rule(store=STORE)
    def comes_back(self, store: str) -> None:
        """It does."""
        self.world.down.discard(store)

    @rule()
    def let_time_pass(self) -> None:
        """Attempts are due, leases are over, what is mortal has expired."""
        self.world.let_time_pass()
        self.world.unsure()

    @precondition(lambda self: self.seen.parked)
    @rule()
    def attempts_are_due(self) -> None:
        """A person does not want to wait."""
        self.world.attempts_are_due()

    @rule(store=STORE, service=SERVICE)
    def forget_service(self, store: str, service: str) -> None:
        """A service does not live at a store any more."""
        self.world.forget(store, service)

    @precondition(lambda self: self.world.forgotten)
    @rule(store=STORE, service=SERVICE)
    def know_service(self, store: str, service: str) -> None:
        """It does again."""
        self.world.know(store, service)

    @rule(service=PLAIN, matches=ELSEWHERE)
    def lead_elsewhere(self, service: str, matches: tuple[str, ...]) -> None:
        """Another route leads from a service, or none."""
        self.world.lead(service, SERVICES[service][0], matches)

    @precondition(lambda self: self.world.routes != SERVICES)
    @rule(service=PLAIN)
    def lead_as_before(self, service: str) -> None:
        """The service's own route again."""
        self.world.lead(service, *SERVICES[service])

    @precondition(lambda self: self.seen.dead)
    @rule(service=SOME)
    def retry_dead(self, service: str | None) -> None:
        """A person wants dead letters tried again."""
        self.world.retry_dead(service)

    @precondition(lambda self: self.seen.dead)
    @rule(service=SOME)
    def discard_dead(self, service: str | None) -> None:
        """A person gives dead letters up."""
        self.world.discard_dead(service)
