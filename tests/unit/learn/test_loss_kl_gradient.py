"""The gradient of the KL, on a policy of two tokens whose every sequence is listed: no expectation is sampled."""

import pytest
import torch

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.loss import TokenInputs, compute_kl_costs, compute_policy_loss

V = 3
SEQUENCES = torch.cartesian_prod(torch.arange(V), torch.arange(V))
FIRST, SECOND = SEQUENCES.unbind(1)
ROWS = torch.arange(len(SEQUENCES)).repeat_interleave(2)
KL_COEF = 0.3


def draw(seed, *, near=None, distance=1.0):
    """Return log-odds: a row for the first token, and one for the second after each first."""
    made = distance * torch.randn(V + 1, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made if near is None else near + made


REFERENCE = draw(0)
CURRENT = draw(1)
STALE = draw(2, near=CURRENT, distance=0.6)


def logprobs_of(table):
    """Return the log-probs of both tokens of every sequence, token by token."""
    first, second = table[0].log_softmax(-1)[FIRST], table[1:].log_softmax(-1)[FIRST, SECOND]
    return torch.stack([first, second], dim=1)


def kl_of(policy, other):
    return (policy.log_softmax(-1).exp() * (policy.log_softmax(-1) - other.log_softmax(-1))).sum(-1)


def exact_gradient(kind):
    """Differentiate the KL itself; that of single tokens is in the states that the current policy visits."""
    table = CURRENT.clone().requires_grad_()
    now, reference = logprobs_of(table), logprobs_of(REFERENCE)
    visits = torch.cat([torch.ones(1, dtype=torch.float64), CURRENT[0].softmax(-1)])
    value = {
        "whole sequences": lambda: (now.sum(1).exp() * (now - reference).sum(1)).sum(),
        "current to reference": lambda: (visits * kl_of(table, REFERENCE)).sum(),
        "reference to current": lambda: (visits * kl_of(REFERENCE, table)).sum(),
    }[kind]()
    return torch.autograd.grad(KL_COEF * value, table)[0]


def found_gradient(behaviour, **settings):
    """Differentiate hpcrl's loss, with each sequence weighed by how often the policy that acted samples it."""
    train = TrainConfig(
        num_steps=1,
        groups_per_step=1,
        learning_rate=1.0,
        kl_coef=KL_COEF,
        max_is_ratio=1e6,
        min_is_ratio=0.0,
        **settings,
    )
    table = CURRENT.clone().requires_grad_()
    current_N, behaviour_N, reference_N = (logprobs_of(each).reshape(-1) for each in (table, behaviour, REFERENCE))
    started_N = current_N.detach()
    advantages_N = torch.zeros_like(started_N)
    if train.kl_in == "reward":
        advantages_N = -compute_kl_costs(started_N, reference_N, ROWS, train=train)
    token_inputs = TokenInputs(
        behaviour_N=behaviour_N,
        proximal_N=started_N,
        advantages_N=advantages_N,
        rows_N=ROWS,
        shares_N=logprobs_of(behaviour).sum(1).exp()[ROWS],
        reference_N=reference_N,
    )
    loss, _ = compute_policy_loss(
        current_N, entropy_N=torch.zeros_like(current_N), token_inputs=token_inputs, train=train
    )
    return torch.autograd.grad(loss, table)[0]


def distance(found, exact):
    return float((found - exact).norm() / exact.norm())


KINDS = {
    "whole sequences": {"kl": "k1", "kl_in": "reward", "kl_gamma": 1.0},
    "current to reference": {"kl": "k2"},
    "reference to current": {"kl": "k3"},
}


@pytest.mark.parametrize("behaviour", [CURRENT, STALE], ids=["fresh", "stale"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_kl(kind, behaviour):
    assert distance(found_gradient(behaviour, correction="sequence", **KINDS[kind]), exact_gradient(kind)) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_stale_samples_without_the_weight_of_their_sequence_have_another_gradient(kind):
    assert distance(found_gradient(STALE, correction="none", **KINDS[kind]), exact_gradient(kind)) > 0.03


@pytest.mark.parametrize("proximal", ["started", "behaviour"])
@pytest.mark.parametrize("correction", ["none", "token", "geometric", "mask-token", "mask-geometric", "mask-sequence"])
def test_no_correction_takes_the_kl_of_a_token_from_the_loss(correction, proximal):
    """With the default limits, for sequences of one token."""
    log_odds = CURRENT[0].clone().requires_grad_()
    now, stale, reference = (each.log_softmax(-1) for each in (log_odds, STALE[0], REFERENCE[0]))
    (exact,) = torch.autograd.grad((now.exp() * (now - reference)).sum(), log_odds, retain_graph=True)
    train = TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0, kl="k2", kl_coef=1.0, correction=correction)
    token_inputs = TokenInputs(
        behaviour_N=stale,
        proximal_N=stale if proximal == "behaviour" else now.detach(),
        advantages_N=torch.zeros_like(stale),
        rows_N=torch.arange(V),
        shares_N=stale.exp(),
        reference_N=reference,
    )
    loss, _ = compute_policy_loss(now, entropy_N=torch.zeros_like(stale), token_inputs=token_inputs, train=train)
    assert distance(torch.autograd.grad(loss, log_odds)[0], exact) < 1e-9


def test_k2_and_k3_have_different_gradients():
    assert distance(exact_gradient("reference to current"), exact_gradient("current to reference")) > 0.1


def test_k1_in_the_loss_has_no_gradient_which_is_why_a_plan_refuses_it():
    assert found_gradient(CURRENT, correction="sequence", kl="k1").abs().max() < 1e-12
