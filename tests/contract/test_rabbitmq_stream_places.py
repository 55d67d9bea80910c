"""Where a RabbitMQ server's streams are, who may write there, and what its settings give."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import SecretStr

from saf.database.bounds import Bounds
from saf.destinations.rabbitmq_stream import RabbitmqStream
from saf.errors import Refused, Unavailable
from saf.testing.forwarder import Forwarder, all_stored
from saf_demo.servers import free_port
from tests.certificates import signed
from tests.programs import ROOT
from tests.queue_suite import ids
from tests.rabbitmq_server import RabbitmqServer, rabbitmq_server
from tests.silence import silent_host

PAGE = (ROOT / "docs" / "destinations.md").read_text()
(RIGHTS,) = re.findall(
    r"^rabbitmqctl set_permissions saf '(.*)' '(.*)' '(.*)'$", PAGE, re.MULTILINE
)

pytestmark = pytest.mark.slow  # its server takes seconds to start


def definitions(folder: Path) -> Path:
    """Users as a server loads them: one may do what the page lists, and one may not write."""
    configure, write, read = (one.replace("orders\\.", "billing") for one in RIGHTS)
    file = folder / "definitions.json"
    users = [
        {"name": name, "password": f"{name}-hunter2", "tags": ""}
        for name in ("saf", "reader", "nobody")
    ]
    rights = [
        {"user": "guest", "configure": ".*", "write": ".*", "read": ".*"},
        {"user": "saf", "configure": configure, "write": write, "read": read},
        {"user": "reader", "configure": configure, "write": "saf-marks", "read": read},
    ]
    file.write_text(
        json.dumps(
            {
                "users": [*users, {"name": "guest", "password": "guest", "tags": ""}],
                "vhosts": [{"name": "/"}],
                "permissions": [{**one, "vhost": "/"} for one in rights],
            }
        )
    )
    return file


@pytest.mark.full
def test_it_is_reached_with_tls_by_who_has_its_rights_and_by_nobody_else(tmp_path: Path) -> None:
    authority, public, key = signed(tmp_path)
    tls = free_port()
    settings = {
        "load_definitions": str(definitions(tmp_path)),
        "stream.listeners.ssl.1": f"127.0.0.1:{tls}",
        "ssl_options.cacertfile": str(authority),
        "ssl_options.certfile": str(public),
        "ssl_options.keyfile": str(key),
        "ssl_options.verify": "verify_peer",
        "ssl_options.fail_if_no_peer_cert": "true",
    }
    forwarder = Forwarder()
    rows = forwarder.messages(8)
    with rabbitmq_server(tmp_path / "rabbitmq", **settings) as server:
        events = RabbitmqStream(
            server=f"rabbitmq-stream+tls://localhost:{tls}",
            username="saf",
            password=SecretStr("saf-hunter2"),
            ca_file=authority,
            certificate_file=public,
            key_file=key,
        )
        with closing(events.open("events")) as destination:
            done = all_stored(destination.store(forwarder.chunk(rows), exactly_once=True))
        assert done.messages == 8
        assert events.known("events", forwarder.source, role="test").marks
        with events.reading("events") as reading:
            assert reading.known(forwarder.source).marks

        with pytest.raises(Unavailable, match="certificate"):
            events.model_copy(update={"ca_file": None}).identity("events")
        for name, said in {
            "nobody": "no access to the virtual host",
            "reader": "the access is refused",
            "stranger": "the login is refused",
        }.items():
            login = RabbitmqStream(
                server=server.address,
                username=name,
                password=SecretStr(f"{name}-hunter2"),
                marks="saf-marks",
            )
            with (
                pytest.raises(Refused, match=said) as caught,
                closing(login.open("events")) as destination,
            ):
                destination.store(forwarder.chunk(forwarder.messages(4)), exactly_once=True)
            assert "hunter2" not in str(caught.value)
        saf = RabbitmqStream(
            server=server.address, username="saf", password=SecretStr("saf-hunter2")
        )
        with closing(saf.open("events")) as destination:
            again = all_stored(destination.store(forwarder.chunk(rows), exactly_once=True))
        assert (again.messages, again.dropped) == (0, 8)
        assert ids(server) == [row["message_id"] for row in rows]

        with pytest.raises(Refused, match="virtual host 'other'"):
            saf.model_copy(update={"server": f"{server.address}/other"}).identity("events")
        given = saf.guarantee("events")
        assert given.server.startswith("RabbitMQ 3.")
        assert "a crash of its process loses nothing that was acknowledged" in given.promise
        assert [cure for _, cure in given.more] == [
            "a cluster of three servers, each with power of its own"
        ]
        new = saf.model_copy(update={"marks": "saf-marks-2"})
        assert "made at the first message" in new.guarantee("events").server


def test_what_is_no_address_is_named() -> None:
    for server, said in {
        "rabbit:5552": "is not an address",
        "amqp://rabbit": "is not an address",
        "rabbitmq-stream://saf:hunter2@rabbit": "give a login by username",
        "rabbitmq-stream://": "is not an address",
        "rabbitmq-stream://rabbit:x": "Port could not be cast",
        "rabbitmq-stream://rabbit/a/b": "a virtual host is one name",
        "rabbitmq-stream://rabbit,,": "lacks a host",
    }.items():
        with pytest.raises(ValueError, match=said):
            RabbitmqStream(server=server)
    with pytest.raises(ValueError, match="certificates need TLS"):
        RabbitmqStream(server="rabbitmq-stream://rabbit", ca_file=Path("ca.pem"))
    with pytest.raises(ValueError, match="belong together"):
        RabbitmqStream(server="rabbitmq-stream+tls://rabbit", key_file=Path("key.pem"))


def test_a_host_that_is_stopped_before_it_greets_leaves_its_turn_to_the_next_one(
    rabbitmq: RabbitmqServer,
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(3)
    with silent_host() as port:
        there = f"rabbitmq-stream://127.0.0.1:{port},127.0.0.1:{rabbitmq.port}"
        events = RabbitmqStream(server=there).bounded(Bounds(network_seconds=0.5))
        with closing(events.open("events")) as destination:
            destination.store(forwarder.chunk(rows), exactly_once=True)
        assert ids(rabbitmq) == [row["message_id"] for row in rows]
