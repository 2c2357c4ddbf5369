"""Scores of single trajectories: killed when they hang, and faults if their process ends."""

import asyncio
import os
import signal
import tempfile

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import EnvFault
from hpcrl.rollout.reward_process import RewardProcess
from hpcrl.rollout.trajectory_scorer import TrajectoryScorer
from hpcrl.system.files import publish_file
from hpcrl.system.processes import list_descendants
from tests.support.disks import largest_file
from tests.support.plans import make_recipe, make_reward_recipe
from tests.support.trajectories import make_lake_trajectory


def score_all(root, function, act=lambda scorer: None, *, count=3, timeout_s=30.0, **options):
    """Score trajectories at the same time; return what each gave, or raised, and the processes left at the end."""
    before = set(list_descendants())
    timeout = f"domains.lake.reward_timeout_s={timeout_s}"
    recipe = make_reward_recipe(f"many_rewards:{function}", timeout, **options)
    publish_file(CampaignDir(root).recipe, msgspec.json.encode(recipe))

    async def run():
        scorer = TrajectoryScorer(RewardProcess(root, concurrency=8, num_cpus=2))
        scores = asyncio.gather(
            *(scorer.score(make_lake_trajectory(0, index)) for index in range(count)), return_exceptions=True
        )
        acting = asyncio.create_task(asyncio.to_thread(act, before))
        found = await scores
        await acting
        await scorer.close()
        return found

    return asyncio.run(run()), [pid for pid in list_descendants() if pid not in before]


def test_a_loop_without_end_costs_its_trajectory_and_no_core_afterwards(tmp_path):
    scores, left = score_all(tmp_path, "hang_for", timeout_s=0.5, index=1)
    assert [score.parts.get("reward") for score in scores] == [0.0, None, 2.0]
    assert "reward_timeout_s = 0.5 s" in scores[1].error
    assert left == []


def kill_process(before):
    """Kill the process that computes the scores, once it has a child."""
    while len(found := [pid for pid in list_descendants() if pid not in before]) < 2:
        pass
    os.kill(min(found), signal.SIGKILL)


def test_the_end_of_the_process_is_a_fault(tmp_path):
    scores, left = score_all(tmp_path, "wait_for", kill_process, index=0, count=1)
    assert isinstance(scores[0], EnvFault)
    assert left == []


def test_without_a_score_no_process_is_started(tmp_path):
    assert score_all(tmp_path, "note", count=0, directory="x") == ([], [])


def test_what_cannot_be_trained_has_no_score(tmp_path):
    publish_file(CampaignDir(tmp_path).recipe, msgspec.json.encode(make_recipe()))

    async def run():
        scorer = TrajectoryScorer(RewardProcess(tmp_path, concurrency=1, num_cpus=1))
        try:
            return await scorer.score(make_lake_trajectory(0, 0, status="env-fault", reward=None))
        finally:
            await scorer.close()

    assert asyncio.run(run()) is None


def test_a_full_disk_is_a_fault_of_the_episode(tmp_path):
    with largest_file(1000):
        fault, left = score_one(tmp_path)
    assert "File too large" in str(fault)
    assert left == []


def test_a_directory_for_temporary_files_that_is_gone_is_a_fault_of_the_episode(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    fault, left = score_one(tmp_path)
    assert str(tmp_path / "gone") in str(fault)
    assert left == []


def score_one(root):
    """Score a trajectory, which must be a fault; return it, and the processes left at the end."""
    before = set(list_descendants())

    async def run():
        scorer = TrajectoryScorer(RewardProcess(root, concurrency=1, num_cpus=1))
        try:
            with pytest.raises(EnvFault) as caught:
                await scorer.score(make_lake_trajectory(0, 0))
        finally:
            await scorer.close()
        return caught.value

    return asyncio.run(run()), [pid for pid in list_descendants() if pid not in before]
