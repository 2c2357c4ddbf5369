"""A worker pool of Parsl, started as a job starts it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parsl.executors.high_throughput.errors import WorkerLost  # noqa: TID251

from hpcrl.job import worker_pool
from hpcrl.system.memory import KILLED, KillWatch

RUN_TASKS = """
import json, sys
from pathlib import Path
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.job.executors import JobExecutors
from hpcrl.job.parsl_providers import StepProvider
from hpcrl.job.runtime import make_pool_command

root = Path(sys.argv[1])
job = CampaignDir(root).job(0)
executors = JobExecutors(job, address="127.0.0.1")
command = make_pool_command(job, "env", python=sys.executable)
pools = StepProvider(prefixes={"n": []}, log_dir=root)
executors.add_pools("env", pools, command=command, workers_per_node=1)
num_pools = executors.num_pools()
results = [executors.submit("env", "builtins:eval", text).result(100) for text in sys.argv[2:]]
print(json.dumps([*results, num_pools]), flush=True)
executors.end_kernel(timeout_s=60)
"""
IS_LOADED = "'parsl.dataflow.dflow' in __import__('sys').modules"
MEMBERS = "__import__('parsl').python_app.__name__, __import__('parsl').executors.ThreadPoolExecutor.__name__"
HAS_METADATA = "len(list(__import__('importlib.metadata').metadata.distributions())) > 0"


def test_pools_start_with_the_job_and_workers_import_parsl_in_full_only_when_a_task_needs_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN_TASKS, str(tmp_path), IS_LOADED, MEMBERS, HAS_METADATA]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert done.returncode == 0, (done.stderr, logs)
    is_loaded, whole, has_metadata, num_pools = json.loads(done.stdout)
    assert num_pools == 1, "Parsl's own timer would start the pool 5 s later"
    assert not is_loaded
    assert whole == ["python_app", "ThreadPoolExecutor"]
    assert has_metadata, "only the pool itself leaves out the metadata of packages"


KILL_SHARED = (
    RUN_TASKS.split("results =")[0]
    + """
import os, signal, time
import psutil
server, worker = (executors.submit("env", "builtins:eval", text).result(100) for text in sys.argv[2:])
pool = psutil.Process(server).ppid()
(shared,) = [one for one in psutil.Process(pool).children() if "spawn_main" in " ".join(one.cmdline())]
shared.kill()
deadline = time.monotonic() + 60
while pools.num_running() and time.monotonic() < deadline:
    time.sleep(0.2)
print(pools.num_running(), flush=True)
os._exit(0)
"""
)


def test_a_pool_ends_with_the_process_that_holds_what_its_workers_share(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        KILL_SHARED,
        str(tmp_path),
        "__import__('os').getppid()",
        "__import__('os').getpid()",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert (done.stdout, done.returncode) == ("0\n", 0), (done.stderr, logs)
    assert any("a process of this worker pool has ended" in log for log in logs)


KILL_POOL = (
    RUN_TASKS.split("results =")[0]
    + """
import os, signal
import psutil
pool = psutil.Process(psutil.Process(executors.submit("env", "builtins:eval", sys.argv[2]).result(100)).ppid())
below = pool.children(recursive=True)
names = {word for one in below for word in ("spawn_main", "resource_tracker") if word in " ".join(one.cmdline())}
pool.kill()
print(sorted(names), psutil.wait_procs(below, timeout=60)[1], flush=True)
os._exit(0)
"""
)


def test_a_pool_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILL_POOL, str(tmp_path), "__import__('os').getppid()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.stdout, done.returncode) == ("['resource_tracker', 'spawn_main'] []\n", 0), done.stderr[-2000:]
    assert [path.read_text() for path in tmp_path.glob("*.log") if "leaked" in path.read_text()] == []


END_OWN_PROCESS = (
    RUN_TASKS.split("results =")[0]
    + """
for text in sys.argv[2:]:
    print(executors.submit("env", "builtins:eval", text).exception(100), flush=True)
executors.end_kernel(timeout_s=60)
"""
)


def test_a_task_that_fails_gives_its_error_and_the_next_one_has_another_process(tmp_path: Path) -> None:
    texts = ["exec('import parsl.app.errors, os; raise OSError(os.getpid())')", "__import__('os').getpid() / 0"]
    command = [sys.executable, "-c", END_OWN_PROCESS, str(tmp_path), texts[0], *texts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, error = done.stdout.splitlines()
    assert first.isdecimal()
    assert second.isdecimal()
    assert first != second
    assert error == "division by zero"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="its workers are spawned by Parsl, which keeps no exit code")
def test_the_loss_of_a_worker_names_how_its_process_ended(tmp_path: Path) -> None:
    texts = ["__import__('os')._exit(3)", "__import__('os').kill(__import__('os').getpid(), 11)"]
    command = [sys.executable, "-c", END_OWN_PROCESS, str(tmp_path), *texts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ["exit code 3" in line for line in done.stdout.splitlines()] == [True, False]
    assert ["SIGSEGV" in line for line in done.stdout.splitlines()] == [False, True]


KILL_IDLE = (
    RUN_TASKS.split("results =")[0]
    + """
import contextlib, os, signal, time
import psutil
worker = executors.submit("env", "builtins:eval", sys.argv[2]).result(100)
time.sleep(1.0)  # it waits for a task by now
os.kill(worker, signal.SIGKILL)
with contextlib.suppress(psutil.NoSuchProcess):
    while psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)  # with its fork server, it ends a little later
print(executors.submit("env", "builtins:eval", sys.argv[2]).result(100) != worker, flush=True)
os._exit(0)
"""
)


def test_a_pool_whose_idle_worker_was_killed_runs_the_next_task(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILL_IDLE, str(tmp_path), "__import__('os').getpid()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr[-2000:]


KILL_TAKING = (
    RUN_TASKS.split("results =")[0]
    + """
import os, signal, time
import psutil
server, worker = (executors.submit("env", "builtins:eval", text).result(100) for text in sys.argv[2:])
pool = psutil.Process(server).ppid()
(shared,) = [one for one in psutil.Process(pool).children() if "spawn_main" in " ".join(one.cmdline())]
shared.suspend()
future = executors.submit("env", "builtins:eval", sys.argv[2])
time.sleep(2.0)  # the worker has taken the task, and cannot note that
os.kill(worker, signal.SIGKILL)
shared.resume()
print(type(future.exception(120)).__name__, flush=True)
os._exit(0)
"""
)


KILL_SERVER = KILL_IDLE.replace("os.kill(worker,", "os.kill(psutil.Process(worker).ppid(),")


def test_a_pool_whose_fork_server_was_killed_runs_the_next_task(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILL_SERVER, str(tmp_path), "__import__('os').getpid()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr[-2000:]


DESCRIBE = """
import os, resource, signal, sys, threading

def describe():
    varying = ("PARSL_WORKER_POOL_ID", "TMPDIR", "PWD")
    return {
        "environ": {name: value for name, value in os.environ.items() if name not in varying},
        "directory": os.getcwd(),
        "signals": {number: str(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "output": [os.path.basename(os.readlink(f"/proc/self/fd/{number}")) for number in range(3)],
        "limits": [resource.getrlimit(number) for number in range(16)],
        "session": os.getsid(0) == os.getpgid(0) != os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": threading.active_count(),
        "argv": sys.argv[2:4],
        "path": sys.path,
        "main": sys.modules["__main__"].__spec__ is None,
        "oom": open("/proc/self/oom_score_adj").read(),
        "umask": os.umask(0o77),
        "is_forked": b"spawn_main" not in open("/proc/self/cmdline", "rb").read(),
    }
"""


SPAWNED = """
import hpcrl.job.runtime
start = "import runpy, hpcrl.job.fork_server as s; s.start_fork_server = print; "
start += "runpy.run_module('hpcrl.job.worker_pool', run_name='__main__', alter_sys=True)"
hpcrl.job.runtime.POOL_COMMAND = ("-c", start)
"""


def test_a_forked_worker_finds_what_a_spawned_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "described.py").write_text(DESCRIBE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    found = []
    for script in (RUN_TASKS, SPAWNED + RUN_TASKS):
        command = [sys.executable, "-c", script, str(tmp_path / "run"), "__import__('described').describe()"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)[0])
        shutil.rmtree(tmp_path / "run")
    forked, spawned = found
    assert (forked.pop("is_forked"), spawned.pop("is_forked")) == (True, False)
    assert forked == spawned


@pytest.mark.long
def test_a_task_is_lost_with_the_worker_that_was_killed_while_it_took_it(tmp_path: Path) -> None:
    texts = ["__import__('os').getppid()", "__import__('os').getpid()"]
    command = [sys.executable, "-c", KILL_TAKING, str(tmp_path), *texts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.stdout, done.returncode) == ("WorkerLost\n", 0), done.stderr[-2000:]


def test_the_loss_of_a_worker_names_the_kernel_as_its_reason_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from parsl.executors.high_throughput import errors  # noqa: TID251

    counts = iter([0, 1, 1])
    monkeypatch.setattr(worker_pool, "KillWatch", lambda: KillWatch(lambda: next(counts)))
    monkeypatch.setattr(errors, "WorkerLost", WorkerLost)
    worker_pool.name_worker_ends()
    killed, other = errors.WorkerLost(0, "n1"), errors.WorkerLost(1, "n1")
    assert type(killed) is type(other) is WorkerLost, "drivers know it by its type"
    assert KILLED in str(killed)
    assert KILLED not in str(other)
