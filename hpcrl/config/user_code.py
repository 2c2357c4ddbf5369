"""Load the user's code, which a recipe names as `package.module:name`."""

import importlib
from types import ModuleType
from typing import Any

from hpcrl.errors import ConfigError, show_error

MAX_LISTED = 12
RENAMED_CODE = {"hpcrl.envs.repair:mended": "hpcrl.envs.repair:rerun_tests"}
"""Old names of hpcrl's own functions and their new ones, for error messages."""


def load_code(name: str, *, what: str) -> Any:
    """Import and return the object called `name`; `what` is its key in the recipe, for error messages."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a package may have exceptions of its own, such as pytest's
        raise ConfigError(
            f"{what} = {name!r}: importing {module_name} failed ({show_error(error)}): "
            f"{_choose_remedy(error, module_name)}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        if name in RENAMED_CODE:
            raise ConfigError(f"{what} = {name!r} is now called {RENAMED_CODE[name]!r}: use the new name") from None
        own = _list_own(module, attribute)
        raise ConfigError(f"{what} = {name!r}: {module_name} has no {attribute!r}: {own}") from None


def _choose_remedy(error: BaseException, module_name: str) -> str:
    """Return what to do about a module that cannot be imported, which may be found and fail."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"correct {module_name}"
    if module_name == error.name or module_name.startswith(f"{error.name}."):
        return "install it in the environment that runs hpcrl, put its folder into PYTHONPATH, or fix the name"
    return f"install {error.name}, which it imports, in the environment that runs hpcrl"


def _list_own(module: ModuleType, attribute: str) -> str:
    """List the classes and functions that a module defines, with the one that may be meant."""
    from hpcrl.config.toml import suggest_name  # not in each process of an environment

    names = sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    )
    shown = ", ".join(names[:MAX_LISTED]) + ", ..." * (len(names) > MAX_LISTED)
    return f"{suggest_name(attribute, names)}it defines {shown or 'no class and no function'}"
