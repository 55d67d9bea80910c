"""Manifests of Kubernetes, as a test looks at them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.needed import absent
from tests.programs import ROOT, saf

Manifest = Mapping[str, Any]

CHART = ROOT / "ops" / "helm" / "saf"

VERSION = "1.33"
"""Version of Kubernetes whose schemas the manifests follow."""

DSN = re.compile(r"postgres(ql)?://[^\s\"']+")


def read(text: str) -> list[Manifest]:
    """The manifests of a file."""
    return [one for one in yaml.safe_load_all(text) if one]


def named(manifests: Sequence[Manifest], kind: str) -> dict[str, Manifest]:
    """The manifests of a kind, by name."""
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


def pods(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """What runs, by name."""
    found = {}
    for one in manifests:
        spec = one.get("spec", {})
        spec = spec.get("jobTemplate", one).get("spec", {})
        if "template" in spec:
            found[one["metadata"]["name"]] = spec["template"]["spec"]
    return found


def validate(manifest: Manifest) -> None:
    """Raise unless Kubernetes, or KEDA for its own kind, knows each field."""
    if manifest["kind"] == "ScaledObject":
        from cloudcoil.models.keda.v1alpha1 import ScaledObject

        taken = ScaledObject.model_validate(manifest)
        # the models ignore unknown fields
        assert taken.model_dump(by_alias=True, exclude_unset=True) == manifest
        return
    import kubernetes_validate  # takes seconds, which every run's collection would pay

    kubernetes_validate.validate(manifest, VERSION, strict=True)


def refuse_privileges(manifests: Sequence[Manifest]) -> None:
    """Raise unless each container is nobody, writes to no image, and has no secret in its text."""
    for name, pod in pods(manifests).items():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            given = {one["name"]: one for one in container.get("env", ())}
            assert {one for one in given if "value" in given[one]} <= {"HOME", "SAF_CONFIG"}, name
            assert container.get("envFrom") or "SAF_DSN" in given, name
            for volume in pod.get("volumes", ()):
                assert volume.keys() & {"configMap", "emptyDir"}, name
    assert not named(manifests, "Secret")
    assert not [one for one in manifests if DSN.search(str(one.get("data", "")))]


def refuse_unknown_words(arguments: Sequence[str]) -> None:
    """Raise unless the command saf has this subcommand with these options."""
    told = saf(arguments[0], "--help").stdout
    for word in arguments:
        assert not word.startswith("--") or word in told, (arguments, word)


def commands(manifests: Sequence[Manifest]) -> Iterator[tuple[str, list[str]]]:
    """Each container's name, and the words after ``saf``."""
    for pod in pods(manifests).values():
        for container in pod["containers"]:
            command = container.get("command", ["saf"])
            if command[0] == "saf":
                yield container["name"], [*command[1:], *container.get("args", ())]


def config(manifests: Sequence[Manifest], folder: Path, key: str = "saf.toml") -> Path:
    """Write a saf.toml of the only ConfigMap."""
    ((_, manifest),) = named(manifests, "ConfigMap").items()
    file = folder / key
    file.write_text(manifest["data"][key])
    return file


def helm() -> Any:
    """Helm itself, as a library."""
    try:
        import helm_python
    except ImportError:
        absent("Helm", f"{sys.executable} -m pip install helm-python-sdk")
    return helm_python


def chart(values: dict[str, Any]) -> list[Manifest]:
    """What ``helm template`` prints."""
    with helm().Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files: dict[str, str] = chart.render(values, name="prod", namespace="orders")
    return [
        one for name, text in sorted(files.items()) if name.endswith(".yaml") for one in read(text)
    ]
