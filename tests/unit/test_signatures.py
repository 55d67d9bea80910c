"""Keys and signatures by themselves: what is no key, what is hidden, what two sides agree on."""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
import json
import pickle
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

import saf
from saf.errors import UsageError
from saf.message import ALTERED, MAX_HEADERS, Number, Row
from saf.received import READ, Received
from saf.signing.signer import Algorithm, covered, read_headers, signed_bytes
from saf.signing.verifier import Refusal, Trust, Verifier
from tests.signing import ED25519, PRIVATE, PUBLIC, SECRET, hmac_key, signer


def row(**columns: Any) -> Row:
    known: dict[str, Any] = {
        "message_id": UUID(int=7),
        "from_service": "shop",
        "to_service": "billing",
        "to_broker": None,
        "key": "A-1",
        "message_type": "OrderPlaced",
        "headers": '{"content-type": "text/plain"}',
        "body": b"A-1",
        "deliver_at": None,
        "expires_at": None,
    }
    return Row(**known | columns)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def as_signed(value: Any) -> Any:
    """With numbers as they are signed."""
    if isinstance(value, dict):
        return {name: as_signed(one) for name, one in value.items()}
    if isinstance(value, list):
        return [as_signed(one) for one in value]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return Number(repr(value)) if number else value


@given(
    st.dictionaries(st.text(max_size=3), values, max_size=4),
    st.dictionaries(st.text(max_size=3), values, max_size=4),
)
def test_two_different_messages_never_have_the_same_bytes(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    one, other = as_signed(one), as_signed(other)

    def told_apart(value: Any) -> Any:  # a number and its text, true and 1
        if isinstance(value, dict):
            return {name: told_apart(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [told_apart(inner) for inner in value]
        return type(value).__name__, value

    same = told_apart(one) == told_apart(other)
    assert (signed_bytes({"headers": one}) == signed_bytes({"headers": other})) is same


def test_a_text_that_looks_like_the_end_of_another_is_not_taken_for_it() -> None:
    assert signed_bytes({"a": "x", "b": "y"}) != signed_bytes({"a": "xs1:bs1:y"})
    assert signed_bytes({"a": "1"}) != signed_bytes({"a": Number("1")})
    assert signed_bytes({"a": ["b", "c"]}) != signed_bytes({"a": ["b"], "c": None})


def test_a_signature_is_the_same_bytes_for_ever() -> None:
    """Receivers of today have to verify what was signed before."""
    before = row(headers='{"n": 1e3, "content-type": "text/plain"}')
    by_hand = (
        b"saf-signature-1\n"
        b"m14:"
        b"s4:bodys64:" + hashlib.sha256(b"A-1").hexdigest().encode() + b"s15:conversation_idn"
        b"s10:deliver_atn"
        b"s10:expires_atd16:1924991999123456"
        b"s14:from_initiatorn"
        b"s12:from_services4:shop"
        b"s7:headersm2:s12:content-types10:text/plains1:nd4:1000"
        b"s3:keys3:A-1"
        b"s6:key_ids6:shop-1"
        b"s10:message_ids36:00000000-0000-0000-0000-000000000007"
        b"s12:message_types11:OrderPlaced"
        b"s8:sequencen"
        b"s9:to_brokern"
        b"s10:to_services7:billing"
    )
    expires_at = datetime(2030, 12, 31, 23, 59, 59, 123456, UTC)
    signed = signer().sign(before._replace(expires_at=expires_at))
    signature = hmac.digest(base64.b64decode(SECRET), by_hand, "sha256")
    assert json.loads(signed.headers)["saf-signature"] == {
        "version": 1,
        "key": "shop-1",
        "to": "billing",
        "value": base64.b64encode(signature).decode(),
        "expires_at": 1924991999123456,
    }


def verified(signed: Row, **altered: Any) -> object:
    """What a receiver says of a signed message: the key's name, or why it is refused."""
    columns = {**signed._asdict(), "message_id": signed.message_id.bytes, **altered}
    message = Received(tuple(columns.get(name) for name in READ))
    trust = Trust(keys=saf.Keys({"shop-1": hmac_key()}), required=True)
    return Verifier(trust=trust, broker=UUID(int=1))(message)


def test_a_message_expires_when_its_sender_has_signed_or_not_yet() -> None:
    expires_at = datetime.now(UTC) + timedelta(hours=1)
    signed = signer().sign(row(expires_at=expires_at))
    assert verified(signed) == "shop-1"
    assert verified(signed, expires_at=None) == "shop-1", "an operator has removed it"
    refusal = verified(signed, expires_at=expires_at + timedelta(hours=1))
    assert refusal == Refusal(reason=ALTERED, error="its expires_at was altered")
    passed = signer().sign(row(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    assert isinstance(verified(passed, expires_at=None), Refusal)


@pytest.mark.parametrize("moment", [1.5, "7", [1], True])
def test_an_expiry_in_a_signature_that_is_no_moment_is_refused(moment: object) -> None:
    """It is read before the signature is verified, so anybody may have written it."""
    signed = signer().sign(row())
    headers = json.loads(signed.headers)
    headers["saf-signature"]["expires_at"] = moment
    refusal = verified(signed, headers=json.dumps(headers))
    assert refusal == Refusal(reason=ALTERED, error="its saf-signature is not one")


def test_a_signature_is_for_the_broker_that_the_message_is_for() -> None:
    signed = [signer().sign(row(to_broker=broker)) for broker in (None, UUID(int=1), UUID(int=2))]
    assert len({one.headers for one in signed}) == 3


@pytest.mark.parametrize(
    ("algorithm", "material", "says"),
    [
        ("hmac-sha256", "c2hvcnQ=", "32 bytes or more"),
        ("hmac-sha256", "not base64 at all, and certainly no secret", "base64"),
        ("hmac-sha256", b"short", "32 bytes or more"),
        ("hmac-sha256", "", "32 bytes or more"),
        ("ed25519", "c2hvcnQ=", "32 bytes"),
        ("ed25519", "-----BEGIN PRIVATE KEY-----\nc2hvcnQ=\n-----END PRIVATE KEY-----", "PEM"),
        ("ed25519", "", "PEM"),
        ("md5", SECRET, "'hmac-sha256' and 'ed25519'"),
        ("none", "", "'none' is not known"),
        (None, "", "None is not known"),
    ],
)
def test_what_is_no_key_is_refused_without_being_shown(
    algorithm: Any, material: Any, says: str
) -> None:
    for make in (
        lambda: saf.Signer("shop-1", algorithm, material),
        lambda: saf.Key(algorithm, material),
    ):
        with pytest.raises(UsageError, match=says) as refused:
            make()
        text = material if isinstance(material, str) else material.decode()
        assert not text or text not in str(refused.value)


def test_one_half_of_a_pair_is_not_taken_for_the_other() -> None:
    with pytest.raises(UsageError, match="a private key for ed25519"):
        saf.Signer("shop-1", "ed25519", PUBLIC)
    with pytest.raises(UsageError, match="a public key for ed25519"):
        saf.Key("ed25519", PRIVATE)


def test_a_key_of_another_kind_is_none_for_ed25519() -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with pytest.raises(UsageError, match="a private key for ed25519 is PEM"):
        saf.Signer("shop-1", "ed25519", other)


def test_a_key_is_pem_or_its_32_bytes_in_base64_with_spaces_as_files_have_them() -> None:
    private = Ed25519PrivateKey.generate()
    raw = base64.b64encode(private.private_bytes_raw()).decode()
    pem = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    ways = (f" {raw}\n", pem, pem.decode(), private.private_bytes_raw())
    signed = {saf.Signer("shop-1", "ed25519", way).sign(row()) for way in ways}
    assert len(signed) == 1  # Ed25519 signs the same bytes in the same way


def test_nothing_that_holds_a_key_shows_it() -> None:
    keys = saf.Keys({"shop-1": hmac_key(), "shop-2": saf.Key("ed25519", PUBLIC)})
    outbox = saf.Outbox(signer=signer())
    worker = saf.Worker("dbname=nowhere", "billing", keys=keys, signer=signer(ED25519))
    for one in (keys, keys["shop-1"], signer(), signer(ED25519), outbox, worker, worker.trust):
        for secret in (SECRET, PRIVATE.decode(), base64.b64decode(SECRET).hex()):
            for text in (repr(one), str(one), f"{one!r:.9999}"):
                assert secret not in text
    assert repr(signer()) == "Signer('shop-1', 'hmac-sha256', '***')"
    assert repr(hmac_key()) == "Key('hmac-sha256', '***', from_services=None)"


@pytest.mark.parametrize("carry", [pickle.dumps, copy.copy], ids=["pickle", "copy"])
def test_a_key_is_not_written_into_a_pickle(carry: Any) -> None:
    for one in (signer(), hmac_key()):
        with pytest.raises(TypeError, match="not pickled"):
            carry(one)


def test_a_key_has_a_name_that_can_be_shown() -> None:
    for name in ("", "a\nb", "k" * 256, 7):
        with pytest.raises(UsageError, match="key_id"):
            saf.Signer(name, "hmac-sha256", SECRET)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="key_id"):
            saf.Keys({name: hmac_key()})  # type: ignore[dict-item]


def test_headers_that_the_signature_would_make_too_large_are_refused() -> None:
    almost = row(headers='{"a": "' + "x" * (MAX_HEADERS - 10) + '"}')
    with pytest.raises(saf.InvalidMessage, match=r"^headers: 1,04\d,\d+ bytes are more than"):
        signer().sign(almost)


def test_headers_that_are_nested_too_deeply_are_refused() -> None:
    deep = "[" * 101 + "]" * 101
    with pytest.raises(saf.InvalidMessage, match="headers: the headers are nested more than 100"):
        signer().sign(row(headers=f'{{"a": {deep}}}'))
    signer().sign(row(headers=f'{{"a": {deep[1:-1]}}}'))


def test_a_signature_that_was_given_is_not_kept() -> None:
    forged = row(headers='{"saf-signature": {"key": "forged"}}')
    said = read_headers(signer().sign(forged).headers)["saf-signature"]
    assert said["key"] == "shop-1"
    plain = row(headers="{}")
    assert said == read_headers(signer().sign(plain).headers)["saf-signature"]
    assert covered(read_headers(forged.headers)) == {}


def test_only_the_headers_are_changed_by_signing() -> None:
    before = row(expires_at=datetime(2031, 1, 2, 3, 4, 5, 678901, UTC))
    after = signer().sign(before)._asdict()
    assert {**after, "headers": before.headers} == before._asdict()


def test_without_the_package_for_ed25519_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import saf\n"
        "saf.Signer('shop-1', 'hmac-sha256', bytes(32))\n"
        "try: saf.Signer('shop-1', 'ed25519', bytes(32))\n"
        "except saf.MissingExtra as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'saf-outbox[signing]'" in done.stdout


def test_a_receiver_without_keys_cannot_require_signatures() -> None:
    for make in (
        lambda: saf.Worker("dbname=nowhere", "billing", require_signed=True),
        lambda: saf.Processors("dbname=nowhere", "billing", saf.Processor, require_signed=True),
        lambda: saf.receive("dbname=nowhere", "billing", require_signed=True).__enter__(),
    ):
        with pytest.raises(UsageError, match="require_signed needs the keys"):
            make()
    for keys in ({}, {"shop-1": SECRET}):
        with pytest.raises(UsageError, match="key"):
            saf.Worker("dbname=nowhere", "billing", keys=keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["hmac-sha256", "ed25519"])
def test_asdict_of_what_holds_a_key_does_not_copy_it(algorithm: Algorithm) -> None:
    from saf.signing.verifier import Trust

    trust = Trust.of({"shop-1": hmac_key()}, required=True)
    assert trust is not None
    assert SECRET not in str(vars(trust))
    with pytest.raises(TypeError, match="not pickled"):
        asdict(trust)
    assert algorithm in repr(signer(algorithm))
