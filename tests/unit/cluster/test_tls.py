"""TLS by files: what cannot be used is named, what is replaced is taken over."""

import socket
import ssl
import threading
from pathlib import Path

import pytest
from tests.support.certificates import Certificate, certificate

from cluster.errors import ConfigError
from cluster.tls import TlsFiles, reload, server_context, tls_files

pytestmark = pytest.mark.unit

WAIT_S = 5.0


@pytest.fixture
def first(tmp_path: Path) -> Certificate:
    return certificate(tmp_path, "first")


def files(made: Certificate) -> TlsFiles:
    return TlsFiles(made.cert, made.key)


def seen(context: ssl.SSLContext, **client_options: object) -> tuple[str, str]:
    """The name in the certificate that a client is shown, and the version that is spoken."""
    ours, theirs = socket.socketpair()
    served = threading.Thread(target=_serve, args=(context, ours))
    served.start()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    client.maximum_version = client_options.get("maximum", ssl.TLSVersion.MAXIMUM_SUPPORTED)
    try:
        theirs.settimeout(WAIT_S)
        with client.wrap_socket(theirs, server_hostname="x") as tls:
            shown = tls.getpeercert(binary_form=True)
            return ssl.DER_cert_to_PEM_cert(shown), str(tls.version())
    finally:
        theirs.close()
        served.join(WAIT_S)
        ours.close()


def _serve(context: ssl.SSLContext, sock: socket.socket) -> None:
    sock.settimeout(WAIT_S)
    try:
        with context.wrap_socket(sock, server_side=True) as tls:
            tls.recv(1)
    except OSError:
        return


def test_none_or_both() -> None:
    assert tls_files("", "") is None
    assert tls_files("a", "b") == TlsFiles(Path("a"), Path("b"))
    with pytest.raises(ConfigError, match="tls_cert_file is set, so tls_key_file must be"):
        tls_files("a", "")
    with pytest.raises(ConfigError, match="tls_key_file is set, so tls_cert_file must be"):
        tls_files("", "b")


def test_what_cannot_be_used_is_named(first: Certificate, tmp_path: Path) -> None:
    absent = tmp_path / "absent.pem"
    with pytest.raises(ConfigError, match=r"tls_cert_file .*absent\.pem: No such file"):
        server_context(TlsFiles(absent, first.key))
    with pytest.raises(ConfigError, match=r"tls_key_file .*absent\.pem: No such file"):
        server_context(TlsFiles(first.cert, absent))
    other = certificate(tmp_path, "other")
    with pytest.raises(ConfigError, match="MISMATCH"):
        server_context(TlsFiles(first.cert, other.key))
    absent.write_text("nonsense")
    with pytest.raises(ConfigError, match="tls_cert_file"):
        server_context(TlsFiles(absent, first.key))


def test_old_versions_are_not_spoken(first: Certificate) -> None:
    context = server_context(files(first))
    assert seen(context)[1] == "TLSv1.3"
    assert seen(context, maximum=ssl.TLSVersion.TLSv1_2)[1] == "TLSv1.2"
    with pytest.raises((ssl.SSLError, OSError)), pytest.warns(DeprecationWarning, match="TLSv1_1"):
        seen(context, maximum=ssl.TLSVersion.TLSv1_1)


def test_replaced_files_hold_for_new_connections_and_broken_ones_do_not(
    first: Certificate, tmp_path: Path
) -> None:
    context = server_context(files(first))
    assert seen(context)[0].strip() == first.cert.read_text().strip()
    other = certificate(tmp_path, "other")
    first.cert.write_bytes(other.cert.read_bytes())
    with pytest.raises(ConfigError):
        reload(context, files(first))
    shown = seen(context)[0].strip()
    assert shown != other.cert.read_text().strip()
    first.key.write_bytes(other.key.read_bytes())
    reload(context, files(first))
    assert seen(context)[0].strip() == other.cert.read_text().strip()
