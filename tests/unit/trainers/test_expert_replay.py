"""Router replay: the engine's log-probs, the gradient of a model that is forced, and choices where there are some."""

import asyncio
from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.errors import TrainError
from hpcrl.learn.batch import make_chosen_rows, make_micro_batches, make_packed_batches, spread_credit
from hpcrl.models.expert_routers import find_routers
from hpcrl.spool.record import EpisodeTurn
from hpcrl.spool.routed_experts import join_experts, place_span
from hpcrl.testing.learning import load_causal
from hpcrl.testing.memory import MemoryStore
from hpcrl.trainers.expert_replay import ExpertReplay, check_choices
from hpcrl.trainers.token_model import TokenModel, compute_token_logprobs
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.torch_model import recompute_layers
from tests.support.families import EXPERT_FAMILIES, make_close_model, make_family_model, perturb_routers
from tests.support.learners import batch, make_model, partly_replayed_batch, replayed_batch, settings
from tests.support.trajectories import make_trajectory

CLOSE = 2e-4
PROMPTS = ([2, 45, 78, 5, 36, 3], [2, 7, 9], [2, 45, 78, 5, 36, 3, 8, 90, 12, 4, 6, 3])


def generate_all(directory):
    """Let an engine answer all prompts, and record its experts."""

    async def run():
        model = load_model(directory, device="cpu")
        async with EmbeddedEngine(model, store=MemoryStore(), records_experts=True) as engine:
            requests = [
                GenerateRequest(request_id=f"{n}", token_ids=prompt, max_new_tokens=20 + n, seed=n, experts_from=0)
                for n, prompt in enumerate(PROMPTS)
            ]
            return await asyncio.gather(*[engine.generate(request) for request in requests])

    return [make_answered(*pair) for pair in zip(PROMPTS, asyncio.run(run()), strict=True)]


def make_answered(prompt, completion):
    """Make the trajectory of one answer."""
    ids, num = [*prompt, *completion.token_ids], len(prompt)
    return make_trajectory(
        token_ids=ids,
        logprobs=[0.0] * num + completion.logprobs,
        versions=[0] * len(ids),
        loss_mask=[False] * num + [True] * (len(ids) - num),
        turns=[EpisodeTurn(start=num, end=len(ids))],
        experts=join_experts(len(ids), [place_span(span, range(len(ids))) for span in completion.experts]),
    )


def list_training_rows(trajectories):
    return [
        row
        for one in trajectories
        for row in make_chosen_rows(one, [(0, [1.0] * len(one.turns))], place_credit=spread_credit)
    ]


def replay_logprobs(model, micro, *, is_on=True):
    replay = ExpertReplay(model, is_on=is_on)
    with replay.use(micro):
        return compute_token_logprobs(TokenModel(model), micro, temperature=1.0)[0]


@pytest.fixture(scope="module", params=sorted(EXPERT_FAMILIES.keys() - {"deepseek_v3"}))  # its KV is compressed
def close_model(request, tmp_path_factory):
    return make_close_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("make", [make_micro_batches, make_packed_batches])
def test_replayed_logprobs_are_those_of_the_engine_though_the_trainer_would_choose_others(close_model, make):
    (micro,) = make(list_training_rows(generate_all(close_model)), tokens_per_micro_batch=1000)
    model = load_causal(close_model)
    perturb_routers(model)
    with torch.no_grad():
        own_N = replay_logprobs(model, micro, is_on=False)
        replayed_N = replay_logprobs(model, micro)
    torch.testing.assert_close(replayed_N, micro.behaviour_N, rtol=0, atol=CLOSE)
    assert (own_N - micro.behaviour_N).abs().max() > 100 * CLOSE


def test_rounding_in_the_trainer_has_less_effect_where_choices_are_replayed(tmp_path):
    """A trainer in bfloat16 rounds the scores of experts, and then chooses others for some tokens."""
    sizes = {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 4}
    directory = make_close_model(tmp_path, "qwen3_moe", **sizes)
    micro = make_micro_batches(list_training_rows(generate_all(directory)), tokens_per_micro_batch=1000)
    gaps = {}
    for replays in (False, True):
        trainer = TorchTrainer(directory, settings(precision="bf16", router_replay=replays), seed=1)
        ((column_N,),) = trainer.compute_logprobs([micro], model=None)
        gaps[replays] = (column_N - micro[0].behaviour_N).abs()
    assert gaps[True].max() < 0.02 < 0.05 < gaps[False].max()
    assert gaps[True].mean() < gaps[False].mean() / 5


def force_weights(router, chosen_MK, hidden):
    """Return what a router gives for these experts: the scores of all others are 0 before they are normalised."""
    hidden_MH = hidden.reshape(-1, router.weight.shape[1])
    logits_ME = hidden_MH @ router.weight.T
    has_bias = hasattr(router, "e_score_correction_bias")
    scores_ME = torch.sigmoid(logits_ME) if has_bias else torch.exp(logits_ME) / torch.exp(logits_ME).sum(1)[:, None]
    mask_ME = torch.nn.functional.one_hot(chosen_MK, router.num_experts).sum(1)
    kept_ME = scores_ME * mask_ME
    if getattr(router, "norm_topk_prob", True):
        kept_ME = kept_ME / kept_ME.sum(1)[:, None]
    kept_ME = kept_ME * getattr(router, "routed_scaling_factor", 1.0)
    return logits_ME, torch.stack([kept_ME[m, chosen] for m, chosen in enumerate(chosen_MK)]), chosen_MK


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_gradient_is_that_of_a_plain_model_whose_experts_are_forced(tmp_path, family, recomputes):
    normalised = {"norm_topk_prob": True} if family == "qwen3_moe" else {}  # as that of the hub is
    directory = make_family_model(tmp_path, family, **normalised)
    (micro,) = make_packed_batches(list_training_rows(replayed_batch(directory)[:5]), tokens_per_micro_batch=1000)
    assert (micro.experts_BTLK != 0xFF).all(), "the reference forces all tokens"
    replayed, forced, plain = (load_causal(directory) for _ in range(3))
    for layer, router in enumerate(find_routers(forced)):
        router.forward = partial(force_weights, router, micro.experts_BTLK[0, :, layer].long())
    if recomputes:
        recompute_layers(replayed)
    replay = ExpertReplay(replayed, is_on=True)
    with replay.use(micro):
        compute_token_logprobs(TokenModel(replayed), micro, temperature=1.0)[0].square().sum().backward()
    for model in (forced, plain):
        compute_token_logprobs(TokenModel(model), micro, temperature=1.0)[0].square().sum().backward()
    names = [name for name, parameter in forced.named_parameters() if parameter.grad is not None]
    assert any("gate.weight" in name for name in names)
    found, wanted, other = (dict(model.named_parameters()) for model in (replayed, forced, plain))
    for name in names:
        torch.testing.assert_close(found[name].grad, wanted[name].grad, rtol=1e-3, atol=1e-5)
    gate = next(name for name in names if "gate.weight" in name)
    assert wanted[gate].grad.abs().max() > 1e-4
    assert not torch.allclose(found[gate].grad, other[gate].grad, rtol=1e-2)


def test_tokens_without_a_choice_have_the_trainers(tmp_path):
    directory = make_family_model(tmp_path, "qwen3_moe")
    one, *others = replayed_batch(directory)[:4]
    unknown = [msgspec.structs.replace(each, experts=None) for each in others]
    model = load_causal(directory)
    with torch.no_grad():
        (mixed,) = make_micro_batches(list_training_rows([one, *unknown]), tokens_per_micro_batch=1000)
        mine_N, own_N = replay_logprobs(model, mixed), replay_logprobs(load_causal(directory), mixed, is_on=False)
        first_N = mixed.rows_N == [
            len(row) for row in sorted(list_training_rows([one, *unknown]), key=len, reverse=True)
        ].index(len(list_training_rows([one])[0]))
        assert torch.equal(mine_N[~first_N], own_N[~first_N])
        assert not torch.allclose(mine_N[first_N], own_N[first_N], atol=1e-4)
        partly = np.array(one.experts)
        partly[-20:] = 0xFF
        (cut,) = make_micro_batches(
            list_training_rows([msgspec.structs.replace(one, experts=partly)]), tokens_per_micro_batch=99
        )
        cut_N = replay_logprobs(load_causal(directory), cut)
        (whole,) = make_micro_batches(list_training_rows([one]), tokens_per_micro_batch=99)
        whole_N = replay_logprobs(load_causal(directory), whole)
        is_early = cut.mask_BT[0].nonzero()[:, 0] < len(one) - 20
        assert torch.allclose(cut_N[is_early], whole_N[is_early], atol=1e-6)
        assert not torch.allclose(cut_N[~is_early], whole_N[~is_early], atol=1e-4)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_a_step_reports_the_share_of_tokens_that_were_predicted_with_the_engines_experts(tmp_path, rows):
    directory, step = make_family_model(tmp_path, "qwen3_moe"), {"step": 1, "version": 1}
    made = partly_replayed_batch(directory)
    num_known = num_tokens = 0
    for one in made:
        trained = np.flatnonzero(one.loss_mask[1:])  # each is predicted from the token before
        num_tokens += len(trained)
        num_known += 0 if one.experts is None else int((one.experts[trained, 0, 0] != 0xFF).sum())
    assert 0 < num_known < num_tokens
    several = {"rows": rows, "num_minibatches": 2, "epochs": 2}
    trainer = TorchTrainer(directory, settings(router_replay=True, **several), seed=1)
    metrics = trainer.train_step(made, **step)
    assert metrics.num_tokens == num_tokens
    assert metrics.replayed_fraction == pytest.approx(num_known / num_tokens)
    assert trainer.train_step(batch(), **step).replayed_fraction == 0.0
    assert trainer.train_step(replayed_batch(directory), **step).replayed_fraction == 1.0
    plain = TorchTrainer(directory, settings(**several), seed=1)
    assert plain.train_step(replayed_batch(directory), **step).replayed_fraction is None


def test_a_policy_replays_and_its_reference_does_not(tmp_path):
    directory = make_family_model(tmp_path, "qwen3_moe")
    micro = make_micro_batches(list_training_rows(replayed_batch(directory)), tokens_per_micro_batch=128)
    bare = make_micro_batches(list_training_rows(batch()), tokens_per_micro_batch=128)
    for kept in ({}, {"lora_rank": 2}):  # a reference of adapters is the same model without them
        kept |= {"kl": "k3", "kl_coef": 1.0}
        on, off = (TorchTrainer(directory, settings(router_replay=each, **kept), seed=1) for each in (True, False))
        for model, replays in ((None, True), ("reference", False)):
            (with_experts,), (own,) = (trainer.compute_logprobs([micro], model=model) for trainer in (on, off))
            assert torch.allclose(torch.cat(with_experts), torch.cat(own), atol=1e-5) != replays
            (without,) = on.compute_logprobs([bare], model=model)
            torch.testing.assert_close(without, own)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_all_passes_of_a_step_replay_also_those_that_compute_layers_again(tmp_path, rows):
    """The policy hardly moves, so its ratios are 1 where the loss sees what the pass before the step saw."""
    torch.set_num_threads(1)
    directory, found = make_close_model(tmp_path, "qwen3_moe"), {}
    still = {"num_minibatches": 2, "learning_rate": 1e-12, "clip_low": 1e-4, "clip_high": 1e-4, "rows": rows}
    for name, changed in {
        "plain": {},
        "kept": {"router_replay": True, "recompute": False},
        "recomputed": {"router_replay": True, "recompute": True},
    }.items():
        trainer = TorchTrainer(directory, settings(**still, **changed), seed=1)
        found[name] = trainer.train_step(replayed_batch(directory), step=1, version=1)
        assert (found[name].skipped, found[name].clip_fraction) == (None, 0.0)
    plain, kept, recomputed = (found[name] for name in ("plain", "kept", "recomputed"))
    assert recomputed.grad_norm == pytest.approx(kept.grad_norm, rel=1e-5)
    assert recomputed.loss == pytest.approx(kept.loss, rel=1e-5)
    assert kept.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)


def test_the_experts_of_another_model_are_refused(tmp_path):
    directory = make_family_model(tmp_path / "two", "qwen3_moe")
    other = make_family_model(tmp_path / "three", "qwen3_moe", num_experts=8, num_experts_per_tok=3)
    (micro,) = make_micro_batches(list_training_rows(replayed_batch(directory)[:2]), tokens_per_micro_batch=1000)
    with pytest.raises(
        TrainError, match=r"reported 2 experts of a token in 2 layers.*the model has 3 of 8 in 2 layers"
    ):
        replay_logprobs(load_causal(other), micro)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_an_expert_that_is_chosen_twice_for_a_token_is_refused(dtype):
    none = 255 if dtype == torch.uint8 else -1
    plain = torch.tensor([[[[0, 3]], [[none, none]]]], dtype=dtype)
    check_choices(plain, num_layers=1, num_chosen=2, num_experts=4)
    with pytest.raises(TrainError, match="reported an expert twice"):
        check_choices(torch.zeros_like(plain), num_layers=1, num_chosen=2, num_experts=4)


def test_models_without_known_routers_are_refused(tmp_path):
    model = load_causal(make_model(tmp_path / "dense"))
    with pytest.raises(TrainError, match=r'not known to be right for a model of type "qwen2": only for deepseek_v3'):
        ExpertReplay(model, is_on=True)
    ExpertReplay(model, is_on=False)
