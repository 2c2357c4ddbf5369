"""`python -m hpcrl.envs.check < domains.json`: can every environment and reward of a recipe be made here?

A process of its own, so that the login-node side stays light and user code that breaks breaks only this.
"""

import sys

import msgspec

from hpcrl.envs.base import load_code, make_env
from hpcrl.errors import ConfigError
from hpcrl.recipe import Domain


def main() -> int:
    domains = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, Domain])
    try:
        for name, domain in domains.items():
            load_code(domain.reward, what=f"domains.{name}.reward")
            make_env(domain.env, domain.options, what=f"domains.{name}.env")
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - this is the program's answer
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
