"""Real processes whose file system fails: nothing ends, nothing acknowledged is lost, and work continues after it."""

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign_dir.endpoints import announce_endpoint
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CheckpointSaved
from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.system.files import publish_file
from hpcrl.testing.faulty_disk import FaultyDisk
from tests.support.endpoints import make_endpoint
from tests.support.faulty_disk import FaultyProcess
from tests.support.plans import plan_recipe

FULL = [errno.ENOSPC, errno.EDQUOT]
GONE = [errno.ESTALE, errno.EIO]
NO_PAUSES = "from hpcrl.system import file_watch; file_watch.PAUSE_SHARE = 0.0\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.fixture
def disk(folder: Path) -> FaultyDisk:
    disk = FaultyDisk.build(folder, directory=folder.parent)
    if disk is None:
        pytest.skip("no C compiler: the file system of these tests cannot be made to fail")
    return disk


@pytest.fixture
def process(disk: FaultyDisk) -> Iterator[FaultyProcess]:
    with FaultyProcess(disk) as process:
        yield process


def read_steps(folder: Path) -> list[int]:
    return [event.step for event in EventReader(folder).poll() if isinstance(event, CheckpointSaved)]


OPEN_LOG = f"""
from pathlib import Path
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import CheckpointSaved
log = EventLog(Path({{folder!r}}) / "w.jsonl", job=0, role="train", worker="w")
{NO_PAUSES}"""


@pytest.mark.parametrize("error", [*FULL, *GONE, errno.EROFS])
def test_events_of_a_process_wait_for_its_file_system(process: FaultyProcess, folder: Path, error: int) -> None:
    assert process.run(OPEN_LOG.format(folder=str(folder)) + "log.emit(CheckpointSaved(step=1))") is None
    with process.failing(error):
        assert process.run("log.emit(CheckpointSaved(step=2)); log.beat()") is None
        assert read_steps(folder) == [1]
    assert process.run("log.emit(CheckpointSaved(step=3))") is None
    assert read_steps(folder) == [1, 2, 3]


def test_a_log_that_could_not_be_made_is_made_later(process: FaultyProcess, folder: Path) -> None:
    process.run("import hpcrl.campaign_dir.event_log")
    with process.failing(errno.EDQUOT):
        assert process.run(OPEN_LOG.format(folder=str(folder)) + "log.emit(CheckpointSaved(step=1))") is None
    process.run("log.beat()")
    assert read_steps(folder) == [1]


@pytest.mark.parametrize("error", [*FULL, *GONE])
def test_trajectories_are_kept_until_they_are_durable(process: FaultyProcess, folder: Path, error: int) -> None:
    writer = f"""
from pathlib import Path
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter
from tests.support.trajectories import make_trajectory
writer = DiskSpoolWriter(Path({str(folder)!r}), producer="000-env-0", batching=BatchLimits(max_age_s=0.0))
writer.append(make_trajectory("lake/0/0", 3))
"""
    assert process.run(writer, "writer.flush()") == ["lake/0/0"]
    with process.failing(error, kinds="w"):
        process.run("writer.append(make_trajectory('lake/1/0', 3))")
        assert "1 trajectories of '000-env-0' are kept in memory" in process.run("", "writer.flush()")
    assert process.run("writer.append(make_trajectory('lake/2/0', 3))", "writer.close()") == ["lake/1/0", "lake/2/0"]
    reader = DiskSpoolReader(folder, on_damage=lambda path, why: pytest.fail(f"{path}: {why}"))
    assert sorted(one.id for one in reader.poll()) == ["lake/0/0", "lake/1/0", "lake/2/0"]


@pytest.mark.parametrize("error", GONE)
def test_endpoints_that_cannot_be_read_stay_in_use(process: FaultyProcess, folder: Path, error: int) -> None:
    def announce(number: int) -> None:
        name = f"000-decode-{number}"
        announce_endpoint(folder, make_endpoint(name))

    names = "[one.worker for one in reader.poll()]"
    announce(0)
    start = f"""{NO_PAUSES}
from pathlib import Path
from hpcrl.campaign_dir.endpoints import EndpointReader
reader = EndpointReader(Path({str(folder)!r}), job=0)
"""
    assert process.run(start, names) == ["000-decode-0"]
    announce(1)
    with process.failing(error, kinds="r"):
        assert process.run("", names) == ["000-decode-0"]
    assert process.run("", names) == ["000-decode-0", "000-decode-1"]


@pytest.mark.parametrize("error", GONE)
def test_a_request_to_drain_is_seen_after_the_file_system_is_back(
    process: FaultyProcess, folder: Path, error: int
) -> None:
    start = f"""{NO_PAUSES}
from pathlib import Path
from hpcrl.system.file_watch import NameWatch
watch = NameWatch(Path({str(folder)!r}))
"""
    assert process.run(start, "'drain' in watch.names()") is False
    (folder / "drain").touch()
    with process.failing(error, kinds="r"):
        assert process.run("", "'drain' in watch.names()") is False
    assert process.run("", "'drain' in watch.names()") is True


def test_the_counts_of_the_trainer_are_written_once_there_is_room(process: FaultyProcess, folder: Path) -> None:
    start = f"""
from pathlib import Path
from hpcrl.rollout.flow_control import HoldWriter, SettledCount, SettledWriter, read_settled
path = Path({str(folder)!r}) / "settled.json"
settled, hold = SettledWriter(path), HoldWriter(path.with_name("0-hold.json"))
settled.write(SettledCount(num=8))
"""
    write = "settled.write(SettledCount(num=16)); hold.write(3, now=0.0)"
    assert process.run(start, "read_settled(path).num") == 8
    with process.failing(errno.EDQUOT, kinds="w"):
        assert process.run(write, "read_settled(path).num") == 8
    assert process.run(write, "read_settled(path).num") == 16
    assert (folder / "0-hold.json").exists()


def test_a_call_that_hangs_holds_up_its_process_and_no_event_is_lost(process: FaultyProcess, folder: Path) -> None:
    process.run(OPEN_LOG.format(folder=str(folder)) + "log.emit(CheckpointSaved(step=1))")
    with process.failing(0, kinds="w", lag_ms=-1):
        process.start("log.emit(CheckpointSaved(step=2))")
        assert read_steps(folder) == [1]
    assert process.wait() is None
    assert read_steps(folder) == [1, 2]


@pytest.mark.parametrize("error", [*GONE, *FULL])
def test_a_request_to_end_that_the_file_system_refuses_ends_no_driver(
    process: FaultyProcess, folder: Path, error: int
) -> None:
    start = """
import functools
from pathlib import Path
from hpcrl.job import runtime
runtime.retry_passing = functools.partial(runtime.retry_passing, timeout_s=0.1)
"""
    assert process.run(start) is None
    with process.failing(error):
        assert process.run(f"runtime.ask_to_end(Path({str(folder / 'end')!r}))") is None
    assert process.run(f"runtime.ask_to_end(Path({str(folder / 'end')!r}))") is None
    assert (folder / "end").exists()


@pytest.mark.parametrize("error", GONE)
def test_a_reward_task_waits_for_segments_that_cannot_be_looked_at(
    process: FaultyProcess, folder: Path, error: int
) -> None:
    name = "000-env-0-00000001-4-abcdef01.h5"
    start = f"""
from pathlib import Path
from tests.support.reward_stage import RewardStage, finish
stage = RewardStage(Path({str(folder)!r}))
session = stage.open("hang_for", index=-1)
stage.add({name!r})
"""
    assert process.run(start) is None
    with process.failing(error, kinds="r"):
        process.start(f"session.start([{name!r}])", "sorted(session.under_way)")
        time.sleep(0.3)
    assert process.wait() == [name]
    assert process.run("finish(session)\nstage.process.close()", f"len(stage.twin({name!r}))") == 4


@pytest.mark.parametrize("error", GONE)
def test_a_worker_starts_once_its_file_system_is_back(process: FaultyProcess, folder: Path, error: int) -> None:
    """The restarts that a worker has are not used up in a second in which nothing could start."""
    start = f"""
import sys, types
from pathlib import Path
import msgspec
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.plan.plan import make_plan
from hpcrl.roles import __main__ as roles
from tests.support.plans import make_recipe, make_site
campaign = CampaignDir(Path({str(folder)!r}))
for path in (campaign.events, campaign.job(0).logs):
    path.mkdir(parents=True)
for path, record in ((campaign.recipe, make_recipe()), (campaign.site, make_site())):
    path.write_bytes(msgspec.json.encode(record))
campaign.plan.write_bytes(make_plan(make_recipe(), make_site()).to_json())
roles.redirect_output = lambda job, role, index: job.log(role).touch()
sys.modules["hpcrl.roles.env"] = types.SimpleNamespace(run=lambda context: 0)
"""
    assert process.run(start) is None
    with process.failing(error):
        process.start(f"code = roles.work({str(folder)!r}, 0, 'env', 0)", "code")
        time.sleep(0.3)
    assert process.wait() == 0


@pytest.mark.parametrize("error", GONE)
def test_records_of_jobs_are_read_once_the_file_system_is_back(
    process: FaultyProcess, folder: Path, error: int
) -> None:
    campaign = CampaignDir(folder)
    (campaign.checkpoints / "000001-step-000004").mkdir(parents=True)
    campaign.job(1).root.mkdir(parents=True)
    campaign.job(1).chain_marker.write_text("3")
    campaign.job(1).outcome.write_bytes(JobEnd(outcome="drained", cause="walltime", run_s=1.0).encode())
    process.run(f"""
from pathlib import Path
from hpcrl.campaign_dir.job_end import read_job_end
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.slurm.next_job import count_jobs_left, find_last_step
campaign = CampaignDir(Path({str(folder)!r}))""")
    for value, known in (
        ("read_job_end(campaign.job(1)).cause", "walltime"),
        ("count_jobs_left(campaign.job(1))", 3),
        ("find_last_step(campaign)", 4),
    ):
        with process.failing(error):
            process.start("", value)
            time.sleep(0.5)
        assert process.wait() == known


def test_a_job_whose_file_system_takes_no_changes_ends_with_one_line(folder: Path, disk: FaultyDisk) -> None:
    campaign = CampaignDir(folder)
    publish_file(campaign.plan, plan_recipe(site="local").to_json())
    with disk.fail_calls(errno.ENOSPC, kinds="w"):
        command = [sys.executable, "-m", "hpcrl.job.driver", str(folder), "0"]
        done = subprocess.run(
            command, env=os.environ | disk.environ, capture_output=True, text=True, timeout=150, check=False
        )
    assert done.returncode == 1
    assert re.search(r"hpcrl: job 0 cannot start: .*No space left on device", done.stderr)
    assert "Traceback" not in done.stderr
