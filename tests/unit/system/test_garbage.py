"""Imports without collections."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hpcrl.system.garbage import pause_collection

END_WITH_A_CYCLE = """
from hpcrl.system.garbage import pause_collection

class Resource:
    def __init__(self):
        self.own = self

    def __del__(self):
        print("freed")

with pause_collection():
    resource = Resource()
del resource
"""


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Leave all objects of the test session to its collector again."""
    yield
    gc.unfreeze()


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that were collected, in order."""
    seen: list[int] = []

    def record(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(record)
    yield seen
    gc.callbacks.remove(record)


def make_objects() -> list[list[int]]:
    return [[number] for number in range(20_000)]


def test_nothing_is_collected_in_the_block_and_again_after_it(collections: list[int]) -> None:
    with pause_collection():
        kept = make_objects()
    assert collections == []
    kept += make_objects()
    assert collections


def test_later_collections_leave_out_what_the_block_made() -> None:
    with pause_collection():
        kept = make_objects()
    assert gc.get_freeze_count() >= len(kept)
    tracked = {id(made) for made in gc.get_objects()}
    assert not any(id(made) in tracked for made in kept)


def test_a_block_inside_another_leaves_the_collector_off() -> None:
    with pause_collection():
        with pause_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_runs_again_after_a_failed_import() -> None:
    with pytest.raises(ModuleNotFoundError), pause_collection():
        import hpcrl.no_such_module  # noqa: F401
    assert gc.isenabled()


def test_cycles_of_the_block_are_freed_when_the_process_ends() -> None:
    done = subprocess.run([sys.executable, "-c", END_WITH_A_CYCLE], capture_output=True, text=True, check=True)
    assert done.stdout == "freed\n"
