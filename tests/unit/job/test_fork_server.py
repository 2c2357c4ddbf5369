"""The server from which the workers of a pool are forked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SERVE = """
import json, os, signal, sys, threading, time
from hpcrl.job.fork_server import ForkedProcess, list_server_pids, start_fork_server

def import_packages():
    import colorsys
    {more}

def report(path):
    state = {{"server": os.getppid(), "is_warm": "colorsys" in sys.modules, "home": os.environ["HOME"]}}
    with open(path, "w") as file:
        json.dump(state, file)

def fork(path):
    process = ForkedProcess(target=report, args=(path,))
    process.start()
    process.join()
    with open(path) as file:
        return json.load(file) | {{"code": process.exitcode}}

if __name__ == "__main__":
    start_fork_server(import_packages)
    (first,) = list_server_pids()
    reports = [fork(sys.argv[1])]
    os.kill(first, signal.SIGKILL)
    reports.append(fork(sys.argv[1]))
    print(json.dumps([first, *reports]))
"""


def _run(tmp_path: Path, more: str) -> tuple[int, dict[str, object], dict[str, object]]:
    """Return the first server, and what a process that it forked reports, and one after it was killed."""
    script = tmp_path / "serve.py"
    script.write_text(SERVE.format(more=more))
    command = [sys.executable, str(script), str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, warm, cold = json.loads(done.stdout)
    return first, warm, cold


def test_processes_have_what_the_server_imported_and_start_without_it_once_it_was_killed(tmp_path: Path) -> None:
    first, warm, cold = _run(tmp_path, "")
    assert (warm["server"], warm["is_warm"], warm["code"]) == (first, True, 0)
    assert cold["server"] != first
    assert (cold["is_warm"], cold["code"], cold["home"]) == (False, 0, warm["home"])


@pytest.mark.parametrize(
    "more", ["threading.Thread(target=time.sleep, args=(300,), daemon=True).start()", "open('/dev/nvidiactl')"]
)
def test_a_server_whose_imports_started_a_thread_imports_nothing(tmp_path: Path, more: str) -> None:
    if "nvidia" in more:
        device = tmp_path / "device"
        device.touch()
        more = (
            f"import hpcrl.job.fork_server as s; s.DEVICE_PREFIXES = ({str(device)!r},); s.kept = open({str(device)!r})"
        )
    first, worker, _ = _run(tmp_path, more)
    assert (worker["server"], worker["is_warm"], worker["code"]) == (first, False, 0)


def test_an_import_that_fails_is_left_to_the_worker(tmp_path: Path) -> None:
    first, worker, _ = _run(tmp_path, "raise RuntimeError('of this machine')")
    assert (worker["server"], worker["is_warm"], worker["code"]) == (first, True, 0)
