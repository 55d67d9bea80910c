"""Where a NATS server is, who may write there, and what its settings give."""

from __future__ import annotations

import base64
import binascii
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import SecretStr

from saf.database.bounds import Bounds
from saf.destinations.nats import Nats
from saf.destinations.nats.connection import Connection, login_of
from saf.errors import Refused, Unavailable
from saf.testing.forwarder import Forwarder, all_stored
from saf_demo.servers import free_port
from tests.certificates import certificate
from tests.nats_server import NatsServer, nats_server
from tests.needed import absent
from tests.queue_suite import ids
from tests.silence import silent_host
from tests.waits import until


def nkey(folder: Path) -> tuple[str, Path]:
    """A user's public key, and the file of its seed, as `nk` writes it."""
    if find_spec("nkeys") is None:
        absent("nkeys", "pip install 'nats-py[nkeys]'")
    key = Ed25519PrivateKey.generate()
    seed = bytes([(18 << 3) | (20 << 3) >> 5, ((20 << 3) & 31) << 3]) + key.private_bytes_raw()
    public = bytes([20 << 3]) + key.public_key().public_bytes_raw()
    file = folder / "user.nk"
    file.write_text(text(seed) + "\n")
    return text(public), file


def text(given: bytes) -> str:
    """Bytes with their checksum, in base 32."""
    whole = given + binascii.crc_hqx(given, 0).to_bytes(2, "little")
    return base64.b32encode(whole).rstrip(b"=").decode()


def by_password(stack: ExitStack, folder: Path) -> tuple[NatsServer, dict[str, Any]]:
    server = nats_server(folder / "nats", authorization="{ user: saf, password: hunter2 }")
    return stack.enter_context(server), {"username": "saf", "password": SecretStr("hunter2")}


def by_token(stack: ExitStack, folder: Path) -> tuple[NatsServer, dict[str, Any]]:
    server = nats_server(folder / "nats", authorization="{ token: hunter2 }")
    return stack.enter_context(server), {"token": SecretStr("hunter2")}


def by_nkey(stack: ExitStack, folder: Path) -> tuple[NatsServer, dict[str, Any]]:
    public, file = nkey(folder)
    server = nats_server(folder / "nats", authorization=f"{{ users: [ {{ nkey: {public} }} ] }}")
    return stack.enter_context(server), {"nkey_file": file}


def by_tls(stack: ExitStack, folder: Path) -> tuple[NatsServer, dict[str, Any]]:
    public, key = certificate(folder)
    tls = f'{{ cert_file: "{public}", key_file: "{key}", ca_file: "{public}", verify: true }}'
    server = stack.enter_context(nats_server(folder / "nats", tls=tls))
    given = {"ca_file": public, "certificate_file": public, "key_file": key}
    return server, {"server": f"tls://localhost:{server.port}", **given}


PLACES: Mapping[str, Callable[[ExitStack, Path], tuple[NatsServer, dict[str, Any]]]] = {
    "password": by_password,
    "token": by_token,
    "nkey": by_nkey,
    "tls": by_tls,
}


@pytest.mark.parametrize("place", PLACES)
def test_who_may_write_there_does_and_nobody_else(tmp_path: Path, place: str) -> None:
    forwarder = Forwarder()
    with ExitStack() as stack:
        server, given = PLACES[place](stack, tmp_path)
        events = Nats(**{"server": server.address, **given})
        with closing(events.open("events")) as destination:
            done = all_stored(
                destination.store(forwarder.chunk(forwarder.messages(8)), exactly_once=True)
            )
        assert done.messages == 8
        assert events.identity("events")
        without = Nats(server=events.server)
        with pytest.raises((Refused, Unavailable)) as caught:
            without.identity("events")
        assert ("Authorization Violation" in str(caught.value)) == (place != "tls")
        assert "hunter2" not in str(caught.value)


def test_a_file_of_a_login_that_has_none_is_refused(tmp_path: Path) -> None:
    _, seed = nkey(tmp_path)
    file = tmp_path / "saf.creds"
    file.write_text(
        "-----BEGIN NATS USER JWT-----\neyJ0.eyJq.c2ln\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed.read_text()}------END USER NKEY SEED------\n"
    )
    assert set(login_of("events", Nats(server="nats://n", creds_file=file))) == {"user_credentials"}
    with pytest.raises(Refused, match="has no JWT of a user"):
        login_of("events", Nats(server="nats://n", creds_file=seed))
    with pytest.raises(Refused, match="has no seed of an nkey"):
        login_of("events", Nats(server="nats://n", nkey_file=Path(__file__)))
    with pytest.raises(Refused, match="cannot be read"):
        login_of("events", Nats(server="nats://n", creds_file=tmp_path / "x"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[NatsServer]]:
    """Three servers of one cluster."""
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = []
    for number, port in enumerate(ports):
        folder = tmp_path / f"n{number}"
        folder.mkdir()
        settings = {
            "server_name": f"n{number}",
            "cluster": f'{{ name: c, listen: "127.0.0.1:{port}", routes: [ {routes} ] }}',
        }
        servers.append(NatsServer(folder=folder, settings=settings, port=free_port()))
    try:
        for one in servers:
            one.start(wait=False)
        yield servers
    finally:
        for one in servers:
            one.kill()


@pytest.mark.full
def test_a_cluster_goes_on_without_one_of_its_servers(cluster: list[NatsServer]) -> None:
    address = "nats://" + ",".join(f"127.0.0.1:{one.port}" for one in cluster)
    events = Nats(server=address, replicas=3).bounded(Bounds(statement_seconds=2))
    forwarder = Forwarder()
    rows = forwarder.messages(4_000)

    def stored(count: int) -> bool:
        try:
            with closing(events.open("events")) as destination:
                destination.store(forwarder.chunk(rows[:count]), exactly_once=True)
        except Unavailable:
            return False
        return True

    until(lambda: stored(1_000))
    assert "most of them before it is acknowledged" in events.guarantee("events").promise
    leader = next(
        one
        for one in cluster
        if one.ask("$JS.API.STREAM.INFO.SAF")["cluster"]["leader"] == one.settings["server_name"]
    )
    leader.kill()
    with pytest.raises(Unavailable), closing(Nats(server=leader.address).open("e")) as gone:
        gone.connect()
    until(lambda: stored(4_000))
    (other, *_) = [one for one in cluster if one is not leader]

    def arrived() -> list[UUID]:
        try:
            return ids(other)
        except TimeoutError:  # the cluster is choosing who says which streams there are
            return []

    until(lambda: arrived() == [row["message_id"] for row in rows])


def test_a_host_that_is_stopped_before_it_greets_leaves_its_turn_to_the_next_one(
    tmp_path: Path,
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(3)
    with nats_server(tmp_path / "nats") as one, silent_host() as port:
        there = f"nats://127.0.0.1:{port},127.0.0.1:{one.port}"
        events = Nats(server=there).bounded(Bounds(network_seconds=0.5))
        with closing(events.open("events")) as destination:
            destination.store(forwarder.chunk(rows), exactly_once=True)
        assert ids(one) == [row["message_id"] for row in rows]


@pytest.mark.timeout(30)
def test_a_server_that_pings_and_does_not_answer_is_not_waited_for_without_end(
    tmp_path: Path,
) -> None:
    with nats_server(tmp_path / "nats", ping_interval='"300ms"') as server:
        bounds = Bounds(network_seconds=1, statement_seconds=1)
        events = Nats(server=server.address).bounded(bounds)
        with (
            socket.create_connection(("127.0.0.1", server.port)) as silent,
            closing(Connection("events", events)) as asking,
        ):
            silent.sendall(b"CONNECT {}\r\nSUB silent 2\r\nPING\r\n")
            received = b""
            while b"PONG" not in received:
                received += silent.recv(1 << 12)
            with pytest.raises(TimeoutError):
                asking.request("silent")


def test_what_its_settings_give_is_said_with_the_setting_that_gives_more(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server:
        events = Nats(server=server.address)
        given = events.guarantee("events")
        assert given.server.startswith("NATS 2.")
        assert "which is made at the first message" in given.server
        with closing(events.open("events")) as destination:
            destination.connect()
        given = events.guarantee("events")
        assert "a crash of its process loses nothing that was acknowledged" in given.promise
        (loss,) = given.more
        assert "a loss of power may lose" in loss[0]
        assert "replicas = 3 in a cluster" in loss[1]
