"""The driver's look at progress: what ends a job as stalled, and the reason that it gives."""

import pytest

from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import FaultReported
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir
from hpcrl.campaign_dir.train_progress import MIN_DROPPED_GROUPS, TrainProgress, write_train_progress
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import load_site
from hpcrl.errors import HpcrlError
from hpcrl.job.driver import JobDriver
from hpcrl.job.supervision import StallDetector
from hpcrl.plan.plan import make_plan
from hpcrl.spool.writer import DiskSpoolWriter
from hpcrl.system.files import make_private_dir
from tests.support.plans import make_recipe
from tests.support.trajectories import make_trajectory

TIMEOUT_S = 60.0


@pytest.fixture
def driver(tmp_path):
    campaign = CampaignDir(tmp_path)
    for directory in (campaign.events, campaign.job(0).logs, *map(campaign.spool, SPOOLS)):
        make_private_dir(directory)
    recipe, site = make_recipe("train.groups_per_step=4", 'train.flat_groups="drop"'), load_site("local")
    events = EventLog(campaign.events / "driver.jsonl", job=0, role="driver", worker="driver", node="n")
    place = WorkerPlace(campaign.job(0), "n")
    return JobDriver(place=place, plan=make_plan(recipe, site), recipe=recipe, site=site, events=events)


def score_segment(driver, number):
    writer = DiskSpoolWriter(driver.campaign.spool("scored"), producer=f"000-env-{number}")
    writer.append(make_trajectory(f"lake/{number}/0", 1))
    writer.flush()


def look_after_timeout(driver, before, after):
    """Let the driver look twice, with a scored segment and the timeout in between."""
    detector = StallDetector(timeout_s=TIMEOUT_S)
    for number, progress in enumerate((before, after)):
        score_segment(driver, number)
        write_train_progress(driver.campaign.train_progress, progress)
        driver._check_progress(detector)
        detector.since -= TIMEOUT_S + 1


@pytest.mark.parametrize(
    ("waste", "reason"),
    [
        ({"num_flat_groups": 9, "num_lost_groups": 90, "reward_error": "m:f: KeyError: 'x'"}, "m:f: KeyError: 'x'"),
        ({"num_lost_groups": 99}, "99 for faults or their age"),
    ],
    ids=["no-reward", "faults"],
)
def test_a_job_that_can_only_drop_groups_is_ended_with_their_number(driver, waste, reason):
    with pytest.raises(HpcrlError, match=r"no progress for 1 min \(job.stall_timeout_min\): 99 groups were") as caught:
        look_after_timeout(driver, TrainProgress(num_lost_groups=MIN_DROPPED_GROUPS), TrainProgress(**waste))
    assert reason in str(caught.value)


def test_a_job_that_only_drops_flat_groups_is_reported_once_in_each_timeout(driver):
    few, more = (TrainProgress(num_flat_groups=num) for num in (MIN_DROPPED_GROUPS, 99))
    look_after_timeout(driver, few, more)
    (fault,) = [event for event in EventReader(driver.campaign.events).poll() if isinstance(event, FaultReported)]
    assert "99 groups were dropped since the last step, 99 as all their rewards are equal" in fault.detail


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"num_flat_groups": 1}, {"num_flat_groups": 3}),
        ({"num_flat_groups": 20}, {"num_flat_groups": 30, "num_ready_groups": 1}),
        ({"num_flat_groups": 20}, {}),
        ({"num_flat_groups": 20}, {"num_flat_groups": 20, "num_warmup_steps": 1}),
    ],
    ids=["few", "one-to-train-on", "a-step", "a-warm-up-step"],
)
def test_a_job_that_also_has_groups_to_train_on_continues(driver, before, after):
    look_after_timeout(driver, TrainProgress(**before), TrainProgress(**after))


def test_a_trainer_that_learned_nothing_is_not_started_again(driver):
    driver._refuse_restart()
    write_train_progress(driver.campaign.train_progress, TrainProgress(failure="no reward was ever computed"))
    with pytest.raises(HpcrlError, match=r"^no reward was ever computed$"):
        driver._refuse_restart()


def test_before_the_trainer_wrote_anything_scored_segments_are_progress(driver):
    detector = StallDetector(timeout_s=TIMEOUT_S)
    for number in range(2):
        score_segment(driver, number)
        driver._check_progress(detector)
        detector.since -= TIMEOUT_S + 1
