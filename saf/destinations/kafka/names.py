"""Names at a Kafka cluster: its brokers, topics, transactions, and the keys of marks.

TOPIC                            messages; see `topic_name`
saf.marks                        one partition, compacted: the last record of a key counts
    SOURCE/SHARD/LANE            the mark of a place
    SOURCE/owner/SHARD           a shard's owner: the shard in the name of the owner's transactions
    SOURCE/topic/TOPIC           a topic that messages of a source went to
    identity                     the destination's identity
saf-IDENTITY-SOURCE-SHARD        transactions of the owner whose lowest shard in hand is SHARD
"""

from __future__ import annotations

import re
from uuid import UUID

from saf.destinations.addresses import hosts_of, without_login
from saf.destinations.marks import Place

IDENTITY = "identity"
TOPIC, OWNER = "topic", "owner"
PORT = 9092
NO_BROKERS = "is not a list of brokers, such as host:9092,host:9092"
CANNOT = re.compile(r"[^a-zA-Z0-9._-]")
LONGEST = 249


def brokers(text: str) -> list[str]:
    """Parse a list of brokers; return each with its port.

    >>> brokers("k1,k2:9093,[::1]:9094")
    ['k1:9092', 'k2:9093', '[::1]:9094']

    Raises:
        ValueError: the list is invalid.
    """
    if "://" in without_login(text):
        raise ValueError(f"{text!r}: use host:9092, and set TLS or SASL by security_protocol = …")
    return [
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for host, port in hosts_of(text, text, PORT, NO_BROKERS)
    ]


def topic_name(topic: str) -> str:
    """Return a topic as a valid name in Kafka: forbidden characters become ``_``.

    >>> topic_name("orders.//example.com/grüezi")
    'orders.__example.com_gr_ezi'
    """
    return CANNOT.sub("_", topic)


def wrong_topic(topic: str) -> str | None:
    """Return why a topic's name cannot be used; None if it can.

    >>> wrong_topic("orders"), wrong_topic("__consumer_offsets")
    (None, "its topic would be '__consumer_offsets', which is the cluster's own")
    """
    if topic in ("", ".", ".."):
        return f"its topic would be {topic!r}, which is not a topic's name"
    if len(topic) > LONGEST:
        return f"its topic has {len(topic):,} characters, more than {LONGEST}"
    if topic in ("__consumer_offsets", "__transaction_state", "__share_group_state"):
        return f"its topic would be {topic!r}, which is the cluster's own"
    return None


def mark(source: UUID | str, place: Place) -> str:
    """Return the key of a place's mark.

    >>> mark(UUID(int=7), ("route:a/b", 3))
    '00000000-0000-0000-0000-000000000007/3/route:a/b'
    """
    lane, shard = place
    return f"{source}/{shard}/{lane}"


def owner(source: UUID | str, shard: int) -> str:
    """Return the key of a shard's owner."""
    return f"{source}/{OWNER}/{shard}"


def topic(source: UUID | str, name: str) -> str:
    """Return the key of a topic that messages of a source went to."""
    return f"{source}/{TOPIC}/{name}"


def transactional_id(identity: UUID, source: UUID, shard: int) -> str:
    """Return the name of an owner's transactions; ``shard``: the lowest that it has in hand."""
    return f"saf-{identity}-{source}-{shard}"
