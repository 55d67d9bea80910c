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


def signed(folder: Path) -> tuple[Path, Path, Path]:
    """The files of an authority, of a certificate that it has signed, and of this one's key."""
    authority, authority_key = certificate(folder)
    program = needed("openssl", "openssl")
    files = folder / "signed.pem", folder / "signed-key.pem"
    subprocess.run(
        [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=saf", "-addext", "basicConstraints=CA:FALSE",
         "-addext", "subjectAltName=DNS:localhost", "-CA", authority, "-CAkey", authority_key,
         "-keyout", files[1], "-out", files[0]],
        check=True, capture_output=True,
    )  # fmt: skip
    return authority, *files
