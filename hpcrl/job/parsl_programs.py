"""Parsl's own programs without the parts of Parsl that they do not use, which cost half a second in every process.

load_program      return the code of a program, and let it import modules of Parsl alone
forget_packages   let later code import Parsl as a whole
use_steady_time   let no jump of the clock look like a silence of other processes
"""

import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType

PACKAGES = ("parsl", "parsl.executors", "parsl.monitoring")
"""The packages whose `__init__` imports the kernel, all executors and the hub, which only a driver needs."""


def load_program(name: str) -> CodeType:
    """Return the code of a module of Parsl, to run as the main module of this process and of those that it spawns."""
    for package in PACKAGES:
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
    """Let the next import of Parsl, which is that of a user's code, run the `__init__` of its packages."""
    for package in PACKAGES:
        sys.modules.pop(package, None)


def use_steady_time() -> None:
    """Let the time of this process follow the clock that never jumps: Parsl measures by it how long others are silent.

    Processes that were forked before have their own.
    """
    started_at, started_turn = time.time(), time.monotonic()
    time.time = lambda: started_at + time.monotonic() - started_turn
