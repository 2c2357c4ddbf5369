"""Which worker pools a job starts, and when, with a real Parsl; a program stands for the interpreter of pools."""

import subprocess
import sys
from pathlib import Path

NOTE_POOL = """#!/bin/sh
while [ "$1" != hpcrl.job.worker_pool ]; do shift; done
touch "$(dirname "$0")/pool-$2"
exec sleep 60
"""
RUN_JOB = """
import os, sys
from pathlib import Path
import msgspec
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.job.runtime import JobRuntime
from hpcrl.slurm.allocation import JobAllocation
from hpcrl.slurm.step_script import StepSetup
from hpcrl.system.files import make_private_dir, publish_file
from tests.support.campaigns import until
from tests.support.plans import make_site, plan_recipe

folder = Path(sys.argv[1])
plan = plan_recipe(site="local")
job = CampaignDir(folder / "campaign").job(0)
for directory in (job.campaign.steps, job.parsl, job.logs):
    make_private_dir(directory)
for component in plan.components:
    setup = StepSetup(python=str(folder / "python"))
    publish_file(job.campaign.steps / f"{component.partition}.json", msgspec.json.encode(setup))
nodes = [[os.uname().nodename] for _ in plan.components]
allocation = JobAllocation(job_id=None, end_time=1e12, nodes=nodes)
place, site = WorkerPlace(job, "n"), make_site("local")
runtime = JobRuntime(plan, place=place, site=site, allocation=allocation, address="127.0.0.1")

def await_pools(*roles):
    names = {f"pool-{role}" for role in roles}
    until(lambda: {path.name for path in folder.glob("pool-*")} == names, what=f"{roles} have started")

assert "parsl" not in sys.modules, "the trainer starts before Parsl is imported"
runtime.start()
await_pools("decode", "env")
runtime.score(["a"], shard=0, num_shards=1, elastic=False)
await_pools("decode", "env", "reward")
assert not runtime.replace_lost_blocks(), "all of them run"
runtime.close(grace_s=0.0)
"""


def test_on_one_machine_reward_workers_start_with_the_first_segment_to_score(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(NOTE_POOL)
    program.chmod(0o700)
    command = [sys.executable, "-c", RUN_JOB, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
