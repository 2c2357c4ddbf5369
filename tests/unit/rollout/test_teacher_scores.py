"""A teacher as an engine: a judge scores the tokens of trajectories, also when it is gone for a while."""

import asyncio
import threading

import msgspec
import numpy as np
import pytest
import torch

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import TeacherConfig
from hpcrl.engines.embedded import batch
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.errors import EngineError
from hpcrl.rollout.reward_process import RewardProcess
from hpcrl.rollout.rewards import RewardScore
from hpcrl.rollout.teacher_scores import apply_teacher_score, score_tokens
from hpcrl.spool.record import ConversationRow, EpisodeTurn
from hpcrl.spool.rows import expand_row
from hpcrl.spool.segment import read_segment, write_segment
from hpcrl.system.files import publish_file
from tests.support.plans import make_reward_recipe
from tests.support.trajectories import make_lake_trajectory, make_trajectory

FORKED = make_trajectory(
    "lake/0/9",
    token_ids=[2, 77, 3, 70, 71, 78, 3, 72],
    loss_mask=[0, 0, 0, 1, 1, 0, 0, 1],
    rows=[ConversationRow(end=5), ConversationRow(end=8, parent=0, shares=4)],
    turns=[EpisodeTurn(start=3, end=5), EpisodeTurn(start=7, end=8, row=1)],
)


def compute_directly(model, token_ids):
    """Compute the log-probs of all tokens but the first in one pass without a cache, as the trainer does."""
    with torch.no_grad():
        ids_1T = torch.tensor([token_ids])
        logprobs = torch.log_softmax(model(ids_1T, use_cache=False).logits[0, :-1].float(), -1)
    return logprobs.gather(1, ids_1T[0, 1:, None])[:, 0].numpy()


def test_a_judge_scores_the_trained_tokens_of_every_conversation(tiny_model_dir, host, proxy):
    host.start()
    found = asyncio.run(score_tokens(FORKED, judge="grader"))
    model = load_model(tiny_model_dir, device="cpu")
    first, second = (compute_directly(model, expand_row(FORKED, number).token_ids.tolist()) for number in (0, 1))
    np.testing.assert_allclose(found[[3, 4, 7]], [first[2], first[3], second[-1]], atol=1e-5)
    assert np.isnan(found[~FORKED.loss_mask]).all()


def test_log_probs_do_not_depend_on_the_size_of_passes(tiny_model_dir, monkeypatch):
    model, ids = load_model(tiny_model_dir, device="cpu"), [2, *range(40, 90)]

    async def score():
        async with EmbeddedEngine(model, store=None) as engine:
            whole = await engine.compute_logprobs(ids)
            monkeypatch.setattr(batch, "MAX_SCORED_TOKENS", 7)
            with pytest.raises(EngineError, match=r"token ids must be in 0\.\.99"):
                await engine.compute_logprobs([2, 100])
            return whole, await engine.compute_logprobs(ids), await engine.compute_logprobs([2])

    whole, divided, nothing = asyncio.run(score())
    np.testing.assert_allclose(whole, compute_directly(model, ids), atol=1e-5)
    np.testing.assert_allclose(divided, whole, atol=1e-5)
    assert nothing == []


@pytest.fixture
def scores(tmp_path, proxy):
    """Return a function that requests the scores of trajectories of a process of rewards with a teacher."""
    campaign = CampaignDir(tmp_path / "campaign")
    recipe = make_reward_recipe("many_rewards:note", "judge.grader.tiny={}", kind="plain")
    recipe = msgspec.structs.replace(recipe, teacher=TeacherConfig(judge="grader"))
    campaign.root.mkdir()
    publish_file(campaign.recipe, msgspec.json.encode(recipe))
    process = RewardProcess(campaign.root, concurrency=4, num_cpus=2, teacher="grader")

    def request(*trajectories):
        path = campaign.root / "a.h5"
        write_segment(path, trajectories)
        process.request(path)
        return lambda timeout_s=60.0: process.receive(timeout_s)

    yield request
    process.close()


def test_a_teacher_that_is_gone_is_waited_for(host, scores):
    receive = scores(make_lake_trajectory(0, 0), make_lake_trajectory(0, 1, status="env-fault"), FORKED)
    assert receive(0.5) is None
    host.start()
    answer = receive()
    assert [one and one.error for one in answer.teacher] == ["", None, ""]
    assert (np.frombuffer(answer.teacher[2].column, np.float32)[FORKED.loss_mask] < 0).all()


def test_tokens_are_scored_by_another_engine_when_the_one_that_had_them_ends(host, scores, monkeypatch):
    asked, compute = threading.Event(), EmbeddedEngine.compute_logprobs

    async def hang(self, token_ids):
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(EmbeddedEngine, "compute_logprobs", hang)
    host.start()
    receive = scores(FORKED)
    assert asked.wait(60)
    monkeypatch.setattr(EmbeddedEngine, "compute_logprobs", compute)
    host.end()
    host.start(worker="000-judge-grader-1")
    (score,) = receive().teacher
    assert score.error == ""
    assert (np.frombuffer(score.column, np.float32)[FORKED.loss_mask] < 0).all()


def test_what_a_teacher_refuses_is_a_fault_and_not_a_zero(host, scores):
    host.start()
    odd = make_lake_trajectory(0, 0, token_ids=[500] * 11)
    (score,) = scores(odd)().teacher
    failed = apply_teacher_score(odd, score, judge="grader")
    assert (failed.status, failed.reward, failed.teacher_logprobs) == ("env-fault", None, None)
    assert "teacher.judge = 'grader': EngineError: judge grader answered 400" in failed.extra["fault"]
    assert "token ids must be in 0..99" in failed.extra["fault"]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_log_probs_of_a_teacher_come_back_from_a_segment_and_are_nan_where_there_are_none(tmp_path, compression):
    column = np.where(FORKED.loss_mask, -np.arange(8), np.nan).astype(np.float32)
    scored = apply_teacher_score(FORKED, RewardScore(column=column.tobytes()), judge="grader")
    write_segment(tmp_path / "a.h5", [scored, make_lake_trajectory()], compression=compression)
    found, other = read_segment(tmp_path / "a.h5")
    np.testing.assert_array_equal(found.teacher_logprobs, column)
    assert np.isnan(other.teacher_logprobs).all()
    assert expand_row(found, 1).teacher_logprobs[-1] == -7
    write_segment(tmp_path / "b.h5", [make_lake_trajectory()], compression=compression)
    assert read_segment(tmp_path / "b.h5")[0].teacher_logprobs is None
