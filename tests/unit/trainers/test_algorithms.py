"""Every algorithm of docs/learning.md can be set in a recipe, and makes steps."""

import math

import pytest
import torch

from hpcrl.config.pipeline import make_pipeline
from hpcrl.config.recipe import load_recipe
from hpcrl.plan.checks import check_recipe
from hpcrl.trainers.torch import TorchTrainer
from tests.support.learners import batch, make_model

ALGORITHMS = {
    "GRPO": ("advantage=grpo", "aggregation=sequence", "kl=k3"),
    "RLOO": ("advantage=rloo",),
    "REINFORCE++": ("advantage=reinforce++",),
    "REINFORCE++ with a baseline": ("advantage=reinforce++-baseline",),
    "PPO": ("advantage=gae", "num_minibatches=2", "gae_lambda=0.95", "value_clip=0.2"),
    "DAPO": ("advantage=grpo", "clip_high=0.28", "flat_groups=drop", "aggregation=token"),
    "GSPO": ("advantage=grpo", "ratio=sequence", "aggregation=sequence", "clip_low=0.0003", "clip_high=0.0004"),
    "Dr. GRPO": ("advantage=dr-grpo", "aggregation=fixed"),
    "TRLOO": ("advantage=trloo", "gamma=0.9"),
    "SFT": ("advantage=sft", "correction=none"),
}
NODES = {"PPO": {"values", "proximal", "update-critic"}, "GRPO": {"reference"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("algorithms") / "model")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_set_in_a_recipe_and_makes_two_steps(model, name):
    recipe = load_recipe("quickstart", settings=tuple(f"train.{setting}" for setting in ALGORITHMS[name]))
    check_recipe(recipe)
    assert NODES.get(name, set()) <= make_pipeline(recipe.train).keys()
    trainer = TorchTrainer(model, recipe.train, seed=1)
    before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    for step in (1, 2):
        metrics = trainer.train_step(batch(step), step=step, version=step)
        assert metrics.skipped is None
        assert metrics.loss is not None
        assert math.isfinite(metrics.loss)
        assert (metrics.value_loss is not None) == (name == "PPO")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.tensors().items())
