"""TLS between the processes of one user: those with the certificate, and strangers."""

import asyncio
import subprocess
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from hpcrl.engines.http import make_client_session
from hpcrl.errors import ConfigError
from hpcrl.rollout.http_server import start_server
from hpcrl.system.tls import make_certificate


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    make_certificate(tmp_path / "own.pem")
    return tmp_path / "own.pem"


def ask(server: Path | None, client: Path | None) -> tuple[str, str]:
    """Return the scheme of a server, and what a client gets from it."""

    async def answer(http: web.BaseRequest) -> web.Response:
        return web.Response(text=f"answered {http.path}")

    async def run() -> tuple[str, str]:
        url, runner = await start_server(answer, host="127.0.0.1", certificate=server)
        try:
            async with make_client_session(client) as session, session.get(f"{url}/x") as response:
                return url.partition(":")[0], await response.text()
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_without_a_certificate_there_is_none() -> None:
    assert ask(None, None) == ("http", "answered /x")


def test_both_sides_have_the_certificate(certificate: Path) -> None:
    assert ask(certificate, certificate) == ("https", "answered /x")
    assert certificate.stat().st_mode & 0o777 == 0o600
    assert list(certificate.parent.iterdir()) == [certificate], "nothing is left beside it"


def test_a_server_with_another_certificate_is_refused(certificate: Path, tmp_path: Path) -> None:
    make_certificate(tmp_path / "other.pem")
    with pytest.raises(aiohttp.ClientConnectorCertificateError, match="verify failed"):
        ask(tmp_path / "other.pem", certificate)


def test_a_client_without_the_certificate_accepts_no_server(certificate: Path) -> None:
    with pytest.raises(aiohttp.ClientConnectorCertificateError, match="verify failed"):
        ask(certificate, None)


def test_a_clock_by_which_the_certificate_has_expired_does_not_matter(certificate: Path) -> None:
    command = ["openssl", "x509", "-in", certificate, "-signkey", certificate, "-days", "-1"]
    expired = subprocess.run(command, capture_output=True, check=True).stdout
    key, mark, _ = certificate.read_bytes().partition(b"-----END PRIVATE KEY-----\n")
    certificate.write_bytes(key + mark + expired)
    assert ask(certificate, certificate) == ("https", "answered /x")


@pytest.mark.parametrize(
    ("program", "reason"), [(None, "needs the program openssl"), ("echo no entropy >&2; exit 1", ": no entropy")]
)
def test_an_openssl_that_is_missing_or_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, reason: str
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    if program is not None:
        (folder / "openssl").write_text(f"#!/bin/sh\n{program}\n")
        (folder / "openssl").chmod(0o700)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ConfigError, match=reason):
        make_certificate(tmp_path / "c.pem")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]
