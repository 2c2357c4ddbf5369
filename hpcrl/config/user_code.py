"""Load the user's code, which a recipe names as `package.module:name`."""

import importlib
from typing import Any

from hpcrl.errors import ConfigError, show_error


def load_code(name: str, *, what: str) -> Any:
    """Import and return the object called `name`; `what` is its key in the recipe, for error messages."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{what} = {name!r}: importing {module_name} failed ({show_error(error)}): "
            "install it in the environment that runs hpcrl, or fix the name"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))[:12])
        raise ConfigError(f"{what} = {name!r}: {module_name} has no {attribute!r}; it has {public}") from None
