"""The contract of every InferenceEngine, in tests/contract, on a real vLLM server behind our HTTP server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpcrl.engines.base import Completion, InferenceEngine
from hpcrl.engines.embedded.engine import load_model
from hpcrl.engines.http import make_client_session
from tests.contract import test_engine as contract
from tests.support.served import Newcomer
from tests.support.structures import SMALL, TEXTS, encode, score_masked

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


def test_a_seed_that_no_agent_asked_for_is_not_used(opened: "Opened") -> None:
    async def body(engine: InferenceEngine) -> list[list[int]]:
        plain = contract.ask(seed=7, needs_seed=False, max_new_tokens=30)
        return [(await engine.generate(plain)).token_ids for _ in range(2)]

    first, second = contract.on(opened, body)
    assert first != second, "each has the next numbers of the engine"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_of_the_tokens_that_a_structure_allows(
    honouring: "Opened", slow_model_dir: Path, temperature: float
) -> None:
    asked = [
        contract.ask(
            f"r{seed}",
            structure=SMALL,
            stop_token_ids=[contract.STOP],
            seed=seed,
            temperature=temperature,
            max_new_tokens=50,
            top_logprobs=3,
        )
        for seed in range(12)
    ]

    async def body(engine: InferenceEngine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request) for request in asked))

    model = load_model(slow_model_dir, device="cpu")
    answers = contract.on(honouring, body)
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    for answer in answers:
        assert contract.read_text(answer.token_ids) in [text + "<eos>" for text in TEXTS]
        expected = score_masked(model, contract.PROMPT, answer.token_ids, stop=contract.STOP, temperature=temperature)
        assert answer.logprobs == pytest.approx(expected, abs=1e-3)
        assert set(answer.top[0]) == {*encode("y"), *encode("n")}
