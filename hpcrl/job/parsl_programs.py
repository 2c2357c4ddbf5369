"""Parsl without the parts that hpcrl does not use, which cost half a second in every process.

skip_database     import it as a whole without a database
load_program      return the code of a program, and let it import modules of Parsl alone
import_whole      let the code of a block import Parsl as a whole
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
_imported_whole: dict[str, ModuleType] = {}
"""The modules of Parsl that users' code has imported in this process."""


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


@contextlib.contextmanager
def import_whole() -> Iterator[None]:
    """Let the code of this block, a user's, import all of Parsl, in modules that only such blocks have.

    A module that was kept would be missing in its new package, and what runs the block must find its own again: it
    pickles errors, which have the classes of their modules.
    """
    own = _take_modules()
    sys.modules.update(_imported_whole)
    try:
        yield
    finally:
        _imported_whole.update(_take_modules())
        sys.modules.update(own)


def _take_modules() -> dict[str, ModuleType]:
    """Take out the modules of Parsl that are imported."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "parsl"}


def use_steady_time() -> None:
    """Let the time of this process follow the clock that never jumps: Parsl measures by it how long others are silent.

    Processes that were forked before have their own.
    """
    started_at, started_turn = time.time(), time.monotonic()
    time.time = lambda: started_at + time.monotonic() - started_turn
