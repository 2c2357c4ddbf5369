"""Recipes: `hpcrl recipe ls`, `show` and `new`.

run_recipe_ls, run_recipe_show, run_recipe_new    the commands
"""

import argparse
import re
import sys

from hpcrl.config.recipe import Recipe, make_recipe
from hpcrl.config.toml import NAME_PATTERN, PATTERN_MEANINGS, find_toml, list_known_names, load_table, user_folder
from hpcrl.errors import ConfigError, HpcrlError
from hpcrl.system.files import make_private_dir, publish_file
from hpcrl.system.terminal import print_line, print_note


def run_recipe_ls(arguments: argparse.Namespace) -> int:
    del arguments
    names = list_known_names("recipes")
    width = max(map(len, names))
    for name in names:
        try:
            description = make_recipe(load_table("recipes", name)).description
        except HpcrlError as error:
            description = f"cannot be used: {error}"
        print_line(f"{name:<{width}}  {description}")
    return 0


def run_recipe_show(arguments: argparse.Namespace) -> int:
    """Print the file, and those that it extends, the first one last."""
    table = load_table("recipes", arguments.recipe)
    for file, _ in table.layers:
        path = find_toml("recipes", file)
        print_line(f"# {path}")
        sys.stdout.write(path.read_text())
    try:
        make_recipe(table)
    except HpcrlError as error:
        print_note(f"it cannot be used: {error}")
    return 0


def run_recipe_new(arguments: argparse.Namespace) -> int:
    """Write a recipe that extends another, with the keys that are changed first in comments."""
    name, parent = arguments.name, arguments.parent
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"{name!r} cannot be the name of a recipe: give {PATTERN_MEANINGS[NAME_PATTERN]}")
    recipe = make_recipe(load_table("recipes", parent))
    path = user_folder("recipes") / f"{name}.toml"
    if path.exists():
        raise ConfigError(f"{path} exists already: choose another name, or edit it")
    if name == parent:
        raise ConfigError(f"{name!r} would extend itself: choose another name")
    make_private_dir(path.parent)
    publish_file(path, _make_text(name, parent, recipe))
    print_line(f"{path} is recipe {name}; next:")
    print_line(f"  hpcrl plan {name} --site local     # after a change of it; `hpcrl help recipe` lists every key")
    return 0


def _make_text(name: str, parent: str, recipe: Recipe) -> str:
    return f"""\
# What is set here takes the place of what {parent} has (`hpcrl recipe show {parent}`).
extends = "{parent}"
name = "{name}"
description = "{parent}, changed"

[model]
# path = "Qwen/Qwen3-0.6B"         # a directory, or a name of the hub, which `hpcrl stage` fetches

[rollout]
# group_size = {recipe.rollout.group_size}
# max_new_tokens = {recipe.rollout.max_new_tokens}

[train]
# num_steps = {recipe.train.num_steps}
# groups_per_step = {recipe.train.groups_per_step}
# learning_rate = {recipe.train.learning_rate:g}

[job]
# walltime_min = {recipe.job.walltime_min}
# num_jobs = {recipe.job.num_jobs}
"""
