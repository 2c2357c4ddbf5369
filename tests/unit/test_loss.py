"""The policy loss against a slow reference: plain Python floats, one token at a time."""

import math

import numpy as np
import pytest
import torch

from hpcrl.learn.loss import LossSums, chosen_logprobs, entropies, log_distribution, policy_loss

SETTINGS = {"clip_low": 0.2, "clip_high": 0.28, "max_is_ratio": 1.5, "entropy_coef": 0.01}


def slow_logprobs(logits, targets, temperature):
    """Log-probs of the targets and entropies, by the definition of softmax."""
    logprobs, entropy = [], []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        weights = [math.exp(value / temperature) for value in row]
        probabilities = [weight / sum(weights) for weight in weights]
        logprobs.append(math.log(probabilities[target]))
        entropy.append(-sum(p * math.log(p) for p in probabilities))
    return logprobs, entropy


def slow_loss(current, behaviour, proximal, advantages, entropy, *, clip_low, clip_high, max_is_ratio, entropy_coef):
    """The loss by its formula, with the figures that go with it."""
    total, clipped, truncated, is_sum, kl = 0.0, 0, 0, 0.0, 0.0
    for c, b, p, a, h in zip(current, behaviour, proximal, advantages, entropy, strict=True):
        ratio, is_ratio = math.exp(c - p), math.exp(p - b)
        bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
        total -= min(is_ratio, max_is_ratio) * min(ratio * a, bounded * a) + entropy_coef * h
        clipped += bounded * a < ratio * a
        truncated += is_ratio > max_is_ratio
        is_sum += is_ratio
        kl += math.exp(c - b) - 1 - (c - b)
    return total, clipped, truncated, is_sum, kl


@pytest.fixture(params=range(5))
def tokens(request):
    """Random log-probs of 64 tokens under three policies that are some way apart."""
    generator = torch.Generator().manual_seed(request.param)
    behaviour = -3 * torch.rand(64, generator=generator, dtype=torch.float64)
    proximal = behaviour + 0.4 * torch.randn(64, generator=generator, dtype=torch.float64)
    current = proximal + 0.3 * torch.randn(64, generator=generator, dtype=torch.float64)
    advantages = torch.randn(64, generator=generator, dtype=torch.float64)
    entropy = 2 * torch.rand(64, generator=generator, dtype=torch.float64)
    return current, behaviour, proximal, advantages, entropy


def loss_of(tokens, *, num_tokens=64, **changed):
    current, behaviour, proximal, advantages, entropy = tokens
    return policy_loss(
        current,
        entropy_N=entropy,
        behaviour_N=behaviour,
        proximal_N=proximal,
        advantages_N=advantages,
        num_tokens=num_tokens,
        **{**SETTINGS, **changed},
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_and_entropies_agree_with_the_definition(temperature):
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(20, 11, generator=generator)
    targets = torch.randint(11, (20,), generator=generator)
    logprobs_NV = log_distribution(logits, temperature=temperature)
    expected_logprobs, expected_entropy = slow_logprobs(logits, targets, temperature)
    np.testing.assert_allclose(chosen_logprobs(logprobs_NV, targets), expected_logprobs, rtol=1e-5)
    np.testing.assert_allclose(entropies(logprobs_NV), expected_entropy, rtol=1e-5)


def test_the_loss_and_its_figures_agree_with_the_slow_reference(tokens):
    loss, sums = loss_of(tokens)
    total, clipped, truncated, is_sum, kl = slow_loss(*(column.tolist() for column in tokens), **SETTINGS)
    assert loss.item() == pytest.approx(total / 64)
    assert sums.loss.item() == pytest.approx(total)
    assert (sums.clipped.item(), sums.truncated.item()) == (clipped, truncated)
    assert clipped > 0
    assert truncated > 0
    assert sums.is_ratio.item() == pytest.approx(is_sum)
    assert sums.kl.item() == pytest.approx(kl)
    assert sums.entropy.item() == pytest.approx(tokens[4].sum().item())


def test_the_gradient_agrees_with_finite_differences_of_the_slow_reference(tokens):
    current, *others = tokens
    current.requires_grad_()
    loss_of(tokens)[0].backward()
    plain = [column.tolist() for column in (current.detach(), *others)]
    for index in range(0, 64, 7):
        sides = []
        for nudge in (1e-6, -1e-6):
            nudged = [list(column) for column in plain]
            nudged[0][index] += nudge
            sides.append(slow_loss(*nudged, **SETTINGS)[0] / 64)
        assert current.grad[index].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-7)


def test_no_gradient_flows_through_the_importance_weight(tokens):
    current, behaviour, _, advantages, entropy = tokens
    current.requires_grad_()
    loss_of((current, behaviour, current, advantages, entropy), entropy_coef=0.0)[0].backward()
    weight = (current.detach() - behaviour).exp().clamp(max=SETTINGS["max_is_ratio"])
    torch.testing.assert_close(current.grad, -weight * advantages / 64)


def test_micro_batches_add_up_to_the_whole(tokens):
    whole_loss, whole = loss_of(tokens)
    halves = [loss_of([column[part] for column in tokens]) for part in (slice(0, 20), slice(20, 64))]
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole_loss)
    for mine, theirs in zip(LossSums.zero().plus(halves[0][1]).plus(halves[1][1]), whole, strict=True):
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_an_absurd_logprob_gives_a_finite_loss():
    one = torch.tensor([-0.5])
    impossible = torch.tensor([-math.inf])
    loss, sums = loss_of((one, impossible, one, one, one), num_tokens=1)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(figure) for figure in sums)
