"""New weights in a running vLLM engine: exact, recorded per token, and refused if they are damaged or do not fit."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from hpcrl.engines.base import Completion, GenerateRequest, JsonValue, OutputStructure
from hpcrl.engines.embedded.engine import load_model
from hpcrl.errors import WeightsError
from hpcrl.weights.model_update import collect_parameters
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.versions import WeightVersion, tensors_file
from tests.contract.test_engine import STOP, read_text
from tests.support.served import greedy

if TYPE_CHECKING:
    from tests.support.served import Behind, Place

PROMPT = [2, 45, 78, 5, 36, 3]
LONG = 400
"""The number of tokens of a turn that is still running after an update, which takes as long as about 20."""
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def updated(pair: "list[Behind]") -> "Behind":
    return pair[1]


@pytest.fixture
def version(updated: "Behind", vllm_place: "Place") -> int:
    """Return the next version; a file with the last may have been refused."""
    newest = FileStore(vllm_place.campaign.weights).newest()
    return max(updated.engine.version, newest.version if newest else 0) + 1


@pytest.fixture
def model(slow_model_dir: Path) -> Any:
    return load_model(slow_model_dir, device="cpu")


def ask(name: str, **changes: Any) -> GenerateRequest:
    request = GenerateRequest(request_id=name, token_ids=PROMPT, max_new_tokens=30, temperature=0.0)
    return msgspec.structs.replace(request, **changes)


def stir(model: Any, *, seed: int) -> dict[str, torch.Tensor]:
    """Change every weight of the model, and return them all."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.02)
    return collect_parameters(model)


def test_a_turn_continues_through_an_update_and_every_token_has_its_version(
    vllm_place: "Place", updated: "Behind", model: Any, version: int
) -> None:
    """Run the first update of this engine, which has the weights of the model directory before."""
    engine = updated.engine
    before = load_model(vllm_place.model, device="cpu")
    vllm_place.window.publish(stir(model, seed=version), WeightVersion(version=version, step=version))

    async def body() -> Completion:
        start = (await engine.load_figures()).num_generated_tokens
        turn = asyncio.create_task(engine.generate(ask("long", max_new_tokens=LONG)))
        while (await engine.load_figures()).num_generated_tokens < start + 10:
            await asyncio.sleep(0.01)
        await engine.load_version(version)
        return await turn

    assert engine.version == 0
    answer = vllm_place.do(body())
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", LONG)
    switch = answer.versions.index(version)
    assert answer.versions == [0] * switch + [version] * (LONG - switch)
    assert switch >= 10
    assert answer.token_ids[:switch] == greedy(before, PROMPT, answer.token_ids[:switch])
    expected = greedy(model, PROMPT, answer.token_ids)
    assert answer.token_ids[switch:] == expected[switch:], "after the switch, as if all had been recomputed"


def test_a_stream_has_the_version_of_each_chunk_through_an_update(
    vllm_place: "Place", updated: "Behind", model: Any, version: int
) -> None:
    engine, old = updated.engine, updated.engine.version
    vllm_place.window.publish(stir(model, seed=version), WeightVersion(version=version, step=version))

    async def body() -> list[int]:
        versions: list[int] = []
        loading = None
        async for chunk in engine.stream(ask("streamed", max_new_tokens=LONG)):
            versions += chunk.versions
            if loading is None and len(versions) >= 10:
                loading = asyncio.create_task(engine.load_version(version))
        assert loading is not None
        await loading
        return versions

    versions = vllm_place.do(body())
    assert len(versions) == LONG
    assert set(versions) == {old, version}


def test_a_recipe_may_keep_kv_of_old_weights(
    vllm_place: "Place", updated: "Behind", model: Any, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = updated.engine, [2, *range(10, 90), 3]
    drops = engine._launch
    monkeypatch.setattr(engine, "_launch", dataclasses.replace(drops, keeps_old_kv=True))
    vllm_place.do(engine.generate(ask("before", token_ids=prompt)))
    vllm_place.window.publish(stir(model, seed=version), WeightVersion(version=version, step=version))
    vllm_place.do(engine.load_version(version))
    kept = vllm_place.do(engine.generate(ask("kept", token_ids=prompt)))
    monkeypatch.setattr(engine, "_launch", drops)
    computed = vllm_place.do(engine.generate(ask("computed", token_ids=prompt)))
    assert set(kept.versions) == set(computed.versions) == {version}
    assert kept.logprobs[0] != pytest.approx(computed.logprobs[0], abs=1e-4)
    assert computed.token_ids == greedy(model, prompt, computed.token_ids)


def test_a_structured_turn_keeps_its_structure_through_an_update(
    vllm_place: "Place", updated: "Behind", model: Any, version: int
) -> None:
    engine, old = updated.engine, updated.engine.version
    vllm_place.window.publish(stir(model, seed=version), WeightVersion(version=version, step=version))
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 60, "maxItems": 60}
    request = ask(
        "structured",
        structure=OutputStructure(parts=[JsonValue(schema=schema)]),
        stop_token_ids=[STOP],
        temperature=1.0,
        max_new_tokens=LONG * 2,
    )

    async def body() -> Completion:
        start = (await engine.load_figures()).num_generated_tokens
        turn = asyncio.create_task(engine.generate(request))
        while (await engine.load_figures()).num_generated_tokens < start + 10:
            await asyncio.sleep(0.01)
        await engine.load_version(version)
        return await turn

    answer = vllm_place.do(body())
    assert len(json.loads(read_text(answer.token_ids).removesuffix("<eos>"))) == 60
    assert set(answer.versions) == {old, version}


def test_new_requests_are_answered_by_the_new_weights_as_by_transformers(
    vllm_place: "Place", updated: "Behind", model: Any, version: int
) -> None:
    engine = updated.engine
    vllm_place.do(engine.generate(ask("fill the prefix cache", token_ids=PROMPT * 20)))
    vllm_place.window.publish(stir(model, seed=version), WeightVersion(version=version, step=version))
    vllm_place.do(engine.load_version(version))
    answer = vllm_place.do(engine.generate(ask("new", token_ids=PROMPT * 20)))
    assert answer.token_ids == greedy(model, PROMPT * 20, answer.token_ids)
    assert set(answer.versions) == {version}


def test_kv_of_the_previous_version_is_not_used(
    vllm_place: "Place", updated: "Behind", model: Any, version: int
) -> None:
    engine, old = updated.engine, updated.engine.version
    handle = vllm_place.do(engine.prefill(ask("prefill")))
    assert handle.version == old
    vllm_place.window.publish(stir(model, seed=version), WeightVersion(version=version, step=version))
    vllm_place.do(engine.load_version(version))
    forged = msgspec.structs.replace(handle, version=version)
    for name, kv in (("honest", handle), ("forged", forged)):
        answer = vllm_place.do(engine.generate(ask(name, kv=kv)))
        assert not answer.remote_prefill
        assert answer.token_ids == greedy(model, PROMPT, answer.token_ids)


def test_a_turn_continues_after_a_sleep_with_the_weights_that_were_loaded_meanwhile(
    vllm_place: "Place", updated: "Behind", model: Any, version: int
) -> None:
    """On CPUs vLLM only pauses: it keeps its memory."""
    engine, old = updated.engine, updated.engine.version
    vllm_place.window.publish(stir(model, seed=version), WeightVersion(version=version, step=version))

    async def body() -> tuple[Completion, int, int]:
        start = (await engine.load_figures()).num_generated_tokens
        turn = asyncio.create_task(engine.generate(ask("sleeps", max_new_tokens=LONG)))
        while (await engine.load_figures()).num_generated_tokens < start + 10:
            await asyncio.sleep(0.01)
        await engine.sleep()
        asleep = await engine.load_figures()
        await engine.wake_weights()
        await engine.load_version(version)
        await asyncio.sleep(0.2)
        woken = await engine.load_figures()
        assert asleep.is_asleep
        await engine.resume()
        return await turn, asleep.num_generated_tokens, woken.num_generated_tokens

    answer, before, after = vllm_place.do(body())
    assert after == before, "nothing is generated until it resumes"
    assert len(answer.token_ids) == LONG
    switch = answer.versions.index(version)
    assert answer.versions == [old] * switch + [version] * (LONG - switch)
    assert answer.token_ids[switch:] == greedy(model, PROMPT, answer.token_ids)[switch:]


def test_a_version_older_than_the_one_in_use_is_refused(vllm_place: "Place", updated: "Behind") -> None:
    with pytest.raises(WeightsError, match="never go back"):
        vllm_place.do(updated.engine.load_version(updated.engine.version - 1))


@pytest.mark.parametrize("wrong", ["missing", "extra", "shape", "damaged", "absent"])
def test_a_version_that_cannot_be_loaded_is_named_and_the_old_one_stays(
    vllm_place: "Place", updated: "Behind", model: Any, version: int, wrong: str
) -> None:
    engine, store = updated.engine, FileStore(vllm_place.campaign.weights)
    tensors = stir(model, seed=version)
    match wrong:
        case "missing":
            del tensors[EMBEDDING]
        case "extra":
            tensors["model.foreign.weight"] = torch.zeros(2)
        case "shape":
            tensors[EMBEDDING] = torch.zeros(3, 3)
    if wrong != "absent":
        store.publish(tensors, WeightVersion(version=version, step=version))
    if wrong == "damaged":
        path = tensors_file(vllm_place.campaign.weights, version)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    before = vllm_place.do(engine.generate(ask("before")))
    named = {"extra": "model.foreign.weight", "damaged": "checksum", "absent": f"version {version} is not"}
    with pytest.raises(WeightsError, match=named.get(wrong, EMBEDDING)):
        vllm_place.do(engine.load_version(version))
    after = vllm_place.do(engine.generate(ask("after")))
    assert (after.token_ids, after.versions) == (before.token_ids, before.versions)


def test_the_engine_continues_when_weights_come_as_files(
    vllm_place: "Place", updated: "Behind", model: Any, version: int
) -> None:
    engine, store = updated.engine, FileStore(vllm_place.campaign.weights)
    store.publish(stir(model, seed=version), WeightVersion(version=version, step=version))
    vllm_place.do(engine.load_version(version))
    answer = vllm_place.do(engine.generate(ask("files")))
    assert answer.token_ids == greedy(model, PROMPT, answer.token_ids)
    assert set(answer.versions) == {version}


def test_an_aborted_request_gives_its_kv_back(vllm_place: "Place", updated: "Behind") -> None:
    engine = updated.engine

    async def body() -> tuple[int, int, Completion]:
        turn = asyncio.create_task(engine.generate(ask("aborted", token_ids=PROMPT * 40, max_new_tokens=LONG)))
        while not (await engine.load_figures()).running_tokens and not turn.done():
            await asyncio.sleep(0.01)
        held = (await engine.load_figures()).running_tokens
        await engine.abort("aborted")
        await engine.generate(ask("next", max_new_tokens=1))  # a step, so that vLLM counts again
        return held, (await engine.load_figures()).running_tokens, await turn

    held, left, answer = vllm_place.do(body())
    assert answer.finish_reason == "aborted"
    assert len(answer.token_ids) < LONG
    assert held >= len(PROMPT) * 40
    assert left == 0
