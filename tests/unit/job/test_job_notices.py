"""The notices of jobs: to a command and to a server, as far as they work."""

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import NoticesConfig
from hpcrl.errors import ConfigError
from hpcrl.job import job_notices
from hpcrl.job.job_notices import JobNotices
from tests.support.campaigns import until
from tests.support.plans import make_recipe

FAILED = JobEnd(outcome="failed", reason="no GPU")


@pytest.fixture
def received() -> Iterator[tuple[str, list[dict]]]:
    """Yield the address of a server and what it has received."""
    bodies: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append(json.loads(body) | {"type": self.headers["Content-Type"]})
            self.send_response(200 if self.path == "/ok" else 403)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    server.server_close()


def notices(tmp_path: Path, **config) -> JobNotices:
    return JobNotices(CampaignDir(tmp_path / "c").job(3), NoticesConfig(**config))


def test_a_command_gets_the_notice_on_its_standard_input(tmp_path):
    copy = f"import sys; open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read())"
    notices(tmp_path, command=[sys.executable, "-c", copy]).report_end(FAILED)
    notice = json.loads((tmp_path / "got").read_text())
    assert notice.pop("time") > 0
    assert notice == {
        "campaign": "c",
        "job": 3,
        "state": "failed",
        "reason": "no GPU",
        "text": "campaign c, job 3: failed: no GPU",
    }


def test_a_server_gets_start_and_end_as_json(tmp_path, received):
    address, bodies = received
    sent = notices(tmp_path, webhook=f"{address}/ok")
    sent.report_start()
    until(lambda: bodies, what="the start is reported in the background")
    sent.report_end(FAILED)
    assert [body["state"] for body in bodies] == ["started", "failed"]
    assert bodies[0]["type"] == "application/json"


def test_only_the_states_that_are_asked_for_are_reported(tmp_path, received):
    address, bodies = received
    sent = notices(tmp_path, webhook=f"{address}/ok", states=["drained"])
    sent.report_end(FAILED)
    sent.report_end(JobEnd(outcome="drained"))
    assert [body["state"] for body in bodies] == ["drained"]


def test_an_address_in_a_variable_is_used_and_never_printed(tmp_path, received, monkeypatch, capsys):
    address, bodies = received
    sent = notices(tmp_path, webhook="$HOOK")
    sent.report_end(FAILED)
    assert "the variable HOOK is not set" in capsys.readouterr().err
    monkeypatch.setenv("HOOK", f"{address}/secret")
    sent.report_end(FAILED)
    assert len(bodies) == 1
    printed = capsys.readouterr().err
    assert "HTTPError: Forbidden" in printed
    assert "secret" not in printed


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/no/such/program"], "was not started"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with code 3"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "took over 0.5 s and was ended"),
    ],
)
def test_a_command_that_fails_is_a_line_in_the_log(tmp_path, monkeypatch, capsys, command, words):
    monkeypatch.setattr(job_notices, "NOTICE_TIMEOUT_S", 0.5 if "sleep" in command[-1] else 30.0)
    notices(tmp_path, command=command).report_end(FAILED)
    assert words in capsys.readouterr().err


def test_a_server_that_is_away_is_a_line_in_the_log(tmp_path, capsys):
    notices(tmp_path, webhook="http://127.0.0.1:9/x").report_end(FAILED)
    assert "[notices] webhook: URLError" in capsys.readouterr().err


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"notices\.webhook"):
        make_recipe("notices.webhook=file:///etc/passwd")
