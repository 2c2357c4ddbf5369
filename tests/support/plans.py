"""Recipes and plans as tests need them: what ships, with a few settings changed.

make_recipe         a shipped recipe
make_reward_recipe  the quickstart with a reward function of the tests
make_site           a shipped site, with an account where jobs need one
plan_recipe         the plan of a recipe for a site
refuse_plan         why the quickstart with some settings is not planned
refuse_recipe       why a recipe's code is refused before submission
"""

import subprocess
import sys
from collections.abc import Sequence
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec
import pytest

from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site, load_site
from hpcrl.errors import PlanError
from hpcrl.plan.plan import Plan, make_plan
from hpcrl.testing.recipes import load_recipe

ACCOUNTS = {
    **{
        name: ("account=proj42",)
        for name in ("frontier", "lumi", "marenostrum5", "jupiter", "jureca-dc", "alps", "delta", "deltaai", "expanse")
    },
    "perlmutter": ("account=m1234",),
    "leonardo": ("partitions.booster.account=IscrC_x", "partitions.dcgp.account=IscrC_x_dcgp"),
}


def make_recipe(*settings: str, name: str = "quickstart") -> Recipe:
    """Return a shipped recipe with some settings: `make_recipe("rollout.group_size=4")`."""
    return load_recipe(name, settings=settings)


def make_reward_recipe(reward: str, *settings: str, judges: Sequence[str] = (), **options: Any) -> Recipe:
    """Return the quickstart with a reward of `tests/support`, `many_rewards:note`, and nothing but these options."""
    recipe = make_recipe(*settings)
    changed = {"reward": f"tests.support.{reward}", "judges": list(judges), "reward_options": options}
    lake = msgspec.structs.replace(recipe.domains["lake"], **changed)
    return msgspec.structs.replace(recipe, domains={"lake": lake})


def make_site(name: str = "lab", *settings: str) -> Site:
    """Return a shipped site with some settings."""
    return load_site(name, settings=(*ACCOUNTS.get(name, ()), *settings))


def plan_recipe(*settings: str, recipe: str = "quickstart", site: str = "lab") -> Plan:
    """Return the plan of a shipped recipe; settings that start with `site.` change the site."""
    of_site = [setting.removeprefix("site.") for setting in settings if setting.startswith("site.")]
    of_recipe = [setting for setting in settings if not setting.startswith("site.")]
    return make_plan(make_recipe(*of_recipe, name=recipe), make_site(site, *of_site))


def refuse_plan(*settings: str, site: str = "lab") -> str:
    """Return why the quickstart with these settings is not planned."""
    with pytest.raises(PlanError) as caught:
        plan_recipe(*settings, site=site)
    return str(caught.value)


def refuse_recipe(recipe: Recipe) -> str:
    """Return what the process that checks a recipe's code answers when it refuses it."""
    with NamedTemporaryFile() as answer:
        command = [sys.executable, "-m", "hpcrl.envs.check", answer.name]
        done = subprocess.run(command, input=msgspec.json.encode(recipe), check=False)
        assert done.returncode == 2
        return answer.read().decode()
