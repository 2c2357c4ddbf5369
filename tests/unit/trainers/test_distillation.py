"""On-policy distillation: the student samples, a larger teacher judges each token, and no reward is given."""

import numpy as np
import pytest
import torch

from hpcrl.config.recipe import TinyModel, TrainConfig
from hpcrl.errors import TrainError
from hpcrl.models.tiny import make_tiny_model
from hpcrl.spool.record import EpisodeTurn
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.torch_model import load_causal
from tests.support.trajectories import make_trajectory

LESSONS = torch.tensor([[10, 50, 60], [11, 51, 60]])
"""A prompt of one token, and the two that the teacher answers."""
SETTINGS = {"kl": "k1", "kl_in": "reward", "kl_coef": 1.0, "learning_rate": 2e-2}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make_student(directory):
    make_tiny_model(directory, TinyModel(hidden_size=32, num_layers=1), seed=0)
    return directory


def make_teacher(directory):
    """Make a larger model that is sure of its answers."""
    make_tiny_model(directory, TinyModel(hidden_size=64, num_layers=2), seed=1)
    model = load_causal(directory)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        logits = model(LESSONS).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), LESSONS[:, 1:].flatten()).backward()
        optimizer.step()
    model.save_pretrained(directory)
    return directory


def compute_agreement(model):
    """Return the probability of the lessons' answers, on average."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(LESSONS, use_cache=False).logits[:, :-1], -1)
    return logprobs.gather(-1, LESSONS[:, 1:, None]).sum((1, 2)).exp().mean().item()


def sample_episodes(model, *, step, generator):
    """Sample sixteen answers to each prompt; all earn the same reward."""
    ids = LESSONS[:, :1].repeat_interleave(16, dim=0)
    logprobs = [torch.zeros(len(ids))]
    with torch.no_grad():
        for _ in range(2):
            logprobs_V = torch.log_softmax(model(ids, use_cache=False).logits[:, -1], -1)
            token = torch.multinomial(logprobs_V.exp(), 1, generator=generator)
            logprobs.append(logprobs_V.gather(1, token)[:, 0])
            ids = torch.cat([ids, token], 1)
    columns = zip(ids.numpy().astype(np.int32), torch.stack(logprobs, 1).numpy(), strict=True)
    return [
        make_trajectory(
            f"{step}-{number // 16}/{number % 16}",
            version=step,
            token_ids=tokens,
            logprobs=known,
            loss_mask=np.array([False, True, True]),
            turns=[EpisodeTurn(start=1, end=3)],
            reward=0.0,
        )
        for number, (tokens, known) in enumerate(columns)
    ]


def distil(student, teacher, *, num_steps, **changed):
    """Train the student on its own samples; return its agreement with the lessons before and after."""
    train = TrainConfig(num_steps=num_steps, groups_per_step=2, **{**SETTINGS, **changed})
    trainer = TorchTrainer(student, train, reference_dir=teacher)
    generator = torch.Generator().manual_seed(0)
    before = compute_agreement(trainer._policy)
    for step in range(1, num_steps + 1):
        episodes = sample_episodes(trainer._policy, step=step, generator=generator)
        metrics = trainer.train_step(episodes, step=step, version=step)
        assert metrics.skipped is None
    return before, compute_agreement(trainer._policy)


def test_a_student_reaches_a_larger_teacher_without_any_reward(tmp_path):
    student, teacher = make_student(tmp_path / "student"), make_teacher(tmp_path / "teacher")
    taught = compute_agreement(load_causal(teacher))
    before, after = distil(student, teacher, num_steps=60)
    assert taught > 0.95
    assert before < 0.01
    assert after > taught - 0.05


def test_a_student_without_a_teacher_stays_where_it_was(tmp_path):
    before, after = distil(make_student(tmp_path / "student"), None, num_steps=5)
    assert after == pytest.approx(before, abs=0.01)


def test_a_teacher_with_another_number_of_tokens_is_refused_when_the_trainer_starts(tmp_path):
    student, teacher = make_student(tmp_path / "student"), make_teacher(tmp_path / "teacher")
    config = (teacher / "config.json").read_text()
    (teacher / "config.json").write_text(config.replace('"vocab_size": ', '"vocab_size": 9'))
    with pytest.raises(TrainError, match=r"teacher\.path = .* has a vocabulary of 9\d+ tokens, the policy one of \d+"):
        TorchTrainer(student, TrainConfig(num_steps=1, groups_per_step=1, **SETTINGS), reference_dir=teacher)
