"""A server with the two kinds of requests of the hub by which files are fetched, for a directory of repositories.

    python -m tests.support.hub_server ROOT [--bytes-per-s N]    prints its address, then serves until it is ended

ROOT has models/OWNER/NAME/... and datasets/OWNER/NAME/... The commit of a repository is a digest of its files. Files
from 1,000 bytes on are large ones: with a sha256, and behind a redirection. ROOT/requests.jsonl gets a line for each
request for a file: its path, from which byte, and how many were sent.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 1000
CHUNK_BYTES = 1 << 16
LISTING = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/([^/]+))?")
FILE = re.compile(r"(?:/(cdn))?(/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class HubRequests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    bytes_per_s: float

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := LISTING.fullmatch(path):
            self._list(self.root / match[1] / match[2], match[2], match[3] or "main")
        elif match := FILE.fullmatch(path):
            kind = "datasets" if match[2] else "models"
            self._send_file(self.root / kind / match[3], match[5], is_redirected=bool(match[1]), path=path)
        else:
            self._refuse("RepoNotFound")

    def _list(self, folder: Path, name: str, revision: str) -> None:
        if not folder.is_dir():
            self._refuse("RepoNotFound")
            return
        if revision not in ("main", find_commit(folder)):
            self._refuse("RevisionNotFound")
            return
        siblings = []
        for file in list_files(folder):
            data = (folder / file).read_bytes()
            facts = {"rfilename": file, "size": len(data), "blobId": hash_blob(data)}
            if len(data) >= LARGE_BYTES:
                facts["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(facts)
        self._send_json(200, {"id": name, "sha": find_commit(folder), "siblings": siblings})

    def _send_file(self, folder: Path, file: str, *, is_redirected: bool, path: str) -> None:
        place = folder / file
        if not place.is_file():
            self._refuse("EntryNotFound")
            return
        sent = folder / f"{file}.sent"  # what is sent in place of what is listed
        data = (sent if sent.exists() else place).read_bytes()
        if len(data) >= LARGE_BYTES and not is_redirected:
            self.send_response(302)
            self.send_header("Location", f"/cdn{path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        num = 0
        try:
            for offset in range(start, len(data), CHUNK_BYTES):
                chunk = data[offset : offset + CHUNK_BYTES]
                self.wfile.write(chunk)
                num += len(chunk)
                if self.bytes_per_s:
                    self.wfile.flush()
                    time.sleep(len(chunk) / self.bytes_per_s)
        except OSError:  # the client has gone
            self.close_connection = True
        with (self.root / "requests.jsonl").open("a") as log:
            log.write(json.dumps({"file": file, "start": start, "sent": num}) + "\n")

    def _refuse(self, code: str) -> None:
        self._send_json(404, {"error": code}, code=code)

    def _send_json(self, status: int, value: object, *, code: str = "") -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def list_files(folder: Path) -> list[str]:
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(file for file in files if not file.endswith(".sent"))


def find_commit(folder: Path) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    for file in list_files(folder):
        digest.update(file.encode() + (folder / file).read_bytes())
    return digest.hexdigest()


def hash_blob(data: bytes) -> str:
    """Return the digest that Git has of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class HubProcess:
    """The server as a process, and its repositories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self, *, bytes_per_s: float = 0) -> None:
        self.end()
        words = [sys.executable, "-m", "tests.support.hub_server", str(self.root), f"--bytes-per-s={bytes_per_s}"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def read_requests(self) -> list[dict[str, int | str]]:
        log = self.root / "requests.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def forget_requests(self) -> None:
        (self.root / "requests.jsonl").unlink(missing_ok=True)

    def find_model(self, name: str) -> Path:
        return self.root / "models" / name


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--bytes-per-s", type=float, default=0.0)
    arguments = parser.parse_args()
    HubRequests.root, HubRequests.bytes_per_s = arguments.root, arguments.bytes_per_s
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubRequests)
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
