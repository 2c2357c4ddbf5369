"""New weights in a running vLLM engine: exact, recorded per token, and refused when something is wrong with them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.engines.embedded import load_model
from hpcrl.errors import EngineError, WeightsError
from hpcrl.weights.fit import parameters_of
from hpcrl.weights.store import FileStore
from hpcrl.weights.versions import tensors_file
from tests.vllm.served import greedy, place

if TYPE_CHECKING:
    from tests.vllm.served import Behind, Place

PROMPT = [2, 45, 78, 5, 36, 3]
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def own_place(tmp_path_factory: pytest.TempPathFactory, slow_model_dir: Path) -> "Iterator[Place]":
    """A campaign whose versions only this module publishes."""
    with place(tmp_path_factory.mktemp("updates") / "campaign", slow_model_dir) as there:
        yield there


@pytest.fixture(scope="module")
def updated(own_place: "Place") -> "Iterator[Behind]":
    with own_place.engines("updated") as (found,):
        yield found


@pytest.fixture
def model(slow_model_dir: Path) -> Any:
    return load_model(slow_model_dir, device="cpu")


def ask(name: str, **changes: Any) -> GenerateRequest:
    request = GenerateRequest(request_id=name, token_ids=PROMPT, max_new_tokens=30, temperature=0.0)
    return msgspec.structs.replace(request, **changes)


def stir(model: Any, *, seed: int) -> dict[str, torch.Tensor]:
    """Change every weight of the model; returns them all."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.02)
    return parameters_of(model)


def next_version(updated: "Behind") -> int:
    return updated.engine.version + 1


def test_a_turn_goes_on_through_an_update_and_every_token_has_its_version(
    own_place: "Place", updated: "Behind", model: Any
) -> None:
    engine, version = updated.engine, next_version(updated)
    before = load_model(own_place.model, device="cpu")
    own_place.window.publish(stir(model, seed=version), version=version, step=version)

    async def body() -> Completion:
        turn = asyncio.create_task(engine.generate(ask("long", max_new_tokens=480)))
        start = (await engine.load_figures()).num_generated_tokens
        while (await engine.load_figures()).num_generated_tokens < start + 10:
            await asyncio.sleep(0.01)
        await engine.load_version(version)
        return await turn

    answer = own_place.do(body())
    assert answer.finish_reason == "length"
    assert answer.versions == sorted(answer.versions), "versions never go back"
    assert set(answer.versions) == {version - 1, version}
    switch = answer.versions.index(version)
    if version == 1:
        assert answer.token_ids[:switch] == greedy(before, PROMPT, num=switch)
    after = greedy(model, PROMPT + answer.token_ids[:switch], num=len(answer.token_ids) - switch)
    assert answer.token_ids[switch:] == after, "from the switch on, as if all had been computed with the new weights"


def test_a_stream_tells_the_version_of_each_piece_through_an_update(
    own_place: "Place", updated: "Behind", model: Any
) -> None:
    engine, version = updated.engine, next_version(updated)
    own_place.window.publish(stir(model, seed=version), version=version, step=version)

    async def body() -> list[int]:
        told: list[int] = []
        loading = None
        async for piece in engine.stream(ask("streamed", max_new_tokens=480)):
            told += piece.versions
            if loading is None and len(told) >= 10:
                loading = asyncio.create_task(engine.load_version(version))
        assert loading is not None
        await loading
        return told

    told = own_place.do(body())
    assert len(told) == 480
    assert set(told) == {version - 1, version}


def test_new_requests_are_answered_by_the_new_weights_as_by_transformers(
    own_place: "Place", updated: "Behind", model: Any
) -> None:
    engine, version = updated.engine, next_version(updated)
    own_place.do(engine.generate(ask("fill the prefix cache", token_ids=PROMPT * 20)))
    own_place.window.publish(stir(model, seed=version), version=version, step=version)
    own_place.do(engine.load_version(version))
    answer = own_place.do(engine.generate(ask("new", token_ids=PROMPT * 20)))
    assert answer.token_ids == greedy(model, PROMPT * 20, num=30)
    assert set(answer.versions) == {version}


def test_kv_of_the_version_before_is_not_used(own_place: "Place", updated: "Behind", model: Any) -> None:
    engine, version = updated.engine, next_version(updated)
    handle = own_place.do(engine.prefill(ask("prefill")))
    assert handle.version == version - 1
    own_place.window.publish(stir(model, seed=version), version=version, step=version)
    own_place.do(engine.load_version(version))
    forged = msgspec.structs.replace(handle, version=version)
    for name, kv in (("honest", handle), ("forged", forged)):
        answer = own_place.do(engine.generate(ask(name, kv=kv)))
        assert not answer.remote_prefill
        assert answer.token_ids == greedy(model, PROMPT, num=30)


def test_a_paused_engine_loads_and_stays_paused(own_place: "Place", updated: "Behind", model: Any) -> None:
    engine, version = updated.engine, next_version(updated)
    own_place.window.publish(stir(model, seed=version), version=version, step=version)

    async def body() -> tuple[bool, Completion]:
        await engine.pause()
        turn = asyncio.create_task(engine.generate(ask("waits")))
        await engine.load_version(version)
        paused = bool((await engine.server.get("/is_paused", limit_s=60))["is_paused"])
        assert not turn.done()
        await engine.resume()
        return paused, await turn

    paused, answer = own_place.do(body())
    assert paused
    assert set(answer.versions) == {version}


def test_a_version_older_than_the_one_in_use_is_refused(own_place: "Place", updated: "Behind") -> None:
    with pytest.raises(WeightsError, match="never go back"):
        own_place.do(updated.engine.load_version(updated.engine.version - 1))


@pytest.mark.parametrize("wrong", ["missing", "extra", "shape", "damaged", "absent"])
def test_a_version_that_cannot_be_loaded_is_named_and_the_old_one_stays(
    own_place: "Place", updated: "Behind", model: Any, wrong: str
) -> None:
    engine, store = updated.engine, FileStore(own_place.run.weights)
    newest = store.newest()
    version = max(engine.version, newest.version if newest else 0) + 1
    tensors = stir(model, seed=version)
    match wrong:
        case "missing":
            del tensors[EMBEDDING]
        case "extra":
            tensors["model.foreign.weight"] = torch.zeros(2)
        case "shape":
            tensors[EMBEDDING] = torch.zeros(3, 3)
    if wrong != "absent":
        store.publish(tensors, version=version, step=version)
    if wrong == "damaged":
        path = tensors_file(own_place.run.weights, version)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    before = own_place.do(engine.generate(ask("before")))
    named = {"extra": "model.foreign.weight", "damaged": "checksum", "absent": f"version {version} is not"}
    with pytest.raises(WeightsError, match=named.get(wrong, EMBEDDING)):
        own_place.do(engine.load_version(version))
    after = own_place.do(engine.generate(ask("after")))
    assert (after.token_ids, after.versions) == (before.token_ids, before.versions)


def test_the_engine_goes_on_when_weights_come_by_files(own_place: "Place", updated: "Behind", model: Any) -> None:
    engine, store = updated.engine, FileStore(own_place.run.weights)
    newest = store.newest()
    version = max(engine.version, newest.version if newest else 0) + 1
    store.publish(stir(model, seed=version), version=version, step=version)
    own_place.do(engine.load_version(version))
    answer = own_place.do(engine.generate(ask("files")))
    assert answer.token_ids == greedy(model, PROMPT, num=30)
    assert set(answer.versions) == {version}


def test_an_aborted_request_gives_its_kv_back(own_place: "Place", updated: "Behind") -> None:
    engine = updated.engine

    async def body() -> tuple[int, int, Completion]:
        turn = asyncio.create_task(engine.generate(ask("aborted", token_ids=PROMPT * 40, max_new_tokens=250)))
        while not (await engine.load_figures()).running_tokens:
            await asyncio.sleep(0.01)
        held = (await engine.load_figures()).running_tokens
        await engine.abort("aborted")
        await engine.generate(ask("next", max_new_tokens=1))  # a step, so that vLLM counts again
        return held, (await engine.load_figures()).running_tokens, await turn

    held, left, answer = own_place.do(body())
    assert answer.finish_reason == "aborted"
    assert len(answer.token_ids) < 250
    assert held >= len(PROMPT) * 40
    assert left == 0


def test_a_server_that_is_killed_is_an_engine_error_and_the_worker_hears_of_it(
    own_place: "Place", updated: "Behind"
) -> None:
    """The last test of the module: it ends the engine."""
    import os
    import signal

    engine = updated.engine

    async def body() -> None:
        turn = asyncio.create_task(engine.generate(ask("lost", max_new_tokens=480)))
        while not (await engine.load_figures()).num_running:
            await asyncio.sleep(0.01)
        os.killpg(engine.server.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="did not answer"):
            await turn
        with pytest.raises(EngineError, match="the vLLM server ended"):
            await engine.failed()

    own_place.do(body())
