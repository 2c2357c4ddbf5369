"""`python -m hpcrl.envs.check < recipe.json`: can all the user's code that a recipe names be used here?

A process of its own, so that the login-node side stays light and user code that breaks breaks only this.
"""

import sys

import msgspec

from hpcrl.envs.base import load_code, make_env
from hpcrl.errors import ConfigError
from hpcrl.recipe import Recipe


def main() -> int:
    recipe = msgspec.json.decode(sys.stdin.buffer.read(), type=Recipe)
    try:
        for name, domain in recipe.domains.items():
            load_code(domain.reward, what=f"domains.{name}.reward")
            make_env(domain.env, domain.options, what=f"domains.{name}.env")
        _check_curriculum(recipe)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - this is the program's answer
        return 2
    return 0


def _check_curriculum(recipe: Recipe) -> None:
    """It is asked before there are rewards, so it is tried with none."""
    name = recipe.rollout.curriculum
    if name is None:
        return
    hook = load_code(name, what="rollout.curriculum")
    try:
        dict(hook({domain: [] for domain in recipe.domains}))
    except Exception as error:
        cure = "it is called with the recent rewards of each domain, none at first, and gives weights by domain"
        raise ConfigError(f"rollout.curriculum = {name!r}: {type(error).__name__}: {error}: {cure}") from error


if __name__ == "__main__":
    sys.exit(main())
