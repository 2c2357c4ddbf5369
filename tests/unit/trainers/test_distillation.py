"""On-policy distillation: the student samples, a larger teacher judges each token, and no reward is given."""

import asyncio

import msgspec
import numpy as np
import pytest
import torch

from hpcrl.config.recipe import TinyModel, TrainConfig
from hpcrl.engines.embedded.batch import RunningBatch
from hpcrl.engines.embedded.engine import load_model
from hpcrl.errors import TrainError
from hpcrl.models.tiny import make_tiny_model
from hpcrl.rollout.judges.proxy import JudgeProxy
from hpcrl.rollout.teacher_scores import score_tokens
from hpcrl.spool.record import EpisodeTurn
from hpcrl.testing.learning import load_causal
from hpcrl.trainers.torch import TorchTrainer
from tests.support.served_judges import judge_host
from tests.support.trajectories import make_trajectory

LESSONS = torch.tensor([[10, 50, 60], [11, 51, 60]])
"""A prompt of one token, and the two that the teacher answers."""
SETTINGS = {"kl": "k1", "kl_in": "reward", "kl_coef": 1.0, "learning_rate": 2e-2}
SCORED = {"has_scored_reference": True}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make_student(directory):
    make_tiny_model(directory, TinyModel(hidden_size=32, num_layers=1), seed=0)
    return directory


def make_trained_teacher(directory):
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


def distil(student, teacher, *, num_steps, score=None, **changed):
    """Train the student on its own samples; return its agreement with the lessons before and after.

    `score` has an engine score them, in place of the model in `teacher`.
    """
    train = TrainConfig(num_steps=num_steps, groups_per_step=2, **{**SETTINGS, **changed})
    trainer = TorchTrainer(student, train, reference_dir=teacher, has_scored_reference=score is not None)
    generator = torch.Generator().manual_seed(0)
    before = compute_agreement(trainer._policy.module)
    for step in range(1, num_steps + 1):
        episodes = sample_episodes(trainer._policy.module, step=step, generator=generator)
        metrics = trainer.train_step(episodes if score is None else score(episodes), step=step, version=step)
        assert metrics.skipped is None
    return before, compute_agreement(trainer._policy.module)


def test_a_student_reaches_a_larger_teacher_without_any_reward(tmp_path):
    student, teacher = make_student(tmp_path / "student"), make_trained_teacher(tmp_path / "teacher")
    taught = compute_agreement(load_causal(teacher))
    before, after = distil(student, teacher, num_steps=60)
    assert taught > 0.95
    assert before < 0.01
    assert after > taught - 0.05


def add_column(episode, column):
    return msgspec.structs.replace(episode, teacher_logprobs=np.array(column, np.float32))


@pytest.fixture
def taught_engine(tmp_path):
    """Return the directory of a teacher, and a function that scores trajectories by its engine."""
    teacher = make_trained_teacher(tmp_path / "teacher")

    async def score_together(episodes):
        return await asyncio.gather(*(score_tokens(one, judge="grader") for one in episodes))

    def score(episodes):
        columns = asyncio.run(score_together(episodes))
        return [add_column(one, column) for one, column in zip(episodes, columns, strict=True)]

    with judge_host(teacher, tmp_path / "endpoints") as host, JudgeProxy({"grader": host.directory}, job=0):
        host.start()
        yield teacher, score


def test_a_student_reaches_a_teacher_that_an_engine_scores(tmp_path):
    model = load_model(make_trained_teacher(tmp_path / "teacher"), device="cpu")
    batch = RunningBatch(model, version=0, prefix_bytes=0, stored={})

    def score(episodes):
        columns = ([np.nan, *batch.compute_logprobs(one.token_ids.tolist())] for one in episodes)
        return [add_column(one, column) for one, column in zip(episodes, columns, strict=True)]

    before, after = distil(make_student(tmp_path / "student"), None, num_steps=60, score=score)
    assert before < 0.01
    assert after > compute_agreement(model) - 0.05


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("kl", [{}, {"kl": "k2", "kl_in": "loss", "num_minibatches": 2}])
def test_a_step_with_a_teachers_engine_is_that_with_its_model(tmp_path, taught_engine, rows, kl):
    teacher, score = taught_engine
    student = make_student(tmp_path / "student")
    episodes = sample_episodes(load_model(student, device="cpu"), step=1, generator=torch.Generator().manual_seed(0))
    plain = {"adam_eps": 1.0, "learning_rate": 1.0}  # near enough to the gradient itself
    train = TrainConfig(num_steps=1, groups_per_step=2, **{**SETTINGS, "rows": rows, **plain, **kl})
    node, engine = (TorchTrainer(student, train, reference_dir=teacher), TorchTrainer(student, train, **SCORED))
    found = [
        trainer.train_step(given, step=1, version=1) for trainer, given in ((node, episodes), (engine, score(episodes)))
    ]
    assert found[0].kl_reference == pytest.approx(found[1].kl_reference, rel=1e-5)
    assert abs(found[0].kl_reference) > 0.1
    for name, weight in node.tensors().items():
        torch.testing.assert_close(engine.tensors()[name], weight, atol=1e-5, rtol=0)


def test_trajectories_that_no_teacher_scored_are_refused(tmp_path):
    student = make_student(tmp_path / "student")
    trainer = TorchTrainer(student, TrainConfig(num_steps=1, groups_per_step=2, **SETTINGS), **SCORED)
    episodes = sample_episodes(trainer._policy.module, step=1, generator=torch.Generator().manual_seed(0))
    with pytest.raises(TrainError, match=r"trajectory '1-0/0' has no log-probs of teacher\.judge"):
        trainer.train_step(episodes, step=1, version=1)


def test_a_student_without_a_teacher_stays_where_it_was(tmp_path):
    before, after = distil(make_student(tmp_path / "student"), None, num_steps=5)
    assert after == pytest.approx(before, abs=0.01)


def test_a_teacher_with_another_number_of_tokens_is_refused_when_the_trainer_starts(tmp_path):
    student, teacher = make_student(tmp_path / "student"), make_trained_teacher(tmp_path / "teacher")
    config = (teacher / "config.json").read_text()
    (teacher / "config.json").write_text(config.replace('"vocab_size": ', '"vocab_size": 9'))
    with pytest.raises(TrainError, match=r"teacher\.path = .* has a vocabulary of 9\d+ tokens, the policy one of \d+"):
        TorchTrainer(student, TrainConfig(num_steps=1, groups_per_step=1, **SETTINGS), reference_dir=teacher)
