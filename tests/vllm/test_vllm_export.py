"""An export of `hpcrl export` served by vLLM: its log-probabilities are those of the trainer."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import TinyModel, TrainConfig
from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.learn.batch import make_packed_batches, make_rows
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.models.tiny import make_tiny_model
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.checkpoint import save_checkpoint
from hpcrl.trainers.export import export_model
from hpcrl.trainers.torch import TorchTrainer
from tests.support.served import place

PROMPT = [2, 45, 78, 5, 36, 3]
NUM_TOKENS = 24
CLOSE = 1e-3


@pytest.fixture
def trained(tmp_path: Path) -> tuple[TorchTrainer, Path]:
    """Return a trainer far from its initial weights, and its exported model."""
    torch.set_num_threads(1)
    run = CampaignDir(tmp_path / "trained")
    run.root.mkdir()
    make_tiny_model(run.model, TinyModel(context_length=512), seed=0)
    trainer = TorchTrainer(run.model, TrainConfig(num_steps=2, groups_per_step=1, learning_rate=1e-2), seed=0)
    rng = np.random.default_rng(0)
    for step in (1, 2):
        episodes = [episode(rng.integers(0, 90, 40).tolist(), index=index) for index in range(4)]
        assert trainer.train_step(episodes, step=step, version=step).skipped is None
    save_checkpoint(run.checkpoints, step=2, version=2, trainer=trainer, consumed=ConsumedTrajectories())
    export_model(run, tmp_path / "exported")
    return trainer, tmp_path / "exported"


def episode(token_ids: list[int], *, index: int = 0, start: int = 6) -> Trajectory:
    """Return an episode in which the model generated all tokens from `start`."""
    generated = np.arange(len(token_ids)) >= start
    return Trajectory(
        id=f"t/0/{index}",
        group="t/0",
        domain="t",
        seed=0,
        status="done",
        producer="000-env-0",
        created=0.0,
        start_version=0,
        end_version=0,
        turns=[],
        reward=float(index % 2),
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.where(generated, -4.6, 0.0).astype(np.float32),
        versions=np.zeros(len(token_ids), np.int32),
        loss_mask=generated,
    )


def trainers_logprobs(trainer: TorchTrainer, answer: Completion) -> list[float]:
    trajectory = episode([*PROMPT, *answer.token_ids], start=len(PROMPT))
    rows, _ = make_rows([trajectory], credits=[[0.0]], max_length=trainer.max_length)
    with torch.no_grad():
        logprobs_N = trainer._logprobs(make_packed_batches(rows, tokens_per_micro_batch=512)[0])
    return list(logprobs_N.tolist())


def test_vllm_loads_the_export_and_agrees_with_the_trainer(trained: tuple[TorchTrainer, Path], tmp_path: Path) -> None:
    trainer, exported = trained
    with place(tmp_path / "campaign", exported) as there, there.engines("exported") as found:
        request = GenerateRequest(request_id="a", token_ids=PROMPT, max_new_tokens=NUM_TOKENS, temperature=1.0)
        answer = there.do(found[0].engine.generate(request))
    assert len(answer.token_ids) > 4
    assert answer.logprobs == pytest.approx(trainers_logprobs(trainer, answer), abs=CLOSE)
    initial = TorchTrainer(
        tmp_path / "trained" / "model", TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0)
    )
    assert answer.logprobs != pytest.approx(trainers_logprobs(initial, answer), abs=0.1)  # not the initial model
