"""Turns that need a version wait until it is loaded, in every engine; none waits forever."""

import asyncio
from typing import Any

import pytest

from hpcrl.config.recipe import TinyModel
from hpcrl.engines import version_gate
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.engines.sim.engine import SimEngine, SimSettings
from hpcrl.engines.version_gate import VersionGate
from hpcrl.errors import EngineError
from hpcrl.hardware.cost_model import ModelShape, estimate_speed
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.models.tiny import make_tiny_model
from hpcrl.testing.memory import MemoryStore
from hpcrl.weights.model_update import collect_parameters
from hpcrl.weights.versions import WeightVersion

SPEED = estimate_speed(
    GPU_CATALOGUE["h20"], shape=ModelShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, num_dense=90000)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("gate") / "model"
    make_tiny_model(directory, TinyModel(), seed=0)
    return load_model(directory, device="cpu")


@pytest.fixture(params=["embedded", "sim"])
def engine(request: pytest.FixtureRequest, model: Any) -> EmbeddedEngine | SimEngine:
    store = MemoryStore()
    store.publish(collect_parameters(model), WeightVersion(version=3, step=3))
    if request.param == "embedded":
        return EmbeddedEngine(model, store=store)
    return SimEngine(SPEED, settings=SimSettings(vocabulary=100, context_length=100, max_batch=4), store=store)


def turn(request_id: str, **changed: Any) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, token_ids=[5, 9], max_new_tokens=2, **changed)


def test_a_turn_is_generated_with_the_version_that_it_needs(engine: EmbeddedEngine | SimEngine) -> None:
    async def run() -> tuple[list[int], list[int], bool]:
        async with engine:
            needing = asyncio.create_task(engine.generate(turn("new", min_version=3)))
            old = await engine.generate(turn("old"))
            was_waiting = not needing.done()
            await engine.load_version(3)
            return old.versions, (await needing).versions, was_waiting

    assert asyncio.run(run()) == ([0, 0], [3, 3], True)


def test_a_streamed_turn_waits_for_its_version_too(engine: EmbeddedEngine | SimEngine) -> None:
    async def collect(request: GenerateRequest) -> tuple[list[int], str | None]:
        chunks = [chunk async for chunk in engine.stream(request)]
        return [version for chunk in chunks for version in chunk.versions], chunks[-1].finish_reason

    async def run() -> list[tuple[list[int], str | None]]:
        async with engine:
            needing, gone = (asyncio.create_task(collect(turn(name, min_version=3))) for name in ("new", "gone"))
            await asyncio.sleep(0)
            old = await collect(turn("old"))
            await engine.abort("gone")
            await engine.load_version(3)
            return [old, await needing, await gone]

    assert asyncio.run(run()) == [([0, 0], "length"), ([3, 3], "length"), ([], "aborted")]


def test_a_prompt_is_computed_with_the_version_that_it_needs(engine: EmbeddedEngine | SimEngine) -> None:
    async def run() -> int:
        async with engine:
            needing = asyncio.create_task(engine.prefill(turn("new", min_version=3)))
            await engine.load_version(3)
            return (await needing).version

    assert asyncio.run(run()) == 3


def test_an_engine_that_loads_nothing_continues_after_a_while(
    engine: EmbeddedEngine | SimEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_gate, "MAX_VERSION_WAIT_S", 0.01)

    async def run() -> list[int]:
        async with engine:
            return (await engine.generate(turn("new", min_version=9))).versions

    assert asyncio.run(run()) == [0, 0]


def test_a_turn_that_is_cancelled_while_it_waits_never_reaches_the_engine(engine: EmbeddedEngine | SimEngine) -> None:
    async def run() -> list[int]:
        async with engine:
            needing = asyncio.create_task(engine.generate(turn("r", min_version=3)))
            await asyncio.sleep(0)
            needing.cancel()
            await asyncio.wait({needing})
            await engine.load_version(3)
            return (await engine.generate(turn("r"))).versions

    assert asyncio.run(run()) == [3, 3]


def test_a_turn_that_is_aborted_while_it_waits_for_a_version_ends(engine: EmbeddedEngine | SimEngine) -> None:
    async def run() -> tuple[list[int], str, bool]:
        async with engine:
            needing, other = (asyncio.create_task(engine.generate(turn(name, min_version=3))) for name in "ab")
            await asyncio.sleep(0)
            await engine.abort("a")
            answer, still_waits = await needing, not other.done()
            await engine.load_version(3)
            await other
            return answer.token_ids, answer.finish_reason, still_waits

    assert asyncio.run(run()) == ([], "aborted", True)


def test_a_prompt_that_is_aborted_while_it_waits_for_a_version_ends(engine: EmbeddedEngine | SimEngine) -> None:
    async def run() -> None:
        async with engine:
            needing = asyncio.create_task(engine.prefill(turn("a", min_version=3)))
            await asyncio.sleep(0)
            await engine.abort("a")
            await needing

    with pytest.raises(EngineError, match="prefill of request 'a' was aborted"):
        asyncio.run(run())


def test_a_gate_opens_for_what_is_loaded_and_older_only() -> None:
    async def run() -> list[str]:
        gate, passed = VersionGate(1), []

        async def go(version: int) -> None:
            await gate.pass_through(turn(f"v{version}", min_version=version))
            passed.append(f"v{version}")

        waiting = [asyncio.create_task(go(version)) for version in (4, 2, 1, 3)]
        await asyncio.sleep(0)
        gate.open_for(2)
        await asyncio.sleep(0.001)
        passed.append("then")
        gate.open_for(5)
        await asyncio.gather(*waiting)
        return passed

    assert asyncio.run(run()) == ["v1", "v2", "then", "v4", "v3"]
