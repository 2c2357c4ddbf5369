"""KV from one vLLM engine to another: the same tokens as from one, with a correct report of the KV's origin."""

import asyncio
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from hpcrl.engines.base import Completion, GenerateRequest, KvHandle
from hpcrl.engines.embedded.engine import load_model
from hpcrl.engines.http import RemoteEngine, make_client_session
from hpcrl.errors import EngineError
from tests.support.served import greedy

if TYPE_CHECKING:
    from tests.support.served import Behind, Place

NUM = 24
LOG_GROWTH = 16 << 10
KV_BYTES_PER_TOKEN = 2 * 4 * 32 * 4
"""A lower bound, for the models of these tests."""
PROMPTS = [[2, 45, 78, 5, 36, 3], [7] * 40, [2, *range(10, 90), 3] * 2]


def ask(name: str, prompt: list[int], **changes: Any) -> GenerateRequest:
    request = GenerateRequest(request_id=name, token_ids=prompt, max_new_tokens=NUM, temperature=0.0)
    return msgspec.structs.replace(request, **changes)


def on_both(pair: "list[Behind]", body: Callable[[RemoteEngine, RemoteEngine], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with make_client_session() as session:
            return await body(*(RemoteEngine(behind.endpoint, session) for behind in pair))

    return asyncio.run(run())


async def handed_over(prefill: RemoteEngine, decode: RemoteEngine, prompt: list[int]) -> Completion:
    handle = await prefill.prefill(ask("prefill", prompt))
    return await decode.generate(ask("decode", prompt, kv=handle))


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)}-tokens")
def test_prefill_here_and_decode_there_give_the_tokens_of_one_engine_and_of_transformers(
    pair: "list[Behind]", slow_model_dir: Path, prompt: list[int]
) -> None:
    async def body(prefill: RemoteEngine, decode: RemoteEngine) -> Any:
        return await handed_over(prefill, decode, prompt), await prefill.generate(ask("alone", prompt))

    decoded, alone = on_both(pair, body)
    assert decoded.remote_prefill
    assert not alone.remote_prefill
    assert len(decoded.token_ids) == NUM
    assert decoded.token_ids == alone.token_ids == greedy(load_model(slow_model_dir), prompt, alone.token_ids)
    assert decoded.logprobs == pytest.approx(alone.logprobs, abs=1e-3)


def test_a_prompt_of_one_token_has_nothing_to_hand_over(pair: "list[Behind]") -> None:
    async def body(prefill: RemoteEngine, decode: RemoteEngine) -> Completion:
        return await decode.generate(ask("one", [5]))

    assert len(on_both(pair, body).token_ids) == NUM


def test_many_handovers_at_once_of_the_same_prompt_do_not_disturb_each_other(pair: "list[Behind]") -> None:
    prompt = [2, *range(20, 60), 3]

    async def body(prefill: RemoteEngine, decode: RemoteEngine) -> Any:
        async def one(number: int) -> Completion:
            handle = await prefill.prefill(ask(f"p{number}", prompt))
            return await decode.generate(ask(f"d{number}", prompt, kv=handle))

        return await asyncio.gather(*(one(number) for number in range(12)))

    answers = on_both(pair, body)
    assert {tuple(answer.token_ids) for answer in answers} == {tuple(answers[0].token_ids)}
    assert any(answer.remote_prefill for answer in answers)


def test_fetched_kv_is_removed_from_the_directory(pair: "list[Behind]", vllm_place: "Place") -> None:
    before = list_files(vllm_place)
    prompt = [2, 90, 80, 70, 60, 3]
    assert on_both(pair, lambda prefill, decode: handed_over(prefill, decode, prompt)).remote_prefill
    assert list_files(vllm_place) <= before


def test_kv_goes_by_http_to_an_engine_on_another_node(pair: "list[Behind]", vllm_place: "Place") -> None:
    before, prompt = list_files(vllm_place), [2, 91, 81, 71, 61, 3]

    async def body(prefill: RemoteEngine, decode: RemoteEngine) -> Any:
        handle = await prefill.prefill(ask("prefill", prompt))
        away = msgspec.structs.replace(handle, transfer={**(handle.transfer or {}), "node": "another"})
        return await decode.generate(ask("decode", prompt, kv=away)), await prefill.generate(ask("alone", prompt))

    decoded, alone = on_both(pair, body)
    assert decoded.remote_prefill
    assert decoded.token_ids == alone.token_ids
    assert list_files(vllm_place) <= before


@pytest.mark.parametrize("num_held", [75, 180])
def test_only_the_blocks_that_decode_lacks_are_handed_over(
    pair: "list[Behind]", vllm_place: "Place", num_held: int
) -> None:
    """It holds 75 tokens of the prompt, which are two whole blocks of 32; what it lacks cannot be left out."""
    first = [2, *range(11 + num_held // 100, 86), 3][:75]
    prompt = [*first, *range(20, 90), *range(30, 90)]

    async def body(prefill: RemoteEngine, decode: RemoteEngine) -> Any:
        await decode.generate(ask("earlier", first))
        sizes = []
        for held in (0, num_held):
            handle = await prefill.prefill(ask(f"prefill{held}", prompt, num_held=held))
            (path,) = (vllm_place.kv / "first").glob(f"{_name(handle)}*")
            sizes.append(path.stat().st_size)
        return sizes, await decode.generate(ask("decode", prompt, kv=handle)), await prefill.generate(ask("a", prompt))

    (whole, part), decoded, alone = on_both(pair, body)
    num_blocks = -(-(len(prompt) - 1) // 32)
    assert part / whole == pytest.approx((num_blocks - num_held // 32) / num_blocks, rel=0.05)
    assert decoded.remote_prefill == (num_held == 75)
    assert decoded.token_ids == alone.token_ids
    assert decoded.logprobs == pytest.approx(alone.logprobs, abs=1e-3)


@pytest.mark.parametrize("damage", ["cut", "swapped"])
def test_damaged_kv_is_recomputed_and_not_counted(pair: "list[Behind]", vllm_place: "Place", damage: str) -> None:
    prompt = [2, 33, 44, 55, 66, 77, 3, 3 if damage == "cut" else 4]

    async def body(prefill: RemoteEngine, decode: RemoteEngine) -> Any:
        handle = await prefill.prefill(ask("prefill", prompt))
        path = next((vllm_place.kv / "first").glob(f"{_name(handle)}*"))
        data = bytearray(path.read_bytes())
        if damage == "cut":  # its header is still readable
            path.write_bytes(data[:-64])
        else:
            other = await prefill.prefill(ask("other", prompt[::-1]))
            path.write_bytes(next((vllm_place.kv / "first").glob(f"{_name(other)}*")).read_bytes())
        return await prefill.generate(ask("alone", prompt)), await decode.generate(ask("decode", prompt, kv=handle))

    alone, decoded = on_both(pair, body)
    assert not decoded.remote_prefill
    assert decoded.token_ids == alone.token_ids


@pytest.mark.parametrize("name", ["../../../etc/passwd", "", "x" * 300, 5])
def test_a_handle_that_names_a_file_elsewhere_is_not_followed(pair: "list[Behind]", name: object) -> None:
    transfer = {"name": name, "engine": "first", "node": "here"}
    handle = KvHandle(url="local:x", token="", version=0, num_tokens=5, transfer=transfer)

    async def body(_: RemoteEngine, decode: RemoteEngine) -> Completion:
        return await decode.generate(ask("decode", PROMPTS[0], kv=handle))

    answer = on_both(pair, body)
    assert not answer.remote_prefill
    assert len(answer.token_ids) == NUM


def test_without_a_directory_prefill_fails_and_decode_continues_alone(
    pair: "list[Behind]", vllm_place: "Place"
) -> None:
    kv = vllm_place.kv / "first"
    aside = kv.rename(kv.with_name("kv-aside"))
    kv.touch()  # a file, since root could write into any directory
    try:

        async def body(prefill: RemoteEngine, decode: RemoteEngine) -> Completion:
            with pytest.raises(EngineError, match="was not saved"):
                await prefill.prefill(ask("prefill", PROMPTS[1]))
            return await decode.generate(ask("decode", PROMPTS[1]))

        assert len(on_both(pair, body).token_ids) == NUM
    finally:
        kv.unlink()
        aside.rename(kv)
    assert on_both(pair, lambda prefill, decode: handed_over(prefill, decode, PROMPTS[0][::-1])).remote_prefill


def test_with_a_full_directory_prefill_fails_and_decode_continues_alone(pair: "list[Behind]") -> None:
    prompt = [2, *range(10, 90), 3] * 4
    prefills = [psutil.Process(pair[0].engine.server.pid), *psutil.Process(pair[0].engine.server.pid).children(True)]
    limit = pair[0].engine.server.launch.log.stat().st_size + LOG_GROWTH
    assert limit < len(prompt) * KV_BYTES_PER_TOKEN, "the KV of the prompt would fit"

    async def body(prefill: RemoteEngine, decode: RemoteEngine) -> Completion:
        with pytest.raises(EngineError, match="was not saved"):
            await prefill.prefill(ask("prefill", prompt))
        return await decode.generate(ask("decode", prompt))

    for process in prefills:  # a file size limit fails a write as a full disk does
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        assert len(on_both(pair, body).token_ids) == NUM
    finally:
        for process in prefills:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert on_both(pair, lambda prefill, decode: handed_over(prefill, decode, prompt)).remote_prefill


def list_files(place: "Place") -> set[Path]:
    return set(place.kv.glob("*/*"))


def _name(handle: KvHandle) -> str:
    assert handle.transfer is not None
    return str(handle.transfer["name"])
