"""Two real vLLM engines that the whole suite shares, since each takes half a minute to start.

The first keeps the weights of the model directory, version 0, and runs as long as the suite. The second gets new
weights and is killed in the end: so the files have an order, in which each finds it in the state that it needs.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.served import Behind, Place
    from tests.support.trained import ExportedModel

ORDER = (
    "test_vllm_export",
    "test_vllm_contract",
    "test_vllm_forms",
    "test_vllm_handover",
    "test_vllm_bad_input",
    "test_vllm_weights",
    "test_vllm_elsewhere",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here: they need vLLM, and time to start it."""
    here = Path(__file__).parent
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make vllm)"))
    items.sort(key=lambda item: ORDER.index(item.path.stem) if item.path.stem in ORDER else -1)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> "ExportedModel":
    """Train a model so deep that a long turn takes many seconds, so that a test can act in the middle of it.

    A server whose engine generates tokens faster than it can send them answers no other request meanwhile.
    """
    from tests.support.trained import train_and_export

    return train_and_export(tmp_path_factory.mktemp("slow"))


@pytest.fixture(scope="session")
def slow_model_dir(trained: "ExportedModel") -> Path:
    """The export of the trained model, which all servers load."""
    return trained.exported


@pytest.fixture(scope="session")
def vllm_place(tmp_path_factory: pytest.TempPathFactory, slow_model_dir: Path) -> "Iterator[Place]":
    from tests.support.served import place

    with place(tmp_path_factory.mktemp("vllm") / "campaign", slow_model_dir) as there:
        yield there


@pytest.fixture(scope="session")
def pair(vllm_place: "Place") -> "Iterator[list[Behind]]":
    with vllm_place.engines("first", "second") as found:
        yield found
