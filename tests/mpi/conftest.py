"""Couriers under mpiexec on this machine."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.testing.nodes import MPIEXEC, CourierFleet, fleet


@pytest.fixture
def needs_mpi() -> None:
    if importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists():
        pytest.skip("the couriers need mpi4py and mpich: pip install 'hpcrl[mpi]'")


@pytest.fixture
def four_nodes(needs_mpi: None, tmp_path: Path) -> Iterator[CourierFleet]:
    """The trainer's node and three others; their couriers do not run yet."""
    with fleet(tmp_path / "campaign", "n0", "n1", "n2", "n3", silent_s=6.0) as couriers:
        yield couriers


@pytest.fixture
def over_tcp(tmp_path: Path) -> Iterator[CourierFleet]:
    """The trainer's node and two others, without MPI."""
    with fleet(tmp_path / "campaign", "n0", "n1", "n2", silent_s=6.0, wire="tcp") as couriers:
        yield couriers
