"""The contract of every InferenceEngine, in tests/contract, on a real vLLM server behind our HTTP server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from hpcrl.engines.base import InferenceEngine
from hpcrl.engines.http import make_client_session
from tests.contract import test_engine as contract
from tests.support.served import Newcomer

if TYPE_CHECKING:
    from tests.contract.test_engine import Opened
    from tests.support.served import Behind

for _name, _test in vars(contract).items():
    if _name.startswith("test_"):
        globals()[_name] = _test


@pytest.fixture
def opened(pair: "list[Behind]") -> "Opened":
    @asynccontextmanager
    async def arrive() -> AsyncIterator[InferenceEngine]:
        async with make_client_session() as session:
            engine = Newcomer(pair[0].endpoint, session)
            await engine.load_figures()
            yield engine

    return arrive


@pytest.fixture
def honouring(opened: "Opened") -> "Opened":
    return opened
