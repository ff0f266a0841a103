"""TLS of a server by two files, which may be replaced while it runs."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the certificate with those between it and its root, and its key without a password."""

    cert: Path
    key: Path


def tls_files(cert: str, key: str) -> TlsFiles | None:
    """As settings name them; None for none. Raises ConfigError where only one is named."""
    if bool(cert) != bool(key):
        given, missing = ("tls_cert_file", "tls_key_file") if cert else ("tls_key_file", "tls_cert_file")
        raise ConfigError(f"{given} is set, so {missing} must be, too")
    return TlsFiles(Path(cert), Path(key)) if cert else None


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 and newer. Raises ConfigError that names the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # What aiohttp speaks: a client that offers HTTP/2 as well must not choose it.
    context.set_alpn_protocols(["http/1.1"])
    _load(context, files)
    return context


def reload(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Have new connections of a context get what the files hold now. Raises ConfigError: then the old
    certificate stays."""
    server_context(files)
    _load(context, files)


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    for setting, path in (("tls_cert_file", files.cert), ("tls_key_file", files.key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{setting} {path}: {error.strerror}") from error

    def no_password() -> NoReturn:
        # Without this, OpenSSL asks on the terminal.
        raise ConfigError(f"tls_key_file {files.key}: has a password, must be without")

    try:
        context.load_cert_chain(files.cert, files.key, password=no_password)
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        raise ConfigError(f"tls_cert_file {files.cert} with tls_key_file {files.key}: {reason}") from error
