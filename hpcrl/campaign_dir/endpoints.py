"""The endpoints of the engine workers: one 0600 file each, published when the worker is ready to serve.

EngineEndpoint                          the record
announce_endpoint, withdraw_endpoint    publish and remove it
withdraw_all                            remove those of all jobs, which a new driver does
EndpointReader                          the endpoints of one job, read when they change
list_endpoints                          read all
make_token                              its bearer token
make_nonce, make_proof, is_proof        how an engine proves to its clients that it has the token
HELLO_PATH, NONCE_HEADER, PROOF_HEADER  the request and the headers for it
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from hpcrl.system.file_watch import LONG_PAUSE_S, SETTLE_S, WatchedValue, retry_passing
from hpcrl.system.files import publish_file

HELLO_PATH = "/hello"
"""The only path that is answered without the token."""
NONCE_HEADER = "X-Hpcrl-Nonce"
PROOF_HEADER = "X-Hpcrl-Proof"


class EngineEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An engine worker that serves requests."""

    role: str
    worker: str
    """Unique in the campaign, such as `000-decode-1` (job, role, index)."""
    node: str
    url: str
    token: str
    """Every request must carry it as `Authorization: Bearer`."""
    job: int = 0
    gpu: str | None = None
    """GPU type in the hardware catalogue; None on CPUs."""
    num_gpus: int = 0
    socket: str = ""
    """The path, on its node, of a Unix socket for turns; "" if it has none."""


def make_token() -> str:
    """Return a bearer token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def make_nonce() -> str:
    """Return what a client sends for the server to sign."""
    return secrets.token_hex(16)


def make_proof(token: str, nonce: str) -> str:
    """Return a server's answer to a nonce, which only one that has the token can make."""
    return hmac.new(token.encode(), nonce.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def is_proof(headers: Mapping[str, str], *, token: str, nonce: str) -> bool:
    """Return whether the headers of an answer prove that its server has the token."""
    seen = headers.get(PROOF_HEADER, "").encode("utf-8", "surrogateescape")
    return hmac.compare_digest(seen, make_proof(token, nonce).encode())


def announce_endpoint(directory: Path, endpoint: EngineEndpoint) -> Path:
    """Publish an endpoint in a file named after its worker."""
    path = directory / f"{endpoint.worker}.json"
    publish_file(path, msgspec.json.encode(endpoint), mode=0o600)
    return path


def withdraw_endpoint(directory: Path, worker: str) -> None:
    """Remove an endpoint before its worker ends."""
    (directory / f"{worker}.json").unlink(missing_ok=True)


def withdraw_all(directory: Path) -> None:
    """Remove every endpoint: those of engines that were killed, on addresses that others may have by now."""
    for path in directory.glob("*.json"):
        path.unlink(missing_ok=True)


class EndpointReader:
    """The endpoints of one job; a file is read again only if another has taken its name.

    That changes the directory: while that has not changed for a while, files are not looked at.
    """

    def __init__(
        self,
        directory: Path,
        *,
        job: int,
        longest_s: float = LONG_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._job = job
        self._clock = clock
        self._listed: tuple[tuple[int, int, int], frozenset[str]] | None = None
        """The stamp of the directory and the names in it at the last reading."""
        self._listed_since = float("-inf")
        self._is_settled = False
        """True once all files were looked at so late after a change that no other one has left the same stamp."""
        self._known: dict[str, tuple[tuple[int, int, int], EngineEndpoint]] = {}
        """The stamp and the content of each file, by its name."""
        self._endpoints = WatchedValue(directory, self._read_new, longest_s=longest_s, clock=clock)

    def expect_change(self) -> None:
        """Look for a change at the next call."""
        self._endpoints.expect_change()

    def poll(self) -> list[EngineEndpoint]:
        """Return the endpoints announced now, sorted by worker name."""
        return self._endpoints.poll()

    def _read_new(self) -> list[EngineEndpoint]:
        now, listed = self._clock(), _list_directory(self._directory)
        if listed != self._listed:
            self._listed, self._listed_since, self._is_settled = listed, now, False
        if not self._is_settled:
            self._read_files(listed[1] if listed is not None else ())
            self._is_settled = now - self._listed_since >= SETTLE_S
        return [self._known[name][1] for name in sorted(self._known) if self._known[name][1].job == self._job]

    def _read_files(self, names: Iterable[str]) -> None:
        stamps: dict[str, tuple[int, int, int]] = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # withdrawn since
                stamps[name] = _stamp_file((self._directory / name).stat())
        known = {name: one for name, one in self._known.items() if stamps.get(name) == one[0]}
        for name in stamps.keys() - known.keys():
            with contextlib.suppress(FileNotFoundError):  # withdrawn since
                data = retry_passing((self._directory / name).read_bytes)
                known[name] = stamps[name], msgspec.json.decode(data, type=EngineEndpoint)
        self._known = known


def _list_directory(directory: Path) -> tuple[tuple[int, int, int], frozenset[str]] | None:
    """Return the stamp of a directory and the names of endpoints in it, which asks the server; None if it is absent."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        names = frozenset(name for name in os.listdir(fd) if name.endswith(".json"))  # noqa: PTH208 - of an open one
        return _stamp_file(os.fstat(fd)), names
    finally:
        os.close(fd)


def _stamp_file(facts: os.stat_result) -> tuple[int, int, int]:
    """Return what differs between a file and a later one of its name, which may have its inode."""
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def list_endpoints(directory: Path) -> list[EngineEndpoint]:
    """Return the endpoints announced now, sorted by worker name."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=EngineEndpoint))
        except FileNotFoundError:  # withdrawn between listing and reading
            continue
    return found
