"""The KL in the reward: credits whose noise does not grow with the length, and the gradient of the exact KL.

The policies are tables of log-odds by the last token, so that every sequence, or every state at every token, is listed.
"""

from dataclasses import dataclass

import pytest
import torch

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import sum_to_go
from hpcrl.trainers.micro_batch_loss import PriorLogprobs, compare_costs, subtract_kl_costs
from hpcrl.trainers.world import SINGLE_RANK

V, NUM_ROWS, LENGTH = 3, 64, 512
GENERATOR = torch.Generator().manual_seed(3)
STUDENT, TEACHER = (torch.randn(V, V, generator=GENERATOR, dtype=torch.float64) for _ in range(2))


def settings_of(gamma, **more):
    return TrainConfig(
        **{"num_steps": 1, "groups_per_step": 1, "learning_rate": 1.0, "advantage": "rloo", "kl_coef": 1.0},
        **{"kl": "k1", "kl_in": "reward", "kl_gamma": gamma, **more},
    )


@dataclass
class SampledRows:
    """Rows of the student, whose first state is token 0; `lengths` of them were generated."""

    lengths: list[int]
    seed: int

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        chances, last_B, states, actions = STUDENT.softmax(-1), torch.zeros(len(self.lengths), dtype=torch.long), [], []
        for _ in range(max(self.lengths)):
            states.append(last_B)
            last_B = torch.multinomial(chances[last_B], 1, generator=generator)[:, 0]
            actions.append(last_B)
        inside_BT = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        self.states_N, self.actions_N = (torch.stack(each, 1)[inside_BT] for each in (states, actions))
        self.rows_N = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))

    def logprobs(self, table):
        return table.log_softmax(-1)[self.states_N, self.actions_N]

    def credits(self, train):
        """Return what the trainer's node makes of rewards that are all zero."""
        known_N = self.logprobs(STUDENT)
        empty_BT = torch.zeros(1, 0, dtype=torch.long)
        micro = MicroBatch(empty_BT, empty_BT.bool(), self.actions_N, known_N, torch.zeros_like(known_N), self.rows_N)
        prior = PriorLogprobs(known_N, self.logprobs(TEACHER))
        ((changed,),) = subtract_kl_costs([[micro]], [[prior]], train=train, world=SINGLE_RANK, num_shares=1)
        return changed.advantages_N

    def gradient(self, credits_N):
        """Return the gradient of the mean reward of a row."""
        table = STUDENT.clone().requires_grad_()
        return torch.autograd.grad((credits_N * self.logprobs(table)).sum() / len(self.lengths), table)[0]


def exact_gradient(gamma):
    """Differentiate the KL of rows of LENGTH tokens (gamma 1), or that of single tokens where the policy comes (0)."""
    table = STUDENT.clone().requires_grad_()
    chances = table.softmax(-1)
    costs = (chances * (table.log_softmax(-1) - TEACHER.log_softmax(-1))).sum(-1)
    visits, total = torch.eye(V, dtype=torch.float64)[0], torch.zeros((), dtype=torch.float64)
    for _ in range(LENGTH):
        total = total + (visits * costs).sum()
        visits = visits @ (chances if gamma else chances.detach())
    return -torch.autograd.grad(total, table)[0]


def measure_alignment(found, exact):
    return float((found * exact).sum() / found.norm() / exact.norm())


@pytest.mark.parametrize("gamma", [0.0, 0.9])
def test_the_noise_of_a_credit_does_not_grow_with_the_length_of_a_row(gamma):
    train, whole = settings_of(gamma), settings_of(1.0)
    short, long = (float(SampledRows([length] * NUM_ROWS, seed=1).credits(train).std()) for length in (64, 2048))
    assert long == pytest.approx(short, rel=0.1)
    assert SampledRows([2048] * NUM_ROWS, seed=1).credits(whole).std() > 5 * long


def test_the_default_discount_counts_each_token_for_its_own_cost_alone():
    train = settings_of(0.0)
    assert TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0).kl_gamma == train.kl_gamma
    rows = SampledRows([5, 9], seed=2)
    own_N = rows.logprobs(STUDENT) - rows.logprobs(TEACHER)
    assert torch.equal(sum_to_go(own_N, rows.rows_N, gamma=0.0), own_N)


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_the_mean_gradient_of_long_rows_is_that_of_the_exact_kl(gamma):
    steps = [SampledRows([LENGTH] * NUM_ROWS, seed=seed) for seed in range(16)]
    found = [rows.gradient(rows.credits(settings_of(gamma))) for rows in steps]
    exact = exact_gradient(gamma)
    mean = torch.stack(found).mean(0)
    assert measure_alignment(mean, exact) > 0.98
    if not gamma:
        assert float((mean - exact).norm() / exact.norm()) < 0.02
        assert min(measure_alignment(each, exact) for each in found) > 0.98  # of 64 rows alone


def test_other_rows_as_a_baseline_make_the_gradient_of_the_whole_kl_less_noisy():
    train, exact = settings_of(1.0), exact_gradient(1.0)
    errors = {"with": 0.0, "without": 0.0}
    for seed in range(8):
        rows = SampledRows([LENGTH] * NUM_ROWS, seed=seed)
        own_N = rows.logprobs(STUDENT) - rows.logprobs(TEACHER)
        plain_N = -sum_to_go(own_N, rows.rows_N, gamma=1.0)
        for name, credits_N in (("with", rows.credits(train)), ("without", plain_N)):
            errors[name] += float((rows.gradient(credits_N) - exact).square().sum())
    assert errors["with"] < errors["without"] / 10


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_the_baseline_leaves_the_expected_gradient_as_it_is(gamma):
    """Over all pairs of rows of two tokens, each pair as often as the student samples it."""
    sequences = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    states, table = torch.stack([torch.zeros(V * V, dtype=torch.long), sequences[:, 0]], 1), STUDENT.clone()
    table.requires_grad_()
    logprobs = table.log_softmax(-1)[states, sequences]
    costs = (logprobs - TEACHER.log_softmax(-1)[states, sequences]).detach()
    chances, rows_N = logprobs.sum(1).exp().detach(), torch.tensor([0, 0, 1, 1])
    compared, plain = 0.0, 0.0
    for one in range(V * V):
        for other in range(V * V):
            to_go_N = sum_to_go(torch.cat([costs[one], costs[other]]), rows_N, gamma=gamma)
            (credits_N,) = compare_costs([(rows_N, to_go_N)], world=SINGLE_RANK, num_shares=1)
            weight, now_N = chances[one] * chances[other], torch.cat([logprobs[one], logprobs[other]])
            compared = compared + weight * (credits_N * now_N).sum()
            plain = plain + weight * (to_go_N * now_N).sum()
    found, exact = (torch.autograd.grad(each, table, retain_graph=True)[0] for each in (compared, plain))
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


def test_a_token_that_no_other_row_reaches_keeps_its_cost():
    rows_N, costs_N = torch.tensor([0, 0, 0, 1]), torch.tensor([4.0, 5.0, 6.0, 1.0])
    (compared,) = compare_costs([(rows_N, costs_N)], world=SINGLE_RANK, num_shares=1)
    assert compared.tolist() == [3.0, 5.0, 6.0, -3.0]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.999, 1.0])
def test_discounted_sums_are_those_of_a_plain_loop(gamma):
    lengths = [1, 7, 300]
    rows_N = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    values_N = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = []
    for row in range(3):
        later = 0.0
        sums = [later := value + gamma * later for value in reversed(values_N[rows_N == row].tolist())]
        expected += reversed(sums)
    assert sum_to_go(values_N, rows_N, gamma=gamma).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert not len(sum_to_go(values_N[:0], rows_N[:0], gamma=gamma))
