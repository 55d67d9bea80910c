"""Where a Redis server is, and what its settings give."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis
from pydantic import SecretStr

from saf.destinations.redis import Redis
from saf.errors import Refused, Unavailable
from saf.testing.forwarder import Forwarder, all_stored
from saf_demo.servers import free_port
from tests.certificates import certificate
from tests.needed import needed
from tests.redis_server import RedisServer, redis_server
from tests.waits import until


def test_what_its_settings_give_is_said_with_the_setting_that_gives_more(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path / "one", appendfsync="everysec") as one,
        redis_server(tmp_path / "two", replicaof=f"127.0.0.1 {one.port}", appendonly="no"),
    ):
        until(lambda: one.client().info()["connected_slaves"] == 1)
        events = Redis(server=one.address)
        given = events.guarantee("events")
        assert given.server.startswith(f"Redis {one.client().info()['redis_version']}, standalone")
        assert "loses messages acknowledged in the last second or two" in given.promise
        assert [cure for _, cure in given.more] == [
            "appendfsync always in redis.conf",
            "replicas = 1 in this destination of saf.toml, and min-replicas-to-write",
        ]
        one.client().config_set("appendfsync", "always")
        given = events.model_copy(update={"replicas": 1}).guarantee("events")
        assert (
            "loses nothing that was acknowledged; a chunk counts as stored when 1 replica"
            in given.promise
        )
        assert given.more == ()
        one.client().config_set("appendonly", "no")
        assert "since the last snapshot" in events.guarantee("events").more[0][0]


@pytest.mark.parametrize("place", ["socket", "tls", "sentinel", "cluster"])
def test_it_is_found_wherever_it_is(tmp_path: Path, place: str) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(300)
    with ExitStack() as stack:
        events, server = PLACES[place](stack, tmp_path)
        with closing(events.open("events")) as destination:
            destination.store(forwarder.chunk(rows), exactly_once=True)
        assert events.guarantee("events").promise.startswith("exactly once")
        assert events.known("events", forwarder.source, role="test").marks
        with closing(server) as client:
            there = client.xrange("{saf}:billing")
        assert [UUID(fields["saf-id"]) for _, fields in there] == [
            row["message_id"] for row in rows
        ]


def test_a_cluster_that_cannot_be_reached_or_is_asked_as_one_server_says_so(
    tmp_path: Path,
) -> None:
    nowhere = Redis(server=f"redis+cluster://127.0.0.1:{free_port()}")
    with pytest.raises(Unavailable, match="refused"):
        nowhere.identity("events")
    with redis_server(tmp_path / "one") as one:
        alone = nowhere.model_copy(update={"server": f"redis+cluster://127.0.0.1:{one.port}"})
        with pytest.raises(Unavailable, match="Cluster mode is not enabled"):
            alone.identity("events")
        one.client().config_set("requirepass", "hunter2")
        with pytest.raises(Refused, match=r"Fix username and password in saf\.toml"):
            alone.identity("events")
    with ExitStack() as stack:
        events, server = by_cluster(stack, tmp_path)
        server.close()
        named = events.model_copy(
            update={"server": events.server.replace("redis+cluster", "redis")}
        )
        with pytest.raises(Refused, match=r"Use redis\+cluster:// in saf\.toml"):
            named.identity("events")


def test_in_a_cluster_the_rights_that_the_page_lists_are_enough_and_one_that_lacks_is_named(
    tmp_path: Path,
) -> None:
    rows = Forwarder().messages(1)
    with ExitStack() as stack:
        events, other = by_cluster(stack, tmp_path)
        given = {"username": "saf", "password": SecretStr("secret")}
        events = events.model_copy(update=given)
        nodes = [other, client_of(events)]
        for node in nodes:
            node.execute_command(*acl().split())
        with pytest.raises(Refused, match="ACL SETUSER"):
            events.identity("events")
        for node in nodes:
            node.execute_command("ACL", "SETUSER", "saf", "+cluster|slots")
        with closing(events.open("events")) as destination:
            stored = all_stored(destination.store(Forwarder().chunk(rows), exactly_once=True))
        assert stored.messages == 1


def client_of(events: Redis) -> Any:
    """Of the node that it names, as the administrator."""
    return redis.Redis(port=int(events.server.rpartition(":")[2]), decode_responses=True)


def acl() -> str:
    """The rights in docs/destinations.md."""
    page = Path(__file__).parents[2] / "docs" / "destinations.md"
    return page.read_text().partition("<!-- test: acl -->\n```text\n")[2].partition("\n")[0]


def by_socket(stack: ExitStack, folder: Path) -> tuple[Redis, Any]:
    path = str(folder / "redis.sock")
    stack.enter_context(redis_server(folder / "redis", unixsocket=path))
    client = redis.Redis(unix_socket_path=path, decode_responses=True)
    return Redis(server=f"unix://{path}"), client


def by_tls(stack: ExitStack, folder: Path) -> tuple[Redis, Any]:
    certificate_file, key_file = certificate(folder)
    tls = free_port()
    server = stack.enter_context(
        redis_server(
            folder / "redis", tls_port=str(tls), tls_cert_file=str(certificate_file),
            tls_key_file=str(key_file), tls_ca_cert_file=str(certificate_file),
        )
    )  # fmt: skip
    events = Redis(
        server=f"rediss://localhost:{tls}", ca_file=certificate_file,
        certificate_file=certificate_file, key_file=key_file,
    )  # fmt: skip
    with pytest.raises(Unavailable, match="certificate"):
        events.model_copy(update={"ca_file": None}).identity("events")
    return events, server.client(decode_responses=True)


def by_sentinel(stack: ExitStack, folder: Path) -> tuple[Redis, Any]:
    server = stack.enter_context(redis_server(folder / "redis"))
    (folder / "sentinel").mkdir()
    file = folder / "sentinel" / "sentinel.conf"
    port = free_port()
    file.write_text(f"port {port}\nsentinel monitor mymaster 127.0.0.1 {server.port} 1\n")
    process = subprocess.Popen(
        [needed("redis-server", "redis-server"), file, "--sentinel"], stdout=subprocess.DEVNULL
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    events = Redis(server=f"redis+sentinel://127.0.0.1:{port}/mymaster")
    until(lambda: answers(events))
    return events, server.client(decode_responses=True)


def answers(events: Redis) -> bool:
    try:
        return bool(events.identity("events"))
    except Unavailable:
        return False


def by_cluster(stack: ExitStack, folder: Path) -> tuple[Redis, Any]:
    """Of two nodes, of which the one that is not named has the keys."""
    buses = [str(free_port()) for _ in range(2)]
    named, other = (
        stack.enter_context(redis_server(folder / bus, cluster_enabled="yes", cluster_port=bus))
        for bus in buses
    )
    slot = int(named.client().execute_command("CLUSTER", "KEYSLOT", "{saf}"))
    assert 0 < slot < 16383
    named.client().execute_command("CLUSTER", "MEET", "127.0.0.1", other.port, buses[1])
    other.client().execute_command("CLUSTER", "ADDSLOTSRANGE", slot, 16383)
    named.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, slot - 1)
    for server in (named, other):
        until(lambda server=server: b"cluster_state:ok" in info(server))  # type: ignore[misc]
    return Redis(server=f"redis+cluster://127.0.0.1:{named.port}"), other.client(
        decode_responses=True
    )


def info(server: RedisServer) -> bytes:
    said = server.client().execute_command("CLUSTER", "INFO")
    return said if isinstance(said, bytes) else repr(said).replace("': '", ":").encode()


PLACES: Mapping[str, Callable[[ExitStack, Path], tuple[Redis, Any]]] = {
    "socket": by_socket,
    "tls": by_tls,
    "sentinel": by_sentinel,
    "cluster": by_cluster,
}
