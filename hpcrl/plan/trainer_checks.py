"""Check whether the trainer can do what a recipe asks of it. Pure.

find_share_conflict      too little in a step for each share of the trainer
find_megatron_conflict   the first setting that trainer "megatron" does not support
"""

import msgspec

from hpcrl.config.pipeline import needs_critic
from hpcrl.config.recipe import Recipe, TrainConfig


def find_share_conflict(recipe: Recipe) -> str | None:
    """Return why a step has too little for each share of the trainer, with a fix; None if it has enough."""
    train, num_shares, warmup = recipe.train, recipe.num_train_shares, recipe.warmup
    batch = train.groups_per_step * recipe.rollout.group_size
    if recipe.has_rollouts and batch < num_shares * train.num_minibatches:
        return (
            f"a step has {batch} trajectories for {num_shares} ranks x train.num_minibatches = "
            f"{train.num_minibatches}: raise train.groups_per_step or lower the others"
        )
    if warmup is not None and warmup.conversations_per_step < num_shares:
        return (
            f"warmup.conversations_per_step = {warmup.conversations_per_step} for {num_shares} ranks: raise it to "
            f"{num_shares} or more"
        )
    return None


def find_megatron_conflict(train: TrainConfig) -> str | None:
    """Return the first setting that trainer "megatron" does not support, with a fix; None if there is none."""
    plain = {"rows": "padded", "lora_rank": 0, "offload": False, "compile": False}
    for name, known in plain.items():
        if (seen := getattr(train, name)) != known:
            shown, plain_value = (msgspec.json.encode(value).decode() for value in (seen, known))  # as in TOML
            return f'train.{name} = {shown} is not supported by trainer "megatron": set it to {plain_value}'
    if train.sharding == "full":
        return (
            'train.sharding = "full" is not supported by trainer "megatron", which splits a model by '
            "train.tensor_parallel, train.expert_parallel and train.pipeline_parallel: remove it"
        )
    if needs_critic(train):
        return (
            'train.advantage = "gae" needs a critic, which trainer "megatron" does not have: use "torch", or a '
            "function of your own for train.pipeline.values"
        )
    return None
