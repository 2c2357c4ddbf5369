"""A policy that is a table of log-odds by the last token, the algorithms of docs/learning.md, and data to train it on.

The data were sampled by two older versions of the policy, which change within an episode.
"""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import torch
from transformers import PreTrainedConfig

import hpcrl.trainers.critic
import hpcrl.trainers.torch
from hpcrl.plan.checks import check_recipe
from hpcrl.rollout.rewards import RewardCaller, apply_score
from hpcrl.spool.record import EpisodeTurn
from hpcrl.trainers.model_files import ModelSource
from hpcrl.trainers.token_model import TokenModel
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.plans import make_recipe
from tests.support.trajectories import make_trajectory

VOCABULARY, CONTEXT, GROUP, RATE = 5, 64, 4, 12.0
BUDGET = 12
PAGE = Path(__file__).parents[2] / "docs" / "learning.md"


def read_algorithms():
    """Return the settings of each row of the page's table."""
    table = PAGE.read_text().partition("| | settings |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {name: tomllib.loads("\n".join(re.findall(r"`([^`]+)`", settings))) for name, settings in rows}


ALGORITHMS = read_algorithms()
MORE = {
    "two epochs": {"epochs": 2, "num_minibatches": 2, "clip_high": 0.3},
    "dual clip": {"dual_clip": 1.1, "num_minibatches": 4},
    "the clip from the policy that acted": {"proximal": "behaviour", "clip_high": 0.28},
    "sequence weights": {"correction": "sequence"},
    "geometric weights": {"correction": "geometric", "max_is_ratio": 1.02},
    "masked sequences": {"correction": "mask-sequence", "max_is_ratio": 3.0, "min_is_ratio": 0.3},
    "GRPO with masks": {"kl": "k3", "correction": "mask-token", "max_is_ratio": 1.2, "min_is_ratio": 0.9},
    "PPO with the KL in its rewards": {"advantage": "gae", "gae_lambda": 0.9, "kl": "k1", "kl_in": "reward"},
    "costs of later tokens": {"advantage": "rloo", "kl": "k1", "kl_in": "reward", "kl_gamma": 0.9},
    "rewards by domain": {"advantage": "reinforce++", "reward_scale": "domain"},
    "overlong episodes filtered": {"overlong": "filter"},
    "an entropy bonus": {"entropy_coef": 0.3, "num_minibatches": 2},
}
ALL = {**ALGORITHMS, **MORE}
EARNING = [("TRLOO", "turn"), ("PPO with a critic", "turn"), ("PPO with a critic", "token")]
"""Algorithms with what each number of the reward function is for."""


class TableModel(torch.nn.Module):
    """A causal model that sees one token: a table of log-odds, or of values with one column."""

    config = PreTrainedConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table.clone())

    def forward(self, inputs_BT, position_ids=None, logits_to_keep=None, use_cache=False):
        logits_BTV = self.table[inputs_BT]
        return SimpleNamespace(logits=logits_BTV if logits_to_keep is None else logits_BTV[:, logits_to_keep])


def tables():
    """Return the policy at the start of the step, two older ones, the reference, and a critic's values."""
    generator = torch.Generator().manual_seed(7)
    draw = [torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(4)]
    policy = 0.5 * draw[0]
    values = torch.randn(VOCABULARY, 1, generator=generator, dtype=torch.float64)
    return policy, (policy + 0.15 * draw[1], policy + 0.25 * draw[2]), policy + 0.3 * draw[3], values


def played():
    """Play six groups in two domains with the older policies; the second turn of an episode is a version newer."""
    rng = np.random.default_rng(11)
    _, older, _, _ = tables()
    episodes = []
    for number in range(6):
        for index in range(GROUP):
            tokens, logprobs, mask, turns = [int(rng.integers(VOCABULARY))], [0.0], [False], []
            for version, table in enumerate(older):
                start = len(tokens)
                for _ in range(int(rng.integers(1, 9))):
                    odds = table[tokens[-1]].log_softmax(-1).numpy()
                    tokens.append(int(rng.choice(VOCABULARY, p=np.exp(odds))))
                    logprobs.append(odds[tokens[-1]])
                    mask.append(True)
                turns.append(EpisodeTurn(start=start, end=len(tokens), reward=float(rng.integers(0, 3)) / 4))
                if not version:  # what the environment answers
                    tokens.append(int(rng.integers(VOCABULARY)))
                    logprobs.append(0.0)
                    mask.append(False)
            episodes.append(make_table_episode(number, index, tokens, logprobs, mask, turns))
    return episodes


def play_earning(unit):
    """Play the same groups; a reward function gives each turn, or each token, a separate number."""
    rng, domain = np.random.default_rng(5), make_recipe().domains["lake"]
    domain = msgspec.structs.replace(domain, reward_unit=unit, on_reward_error="fault")
    earn = {
        "turn": lambda given: rng.normal(size=len(given.turns)),
        "token": lambda given: np.where(given.loss_mask, rng.normal(size=len(given)), 0.0),
    }[unit]
    caller = RewardCaller(function=earn, takes_list=False, is_async=False, unit=unit)
    episodes = []
    for one in played():
        (score,) = caller.read_scores(caller.call([one]), [one])
        episodes.append(apply_score(one, domain, score))
    return episodes


def play_all():
    """Return the episodes of every step that is compared, with the algorithm of each."""
    earning = {f"{name}, rewards of {unit}s": (name, play_earning(unit)) for name, unit in EARNING}
    return {**{name: (name, played()) for name in ALL}, **earning}


def make_table_episode(number, index, tokens, logprobs, mask, turns):
    domain = "lake" if number % 2 else "sums"
    scale = 10.0 if domain == "sums" else 1.0
    turns = [EpisodeTurn(start=turn.start, end=turn.end, reward=scale * turn.reward) for turn in turns]
    return make_trajectory(
        f"{domain}/{number}/{index}",
        seed=number,
        end_version=1,
        token_ids=tokens,
        logprobs=logprobs,
        loss_mask=mask,
        turns=turns,
        reward=sum(turn.reward for turn in turns) + scale * (index == number % GROUP),
    )


def settings_of(name, **more):
    """Return [train] of a recipe with a row's settings, as `hpcrl plan` accepts it."""
    given = {**ALL[name], **more, "learning_rate": RATE, "groups_per_step": 8, "max_grad_norm": 1e9}
    given |= {"kl_coef": 0.2} if "kl" in given else {}
    recipe = make_recipe(*(f"train.{key}={value}" for key, value in given.items()))
    check_recipe(recipe)
    return msgspec.structs.replace(recipe.train, response_budget={"lake": BUDGET, "sums": BUDGET})


def make_table_trainer(train, *, world=SINGLE_RANK):
    """Make the torch trainer of the table, with plain gradient descent; return it and the list of its gradients."""
    policy, _, reference, values = tables()
    models = [TableModel(policy), TableModel(reference)]
    hpcrl.trainers.torch.open_causal = lambda *_, **__: ModelSource(models.pop(0), None)
    hpcrl.trainers.torch.load_fixed = lambda *_, **__: TokenModel(models.pop(0))
    hpcrl.trainers.critic.open_critic = lambda _: ModelSource(TableModel(values), None)
    trainer = TorchTrainer(Path("unused"), train, seed=3, world=world)
    trainer._policy.optimizer = torch.optim.SGD(trainer._policy.parameters, lr=1.0)
    gradients, apply_gradient = [], trainer.apply_gradient

    def record_gradient(*, rate):
        gradients.append(trainer._policy.parameters[0].grad.clone())
        apply_gradient(rate=rate)

    trainer.apply_gradient = record_gradient
    return trainer, gradients


def compute_gradients(world):
    """Return the gradients and the clip share of every step that is compared, on one rank of several."""
    results = {"padded": {}, "packed": {}}
    for name, (algorithm, episodes) in play_all().items():
        for rows, found in results.items():
            train = settings_of(algorithm, rows=rows, tokens_per_micro_batch=40)
            trainer, gradients = make_table_trainer(train, world=world)
            metrics = trainer.train_step(episodes, step=1, version=1)
            found[name] = [[gradient.tolist() for gradient in gradients], metrics.clip_fraction]
    return results


def play_chain(table, *, version, num_groups=6):
    """Play a chain of two turns with a policy: token 3, then token 4 after it, is worth 1, and token 3 a little."""
    rng, odds = np.random.default_rng(version), table.log_softmax(-1).numpy()
    episodes = []
    for number in range(num_groups):
        for index in range(GROUP):
            first = int(rng.choice(VOCABULARY, p=np.exp(odds[0])))
            second = int(rng.choice(VOCABULARY, p=np.exp(odds[first])))
            turns = [EpisodeTurn(start=1, end=2), EpisodeTurn(start=2, end=3)]
            logprobs = [0.0, odds[0, first], odds[first, second]]
            made = make_table_episode(number, index, [0, first, second], logprobs, [False, True, True], turns)
            won = 1.0 if (first, second) == (3, 4) else 0.2 * (first == 3)
            episodes.append(msgspec.structs.replace(made, reward=won))
    return episodes
