"""[signing] of saf.toml: what is wrong is named, and no secret is shown."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest

import saf
from saf.config import load, load_keys, load_signer
from saf.errors import ConfigurationError, UsageError
from tests.signing import PRIVATE, PUBLIC, SECRET, key

WHOLE = """
[brokers.app]
dsn = "dbname=app"
[destinations.mom]
dsn = "dbname=mom"
"""

CANARY = "Y2FuYXJ5LWNhbmFyeS1jYW5hcnktY2FuYXJ5LWNhbmFyeQ=="
"""A secret of 34 bytes."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> None:
    (folder / "saf.toml").write_text(text)


BOTH = """
[signing]
key_id = "shop-1"
algorithm = "hmac-sha256"
secret = "${SHOP_KEY}"
redirected_from = ["departures"]

[signing.keys.shop-1]
algorithm = "hmac-sha256"
secret = "${SHOP_KEY}"
from_services = ["shop"]

[signing.keys.bank-1]
algorithm = "ed25519"
public_key_file = "bank.pub"
"""


def test_a_sender_and_a_receiver_each_read_their_part_of_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, BOTH)
    monkeypatch.setenv("SHOP_KEY", f"{SECRET}\n")
    assert load_signer().key_id == "shop-1"  # without the bank's file
    (folder / "bank.pub").write_bytes(PUBLIC)
    keys = load_keys()
    assert sorted(keys) == ["bank-1", "shop-1"]
    assert keys["shop-1"].from_services == frozenset(["shop"])
    assert keys["bank-1"].from_services is None
    assert keys.redirected_from == {"departures"}
    monkeypatch.delenv("SHOP_KEY")
    write(folder, BOTH.replace('secret = "${SHOP_KEY}"\nfrom', f'secret = "{SECRET}"\nfrom'))
    load_keys()  # without the sender's variable


def test_keys_come_from_files_too_and_from_variables_that_override_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "key.pem").write_bytes(PRIVATE)
    write(folder, '[signing]\nkey_id = "s"\nalgorithm = "ed25519"\nsecret_file = "key.pem"')
    assert load_signer(folder / "saf.toml").algorithm == "ed25519"
    write(folder, '[signing]\nkey_id = "s"\nalgorithm = "hmac-sha256"')
    monkeypatch.setenv("SAF_SIGNING__SECRET", SECRET)
    assert load_signer().algorithm == "hmac-sha256"


def test_who_forwards_reads_a_file_with_keys_that_are_not_there(folder: Path) -> None:
    write(folder, WHOLE + BOTH)
    settings = load()
    assert settings.signing.key_id == "shop-1"
    assert list(settings.signing.keys) == ["shop-1", "bank-1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"to sign, \[signing\] has key_id and algorithm and either secret or secret_file"),
        ('[signing]\nkey_id = "s"\nsecret = "x"', r"\[signing\] has algorithm"),
        (
            '[signing]\nkey_id = "s"\nalgorithm = "hmac-sha256"\nsecret = "${NOT_SET}"',
            "signing.secret needs the environment variable NOT_SET, which is not set",
        ),
        (
            f'[signing]\nkey_id = "s"\nalgorithm = "md5"\nsecret = "{CANARY}"',
            "signing.algorithm: .*'hmac-sha256' or 'ed25519', and not 'md5'",
        ),
        (
            f'[signing]\nkey_id = "s"\nalgorithm = "ed25519"\nsecret = "{CANARY}"',
            "key 's': a private key for ed25519 is PEM",
        ),
        (
            f'[signing]\nkey_id = "s"\nalgorithm = "hmac-sha256"\nsecret = "{CANARY}!"',
            "key 's': a secret for hmac-sha256 is the base64 of 32 bytes or more",
        ),
        (
            '[signing]\nkey_id = "s"\nalgorithm = "hmac-sha256"\nsecret_file = "none.key"',
            "secret_file: cannot read none.key: No such file",
        ),
        (
            f'[signing]\nkey_id = "s"\nalgorithm = "hmac-sha256"\nsecret = "{CANARY}"\n'
            'secret_file = "x"',
            "has either secret or secret_file",
        ),
        (f'[signing]\nsecrets = "{CANARY}"', "unknown setting signing.secrets .did you mean"),
        (f'[signing]\nsecret = ["{CANARY}"]', "signing.secret: "),
        (f'signing = "{CANARY}"', "signing: "),
    ],
)
def test_a_wrong_setting_of_a_sender_is_named_and_no_secret_is_shown(
    folder: Path, text: str, said: str
) -> None:
    write(folder, text)
    refused(load_signer, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"to verify, there is a table \[signing.keys.NAME\] for each key"),
        (
            f'[signing.keys.s]\nalgorithm = "ed25519"\nsecret = "{CANARY}"',
            "signing.keys.s: a key for ed25519 has either public_key or public_key_file",
        ),
        (
            f'[signing.keys.s]\nalgorithm = "hmac-sha256"\npublic_key = "{CANARY}"',
            "signing.keys.s: a key for hmac-sha256 has either secret or secret_file",
        ),
        (
            f'[signing.keys.s]\nalgorithm = "ed25519"\npublic_key = "{CANARY}"',
            "signing.keys.s: a public key for ed25519 is PEM",
        ),
        (
            '[signing.keys.s]\nalgorithm = "hmac-sha256"\nsecret = "${NOT_SET}"',
            "signing.keys.s.secret needs the environment variable NOT_SET",
        ),
        (f'[signing.keys.s]\nalgorithm = "none"\nsecret = "{CANARY}"', "signing.keys.s.algorithm"),
        (f'[signing.keys.s]\nsecert = "{CANARY}"', "did you mean 'secret'"),
        (f'[signing.keys]\ns = "{CANARY}"', "signing.keys.s: "),
        (f'[signing.keys."a\\nb"]\nalgorithm = "hmac-sha256"\nsecret = "{SECRET}"', "key_id"),
    ],
)
def test_a_wrong_setting_of_a_receiver_is_named_and_no_secret_is_shown(
    folder: Path, text: str, said: str
) -> None:
    write(folder, text)
    refused(load_keys, said)


def refused(read: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as error:
        read()
    assert isinstance(error.value, UsageError)
    assert re.match(r".*saf\.toml: ", str(error.value))
    shown = "".join(traceback.format_exception(error.value))
    assert CANARY not in shown
    frames = traceback.walk_tb(error.value.__traceback__)
    ours = [frame for frame, _ in frames if "/saf/" in frame.f_code.co_filename]
    held = "".join(repr(frame.f_locals) for frame in ours)
    assert CANARY not in held


def test_settings_that_are_printed_or_dumped_show_no_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, WHOLE + BOTH.replace("${SHOP_KEY}", CANARY))
    monkeypatch.setenv("SAF_SIGNING__SECRET", CANARY)
    settings = load()
    assert settings.signing.secret is not None
    shown = (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump()))
    assert not [one for one in shown if CANARY in one]
    assert CANARY not in repr((load_signer(), saf.Keys({"bank-1": key()})))


def test_a_file_that_is_not_there_says_so(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read saf.toml: No such file"):
        load_keys()
    assert not (folder / "saf.toml").exists()
