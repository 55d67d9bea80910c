"""What may stand in the settings of a Kafka cluster, and what a client makes of them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from pydantic import ValidationError

from saf.destinations.kafka import Kafka
from saf.destinations.kafka.client import Voices, settings_of
from saf.destinations.kafka.names import brokers
from saf.destinations.kafka.transactions import records
from saf.destinations.mapping import mapped
from saf.errors import Refused
from saf.testing.forwarder import Forwarder

SASL = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "username": "saf"}

BY_TOKEN = {
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "OAUTHBEARER",
    "sasl_oauthbearer_token_endpoint_url": "http://127.0.0.1:9/token?key=hunter2",
    "sasl_oauthbearer_client_id": "saf",
}
SECRET = {"sasl_oauthbearer_client_secret": "hunter2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("saf:hunter2@host", "give a login by username"),
        ("kafka://host:9092", "security_protocol"),
        ("host:x", "Port could not be cast"),
        ("", "is not a list of brokers"),
        ("a,,b", "is not a list of brokers"),
        ("host/x", "is not a list of brokers"),
    ],
)
def test_brokers_that_are_none_are_refused_with_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        brokers(text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (SASL, "PLAIN needs password"),
        ({"security_protocol": "SASL_SSL"}, "SASL needs sasl_mechanism, username and password"),
        (SASL | {"sasl_mechanism": "GSSAPI"}, "GSSAPI cannot be used.*without Kerberos"),
        (SASL | {"sasl_mechanism": "X"}, "'PLAIN', 'SCRAM-SHA-256', 'SCRAM-SHA-512' or 'OAUTH"),
        (BY_TOKEN, "OAUTHBEARER needs sasl_oauthbearer_client_secret"),
        (BY_TOKEN | SECRET | {"username": "saf"}, "OAUTHBEARER has no use for username"),
        (SASL | SECRET | {"password": "x"}, "PLAIN has no use for sasl_oauthbearer_client_secret"),
        (SECRET, "sasl_oauthbearer_client_secret needs security_protocol"),
        ({"username": "saf"}, "username needs security_protocol"),
        ({"ca_file": "/ca.pem"}, "certificates need security_protocol"),
        ({"security_protocol": "SSL", "key_file": "/k"}, "belong together"),
        ({"security_protocol": "SSL", "key_password": "x"}, "key_password needs key_file"),
        ({"security_protocol": "TLS"}, "Input should be"),
        ({"marks_topic": "saf/marks"}, "is not a topic's name"),
        ({"partitions": 0}, "is not from 1 to 10,000"),
        ({"step_rows": 10**7}, "is not from 1 to 1,000,000"),
        ({"format": "xml"}, "cloudevents-structured"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Kafka(brokers="host", **given)


def test_a_login_by_a_token_is_given_to_the_client_and_its_secrets_are_not_shown() -> None:
    more = {
        "sasl_oauthbearer_scope": "kafka",
        "sasl_oauthbearer_extensions": "logicalCluster=lkc-1",
        "https_ca_file": "/ca.pem",
    }
    settings = Kafka.model_validate({"brokers": "host", **BY_TOKEN, **SECRET, **more})
    given = settings_of(settings, Voices())
    assert {name: value for name, value in given.items() if "oauth" in name or "https" in name} == {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": "http://127.0.0.1:9/token?key=hunter2",
        "sasl.oauthbearer.client.id": "saf",
        "sasl.oauthbearer.client.secret": "hunter2",
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.extensions": "logicalCluster=lkc-1",
        "https.ca.location": "/ca.pem",
    }
    assert given["sasl.mechanism"] == "OAUTHBEARER"
    assert "hunter2" not in f"{settings!r} {settings.model_dump_json()}"
    Producer({**given, "https.ca.location": "probe"})  # the client has all that it takes
    with pytest.raises(KafkaException, match="GSSAPI"):
        Producer({**settings_of(Kafka(brokers="host"), Voices()), "sasl.mechanism": "GSSAPI",
                  "security.protocol": "SASL_PLAINTEXT"})  # fmt: skip


def test_without_its_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("saf.destinations.kafka.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    there = Kafka(brokers="h")
    for ask in (there.open, there.identity, there.guarantee, there.reading):
        with pytest.raises(Refused, match=r"pip install 'saf-outbox\[kafka\]'") as caught:
            ask("events")
        assert "destination 'events' cannot be used" in str(caught.value)


def test_each_message_has_the_headers_that_it_has_and_no_others() -> None:
    forwarder = Forwarder()
    rows = [
        forwarder.message(key="a", message_type="paid", headers='{"trace": "1"}'),
        forwarder.message(key=None, headers=None),
    ]
    what = mapped(
        "here", forwarder.chunk(rows).rows, forwarder.source, Kafka(brokers="k"), prefix="ce_"
    )  # fmt: skip
    first, second = records(what)
    assert [(topic, body, key) for topic, body, key, _ in (first, second)] == [
        ("billing", b"1", "a"),
        ("billing", b"2", None),
    ]
    assert {"trace", "saf-type", "saf-key"} <= dict(first[3]).keys()
    assert not {"trace", "saf-type", "saf-key"} & dict(second[3]).keys()
    assert dict(first[3])["saf-id"] == str(rows[0]["message_id"])
