"""Parsl without the parts that hpcrl does not use, which cost half a second in every process.

skip_database     import it as a whole without a database
load_program      return the code of a program, and let it import modules of Parsl alone
forget_packages   let later code import Parsl as a whole
use_steady_time   let no jump of the clock look like a silence of other processes
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType

PACKAGES = ("parsl", "parsl.executors", "parsl.monitoring")
"""The packages whose `__init__` imports the kernel, all executors and the hub, which only a driver needs."""


@contextlib.contextmanager
def skip_database() -> Iterator[None]:
    """Let Parsl, which this block imports, meet an ImportError at the database of its monitoring: that is optional."""
    database = "parsl.monitoring.db_manager"
    sys.modules.setdefault(database, None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if sys.modules[database] is None:
            del sys.modules[database]


def load_program(name: str) -> CodeType:
    """Return the code of a module of Parsl, to run as the main module of this process and of those that it spawns."""
    for package in PACKAGES:
        if package in sys.modules:
            continue
        spec = find_spec(package)
        assert spec is not None
        module = ModuleType(package)
        module.__path__ = spec.submodule_search_locations or []
        sys.modules[package] = module
    spec = find_spec(name)
    assert spec is not None
    assert isinstance(spec.loader, SourceFileLoader)
    code = spec.loader.get_code(name)
    assert code is not None
    return code


def forget_packages() -> None:
    """Let the next import of Parsl, which is that of a user's code, load all of it again.

    A module that was kept would be missing in its new package.
    """
    for name in [one for one in sys.modules if one.partition(".")[0] == "parsl"]:
        del sys.modules[name]


def use_steady_time() -> None:
    """Let the time of this process follow the clock that never jumps: Parsl measures by it how long others are silent.

    Processes that were forked before have their own.
    """
    started_at, started_turn = time.time(), time.monotonic()
    time.time = lambda: started_at + time.monotonic() - started_turn
