"""Distillation: a student moves to its teacher along its own samples, and another vocabulary is refused."""

import json
import shutil

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.campaign.model_check import check_model
from hpcrl.config.recipe import ModelConfig, PipelineNode, TeacherConfig, TinyModel, TrainConfig
from hpcrl.errors import ConfigError, TrainError
from hpcrl.models.tiny import make_tiny_model
from hpcrl.testing.model_templates import FAMILIES, save_family
from hpcrl.testing.recipes import load_recipe
from hpcrl.trainers.torch import TorchTrainer
from tests.support.learners import make_model
from tests.support.trajectories import make_trajectory

TRAIN = TrainConfig(
    num_steps=100, groups_per_step=1, learning_rate=2e-2, kl="k1", kl_in="reward", kl_coef=1.0, correction="none"
)
PROMPT = 5


def distribution(model):
    return torch.log_softmax(model(torch.tensor([[PROMPT]])).logits[0, -1].detach().double(), -1)


def sample(trainer, generator):
    """Return a group of answers of one token; all have the same reward."""
    chances = distribution(trainer._policy.module).exp()
    drawn = torch.multinomial(chances, 32, replacement=True, generator=generator)
    return [
        make_trajectory(
            f"t/0/{index}",
            turns=[],
            reward=0.0,
            token_ids=[PROMPT, int(token)],
            loss_mask=[False, True],
            logprobs=np.array([0.0, float(chances[token].log())]),
        )
        for index, token in enumerate(drawn)
    ]


def test_a_student_reaches_its_teacher_along_its_own_samples(tmp_path):
    torch.set_num_threads(1)
    student_dir, teacher_dir = make_model(tmp_path / "student"), make_model(tmp_path / "teacher", seed=1)
    trainer = TorchTrainer(student_dir, TRAIN, reference_dir=teacher_dir)
    teacher = distribution(trainer._fixed_models["reference"].causal)
    generator = torch.Generator().manual_seed(0)

    def distance():
        student = distribution(trainer._policy.module)
        return float((student.exp() * (student - teacher)).sum())

    before = distance()
    for step in range(1, 41):
        assert trainer.train_step(sample(trainer, generator), step=step, version=0).skipped is None
    assert distance() < before / 4


def test_a_teacher_of_another_size_of_vocabulary_is_refused_by_the_trainer(tmp_path):
    make_tiny_model(tmp_path / "teacher", TinyModel(), seed=0)
    with pytest.raises(TrainError, match=r"teacher\.path = .* has a vocabulary of 100 tokens, the policy one of 32"):
        TorchTrainer(make_model(tmp_path / "student"), TRAIN, reference_dir=tmp_path / "teacher")


def test_a_teacher_with_other_tokens_is_refused_at_plan(tmp_path):
    paths = [save_family(tmp_path / name, FAMILIES[name]) for name in ("Qwen2.5", "Gemma-3")]
    (paths[1] / "config.json").write_text("{}")
    recipe = msgspec.structs.replace(
        load_recipe("quickstart"),
        model=ModelConfig(path=str(paths[0])),
        teacher=TeacherConfig(path=str(paths[1])),
    )
    with pytest.raises(
        ConfigError, match=r"teacher.path = .* has another vocabulary than model.path \(\d+ and \d+ tok"
    ):
        check_model(recipe)
    nodes = {"second": PipelineNode(model=str(paths[1]), role="reference", inputs=["batches"])}
    second = msgspec.structs.replace(recipe, teacher=None, train=msgspec.structs.replace(recipe.train, pipeline=nodes))
    with pytest.raises(
        ConfigError, match=r"train\.pipeline\.second\.model = .* has another vocabulary than model\.path"
    ):
        check_model(second)
    missing = msgspec.structs.replace(recipe, teacher=TeacherConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"is not a model directory: it has no config\.json"):
        check_model(missing)


def distil(*, teacher, policy=None):
    """Check the quickstart with this teacher; its policy is tiny if it has no path."""
    recipe = msgspec.structs.replace(load_recipe("quickstart"), teacher=TeacherConfig(path=str(teacher)))
    check_model(recipe if policy is None else msgspec.structs.replace(recipe, model=ModelConfig(path=str(policy))))


def make_copy(model_dir, target, **fields):
    """Copy a model's directory with other fields in its config.json; files have rows for all of its words."""
    shutil.copytree(model_dir, target)
    stored = load_file(target / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if "vocab_size" in fields and name in stored:
            more = fields["vocab_size"] - len(stored[name])
            stored[name] = torch.nn.functional.pad(stored[name], (0, 0, 0, more))
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_bytes())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


def test_a_teacher_of_a_tiny_policy_needs_its_tokens(tmp_path, tiny_model_dir):
    distil(teacher=tiny_model_dir)
    other = save_family(tmp_path / "Qwen2.5", FAMILIES["Qwen2.5"])
    with pytest.raises(ConfigError, match=r"has another vocabulary than model\.tiny \(\d+ and 100 tokens"):
        distil(teacher=other)


def test_a_teacher_with_the_same_tokens_and_more_rows_for_them_is_refused_at_plan(tmp_path, tiny_model_dir):
    padded = make_copy(tiny_model_dir, tmp_path / "padded", vocab_size=128)
    for policy, size in ((None, 100), (make_copy(tiny_model_dir, tmp_path / "other", vocab_size=112), 112)):
        with pytest.raises(ConfigError, match=rf"vocab_size = 128 in its config\.json, the policy's is {size}"):
            distil(teacher=padded, policy=policy)


def refuse_judge(*settings):
    with pytest.raises(ConfigError) as caught:
        check_model(load_recipe("quickstart", settings=("teacher.judge=grader", *settings)))
    return str(caught.value)


def test_a_teaching_judge_with_other_tokens_is_refused_at_plan_for_tiny_models_too(tmp_path):
    other = save_family(tmp_path / "other", FAMILIES["Qwen2.5"])
    refused = refuse_judge(f"judge.grader.path={other}")
    assert "has another vocabulary than model.tiny (" in refused
    assert "and 100 tokens" in refused
    refused = refuse_judge("judge.grader.tiny={}", f"model.path={other}")
    assert "judge.grader.tiny has another vocabulary than model.path (100 and" in refused
    make_tiny_model(tmp_path / "same", TinyModel(), seed=0)
    check_model(load_recipe("quickstart", settings=("teacher.judge=grader", f"judge.grader.path={tmp_path / 'same'}")))


def test_a_teacher_whose_context_is_shorter_than_the_policys_is_refused(tmp_path):
    make_tiny_model(tmp_path / "short", TinyModel(context_length=64), seed=0)

    def load(*settings):
        return load_recipe("quickstart", settings=("model.tiny.context_length=128", *settings))

    teacher = f"teacher.path={tmp_path / 'short'}"
    for setting in (teacher, f'train.pipeline.other={{model="{tmp_path / "short"}"}}'):
        with pytest.raises(ConfigError, match=r"reads 64 tokens, by its config\.json, and trajectories may have 128"):
            check_model(load(setting))
    check_model(load(teacher, "engine.max_model_len=64"))


def test_a_teaching_judge_that_reads_fewer_tokens_than_the_policy_generates_is_refused():
    tiny = ("model.tiny.context_length=128", "judge.grader.tiny.context_length=64")
    assert "teacher.judge = 'grader' reads 64 tokens (judge.grader), and trajectories may have 128" in refuse_judge(
        *tiny
    )
    same = ("model.tiny.context_length=128", "judge.grader.tiny.context_length=128")
    assert "set engine.max_model_len to 127 or less" in refuse_judge(*same, "judge.grader.engine.backend=vllm")
    check_model(load_recipe("quickstart", settings=("teacher.judge=grader", *same)))
