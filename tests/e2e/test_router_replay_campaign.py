"""A whole campaign whose engine reports experts: they are stored with every episode, and a trainer replays them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.learn.batch import make_chosen_rows, make_micro_batches, spread_credit
from hpcrl.models.expert_routers import find_routers
from hpcrl.spool.record import Trajectory
from hpcrl.spool.routed_experts import find_known_tokens
from hpcrl.testing.learning import load_causal
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.traj.history import TrajectoryHistory, TrajectorySelection
from tests.support.campaigns import events_of, hpcrl, outcome, processes_of, steps, until
from tests.support.families import make_close_model, perturb_routers
from tests.support.learners import settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
SMALL = ("train.num_steps=4", "train.groups_per_step=4", "train.learning_rate=1e-3", "rollout.mode=sync")
REPLAYED = ("train.router_replay=true", 'spool.compression="zstd"', "rollout.max_new_tokens=3")


def choose_experts(model: torch.nn.Module, one: Trajectory) -> np.ndarray:
    """Return the experts that a plain pass chooses, in rising order."""
    chosen: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda *given: chosen.append(given[2][2])) for router in find_routers(model)]
    with torch.no_grad():
        model(torch.from_numpy(one.token_ids.astype(np.int64))[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(chosen, dim=1).numpy(), -1)


def compute_gap(directory: Path, found: list[Trajectory], *, replays: bool) -> float:
    """Return the largest difference between the log-probs of a trainer with other routers and those of the engine."""
    trainer = TorchTrainer(directory, settings(router_replay=replays), seed=1)
    rows = [
        row for one in found for row in make_chosen_rows(one, [(0, [1.0] * len(one.turns))], place_credit=spread_credit)
    ]
    micro = make_micro_batches(rows, tokens_per_micro_batch=1000)
    (columns,) = trainer.compute_logprobs([micro], model=None)
    return max(
        float((column_N - each.behaviour_N).abs().max())
        for column_N, each in zip(columns, micro, strict=True)
        if column_N is not None
    )


def test_a_campaign_stores_the_experts_of_its_engine_and_a_trainer_replays_them(
    campaigns: Path, home: Path, tmp_path: Path
) -> None:
    model = make_close_model(tmp_path / "model", "qwen3_moe")
    given = (f"model.path={model}", *SMALL, *REPLAYED)
    words = (word for setting in given for word in ("-s", setting))
    hpcrl("submit", "quickstart", "--site", "local", "--name", "r", *words)
    campaign = CampaignDir(campaigns / "r")
    until(campaign.job(0).outcome.exists, what="the campaign has ended", timeout_s=500)
    assert outcome(campaign)["outcome"] == "done"
    assert events_of(campaign, "fault") == []
    until(lambda: not processes_of(home), what="no process is left", timeout_s=60)
    assert [step["skipped"] for step in steps(campaign)] == [None] * 4

    history = TrajectoryHistory(campaign, spools=("scored", "archive"))
    stored = [one for _, one in history.trajectories(TrajectorySelection(), verify=True) if one.turns]
    assert max(len(one.turns) for one in stored) > 1, "some episodes have several turns"
    first = [one for one in stored if one.end_version == 0]
    for one in stored:
        assert one.experts is not None
        assert (one.experts.shape[1:], one.experts.dtype) == ((2, 2), np.uint8)
        last = one.turns[-1].end - 1
        np.testing.assert_array_equal(find_known_tokens(one.experts), np.arange(len(one)) < last)
    plain = load_causal(model)
    for one in first:
        known = find_known_tokens(one.experts)
        np.testing.assert_array_equal(np.sort(one.experts[known], -1), choose_experts(plain, one)[known])

    changed = shutil.copytree(model, tmp_path / "changed")
    perturb_routers(plain)
    plain.save_pretrained(changed)
    assert compute_gap(changed, first, replays=True) < 1e-3
    assert compute_gap(changed, first, replays=False) > 0.1
