"""Every algorithm of docs/learning.md: its step equals a slow reference, written from the papers one token at a time.

The policy is a table of log-odds by the last token, so the reference needs no network. It is in double precision, and
the losses of the trainer in single: no entry of a gradient is off by more than a millionth of the largest.
"""

import math

import msgspec
import numpy as np
import pytest
import torch

import hpcrl.trainers.critic
import hpcrl.trainers.torch
from hpcrl.config.pipeline import make_pipeline
from hpcrl.learn.distribute import split_minibatches
from hpcrl.testing.ranks import run_ranks
from tests.support.table_policy import (
    ALGORITHMS,
    ALL,
    BUDGET,
    EARNING,
    RATE,
    make_table_trainer,
    play_all,
    play_chain,
    play_earning,
    played,
    settings_of,
    tables,
)

NODES = {
    "PPO with a critic": {"values", "proximal", "update-critic"},
    "GRPO": {"reference"},
    "REINFORCE++": {"reference", "proximal"},
}


@pytest.fixture(autouse=True)
def _restore_loaders(monkeypatch):
    """Restore the functions that `make_table_trainer` replaces."""
    monkeypatch.setattr(hpcrl.trainers.torch, "open_causal", hpcrl.trainers.torch.open_causal)
    monkeypatch.setattr(hpcrl.trainers.torch, "load_fixed", hpcrl.trainers.torch.load_fixed)
    monkeypatch.setattr(hpcrl.trainers.critic, "open_critic", hpcrl.trainers.critic.open_critic)


TOLERANCE = 1e-6
STD_EPSILON = 1e-6
"""The term that is added to every standard deviation by which advantages are divided."""


# ---- The reference: plain loops over episodes and tokens, in double precision.


class SlowEpisode:
    """An episode as the papers see it: pairs of state and action, log-probs, an advantage for each."""

    def __init__(self, episode):
        self.episode = episode
        self.positions = [t for t in range(len(episode.token_ids)) if episode.loss_mask[t]]
        self.states = [int(episode.token_ids[t - 1]) for t in self.positions]
        self.actions = [int(episode.token_ids[t]) for t in self.positions]
        self.behaviour = [float(episode.logprobs[t]) for t in self.positions]
        self.turn = [sum(turn.start <= t for turn in episode.turns) - 1 for t in self.positions]
        self.advantages = []

    def logprobs(self, table):
        return [table[s].log_softmax(-1)[a] for s, a in zip(self.states, self.actions, strict=True)]


def slow_rewards(slow, train):
    """Return the reward of each episode: punished as DAPO's equation 13, in units of its domain."""
    rewards = []
    for one in slow:
        reward, length = one.episode.reward, len(one.positions)
        if train.overlong == "punish":
            cache = train.overlong_margin * BUDGET
            if length > BUDGET:
                reward -= 1
            elif length > BUDGET - cache:
                reward += (BUDGET - cache - length) / cache
        rewards.append(reward)
    if train.reward_scale == "domain":
        for domain in ("lake", "sums"):
            members = [i for i, one in enumerate(slow) if one.episode.domain == domain]
            std = np.std([rewards[i] for i in members])
            for i in members:
                rewards[i] /= std
    return rewards


def slow_advantages(slow, train, policy, reference, values):
    """Set the advantage of each token by the paper of `train.advantage`."""
    rewards = slow_rewards(slow, train)
    kl_costs = [[0.0] * len(one.positions) for one in slow]
    if train.kl_in == "reward":
        for costs, one in zip(kl_costs, slow, strict=True):
            pairs = zip(one.logprobs(policy), one.logprobs(reference), strict=True)
            costs[:] = [train.kl_coef * float(p - q) for p, q in pairs]
    for i, one in enumerate(slow):
        peers = [rewards[j] for j, other in enumerate(slow) if other.episode.group == one.episode.group]
        plain = slow_comparison(rewards[i], peers, train.advantage)
        one.advantages = [plain - cost for cost in slow_credits(kl_costs, i, train)]
    if train.advantage == "trloo":
        set_turn_advantages(slow, train.gamma)
    if train.advantage == "gae":
        set_critic_advantages(slow, rewards, kl_costs, values, train)
    if train.advantage.startswith("reinforce++") or train.advantage == "gae":
        for domains in (["lake"], ["sums"]) if train.reward_scale == "domain" else (["lake", "sums"],):
            normalize([one for one in slow if one.episode.domain in domains])


def slow_credits(kl_costs, i, train):
    """Return the discounted costs from each token on, beside the mean of those of the other rows at that token."""
    to_go = [
        [sum(train.kl_gamma ** (u - t) * costs[u] for u in range(t, len(costs))) for t in range(len(costs))]
        for costs in kl_costs
    ]
    if train.advantage.startswith("reinforce++"):
        return to_go[i]
    others = [costs for j, costs in enumerate(to_go) if j != i]
    means = [np.mean([costs[t] for costs in others if len(costs) > t] or [0.0]) for t in range(len(to_go[i]))]
    return [cost - mean for cost, mean in zip(to_go[i], means, strict=True)]


def normalize(slow):
    tokens = [advantage for one in slow for advantage in one.advantages]
    mean, std = np.mean(tokens), np.std(tokens)
    for one in slow:
        one.advantages = [(advantage - mean) / (std + STD_EPSILON) for advantage in one.advantages]


def slow_comparison(reward, peers, advantage):
    """Return what an episode is worth beside its group, itself included."""
    mean = sum(peers) / len(peers)
    match advantage:
        case "grpo":
            std = math.sqrt(sum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
            return (reward - mean) / (std + STD_EPSILON)
        case "dr-grpo" | "reinforce++-baseline":
            return reward - mean
        case "rloo":
            return reward - (sum(peers) - reward) / (len(peers) - 1)
        case _:
            return reward


def slow_turn_rewards(episode):
    rewards = [turn.reward for turn in episode.turns]
    rewards[-1] += episode.reward - sum(rewards)
    return rewards


def set_turn_advantages(slow, gamma):
    returns = []
    for one in slow:
        first, second = slow_turn_rewards(one.episode)
        returns.append((first + gamma * second, second))
    for i, one in enumerate(slow):
        others = [j for j, o in enumerate(slow) if o.episode.group == one.episode.group and j != i]
        by_turn = [returns[i][k] - sum(returns[j][k] for j in others) / len(others) for k in (0, 1)]
        one.advantages = [by_turn[k] for k in one.turn]


def set_critic_advantages(slow, rewards, kl_costs, values, train):
    for one, costs in zip(slow, kl_costs, strict=True):
        num = len(one.positions)
        value = [float(values[s]) for s in one.states] + [0.0]
        paid = [-cost for cost in costs]
        for k, reward in enumerate(slow_turn_rewards(one.episode)):
            turn = one.episode.turns[k]
            for offset, earned in enumerate(turn.token_rewards):
                paid[one.positions.index(turn.start + offset)] += earned
            paid[max(t for t in range(num) if one.turn[t] == k)] += reward - sum(turn.token_rewards)
        surprise = [paid[t] + train.gamma * value[t + 1] - value[t] for t in range(num)]
        decay = train.gamma * train.gae_lambda
        one.advantages = [sum(decay ** (u - t) * surprise[u] for u in range(t, num)) for t in range(num)]


def slow_weights(one, logprobs, train):
    """Return the importance weight of each token under the policy that these log-probs are of."""
    logs = [p - b for p, b in zip(logprobs, one.behaviour, strict=True)]
    if "sequence" in train.correction:
        logs = [sum(logs)] * len(logs)
    elif "geometric" in train.correction:
        logs = [sum(logs) / len(logs)] * len(logs)
    ratios = [math.exp(log) for log in logs]
    if train.correction.startswith("mask"):
        return [r if train.min_is_ratio <= r <= train.max_is_ratio else 0.0 for r in ratios]
    return [min(r, train.max_is_ratio) for r in ratios]


def slow_kl_weights(one, logprobs, train):
    """Return the weight of each token's KL under the policy that these log-probs are of."""
    logs = [p - b for p, b in zip(logprobs, one.behaviour, strict=True)]
    if "sequence" in train.correction:
        logs = [sum(logs)] * len(logs)
    return [min(math.exp(log), max(train.max_is_ratio, 10)) for log in logs]


def slow_loss(minibatch, table, policy, reference, train):
    """Return the loss of a minibatch and the number of clipped tokens; `policy` is that of the start of the step."""
    num_tokens, total, clipped = sum(len(one.positions) for one in minibatch), 0.0, 0
    for one in minibatch:
        current, started = one.logprobs(table), [float(p) for p in one.logprobs(policy)]
        if train.proximal == "behaviour":
            started = one.behaviour
        weights, kl_weights = (
            slow_weights(one, started, train),
            slow_kl_weights(one, [c.item() for c in current], train),
        )
        num = len(current)
        logs = [c - s for c, s in zip(current, started, strict=True)]
        if train.ratio == "sequence":
            logs = [sum(logs) / num] * num
        for t in range(num):
            ratio, advantage = logs[t].exp(), one.advantages[t]
            bounded = min(max(ratio.item(), 1 - train.clip_low), 1 + train.clip_high)
            if train.surrogate == "cispo":
                gain, is_clipped = bounded * advantage * current[t], bounded != ratio.item()
            else:
                is_clipped = bounded * advantage < ratio.item() * advantage
                gain = bounded * advantage + 0 * ratio if is_clipped else ratio * advantage
                if train.dual_clip is not None and advantage < 0 and gain.item() < train.dual_clip * advantage:
                    gain, is_clipped = train.dual_clip * advantage + 0 * ratio, True
            term = -weights[t] * gain
            if train.kl_in == "loss" and train.kl != "none":
                log = one.logprobs(reference)[t] - current[t]
                estimate = {"k2": log**2 / 2, "k3": log.exp() - 1 - log}[train.kl]
                term = term + train.kl_coef * kl_weights[t] * estimate
            if train.entropy_coef:
                odds = table[one.states[t]].log_softmax(-1)
                term = term + train.entropy_coef * (odds.exp() * odds).sum()
            share = {
                "token": 1 / num_tokens,
                "sequence": 1 / (num * len(minibatch)),
                "fixed": 1 / (BUDGET * len(minibatch)),
            }[train.aggregation]
            total = total + share * term
            clipped += is_clipped
    return total, clipped


def slow_step(train, episodes):
    """Make the optimizer steps of a training step by plain gradient descent; return gradients and the clip share."""
    policy, _, reference, values = tables()
    slow = [SlowEpisode(one) for one in episodes]
    slow_advantages(slow, train, policy, reference, values)
    if train.overlong == "filter":
        slow = [one for one in slow if len(one.positions) < BUDGET]
    parts = split_minibatches(range(len(slow)), num=train.num_minibatches, seed=3, step=1)
    table, gradients, clipped, num = policy.clone(), [], 0, 0
    for part in parts * train.epochs:
        table.requires_grad_()
        minibatch = [slow[i] for i in part]
        loss, stopped = slow_loss(minibatch, table, policy, reference, train)
        (gradient,) = torch.autograd.grad(loss, table)
        gradients.append(gradient)
        table = table.detach() - RATE * gradient
        clipped, num = clipped + stopped, num + sum(len(one.positions) for one in minibatch)
    return gradients, clipped / num


# ---- The tests.


def assert_equal_gradients(found, slow):
    assert slow.abs().max() > 1e-3
    torch.testing.assert_close(found, slow, rtol=0, atol=TOLERANCE * slow.abs().max().item())


@pytest.mark.parametrize("name", NODES)
def test_a_pipeline_has_the_nodes_of_its_algorithm(name):
    assert NODES[name] <= make_pipeline(settings_of(name)).keys()


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("name", ALL)
def test_every_gradient_of_a_step_equals_the_slow_reference(name, rows):
    train, episodes = settings_of(name, rows=rows, tokens_per_micro_batch=40), played()
    trainer, gradients = make_table_trainer(train)
    metrics = trainer.train_step(episodes, step=1, version=1)
    expected, clip_share = slow_step(train, episodes)
    assert metrics.skipped is None
    assert len(gradients) == len(expected) == train.num_minibatches * train.epochs
    for found, slow in zip(gradients, expected, strict=True):
        assert_equal_gradients(found, slow)
    assert metrics.clip_fraction == pytest.approx(clip_share, abs=1e-9)


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize(("name", "unit"), EARNING)
def test_rewards_of_turns_and_tokens_count_where_they_were_earned(name, unit, rows):
    episodes, train = play_earning(unit), settings_of(name, rows=rows, tokens_per_micro_batch=40)
    for turn in (turn for one in episodes for turn in one.turns):
        assert len(turn.token_rewards) == (turn.end - turn.start if unit == "token" else 0)
    trainer, gradients = make_table_trainer(train)
    trainer.train_step(episodes, step=1, version=1)
    for found, slow in zip(gradients, slow_step(train, episodes)[0], strict=True):
        assert_equal_gradients(found, slow)


@pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
def test_four_ranks_have_the_gradients_of_the_slow_reference():
    steps = play_all().items()
    slow_steps = {name: slow_step(settings_of(algorithm), episodes) for name, (algorithm, episodes) in steps}
    for rank in run_ranks(4, "tests.support.table_policy:compute_gradients"):
        for rows in ("padded", "packed"):
            assert rank[rows].keys() == slow_steps.keys()
            for name, (gradients, clip_fraction) in rank[rows].items():
                expected, clip_share = slow_steps[name]
                for found, slow in zip(gradients, expected, strict=True):
                    assert_equal_gradients(torch.tensor(found, dtype=torch.float64), slow)
                assert clip_fraction == pytest.approx(clip_share, abs=1e-9)


@pytest.mark.parametrize("name", ["DAPO", "GSPO", "PPO with a critic"])
def test_the_clip_acts_as_documented(name):
    trainer, _ = make_table_trainer(settings_of(name))
    assert trainer.train_step(played(), step=1, version=1).clip_fraction > 0.02


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_learns_a_chain_from_episodes_that_are_a_version_old(name):
    train = msgspec.structs.replace(settings_of(name), kl_coef=0.001, max_grad_norm=1.0)
    share = 2 / BUDGET if train.aggregation == "fixed" else 1  # of an episode's two tokens
    trainer, _ = make_table_trainer(msgspec.structs.replace(train, learning_rate=2.0 / share))
    policy = trainer._policy.parameters[0]
    old = policy.detach().clone()
    for step in range(1, 61):
        now = policy.detach().clone()
        trainer.train_step(play_chain(old, version=step), step=step, version=step)
        old = now
    chances = policy.detach().softmax(-1)
    assert chances[0, 3] * chances[3, 4] > 0.8
