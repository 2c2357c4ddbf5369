"""TLS between the processes of one user: a certificate that only they have is the only one that they accept.

make_certificate   write a new key and its certificate
open_server_tls, open_client_tls, name_scheme   the settings of both sides
MAX_DAYS   how long it is valid by the clock, which is not checked: it ends with its directory
"""

import ssl
import subprocess
import tempfile
from pathlib import Path

from hpcrl.errors import ConfigError

MAX_DAYS = 3650
_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python has no name for: clocks of nodes differ, and may jump."""
_COMMAND = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def make_certificate(path: Path) -> None:
    """Write a new key with its certificate to a file that only this user reads; raise ConfigError without OpenSSL."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tls-") as name:  # 0700
        key, certificate = Path(name) / "key", Path(name) / "certificate"
        words = [*_COMMAND, "-keyout", str(key), "-out", str(certificate), "-days", str(MAX_DAYS), "-subj", "/CN=hpcrl"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise ConfigError(
                f"network.tls needs the program openssl on PATH here ({error.strerror}): load its module, or set "
                "network.tls = false"
            ) from error
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            raise ConfigError(f"network.tls: openssl made no certificate: {lines[-1]}")
        whole = Path(name) / "whole"
        whole.touch(mode=0o600)
        whole.write_bytes(key.read_bytes() + certificate.read_bytes())
        whole.rename(path)


def name_scheme(certificate: Path | None) -> str:
    """Return the scheme of the URLs of a server."""
    return "http" if certificate is None else "https"


def open_server_tls(path: Path | None) -> ssl.SSLContext | None:
    """Return the settings of a server; without a certificate it has no TLS."""
    if path is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(path)
    return context


def open_client_tls(path: Path | None) -> ssl.SSLContext | None:
    """Return the settings of a client, which accepts this certificate alone; without one it uses no TLS."""
    if path is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # whoever has the key is one of us, wherever it listens
    context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    context.load_verify_locations(path)
    return context
