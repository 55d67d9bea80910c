"""saf.toml: what it refuses, in one sentence with the setting, the value and the range."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from saf.config import Forwarder, Purge, load, with_options
from saf.database import Dsn
from saf.errors import ConfigurationError

SECRET = "CanarySecret"
BROKER = '[brokers.a]\ndsn = "host=h dbname=a"\n'
FLEET = '[fleets.f]\ndsn = "host=h dbname=a"\ndatabases = "*"\n'
DESTINATION = '[destinations.m]\ndsn = "host=h dbname=m"\n'
FORWARDER = f"{BROKER}{DESTINATION}[forwarder]\n{{}}"

NUMBERS = {
    f"{BROKER}{{}}\n{DESTINATION}": ["max_connections"],
    f"{FLEET}{{}}\n{DESTINATION}": ["max_connections", "refresh_seconds"],
    f"{BROKER}{DESTINATION}{{}}": ["max_connections"],
    FORWARDER: [
        name
        for name, field in Forwarder.model_fields.items()
        if "int" in str(field.annotation) or "float" in str(field.annotation)
    ],
    f"{BROKER}{DESTINATION}[purge]\n{{}}": ["retention_seconds", "rotate_after_seconds"],
}


def refused(folder: Path, text: str) -> str:
    file = folder / "saf.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load(file)
    return str(caught.value)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-1", "1" + "0" * 30, "1e300", "'many'"])
@pytest.mark.parametrize(
    ("text", "setting"), [(text, name) for text, names in NUMBERS.items() for name in names]
)
def test_every_number_has_a_range(tmp_path: Path, text: str, setting: str, value: str) -> None:
    said = refused(tmp_path, text.format(f"{setting} = {value}"))
    assert f".{setting}: " in said
    assert len(said.splitlines()) == 1
    assert len(said) < 400


def test_the_numbers_of_the_forwarder_are_known_here() -> None:
    assert len(NUMBERS[FORWARDER]) == 11


def test_a_number_out_of_its_range_is_named_with_both_ends(tmp_path: Path) -> None:
    said = refused(tmp_path, FORWARDER.format("lease_seconds = inf"))
    assert said.endswith("saf.toml: forwarder.lease_seconds: inf is not from 1 to 86,400")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, -1.0])
def test_an_option_of_the_command_has_the_same_range(value: float) -> None:
    with pytest.raises(ConfigurationError, match=r"^forwarder\.interval_seconds: .* is not from"):
        with_options(Forwarder(), interval_seconds=value, master=None)
    with pytest.raises(ConfigurationError, match=r"^purge\.retention_seconds: .* is not from"):
        with_options(Purge(), retention_seconds=value, archive=None)
    assert with_options(Forwarder(), interval_seconds=2.0, master=None).interval_seconds == 2


def test_a_variable_that_is_not_what_it_should_be_is_one_sentence_without_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAF_BROKERS", '{"a": {"dsn": "host=h password=' + SECRET)
    said = refused(tmp_path, BROKER + DESTINATION)
    assert "brokers" in said
    assert SECRET not in said


MARKS = [*"/@:?#%&=+[],;'\\\" $", "//", "@/", "/@", "?/", "#/", "/?", "/#", "%2", ":/", "/:", "/7/"]
PASSWORDS = [
    password
    for mark in MARKS
    for password in (f"{SECRET}{mark}{SECRET}", f"{mark}{SECRET}", f"{SECRET}{mark}")
]
"""With each character that means something in a URL, within and at its ends."""


@pytest.mark.parametrize("password", PASSWORDS)
def test_no_text_of_a_dsn_shows_a_password_however_it_is_written(
    tmp_path: Path, password: str
) -> None:
    texts = [
        f"postgresql://user:{password}@host/db",
        f"postgres://user:{password}@host:5432/db?sslmode=require",
        f"postgresql://user:{password}@/db?host=/run",
        f"postgresql://user:{password}@host",
    ]
    if not {"@", ","} & set(password):
        texts.append(f"postgresql://user:{password}/db")  # the host is missing
    for text in texts:
        file = tmp_path / "saf.toml"
        file.write_text(f"[brokers.a]\ndsn = {json.dumps(text)}\n{DESTINATION}")
        for shown in (said(lambda text=text: Dsn(text)), said(lambda file=file: load(file))):  # type: ignore[misc]
            assert SECRET not in shown, text
            assert len(shown.splitlines()) == 1


def said(make: Callable[[], object]) -> str:
    """What one sees of what is made, or of why it is not."""
    try:
        return f"{(made := make())!r} {made}"
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize(
    "text",
    [
        f"dbname=postgresql://user:{SECRET}@host/db",
        f"host=host port={SECRET} dbname=db",
        f"host=host password={SECRET} {SECRET} dbname=db",
    ],
)
def test_nor_does_one_of_names_and_values(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Dsn(text)
    assert SECRET not in str(caught.value)


def test_names_may_hold_what_a_url_escapes() -> None:
    dsn = Dsn("postgresql://u%40x:p%2Fw@host:5432,5433/a%40b")
    assert (dsn.database, dsn.parts["password"], dsn.parts["user"]) == ("a@b", "p/w", "u@x")
    assert Dsn(make_conninfo(host="@abstract", dbname="a@b")).database == "a@b"


WITHOUT_UTF_8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale whose encoding is ASCII."""
NAMES = "from saf.config import load; print(ascii([*load().brokers]))"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "with a mark"])
def test_a_file_is_utf_8_whatever_the_locale_is(tmp_path: Path, mark: bytes) -> None:
    text = f'[brokers."Zürich"]\ndsn = "host=h dbname=d"\n{DESTINATION}'
    (tmp_path / "saf.toml").write_bytes(mark + text.encode())
    done = subprocess.run(
        [sys.executable, "-c", NAMES],
        env=os.environ | WITHOUT_UTF_8,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['Z\\xfcrich']\n"


def test_what_the_locale_cannot_encode_is_printed_nevertheless() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "saf", "purge", "--help"],
        env=os.environ | WITHOUT_UTF_8 | {"PYTHONIOENCODING": "latin-1:strict"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u" in done.stdout


def test_a_destination_is_needed_only_where_messages_are_delivered(tmp_path: Path) -> None:
    assert refused(tmp_path, BROKER).endswith(
        "saf.toml: [destinations.NAME] is missing: messages need a destination"
    )
    assert [*load(tmp_path / "saf.toml", delivers=False).brokers] == ["a"]
