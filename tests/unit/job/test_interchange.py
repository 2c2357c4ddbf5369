"""The interchange of Parsl, started as a job starts it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from hpcrl.system.processes import is_alive, read_start_ticks
from tests.support.campaigns import until

START_EXECUTOR = """
import sys, time
from pathlib import Path
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.job.executors import JobExecutors
from hpcrl.job.parsl_providers import StepProvider

root = Path(sys.argv[1])
executors = JobExecutors(CampaignDir(root).job(0), address="127.0.0.1")
executors.add_elastic("env", StepProvider(prefixes={"n": []}, log_dir=root), command=["true"], workers_per_node=1)
print(executors._executors["env"].interchange_proc.pid, flush=True)
time.sleep(600)
"""


def test_an_interchange_ends_when_its_driver_is_killed(tmp_path: Path) -> None:
    """A whole job that is killed at once has no guardian left that would end it."""
    command = [sys.executable, "-c", START_EXECUTOR, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        ticks = read_start_ticks(pid)
        assert is_alive(pid, ticks)
        os.kill(driver.pid, signal.SIGKILL)
    try:
        until(lambda: not is_alive(pid, ticks), what="the interchange has ended")
    finally:
        if is_alive(pid, ticks):
            os.kill(pid, signal.SIGKILL)
