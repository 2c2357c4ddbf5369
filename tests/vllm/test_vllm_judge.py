"""A judge on a real vLLM server, started by its role: chat for reward functions, and log-probs for a distillation."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.envs.judge_access import JudgeAccess, find_judge
from hpcrl.roles import judge as judge_role
from hpcrl.rollout.judges.proxy import JudgeProxy, open_judge_proxy
from hpcrl.rollout.teacher_scores import score_tokens
from hpcrl.system.files import make_private_dir
from tests.support.plans import make_recipe
from tests.support.trajectories import make_lake_trajectory
from tests.support.workers import make_worker_context

SETTINGS = (
    "judge.grader.engine.backend=vllm",
    "judge.grader.engine.dtype=float32",
    "judge.grader.engine.max_model_len=256",
    'judge.grader.engine.vllm_args=["--enforce-eager", "--block-size", "32"]',
    "judge.grader.resources.gpus_per_worker=0",
    "judge.grader.resources.affinity=cpu",
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[JudgeAccess]:
    """Run the role of a judge until the tests have ended; return how its proxy is reached."""
    campaign = CampaignDir(tmp_path_factory.mktemp("judge"))
    recipe = make_recipe(f"judge.grader.path={tiny_model_dir}", *SETTINGS)
    job = campaign.job(0)
    for directory in (job.logs, campaign.events):
        make_private_dir(directory)
    context = make_worker_context(campaign, "judge-grader", recipe)
    problems: list[BaseException] = []

    def serve() -> None:
        try:
            judge_role.run(context)
        except BaseException as error:  # noqa: BLE001 - raised by the test
            problems.append(error)

    thread = threading.Thread(target=serve, name="judge")
    thread.start()
    try:
        with open_judge_proxy(recipe, campaign, job=0, report=problems.append) as proxy:
            assert isinstance(proxy, JudgeProxy)
            while not list(campaign.judge("grader").endpoints.glob("*")):
                assert not problems, problems
                assert thread.is_alive()
                time.sleep(0.1)
            yield find_judge("grader")
        assert not problems, problems
    finally:
        context.end_requested.set()
        thread.join()


def test_the_openai_client_chats_with_a_vllm_judge_through_the_proxy(judge: JudgeAccess) -> None:
    with openai.OpenAI(base_url=judge.url, api_key=judge.api_key, max_retries=0, timeout=120) as client:
        answer = client.chat.completions.create(
            model=judge.model, messages=[{"role": "user", "content": "2+2?"}], max_tokens=8, temperature=0
        )
    assert answer.model == "grader"
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 8
    assert answer.choices[0].message.content is not None


def test_a_vllm_teacher_scores_tokens_as_the_models_own_pass_does(judge: JudgeAccess, tiny_model_dir: Path) -> None:
    one = make_lake_trajectory()
    found = asyncio.run(score_tokens(one, judge="grader"))

    async def score() -> list[float]:
        async with EmbeddedEngine(load_model(tiny_model_dir, device="cpu"), store=None) as engine:
            return await engine.compute_logprobs(one.token_ids.tolist())

    expected = np.array([0.0, *asyncio.run(score())])
    np.testing.assert_allclose(found[one.loss_mask], expected[one.loss_mask], atol=1e-5)
    assert np.isnan(found[~one.loss_mask]).all()
