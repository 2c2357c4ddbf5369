"""The Megatron trainer: the numbers of the torch trainer and exchangeable checkpoints, on any parallelism."""

from collections import Counter, defaultdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.learn.distribute import distribute_step
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.architectures import make_small
from tests.support.learners import CONTEXT, forked_batch, forked_turns, make_model, settings, train_forked, train_torch
from tests.support.live_bytes import LiveBytes
from tests.support.megatron import skip_without_megatron

skip_without_megatron()

RELATIVE = 1e-4
pytestmark = pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
TP2 = {"trainer": "megatron", "tensor_parallel": 2}
PP2 = {"trainer": "megatron", "pipeline_parallel": 2}


def same(mine, expected, *, steps):
    for name in ("loss", "grad_norm", "entropy"):
        assert mine[name] == pytest.approx(expected[name][steps], rel=RELATIVE, abs=1e-6), name
    assert mine["num_tokens"] == expected["num_tokens"][steps]


@pytest.mark.parametrize(("family", "tied"), [("qwen2", False), ("qwen3", True), ("llama", False)])
def test_megatron_gives_the_numbers_of_torch_and_resumes_on_another_parallelism(family, tied, tmp_path):
    model_dir = str(make_model(tmp_path / "model", family=family, tied=tied))
    expected = train_torch(SINGLE_RANK, model_dir, {"num_minibatches": 2})
    two = {"num_minibatches": 2}
    saved = run_ranks(
        2, "tests.support.learners:train_megatron", model_dir, TP2 | two, None, str(tmp_path / "tp2"), 1, 2
    )
    same(saved[0], expected, steps=slice(0, 2))
    resumed = run_ranks(
        2,
        "tests.support.learners:train_megatron",
        model_dir,
        PP2 | two,
        str(tmp_path / "tp2"),
        str(tmp_path / "pp2"),
        3,
        4,
    )
    same(resumed[0], expected, steps=slice(2, 4))
    assert resumed[0]["weights"] == resumed[1]["weights"]
    last = train_torch(SINGLE_RANK, model_dir, two, load_from=tmp_path / "pp2", first=5, last=5)
    same(last, expected, steps=slice(4, 5))
    for name, numbers in expected["weights"].items():
        assert last["weights"][name] == pytest.approx(numbers, rel=RELATIVE, abs=1e-5), name


@pytest.mark.parametrize("parallel", [TP2, PP2], ids=["tp2", "pp2"])
def test_bf16_steps_stay_near_those_of_torch(parallel, tmp_path):
    model_dir = str(make_model(tmp_path / "model"))
    changed = {"precision": "bf16", "num_minibatches": 2}
    expected = train_torch(SINGLE_RANK, model_dir, changed, last=2)
    found = run_ranks(2, "tests.support.learners:train_megatron", model_dir, parallel | changed, None, None, 1, 2)[0]
    assert found["skipped"] == [None, None]
    for name in ("entropy", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=0.05), name


@pytest.mark.parametrize("family", ["llama3", "glm4_moe"])
def test_the_norm_of_the_gradient_is_summed_in_small_parts(family, tmp_path, monkeypatch):
    from hpcrl.trainers.megatron import trainer as module

    trainer = module.MegatronTrainer(make_small(tmp_path, family), settings(trainer="megatron"), world=SINGLE_RANK)
    gradients = []
    for parameter in trainer._parameters.values():
        parameter.grad = torch.randn_like(parameter)
        gradients.append(parameter.grad.double().flatten())
    num_values = 100
    monkeypatch.setattr(module, "NORM_VALUES", num_values)
    with LiveBytes() as live:
        for parameter in trainer._parameters.values():
            live.ignore(parameter.grad)
        norm = trainer.clip_gradient()
    assert norm == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-14)
    assert live.peak < 8 * num_values + 100, "one part in double precision, and sums"
    clipped = torch.cat([parameter.grad.flatten() for parameter in trainer._parameters.values()])
    assert clipped.norm().item() == pytest.approx(trainer._train.max_grad_norm, rel=1e-4)


PLAIN = {"advantage": "dr-grpo", "proximal": "behaviour", "correction": "none", "max_grad_norm": 1e9}
FORKED = [PLAIN, PLAIN | {"aggregation": "sequence", "ratio": "sequence"}]
OWN_TURNS = [(1,), (0, 3), (2, 4), (5,)]
"""The turns of `forked_turns` by the row that trains them: what two conversations share counts in the first."""


def compute_by_turn(model_dir, episodes, changed):
    """Return the loss and the norm of its gradient from the turns themselves, each after what the model saw."""
    train, model = settings(**changed), AutoModelForCausalLM.from_pretrained(model_dir)
    rewards = defaultdict(list)
    for episode in episodes:
        rewards[episode.group].append(episode.reward)
    sequences = []
    for number, episode in enumerate(episodes):
        turns = forked_turns([1 * 3 + number // 4, number % 4])
        advantage = episode.reward - sum(rewards[episode.group]) / len(rewards[episode.group])
        for own in OWN_TURNS:
            drifts = []
            for turn in (turns[index] for index in own):
                prompt, generated = list(turn.prompt.token_ids()), turn.completion.token_ids
                logits = model(torch.tensor([[*prompt, *generated]])).logits[0, len(prompt) - 1 : -1]
                found = logits.log_softmax(-1).gather(-1, torch.tensor(generated)[:, None])[:, 0]
                drifts.append(found - torch.tensor(turn.completion.logprobs))
            sequences.append((torch.cat(drifts), advantage))
    num_tokens = sum(len(drift) for drift, _ in sequences)
    loss = torch.zeros(())
    for drift, advantage in sequences:
        ratio = (drift.mean().expand(len(drift)) if train.ratio == "sequence" else drift).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - train.clip_low, 1 + train.clip_high) * advantage)
        whole = num_tokens if train.aggregation == "token" else len(drift) * len(sequences)
        loss = loss - objective.sum() / whole
    loss.backward()
    return loss.item(), torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


@pytest.mark.parametrize("parallel", [{"trainer": "megatron"}, TP2], ids=["dp2", "tp2"])
def test_episodes_of_several_conversations_are_trained_as_their_turns_are(parallel, tmp_path):
    model_dir = str(make_model(tmp_path / "model"))
    alone = train_forked(SINGLE_RANK, model_dir, "torch", FORKED)
    for changed, expected in zip(FORKED, alone, strict=True):
        loss, norm = compute_by_turn(model_dir, forked_batch(1), changed)
        assert (expected["loss"][0], expected["grad_norm"][0]) == pytest.approx((loss, norm), rel=RELATIVE)
    variants = [parallel | changed for changed in FORKED]
    for rank in run_ranks(2, "tests.support.learners:train_forked", model_dir, "megatron", variants):
        for mine, expected in zip(rank, alone, strict=True):
            same(mine, expected, steps=slice(0, 2))
            for name, numbers in expected["weights"].items():
                assert mine["weights"][name] == pytest.approx(numbers, rel=RELATIVE, abs=1e-5), name


def test_both_ranks_get_rows_of_the_same_episodes():
    dealt = distribute_step(forked_batch(1), train=settings(), num_ranks=2, seed=0, step=1, max_length=CONTEXT)
    rows = [Counter(item.id for part in share for item in part) for share in dealt.shares]
    assert rows[0] + rows[1] == Counter({episode.id: len(OWN_TURNS) for episode in forked_batch(1)})
    assert rows[0].keys() & rows[1].keys()


@pytest.mark.parametrize("chunks", [1, 2])
def test_micro_batches_of_short_and_long_rows_keep_their_shapes(chunks, tmp_path):
    """One with many short rows is not padded to the longest row of all, nor has a long row empty rows beside it."""
    bound = 64
    plain = {"tokens_per_micro_batch": bound, "num_minibatches": 1}
    two = PP2 | plain | {"pipeline_chunks": chunks}
    for shapes in run_ranks(2, "tests.support.learners:list_shapes", str(make_model(tmp_path / "model")), two, 60):
        assert max(rows for rows, _ in shapes) > 1
        assert max(length for _, length in shapes) > bound // 2
        assert all(rows * length <= bound for rows, length in shapes)
