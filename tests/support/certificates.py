"""Certificates for tests, made by the `openssl` of the machine and trusted by themselves."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

OPENSSL_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files; `cert` is its own CA."""

    cert: Path
    key: Path


def certificate(folder: Path, name: str, host: str = "127.0.0.1") -> Certificate:
    """A new one for an address or a name; skips the test where there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on this machine to make a certificate with")
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    kind = "IP" if host.replace(".", "").isdigit() else "DNS"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName={kind}:{host}"),
            *("-keyout", str(made.key), "-out", str(made.cert)),
        ],
        check=True,
        capture_output=True,
        timeout=OPENSSL_S_MAX,
    )
    return made
