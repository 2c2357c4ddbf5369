"""A whole campaign whose teacher is a judge: its engines score what the student generates, and it is distilled."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import TinyModel
from hpcrl.models.tiny import make_tiny_model
from hpcrl.testing.learning import load_causal
from hpcrl.traj.history import TrajectoryHistory, TrajectorySelection
from tests.support.campaigns import events_of, hpcrl, outcome, processes_of, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
SMALL = ("train.num_steps=8", "train.groups_per_step=4", "train.learning_rate=1e-2", "rollout.mode=sync")
TAUGHT = ("teacher.judge=tutor", "train.kl=k1", "train.kl_in=reward", "train.kl_coef=1.0")
FEW_REWARDS = ("domains.lake.reward=hpcrl.envs.base:env_reward",)


def make_sure_teacher(directory: Path) -> Path:
    """Make a model of another shape than the policy that is surer of its answers."""
    make_tiny_model(directory, TinyModel(hidden_size=32, num_layers=1), seed=1)
    model = load_causal(directory)
    with torch.no_grad():
        model.lm_head.weight *= 12
    model.save_pretrained(directory)
    return directory


def test_a_campaign_distils_a_teacher_that_engines_serve(campaigns: Path, home: Path, tmp_path: Path) -> None:
    teacher = make_sure_teacher(tmp_path / "teacher")
    settings = (
        word for setting in (*SMALL, *TAUGHT, *FEW_REWARDS, f"judge.tutor.path={teacher}") for word in ("-s", setting)
    )
    hpcrl("submit", "quickstart", "--site", "local", "--name", "t", *settings)
    campaign = CampaignDir(campaigns / "t")
    until(campaign.job(0).outcome.exists, what="the campaign has ended", timeout_s=500)
    assert outcome(campaign)["outcome"] == "done"
    assert events_of(campaign, "fault") == []
    until(lambda: not processes_of(home), what="no process is left", timeout_s=60)

    model, gaps = load_causal(teacher), dict[int, list[float]]()
    history = TrajectoryHistory(campaign, spools=("scored", "archive"))
    for _, one in history.trajectories(TrajectorySelection(), verify=True):
        ids_1T = torch.from_numpy(one.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(ids_1T, use_cache=False).logits[0, :-1].float(), -1)
        exact = logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0].numpy()[one.loss_mask[1:]]
        assert one.teacher_logprobs is not None
        np.testing.assert_allclose(one.teacher_logprobs[one.loss_mask], exact, atol=1e-4)
        gaps.setdefault(one.start_version, []).extend(one.logprobs[one.loss_mask] - exact)
    first = np.mean([gap for version, found in gaps.items() if version < 2 for gap in found])
    last = np.mean([gap for version, found in gaps.items() if version >= 6 for gap in found])
    assert last < 0.7 * first, "the student moved towards the teacher"
