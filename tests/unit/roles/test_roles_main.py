"""How the process of a step ends, and when a worker that a file system has ended is reported."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.site import load_site
from hpcrl.errors import SpoolError
from hpcrl.plan.plan import make_plan
from hpcrl.roles.__main__ import await_files, describe_failure
from hpcrl.system.files import make_private_dir
from hpcrl.system.memory import KILLED, KillWatch
from tests.support.plans import make_recipe

SCRIPT = """
import atexit
import threading
import time
from hpcrl.roles.__main__ import QuickExit

class Resource:
    def __del__(self):
        print("torn down")

resource = Resource()
quick_exit = QuickExit()
atexit.register(print, "handlers ran")
threading.Thread(target=lambda: (time.sleep(0.1), print("threads ended"))).start()
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_step_ends_with_its_code_after_its_threads_and_handlers_and_without_teardown(code: int) -> None:
    script = f"{SCRIPT}\nquick_exit.code = {code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "threads ended\nhandlers ran\n", "")


def test_a_step_that_fails_ends_as_any_process_with_its_traceback() -> None:
    script = f"{SCRIPT}\nraise RuntimeError('no such version')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "threads ended\nhandlers ran\ntorn down\n")
    assert done.stderr.endswith("RuntimeError: no such version\n")


@pytest.mark.parametrize(("number", "num_looks"), [(errno.EIO, 3), (errno.ESTALE, 3), (errno.EACCES, 0)])
def test_a_worker_that_an_error_of_files_has_ended_waits_until_it_has_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, num_looks: int
) -> None:
    looks: list[Path] = []

    def list_names(path: Path) -> list[Path]:
        looks.append(path)
        if len(looks) < 3:
            raise OSError(number, "away")
        return []

    monkeypatch.setattr(Path, "iterdir", list_names)
    error = SpoolError("a segment cannot be written")
    error.__cause__ = OSError(number, "away")
    await_files(tmp_path, error)
    assert looks == [tmp_path] * num_looks


IMPORT = """
import json, os, sys
from hpcrl.job.fork_server import is_fork_safe
from hpcrl.roles.__main__ import import_role

import_role(sys.argv[1], sys.argv[2])
facts = {"is_safe": is_fork_safe(), "blas": os.environ.get("OPENBLAS_NUM_THREADS"), "num_threads": None}
facts["module"] = [name for name in sys.modules if name == f"hpcrl.roles.{sys.argv[3]}"]
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
if (torch := sys.modules.get("torch")) is not None:
    (torch.rand(600, 600) @ torch.rand(600, 600)).sum()
    facts["num_threads"] = torch.get_num_threads()
print(json.dumps(facts), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("role", "module"), [("decode", "serve"), ("env", "env"), ("reward", "reward")])
def test_what_a_role_needs_is_imported_without_threads_and_works_in_a_process_that_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, module: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    recipe, site = make_recipe("resources.decode.cpus_per_worker=1"), load_site("local")
    campaign = CampaignDir(tmp_path)
    campaign.recipe.write_bytes(msgspec.json.encode(recipe))
    campaign.plan.write_bytes(make_plan(recipe, site).to_json())
    command = [sys.executable, "-c", IMPORT, str(tmp_path), role, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    num_threads = 1 if role == "decode" else None
    facts = {"is_safe": True, "blas": None, "num_threads": num_threads, "module": [f"hpcrl.roles.{module}"]}
    assert json.loads(done.stdout) == facts


def test_a_worker_whose_server_the_kernel_has_killed_for_its_memory_names_that() -> None:
    counts = iter([2, 3, 3])
    kills, error = KillWatch(lambda: next(counts)), RuntimeError("the server was killed by SIGKILL")
    assert describe_failure(error, kills) == f"RuntimeError: the server was killed by SIGKILL ({KILLED})"
    assert describe_failure(error, kills) == "RuntimeError: the server was killed by SIGKILL"


def test_a_worker_that_gets_a_place_when_its_job_drains_starts_nothing(tmp_path: Path) -> None:
    job = CampaignDir(tmp_path).job(0)
    make_private_dir(job.logs)
    job.drain.touch()
    program = f"from hpcrl.roles.__main__ import work; print(work({str(tmp_path)!r}, 0, 'env', 0), file=sys.__stderr__)"
    done = subprocess.run([sys.executable, "-c", f"import sys; {program}"], check=False, timeout=60)
    assert (done.returncode, job.log("env-0").read_text()) == (0, "0\n"), "it reads no plan, which is not there"
