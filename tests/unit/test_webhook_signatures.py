"""Signatures of webhooks by themselves: from when to when they hold, and which of them count."""

from __future__ import annotations

import base64

import pytest

from saf.errors import NotVerified, UsageError
from saf.signing.webhook import LONGEST, PREFIX, SHORTEST, key_of, sign, stated, verify

NOW = 1_700_000_000


def secret_of(size: int) -> str:
    return PREFIX + base64.b64encode(bytes(range(size))).decode()


SECRET, OTHER = secret_of(32), secret_of(33)


def signed(at: int, body: bytes = b"7", number: str = "id") -> dict[str, str]:
    return sign(number, at, body, [key_of(SECRET)])


@pytest.mark.parametrize("ahead", [-300, 0, 300])
def test_a_webhook_holds_within_the_tolerance_on_either_side(ahead: int) -> None:
    assert verify(signed(NOW + ahead), b"7", SECRET, now=NOW) == "id"


@pytest.mark.parametrize(("ahead", "why"), [(-301, "301 s ago"), (301, "301 s from now")])
def test_a_webhook_of_the_past_or_of_the_future_is_refused(ahead: int, why: str) -> None:
    """One that was dated years ahead would be good for replays until then."""
    with pytest.raises(NotVerified, match=why):
        verify(signed(NOW + ahead), b"7", SECRET, now=NOW)


@pytest.mark.parametrize("timestamp", ["", "-1", "1e9", "٣", "²", "1" * 13])
def test_a_timestamp_that_is_no_number_of_seconds_is_refused(timestamp: str) -> None:
    with pytest.raises(NotVerified):
        stated({**signed(NOW), "webhook-timestamp": timestamp}, now=NOW)


def test_a_signature_of_another_length_is_refused_before_the_body_is_received() -> None:
    headers = signed(NOW)
    for other in (headers["webhook-signature"][:-1], headers["webhook-signature"] + "=", "v1,"):
        with pytest.raises(NotVerified, match="no signature in it is right"):
            stated({**headers, "webhook-signature": other}, now=NOW)


def test_a_signature_covers_the_id_the_time_and_the_body() -> None:
    headers = signed(NOW)
    for changed in ({"webhook-id": "other"}, {"webhook-timestamp": str(NOW + 1)}):
        with pytest.raises(NotVerified, match="no signature in it is right"):
            verify({**headers, **changed}, b"7", SECRET, now=NOW)
    with pytest.raises(NotVerified, match="no signature in it is right"):
        verify(headers, b"8", SECRET, now=NOW)


def test_the_time_that_a_comparison_takes_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(right: bytes, given: bytes) -> bool:
        compared.append((right, given))
        return right == given

    monkeypatch.setattr("saf.signing.webhook.hmac.compare_digest", compare)
    (signature,) = signed(NOW)["webhook-signature"].split()
    assert verify(signed(NOW), b"7", SECRET, now=NOW) == "id"
    assert compared == [(signature.removeprefix("v1,").encode(),) * 2]


def test_only_signatures_of_version_1_count() -> None:
    headers = signed(NOW)
    (signature,) = headers["webhook-signature"].split()
    later = signature.replace("v1,", "v2,")
    for given in (later, signature.removeprefix("v1,")):
        with pytest.raises(NotVerified):
            verify({**headers, "webhook-signature": given}, b"7", SECRET, now=NOW)
    both = {**headers, "webhook-signature": f"{later} {signature}"}
    assert verify(both, b"7", [OTHER, SECRET], now=NOW) == "id"


@pytest.mark.parametrize("size", [SHORTEST - 1, LONGEST + 1])
def test_a_secret_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match="a webhook's secret"):
        key_of(secret_of(size))


@pytest.mark.parametrize("size", [SHORTEST, LONGEST])
def test_the_shortest_and_the_longest_secret_are_taken(size: int) -> None:
    assert len(key_of(secret_of(size))) == size


@pytest.mark.parametrize("extra", ["!", " ", "\n", "-_"])
def test_a_secret_that_is_not_all_base64_is_refused(extra: str) -> None:
    """Another key than the one that was meant would verify nothing."""
    for secret in (f"{SECRET}{extra}", f"{SECRET[:20]}{extra}{SECRET[20:]}"):
        with pytest.raises(UsageError, match="a webhook's secret"):
            key_of(secret)


def test_a_secret_without_its_prefix_is_refused() -> None:
    with pytest.raises(UsageError, match=PREFIX):
        key_of(SECRET.removeprefix(PREFIX))
