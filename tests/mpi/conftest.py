"""Couriers under mpiexec on this machine."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi.fleet import MPIEXEC, Fleet, fleet

# Off by default and not yet steady under load: CONTRIBUTING.md says how to run them.
collect_ignore = [] if os.environ.get("HPCRL_TEST_COURIERS") else ["test_transfer.py"]


@pytest.fixture
def needs_mpi() -> None:
    if importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists():
        pytest.skip("the couriers need mpi4py and mpich: pip install 'hpcrl[mpi]'")


@pytest.fixture
def four_nodes(needs_mpi: None, tmp_path: Path) -> Iterator[Fleet]:
    """The trainer's node and three others; their couriers do not run yet."""
    with fleet(tmp_path / "campaign", "n0", "n1", "n2", "n3", silent_s=4.0) as couriers:
        yield couriers
