"""The policy loss, compared with a slow reference: plain Python floats, one token at a time."""

import math

import numpy as np
import pytest
import torch

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.loss import (
    LossSums,
    TokenInputs,
    compute_entropies,
    compute_log_distribution,
    compute_policy_loss,
    compute_ratio_quantiles,
    compute_token_shares,
    compute_value_loss,
    estimate_kl,
    gather_logprobs,
    logprobs_and_entropy,
)

LENGTHS = (20, 1, 13, 30)
ROWS = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
N = sum(LENGTHS)
PLAIN = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "max_is_ratio": 1.5,
    "min_is_ratio": 0.7,
    "entropy_coef": 0.01,
    "kl_coef": 0.05,
}
VARIANTS = {
    "token ratio, truncated per token": {},
    "no correction": {"correction": "none"},
    "truncated per sequence": {"correction": "sequence"},
    "masked per token": {"correction": "mask-token"},
    "masked per sequence": {"correction": "mask-sequence", "max_is_ratio": 50.0, "min_is_ratio": 0.02},
    "truncated geometric mean": {"correction": "geometric", "max_is_ratio": 1.02},
    "masked geometric mean": {"correction": "mask-geometric", "max_is_ratio": 1.1, "min_is_ratio": 0.95},
    "dual clip": {"dual_clip": 1.3},
    "GSPO": {"ratio": "sequence", "aggregation": "sequence", "clip_low": 0.005, "clip_high": 0.005},
    "GSPO with dual clip": {"ratio": "sequence", "dual_clip": 1.01, "clip_low": 0.01, "clip_high": 0.01},
    "sequences count the same": {"aggregation": "sequence"},
    "divided by a constant": {"aggregation": "fixed"},
    "k2 to a reference": {"kl": "k2"},
    "k3 to a reference": {"kl": "k3"},
    "k3 under masks": {"kl": "k3", "correction": "mask-geometric", "max_is_ratio": 1.1, "min_is_ratio": 0.9},
}


def settings(**changed):
    return TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0, **{**PLAIN, **changed})


def slow_logprobs(logits, targets, temperature):
    """Compute log-probs of the targets and entropies by the definition of softmax."""
    logprobs, entropy = [], []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        weights = [math.exp(value / temperature) for value in row]
        probabilities = [weight / sum(weights) for weight in weights]
        logprobs.append(math.log(probabilities[target]))
        entropy.append(-sum(p * math.log(p) for p in probabilities))
    return logprobs, entropy


def slow_kl(current, reference, estimator):
    ratio = math.exp(reference - current)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[estimator]


def slow_kl_weight(tokens, index, train):
    """Return the weight of a token's KL."""
    row = [i for i in range(N) if ROWS[i] == ROWS[index]] if train.correction.endswith("sequence") else [index]
    ratio = math.prod(math.exp(tokens["now"][i] - tokens["behaviour"][i]) for i in row)
    return min(ratio, max(train.max_is_ratio, 10))


def slow_weight(tokens, index, train):
    """Return the importance weight of one token, and whether it differs from the ratio."""
    row = [index] if train.correction.endswith("token") else [i for i in range(N) if ROWS[i] == ROWS[index]]
    ratio = math.prod(math.exp(tokens["proximal"][i] - tokens["behaviour"][i]) for i in row)
    if train.correction.endswith("geometric"):
        ratio = ratio ** (1 / len(row))
    if train.correction == "none":
        return 1.0, False
    if train.correction.startswith("mask"):
        outside = not train.min_is_ratio <= ratio <= train.max_is_ratio
        return (0.0 if outside else ratio), outside
    return min(ratio, train.max_is_ratio), ratio > train.max_is_ratio


def slow_share(index, train):
    length = LENGTHS[int(ROWS[index])]
    return {
        "token": 1 / N,
        "sequence": 1 / (len(LENGTHS) * length),
        "fixed": 1 / (len(LENGTHS) * 100),
    }[train.aggregation]


def slow_loss(tokens, train):
    """Compute the loss by its formula, with the numbers of clipped and truncated tokens."""
    total, clipped, truncated = 0.0, 0, 0
    for index in range(N):
        advantage = tokens["advantages"][index]
        row = [i for i in range(N) if ROWS[i] == ROWS[index]] if train.ratio == "sequence" else [index]
        ratio = math.exp(sum(tokens["current"][i] - tokens["proximal"][i] for i in row) / len(row))
        bounded = min(max(ratio, 1 - train.clip_low), 1 + train.clip_high)
        surrogate = min(ratio * advantage, bounded * advantage)
        stopped = bounded * advantage < ratio * advantage
        if train.dual_clip is not None and advantage < 0 and surrogate < train.dual_clip * advantage:
            surrogate, stopped = train.dual_clip * advantage, True
        weight, cut = slow_weight(tokens, index, train)
        term = -weight * surrogate - train.entropy_coef * tokens["entropy"][index]
        if train.kl != "none":
            weight = slow_kl_weight(tokens, index, train)
            term += train.kl_coef * weight * slow_kl(tokens["current"][index], tokens["reference"][index], train.kl)
        total += slow_share(index, train) * term
        clipped += stopped
        truncated += cut
    return total, clipped, truncated


@pytest.fixture(params=range(3))
def tokens(request):
    """Return random log-probs of 64 tokens in four rows under four policies that differ."""
    generator = torch.Generator().manual_seed(request.param)

    def near(center, distance):
        return center + distance * torch.randn(N, generator=generator, dtype=torch.float64)

    behaviour = -3 * torch.rand(N, generator=generator, dtype=torch.float64)
    proximal = near(behaviour, 0.4)
    current = near(proximal, 0.3)
    return {
        "behaviour": behaviour,
        "proximal": proximal,
        "current": current,
        "now": current.clone(),  # the current policy as a constant
        "reference": near(behaviour, 0.5),
        "advantages": torch.randn(N, generator=generator, dtype=torch.float64),
        "fresh": torch.rand(N, generator=generator) < 0.5,
        "entropy": 2 * torch.rand(N, generator=generator, dtype=torch.float64),
    }


def shares(train, *, rows=ROWS):
    return compute_token_shares(
        rows, aggregation=train.aggregation, num_tokens=N, num_sequences=len(LENGTHS), budget=100
    ).double()


def loss_of(tokens, train, *, part=slice(None)):
    cut = {name: column[part] for name, column in tokens.items()}
    rows = ROWS[part] - int(ROWS[part][0])
    token_inputs = TokenInputs(
        behaviour_N=cut["behaviour"],
        proximal_N=cut["proximal"],
        advantages_N=cut["advantages"],
        rows_N=rows,
        shares_N=shares(train, rows=rows),
        reference_N=None if train.kl == "none" else cut["reference"],
        fresh_N=cut["fresh"],
    )
    return compute_policy_loss(cut["current"], entropy_N=cut["entropy"], token_inputs=token_inputs, train=train)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_and_entropies_agree_with_the_definition(temperature):
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(20, 11, generator=generator)
    targets = torch.randint(11, (20,), generator=generator)
    logprobs_NV = compute_log_distribution(logits, temperature=temperature)
    expected_logprobs, expected_entropy = slow_logprobs(logits, targets, temperature)
    np.testing.assert_allclose(gather_logprobs(logprobs_NV, targets), expected_logprobs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(compute_entropies(logprobs_NV), expected_entropy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_loss_and_its_sums_agree_with_the_slow_reference(tokens, variant):
    train = settings(**variant)
    loss, sums = loss_of(tokens, train)
    total, clipped, truncated = slow_loss({name: column.tolist() for name, column in tokens.items()}, train)
    assert loss.item() == pytest.approx(total, rel=1e-6)
    assert (sums.clipped.item(), sums.truncated.item()) == (clipped, truncated)
    is_ratio = sum(math.exp(p - b) for p, b in zip(tokens["proximal"], tokens["behaviour"], strict=True))
    assert sums.is_ratio.item() == pytest.approx(is_ratio)
    assert sums.entropy.item() == pytest.approx(tokens["entropy"].sum().item())


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_gradient_agrees_with_finite_differences_of_the_slow_reference(tokens, variant):
    train = settings(**variant)
    tokens["current"].requires_grad_()
    loss_of(tokens, train)[0].backward()
    plain = {name: column.detach().tolist() for name, column in tokens.items()}
    for index in range(0, N, 7):
        sides = []
        for nudge in (1e-6, -1e-6):
            nudged = [value + nudge * (i == index) for i, value in enumerate(plain["current"])]
            sides.append(slow_loss({**plain, "current": nudged}, train)[0])
        assert tokens["current"].grad[index].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("variant", [VARIANTS["dual clip"], VARIANTS["masked per token"], VARIANTS["GSPO"]])
def test_the_random_tokens_are_clipped_and_truncated(tokens, variant):
    _, sums = loss_of(tokens, settings(**variant))
    assert sums.clipped > 0
    assert sums.truncated > 0


def test_a_higher_clip_lets_good_tokens_grow_further_and_bad_ones_shrink_no_further(tokens):
    narrow, wide = (loss_of(tokens, settings(clip_high=high, entropy_coef=0.0))[1] for high in (0.2, 0.6))
    assert wide.clipped < narrow.clipped
    tokens["advantages"] = -tokens["advantages"].abs()
    narrow, wide = (loss_of(tokens, settings(clip_high=high, entropy_coef=0.0))[0] for high in (0.2, 0.6))
    assert wide == narrow


def test_no_gradient_flows_through_the_importance_weight(tokens):
    tokens["current"].requires_grad_()
    loss_of({**tokens, "proximal": tokens["current"]}, settings(entropy_coef=0.0))[0].backward()
    weight = (tokens["current"].detach() - tokens["behaviour"]).exp().clamp(max=PLAIN["max_is_ratio"])
    torch.testing.assert_close(tokens["current"].grad, -weight * tokens["advantages"] / N, rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_micro_batches_add_up_to_the_whole(tokens, variant):
    train = settings(**variant)
    whole_loss, whole = loss_of(tokens, train)
    halves = [loss_of(tokens, train, part=part) for part in (slice(0, 21), slice(21, N))]
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole_loss)
    added = LossSums.zero().add(halves[0][1]).add(halves[1][1])
    torch.testing.assert_close(added.flatten(), whole.flatten(), rtol=1e-6, atol=1e-6)
    assert all(
        torch.equal(mine, its.double()) for mine, its in zip(LossSums.unflatten(added.flatten()), added, strict=True)
    )


def test_an_absurd_logprob_gives_a_finite_loss(tokens):
    tokens["behaviour"][3] = -math.inf
    loss, sums = loss_of(tokens, settings())
    assert torch.isfinite(loss)
    assert sums.flatten().isfinite().all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_right_on_average_for_policies_that_are_close(estimator):
    generator = torch.Generator().manual_seed(0)
    current = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    reference = (current + 0.05 * torch.randn(7, generator=generator, dtype=torch.float64)).log_softmax(-1)
    exact = (current.exp() * (current - reference)).sum()
    expected = (current.exp() * estimate_kl(current, reference, estimator=estimator)).sum()
    assert expected.item() == pytest.approx(exact.item(), rel=0.1)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_agrees_with_its_definition(clip):
    generator = torch.Generator().manual_seed(2)
    values, before, returns = torch.randn(3, 9, generator=generator, dtype=torch.float64)
    total = 0.0
    for v, b, r in zip(values.tolist(), before.tolist(), returns.tolist(), strict=True):
        near = v if clip is None else b + min(max(v - b, -clip), clip)
        total += max((v - r) ** 2, (near - r) ** 2) / 9 / 2
    found = compute_value_loss(values, before_N=before, returns_N=returns, shares_N=torch.full((9,), 1 / 9), clip=clip)
    assert found.item() == pytest.approx(total, rel=1e-6)


def test_quantiles_of_the_ratio_are_as_exact_as_the_bins():
    tokens = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    zeros = torch.zeros_like(tokens)
    token_inputs = TokenInputs(
        behaviour_N=-tokens, proximal_N=zeros, advantages_N=zeros, rows_N=zeros.long(), shares_N=zeros
    )
    _, sums = compute_policy_loss(zeros, entropy_N=zeros, token_inputs=token_inputs, train=settings())
    for found, exact in zip(compute_ratio_quantiles(sums.ratio_bins, (0.05, 0.5, 0.95)), (-0.9, 0.0, 0.9), strict=True):
        assert math.log(found) == pytest.approx(exact, abs=0.1)
    assert compute_ratio_quantiles(torch.zeros(80), (0.5,)) == [None]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_in_one_pass_agree_with_autograd(temperature):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 11, generator=generator, requires_grad=True)
    targets, weights = torch.arange(6), torch.linspace(-1, 2, 6)
    at_once, entropy = logprobs_and_entropy(logits, targets, temperature=temperature, has_entropy_bonus=False)
    (found,) = torch.autograd.grad((at_once * weights).sum(), logits)
    distribution = compute_log_distribution(logits, temperature=temperature)
    slowly = gather_logprobs(distribution, targets)
    (expected,) = torch.autograd.grad((slowly * weights).sum(), logits)
    torch.testing.assert_close(at_once, slowly)
    torch.testing.assert_close(entropy, compute_entropies(distribution.detach()))
    torch.testing.assert_close(found, expected)
    assert not entropy.requires_grad


def test_with_an_entropy_bonus_the_entropy_is_differentiated():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(5), requires_grad=True)
    _, entropy = logprobs_and_entropy(logits, torch.arange(3), temperature=1.0, has_entropy_bonus=True)
    (slope,) = torch.autograd.grad(entropy.sum(), logits)
    chances = logits.detach().softmax(-1)
    expected = -chances * (chances.log() + compute_entropies(chances.log()).unsqueeze(-1))
    torch.testing.assert_close(slope, expected)
