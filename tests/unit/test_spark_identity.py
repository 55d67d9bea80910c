"""What Spark is told of its user and its host where the system has no name for them."""

from __future__ import annotations

import pwd
import socket

import pytest

from saf.errors import ConfigurationError
from saf.spark.java import ADDRESSED_BY, NAMED_BY, address, java_options

LOST = "no-such-host.invalid"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ADDRESSED_BY, *NAMED_BY):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: LOST)


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("os.getuid", lambda: 54321)


def test_a_host_whose_name_resolves_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert address({}, local=True) == address({}, local=False) == {}


@pytest.mark.usefixtures("lost")
def test_a_local_master_needs_no_name_of_the_host() -> None:
    assert address({}, local=True) == {"SPARK_LOCAL_IP": "127.0.0.1"}


@pytest.mark.usefixtures("lost")
def test_executors_elsewhere_need_an_address_and_the_error_says_which_ways_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{LOST}', does not resolve.*SPARK_LOCAL_IP"):
        address({}, local=False)
    given = {"spark.driver.host": "10.1.2.3"}
    assert address(given, local=False) == {"SPARK_LOCAL_HOSTNAME": "10.1.2.3"}
    monkeypatch.setenv("SPARK_LOCAL_IP", "10.1.2.3")
    assert address({}, local=False) == {}


def test_a_user_with_a_name_is_told_nothing() -> None:
    assert java_options() == []


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize(("home", "there"), [("/home/app", "/home/app"), ("", "/t"), ("app", "/t")])
def test_a_user_without_a_name_gets_one_and_a_home(
    monkeypatch: pytest.MonkeyPatch, home: str, there: str
) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/t")
    assert java_options() == ["-Duser.name=uid-54321", f"-Duser.home={there}"]
    monkeypatch.setenv("HADOOP_USER_NAME", "app")
    assert java_options()[0] == "-Duser.name=app"
