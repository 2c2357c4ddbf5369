"""The warm-up: what its steps train on, how far it learns, and that a resumed one ends with the same weights."""

import json
import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import TeacherConfig, WarmupConfig
from hpcrl.envs.task_set import check_conversations, import_conversations
from hpcrl.errors import ConfigError, PlanError
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.learn.distribute import ShareItem
from hpcrl.models.tiny import make_tiny_model
from hpcrl.plan.checks import check_recipe
from hpcrl.roles.warmup import WarmupData
from hpcrl.testing.learning import load_checkpoint, save_checkpoint
from hpcrl.trainers.torch import TorchTrainer
from tests.support.chats import make_chat
from tests.support.plans import make_recipe


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


CHAT = make_chat("a", "b")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare(tmp_path, rows, *, settings=(), **warmup):
    """Return a recipe, its model directory, and the data of its warm-up."""
    path = write_rows(tmp_path / "rows.jsonl", rows)
    recipe = make_recipe("train.num_steps=1000", *settings)
    recipe = msgspec.structs.replace(recipe, warmup=WarmupConfig(path=path, **{"steps": 900, **warmup}))
    campaign = CampaignDir(tmp_path / "campaign")
    campaign.warmup.mkdir(parents=True)
    import_conversations(recipe.warmup, directory=campaign.warmup)
    make_tiny_model(campaign.model, recipe.model.tiny, seed=0)
    return recipe, campaign, WarmupData(campaign, recipe, recipe.warmup)


def run_steps(trainer, data, steps):
    return [trainer.train_step(data.choose(step), step=step, version=0, train=data.train) for step in steps]


def test_an_epoch_has_each_conversation_once_and_the_next_has_another_order(tmp_path):
    rows = [make_chat(f"{n}", "ok") for n in range(10)]
    _, _, data = prepare(tmp_path, rows, conversations_per_step=5)
    epochs = [[one.token_ids[1] for step in (first, first + 1) for one in data.choose(step)] for first in (1, 3)]
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert len(set(epochs[0])) == 10
    assert epochs[0] != epochs[1]


def test_ranks_read_what_the_leader_chose(tmp_path):
    _, _, data = prepare(tmp_path, [make_chat(f"{n}", "ok") for n in range(10)], conversations_per_step=4)
    chosen = data.choose(7)
    fetched = data.fetch([ShareItem(id=one.id, credit=[1.0]) for one in reversed(chosen)])
    assert [one.token_ids.tolist() for one in reversed(fetched)] == [one.token_ids.tolist() for one in chosen]


def test_the_first_loss_is_the_cross_entropy_of_the_answers_alone(tmp_path):
    settings = ("rollout.temperature=0.5", "train.kl=k3", "train.entropy_coef=0.1", "train.advantage=gae")
    recipe, campaign, data = prepare(tmp_path, [make_chat("ab", "cd")], settings=settings, conversations_per_step=2)
    trainer = TorchTrainer(campaign.model, recipe.train, temperature=recipe.rollout.temperature)
    (metrics,) = run_steps(trainer, data, [1])
    (one, _) = data.choose(1)
    model = AutoModelForCausalLM.from_pretrained(campaign.model, dtype=torch.float32)
    ids = torch.from_numpy(one.token_ids.astype(np.int64))
    logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
    expected = -logprobs[torch.from_numpy(one.loss_mask[1:])].mean()
    assert metrics.loss == pytest.approx(expected.item(), rel=1e-5)
    assert metrics.num_tokens == 2 * len("cd ")  # with the token that ends the answer
    assert metrics.value_loss is None


def test_the_loss_falls_to_the_entropy_of_the_data(tmp_path):
    rows = [make_chat("coin?", "h"), make_chat("coin?", "h"), make_chat("coin?", "h"), make_chat("coin?", "t")]
    recipe, campaign, data = prepare(
        tmp_path, rows, conversations_per_step=4, learning_rate=1e-2, settings=("train.learning_rate=1e-9",)
    )
    trainer = TorchTrainer(campaign.model, recipe.train)
    losses = [metrics.loss for metrics in run_steps(trainer, data, range(1, 31))]
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / 2  # the other token of each answer is certain
    assert losses[0] > 4
    assert losses[-1] == pytest.approx(entropy, abs=0.01)
    assert min(losses) > entropy - 1e-4


def test_a_warm_up_resumed_in_the_middle_ends_with_the_same_bits(tmp_path):
    rows = [make_chat(f"{n}+1=", f"{n + 1}") for n in range(9)]
    recipe, campaign, data = prepare(tmp_path, rows, conversations_per_step=2)
    whole, first = (TorchTrainer(campaign.model, recipe.train) for _ in range(2))
    run_steps(whole, data, range(1, 7))
    run_steps(first, data, range(1, 4))
    saved = save_checkpoint(campaign.checkpoints, step=3, version=0, trainer=first, consumed=ConsumedTrajectories())
    second = TorchTrainer(campaign.model, recipe.train)
    load_checkpoint(saved, trainer=second)
    run_steps(second, WarmupData(campaign, recipe, recipe.warmup), range(4, 7))
    expected = whole.tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in second.tensors().items())


def test_reinforcement_learning_has_the_recipes_settings_again_after_the_warm_up(tmp_path):
    recipe, campaign, data = prepare(
        tmp_path, [make_chat("a", "b")], settings=("train.kl=k3",), conversations_per_step=2
    )
    trainer = TorchTrainer(campaign.model, recipe.train)
    run_steps(trainer, data, [1])
    episodes = [msgspec.structs.replace(one, reward=float(n)) for n, one in enumerate(data.choose(2))]
    metrics = trainer.train_step(episodes, step=2, version=0)
    assert metrics.kl_reference != 0
    assert metrics.learning_rate == recipe.train.learning_rate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "warmup.path = .* has no rows"),
        ('{"messages": [}\n', "line 1 is not a JSON object"),
        (json.dumps(CHAT) + '\n{"text": "a"}\n', "line 2: it has no `messages`, only text"),
        (
            json.dumps(CHAT) + "\n\n" + json.dumps(make_chat("a", "")) + "\n",
            r"line 3: messages\[1\] is an assist",
        ),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_file_and_line(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        check_conversations(WarmupConfig(path=str(path), steps=1))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_parquet_is_read_like_lines(tmp_path):
    import pyarrow as pa  # noqa: TID251
    import pyarrow.parquet as pq  # noqa: TID251

    pq.write_table(pa.Table.from_pylist([make_chat("a", "b"), make_chat("c", "d")]), path := tmp_path / "rows.parquet")
    assert check_conversations(WarmupConfig(path=str(path), steps=1)) == 2
    pq.write_table(pa.Table.from_pylist([{"text": "a"}]), path)
    with pytest.raises(ConfigError, match="row 0: it has no `messages`, only text"):
        check_conversations(WarmupConfig(path=str(path), steps=1))


@pytest.mark.parametrize(
    ("warmup", "message"),
    [
        ({"steps": 31}, "warmup.steps = 31 are more than train.num_steps = 30"),
        ({"steps": 1, "conversations_per_step": 1}, "conversations_per_step = 1 for 2 ranks: raise it to 2"),
    ],
)
def test_a_warm_up_that_does_not_fit_is_refused(warmup, message):
    settings = ("train.num_steps=30", "resources.train.num_workers=2")
    recipe = make_recipe(*settings)
    with pytest.raises(PlanError, match=message):
        check_recipe(msgspec.structs.replace(recipe, warmup=WarmupConfig(path="x.jsonl", **warmup)))


def test_a_teacher_without_a_kl_is_refused():
    recipe = msgspec.structs.replace(make_recipe(), teacher=TeacherConfig(path="/models/teacher"))
    with pytest.raises(PlanError, match=r'teacher is set and train\.kl is "none"'):
        check_recipe(recipe)


def test_a_teacher_and_another_model_of_the_reference_are_refused():
    recipe = make_recipe("train.kl=k3", "train.pipeline.reference.model=/models/first")
    with pytest.raises(PlanError, match=r"teacher\.path and train\.pipeline\.reference\.model both set the model"):
        check_recipe(msgspec.structs.replace(recipe, teacher=TeacherConfig(path="/models/teacher")))
