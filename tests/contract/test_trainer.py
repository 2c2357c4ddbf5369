"""The contract of every Trainer; an implementation added to MAKERS is tested like the others."""

import json

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hpcrl.config.pipeline import PipelineNode
from hpcrl.config.recipe import TrainConfig
from hpcrl.errors import TrainError
from hpcrl.trainers.base import StepAbandonedError
from hpcrl.trainers.memory_error import StepMemoryError
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.memory_losses import LIMIT_VARIABLE
from tests.support.trajectories import make_random_trajectory


def packed(model_dir, train, **options):
    return TorchTrainer(model_dir, msgspec.structs.replace(train, rows="packed"), **options)


def megatron(model_dir, train, **options):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from hpcrl.trainers.megatron.trainer import MegatronTrainer

    return MegatronTrainer(model_dir, msgspec.structs.replace(train, trainer="megatron"), world=SINGLE_RANK, **options)


MAKERS = {"torch": TorchTrainer, "packed": packed, "megatron": megatron}
VOCABULARY = 32
CONTEXT = 64


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_dir(request, tmp_path_factory):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=request.param,
    )
    directory = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(params=MAKERS.values(), ids=MAKERS)
def make(request, model_dir):
    def made(*, temperature=1.0, has_scored_reference=False, **changed):
        settings = {"num_steps": 9, "groups_per_step": 2, "learning_rate": 1e-2, "tokens_per_micro_batch": 128}
        more = {"temperature": temperature, "has_scored_reference": has_scored_reference}
        return request.param(model_dir, TrainConfig(**{**settings, **changed}), seed=3, **more)

    return made


def trajectory(group, index, **given):
    return make_random_trajectory(f"{group}/{index}", vocabulary=VOCABULARY, **{"turns": [], **given})


def batch(seed=0):
    """Make two groups of four episodes of different lengths, half of each rewarded."""
    return [
        trajectory(f"math/{number}", index, reward=float(index % 2), seed=seed + number, length=12 + 7 * index)
        for number in range(2)
        for index in range(4)
    ]


def copied(trainer):
    return {name: tensor.clone() for name, tensor in trainer.tensors().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def slow_logprob(trainer, model_dir, episode):
    """Sum the model tokens' log-probs with transformers alone, one forward pass per token."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.load_state_dict(trainer.tensors(), strict=False)
    total = 0.0
    with torch.no_grad():
        for position in np.flatnonzero(episode.loss_mask):
            past = torch.from_numpy(episode.token_ids[:position].astype(np.int64))[None]
            total += model(past).logits[0, -1].log_softmax(-1)[int(episode.token_ids[position])].item()
    return total


def test_a_step_makes_rewarded_tokens_likelier_and_the_others_less_likely(make, model_dir):
    trainer = make(learning_rate=1e-3)
    good, bad = trajectory("math/0", 0, reward=1.0), trajectory("math/0", 1, reward=0.0)
    before = [slow_logprob(trainer, model_dir, episode) for episode in (good, bad)]
    trainer.train_step([good, bad], step=1, version=1)
    after = [slow_logprob(trainer, model_dir, episode) for episode in (good, bad)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_the_tensors_have_the_names_shapes_and_values_of_the_model_directory(make, model_dir):
    assert same(make().tensors(), load_file(model_dir / "model.safetensors"))


def test_the_same_steps_give_the_same_bits(make):
    first, second = make(num_minibatches=3), make(num_minibatches=3)
    for step in range(3):
        for trainer in (first, second):
            trainer.train_step(batch(step), step=step, version=step)
    assert same(first.tensors(), second.tensors())


def test_a_loaded_trainer_continues_like_the_saved_one(make, tmp_path):
    saved, loaded = make(num_minibatches=2), make(num_minibatches=2)
    saved.train_step(batch(0), step=0, version=0)
    saved.snapshot().write(tmp_path)
    loaded.load(tmp_path)
    metrics = []
    for trainer in (saved, loaded):
        steps = [trainer.train_step(batch(step), step=step, version=step) for step in (1, 2)]
        metrics.append([msgspec.structs.replace(step, step_s=0.0, times={}, tokens_per_s=0.0) for step in steps])
    assert metrics[0] == metrics[1]
    assert same(saved.tensors(), loaded.tensors())


def test_a_restarted_optimizer_makes_its_first_step_again(make, tmp_path):
    old, new = make(learning_rate=1e-3), make(learning_rate=1e-3)
    for step in range(5):  # without a gradient: the moments stay zero while their steps are counted
        old.train_step([trajectory("a", index, reward=1.0) for index in range(2)], step=step, version=step)
    old.restart_optimizer()
    old.snapshot().write(tmp_path)
    new.load(tmp_path)
    before = copied(old)
    for trainer in (old, new):
        trainer.train_step(batch(0), step=5, version=5)
    after = old.tensors()
    moved = max((after[name] - before[name]).abs().max().item() for name in before)
    assert moved == pytest.approx(1e-3, rel=1e-2)  # AdamW's first step, however large the gradient is
    assert same(after, new.tensors())


def test_an_untrained_trainer_can_be_saved_and_loaded(make, tmp_path):
    saved, loaded = make(), make()
    saved.snapshot().write(tmp_path)
    loaded.train_step(batch(5), step=0, version=0)
    loaded.load(tmp_path)
    for trainer in (saved, loaded):
        trainer.train_step(batch(0), step=0, version=0)
    assert same(saved.tensors(), loaded.tensors())


@pytest.mark.parametrize("num_minibatches", [1, 3])
@pytest.mark.parametrize("poison", [{"reward": float("nan")}, {"logprobs": np.full(20, np.nan, dtype=np.float32)}])
def test_a_step_that_is_not_finite_is_skipped_with_its_reason_and_changes_nothing(make, poison, num_minibatches):
    poisoned, clean = make(num_minibatches=num_minibatches), make(num_minibatches=num_minibatches)
    before = copied(poisoned)
    bad = [trajectory("math/9", 0, reward=1.0), trajectory("math/9", 1, **{"reward": 0.0, **poison})]
    metrics = poisoned.train_step(batch() + bad, step=1, version=1)
    assert "not finite" in metrics.skipped
    assert metrics.loss is None
    assert same(before, poisoned.tensors())
    for trainer in (poisoned, clean):  # neither the optimizer nor a leftover gradient keeps a trace of it
        assert trainer.train_step(batch(), step=2, version=1).skipped is None
    assert same(poisoned.tensors(), clean.tensors())


def test_weights_without_a_finite_loss_are_left_as_they_are(make):
    trainer = make(learning_rate=1e30)
    trainer.train_step(batch(), step=1, version=1)
    before = copied(trainer)
    metrics = trainer.train_step(batch(), step=2, version=2)
    assert "is not finite" in metrics.skipped
    assert metrics.grad_norm is None
    assert same(before, trainer.tensors())


@pytest.mark.parametrize("nothing", [[], [trajectory("math/0", 0, reward=1.0, loss_mask=np.zeros(20, dtype=np.bool_))]])
def test_a_step_without_model_tokens_is_skipped(make, nothing):
    trainer = make()
    before = copied(trainer)
    assert trainer.train_step(nothing, step=1, version=1).skipped == "no trainable tokens"
    assert same(before, trainer.tensors())


@pytest.mark.parametrize(("length", "num_too_long"), [(CONTEXT + 1, 0), (CONTEXT + 2, 1)])
def test_a_trajectory_longer_than_the_context_is_left_out_and_counted(make, length, num_too_long):
    long, short = trajectory("math/9", 0, reward=1.0, length=length), trajectory("math/9", 1, reward=0.0)
    metrics = make().train_step([long, short], step=1, version=1)
    assert metrics.skipped is None
    assert metrics.num_too_long == num_too_long
    assert metrics.num_tokens == short.loss_mask.sum() + (0 if num_too_long else long.loss_mask.sum())


def test_rows_longer_than_the_memory_allows_are_left_out_and_the_others_keep_their_advantages(make):
    episodes = batch()
    trainer, whole = make(max_row_tokens=30), make()
    metrics = trainer.train_step(episodes, step=1, version=1)
    long = [one for one in episodes if len(one) == 33]
    assert (metrics.num_too_long, metrics.too_long_tokens) == (2, {"math": sum(one.loss_mask.sum() for one in long)})
    assert metrics.num_rows == 6
    assert metrics.reward_mean == whole.train_step(episodes, step=1, version=1).reward_mean
    assert not same(trainer.tensors(), whole.tensors())


def test_a_step_that_is_abandoned_leaves_all_as_before_it(make):
    trainer, other = make(tokens_per_micro_batch=40), make(tokens_per_micro_batch=40)
    for one in (trainer, other):
        one.train_step(batch(), step=1, version=1)
    answers = [] if hasattr(trainer, "_run_schedule") else [False]  # a schedule of stages is not interrupted
    with pytest.raises(StepAbandonedError, match=r"^step 2 was abandoned"):
        trainer.train_step(batch(1), step=2, version=2, must_abandon=lambda: not answers or answers.pop())
    assert same(trainer.tensors(), other.tensors())
    for one in (trainer, other):
        one.train_step(batch(2), step=2, version=2)
    assert same(trainer.tensors(), other.tensors()), "neither its gradient nor the state of the optimizer has changed"


def test_a_step_that_has_changed_the_weights_is_completed(make):
    trainer, updates = make(epochs=2), []
    apply = trainer.apply_gradient
    trainer.apply_gradient = lambda **options: updates.append(apply(**options))
    assert trainer.train_step(batch(), step=1, version=1, must_abandon=lambda: bool(updates)).skipped is None
    assert len(updates) == 2


def test_a_step_that_runs_out_of_memory_names_its_micro_batch_and_can_be_made_again(make, monkeypatch):
    nodes = {"loss": PipelineNode(function="tests.support.memory_losses:raise_above")}
    trainer, other = make(pipeline=nodes), make(pipeline=nodes)
    monkeypatch.setenv(LIMIT_VARIABLE, "1000")
    for one in (trainer, other):
        one.train_step(batch(), step=1, version=1)
    monkeypatch.setenv(LIMIT_VARIABLE, "7")
    with pytest.raises(StepMemoryError, match="CUDA out of memory") as caught:
        trainer.train_step(batch(1), step=2, version=2)
    error = caught.value
    assert error.step == 2
    assert 1 <= error.num_rows <= 8
    assert 12 <= error.num_tokens <= error.fitting_tokens <= 8 * 33
    trainer.discard_gradient()
    monkeypatch.setenv(LIMIT_VARIABLE, "1000")
    for one in (trainer, other):
        one.train_step(batch(1), step=2, version=2)
    assert same(trainer.tensors(), other.tensors())


def bare_step(model_dir, episodes, *, learning_rate, temperature):
    """Make one step of GRPO with truncated importance sampling, without padding, batching or hpcrl."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    num_tokens = sum(int(episode.loss_mask.sum()) for episode in episodes)
    total = 0.0
    for episode in episodes:
        peers = [other.reward for other in episodes if other.group == episode.group]
        advantage = (episode.reward - np.mean(peers)) / np.std(peers, ddof=1)
        tokens = torch.from_numpy(episode.token_ids.astype(np.int64))
        logprobs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
        for position in np.flatnonzero(episode.loss_mask):
            logprob = logprobs[position - 1, tokens[position]]
            weight = min(float((logprob.detach() - episode.logprobs[position]).exp()), 2.0)
            total = total - weight * advantage * (logprob - logprob.detach()).exp() / num_tokens
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return dict(model.named_parameters()), total.item(), norm.item()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_step_agrees_with_a_bare_loop(make, model_dir, temperature):
    trainer = make(temperature=temperature, learning_rate=1e-2)
    metrics = trainer.train_step(batch(), step=1, version=1)
    weights, loss, norm = bare_step(model_dir, batch(), learning_rate=1e-2, temperature=temperature)
    assert metrics.loss == pytest.approx(loss, abs=1e-5)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)
    for name, tensor in trainer.tensors().items():
        torch.testing.assert_close(tensor, weights[name].detach(), atol=2e-4, rtol=0, msg=name)


def test_the_split_into_micro_batches_does_not_matter(make):
    small, large = make(tokens_per_micro_batch=1), make(tokens_per_micro_batch=100_000)
    for trainer in (small, large):
        trainer.train_step(batch(), step=1, version=1)
    for name, tensor in small.tensors().items():
        torch.testing.assert_close(tensor, large.tensors()[name], atol=2e-4, rtol=0, msg=name)


def test_the_clip_acts_once_the_policy_moves_within_a_step(make):
    still, moving = make(num_minibatches=1, learning_rate=0.1), make(num_minibatches=8, learning_rate=0.1)
    assert still.train_step(batch(), step=1, version=1).clip_fraction == 0
    assert moving.train_step(batch(), step=1, version=1).clip_fraction > 0


def test_tokens_outside_the_vocabulary_are_refused(make):
    foreign = trajectory("math/0", 0, reward=1.0, token_ids=np.full(20, VOCABULARY, dtype=np.int32))
    with pytest.raises(TrainError, match=r"'math/0/0' has token ids from 32 to 32, the model has 0 to 31"):
        make().train_step([foreign], step=1, version=1)


def test_an_unscored_trajectory_is_refused(make):
    with pytest.raises(TrainError, match="has no reward"):
        make().train_step([trajectory("math/0", 0, reward=None)], step=1, version=1)


def test_the_metrics_report_the_trajectories(make):
    episodes = [*batch(), trajectory("math/7", 0, reward=0.5), trajectory("math/7", 1, reward=0.5)]
    metrics = make().train_step(episodes, step=4, version=3)
    assert (metrics.step, metrics.version, metrics.skipped) == (4, 3, None)
    assert (metrics.num_trajectories, metrics.num_groups, metrics.num_flat_groups) == (10, 3, 1)
    assert metrics.num_tokens == sum(int(episode.loss_mask.sum()) for episode in episodes)
    assert metrics.num_padded_tokens >= sum(len(episode) - 1 for episode in episodes)
    assert (metrics.reward_mean, metrics.reward_std) == (0.5, pytest.approx(np.sqrt(0.2)))
    assert (metrics.lag_mean, metrics.lag_max) == (2, 2)
    assert metrics.entropy == pytest.approx(np.log(VOCABULARY), rel=0.05)
    assert metrics.is_ratio_mean == pytest.approx(1.0, abs=0.2)
    assert json.loads(json.dumps(msgspec.to_builtins(metrics), allow_nan=False))["step"] == 4


def test_the_metrics_of_a_skipped_step_are_plain_json_too(make):
    metrics = make().train_step([trajectory("math/0", 0, reward=float("nan"))], step=1, version=1)
    assert json.loads(json.dumps(msgspec.to_builtins(metrics), allow_nan=False))["reward_mean"] is None


def test_a_checkpoint_of_another_model_is_refused(make, tmp_path):
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "other")
    (tmp_path / "saved").mkdir()
    other = TorchTrainer(tmp_path / "other", TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0))
    other.snapshot().write(tmp_path / "saved")
    with pytest.raises(TrainError, match="resume with the model that the campaign started from"):
        make().load(tmp_path / "saved")


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(TrainError, match="cannot be loaded"):
        TorchTrainer(tmp_path, TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0))


@pytest.fixture
def compute_logprobs(model_dir):
    """Return the function of an episode that computes the log-probs of its tokens under the model."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def compute(episode):
        ids_1T = torch.from_numpy(episode.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids_1T, use_cache=False).logits[0, :-1], -1)
        column = np.full(len(episode), np.nan, np.float32)
        column[1:] = logprobs.gather(1, ids_1T[0, 1:, None])[:, 0].numpy()
        return column

    return compute


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_the_kl_of_tokens_without_lag_has_neither_lag_nor_updates_in_it(make, compute_logprobs, num_minibatches):
    trainer, drift = make(num_minibatches=num_minibatches, learning_rate=0.5), {5: -0.2, 4: 1.5}
    episodes = []
    for episode in batch():
        versions = np.where(np.arange(len(episode)) < len(episode) // 2, 4, 5).astype(np.int32)  # a turn of each
        logprobs = compute_logprobs(episode) - np.where(versions == 5, drift[5], drift[4])
        logprobs = np.where(episode.loss_mask, logprobs, 0.0).astype(np.float32)
        episodes.append(msgspec.structs.replace(episode, versions=versions, logprobs=logprobs))
    expected = {version: np.exp(value) - 1 - value for version, value in drift.items()}
    metrics = trainer.train_step(episodes, step=1, version=5)
    assert metrics.kl_fresh == pytest.approx(expected[5], rel=1e-3)
    assert metrics.kl > 5 * expected[5]
    assert trainer.train_step(episodes, step=2, version=6).kl_fresh is None


@pytest.mark.parametrize("changed", [{"kl": "k1", "kl_in": "reward"}, {"kl": "k2", "num_minibatches": 2}])
def test_scored_log_probs_take_the_place_of_the_models_of_the_reference(make, compute_logprobs, changed):
    def score(episode):
        column = np.where(episode.loss_mask, compute_logprobs(episode), np.float32(np.nan))
        return msgspec.structs.replace(episode, teacher_logprobs=column)

    settings = {"kl_coef": 1.0, "adam_eps": 1.0, "learning_rate": 1.0, **changed}
    first, second = make(**settings), make(**settings, has_scored_reference=True)
    for step in (1, 2):
        found = first.train_step(batch(), step=step, version=1)
        scored = second.train_step([score(episode) for episode in batch()], step=step, version=1)
        assert scored.kl_reference == pytest.approx(found.kl_reference, abs=1e-5)
    assert found.kl_reference != 0
    for name, weight in first.tensors().items():
        torch.testing.assert_close(second.tensors()[name], weight, atol=1e-5, rtol=0)
