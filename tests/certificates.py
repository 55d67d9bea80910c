"""A certificate for localhost, and its key, for servers with TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.needed import needed


def certificate(folder: Path) -> tuple[Path, Path]:
    """The files of a certificate and of its key, made in a folder."""
    program = needed("openssl", "openssl")
    files = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", files[1], "-out", files[0]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files
