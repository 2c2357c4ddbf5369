"""The tests here need one CUDA device, and are skipped without; `make gpu-check DEVICE=cpu` runs them on CPUs."""

import os
from pathlib import Path

import pytest
import torch

DEVICE = os.environ.get("HPCRL_CHECK_DEVICE", "cuda")


@pytest.fixture
def device() -> torch.device:
    """The device that is compared with the CPU."""
    return torch.device("cpu") if DEVICE == "cpu" else torch.device(DEVICE, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if DEVICE == "cuda" and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
