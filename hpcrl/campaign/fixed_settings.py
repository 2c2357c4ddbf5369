"""The settings that a campaign keeps, since its checkpoints or its tasks in flight depend on them. Pure.

list_fixed_settings     those of a recipe
explain_fixed_setting   the reason why a setting is kept
find_differences        the settings in which such tables differ
split_entry             the partition, or the kind of GPU, that a setting of a site is of
FIXED_SETTINGS, DOMAIN_SETTINGS   the settings and the reasons
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.config.toml import flatten_table

NAMING_SETTINGS = frozenset({"name", "description", "site.name", "site.description"})
"""Settings in which campaigns may differ without being different."""
FIXED_SETTINGS = {
    "name": "it names the campaign's files",
    "seed": "the tasks in flight were drawn with it",
    "model": "the checkpoints are of this model",
    "warmup": "its conversations were copied at submission",
    "rollout.group_size": "groups in flight have the size that they were started with",
    "train.advantage": "the checkpoints have, or lack, its critic",
    "train.lora_rank": "the checkpoints have adapters of this rank",
    "train.lora_alpha": "the adapters were trained with it",
    "train.pipeline": "the checkpoints have the state of its nodes",
}
"""Settings of a recipe that a campaign keeps, and why."""
DOMAIN_SETTINGS = {
    "env": "the tasks in flight are its own",
    "tasks": "its rows were copied at submission",
    "held_out": "its rows were copied at submission",
}
"""Settings of each domain that a campaign keeps, and why."""


def find_differences(tables: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the settings in which flat tables differ, with the value of each; None where one does not have it."""
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name) for table in tables]
        if name not in NAMING_SETTINGS and any(value != values[0] for value in values):
            yield name, values


def split_entry(key: str) -> tuple[str, bool]:
    """Return the part of a site's key that names a partition or a kind of GPU, and whether it does; else the key."""
    parts = key.removeprefix("site.").split(".")
    is_named = parts[0] in ("partitions", "gpus") and len(parts) > 2
    return (key[: -len(".".join(parts[2:])) - 1], True) if is_named else (key, False)


def explain_fixed_setting(key: str) -> str | None:
    """Return why a campaign keeps this setting; None if it may change."""
    first, _, rest = key.partition(".")
    named, known = (rest.partition(".")[2], DOMAIN_SETTINGS) if first == "domains" else (key, FIXED_SETTINGS)
    return next((why for fixed, why in known.items() if f"{named}.".startswith(f"{fixed}.")), None)


def list_fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that no other job of the campaign may change."""
    settings = flatten_table(msgspec.to_builtins(recipe))
    return {key: value for key, value in settings if explain_fixed_setting(key) is not None}
