"""The embedded engine's numbers: exact in any batch, across weights, from handed-over and from kept KV."""

import asyncio
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.engines.base import LOCAL_URL_PREFIX, Completion, GenerateRequest, KvHandle
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.engines.embedded.kv_cache import HandoverStore, PrefixCache, RowKv, pack_kv, unpack_kv
from hpcrl.engines.embedded.sampling import compute_logprobs, draw_uniforms, sample_tokens
from hpcrl.errors import EngineError, WeightsError
from hpcrl.testing.engines import pause_steps
from hpcrl.testing.memory import MemoryStore
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.model_update import BorrowedWeights, collect_parameters, copy_weights
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.store import WeightSource
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.file import WindowKey
from tests.support.embedded_engines import on
from tests.support.families import SCALED_FAMILIES, make_family_model


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    return load_model(tiny_model_dir, device="cpu")


def ask(request_id: str = "r", **changes: Any) -> GenerateRequest:
    request = GenerateRequest(request_id=request_id, token_ids=[2, 45, 78, 5, 36, 3], max_new_tokens=12)
    return msgspec.structs.replace(request, **changes)


def crowd(*, num: int, temperature: float) -> list[GenerateRequest]:
    rng = random.Random(4)
    return [
        ask(
            f"r{n}",
            token_ids=[rng.randrange(100) for _ in range(rng.randint(1, 90))],
            max_new_tokens=rng.randint(1, 12),
            temperature=temperature,
            seed=n,
        )
        for n in range(num)
    ]


@torch.inference_mode()
def reference(model: Any, prompt: list[int], answer: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """Return log-probabilities of every next token from one plain forward pass over the whole sequence."""
    logits_TV = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits_TV / (temperature or 1.0), dim=-1)


def scored(model: Any, prompt: list[int], answer: list[int], *, temperature: float = 1.0) -> list[float]:
    logprobs_TV = reference(model, prompt, answer, temperature=temperature)
    return [float(logprobs_TV[at, token]) for at, token in enumerate(answer)]


async def staggered(engine: EmbeddedEngine, requests: list[GenerateRequest]) -> list[Completion]:
    """Run all requests, starting a few more after each step or so."""

    async def later(request: GenerateRequest, turns: int) -> Completion:
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        return await engine.generate(request)

    return await asyncio.gather(*[later(request, n // 3) for n, request in enumerate(requests)])


def another(model: Any, *, scale: float) -> dict[str, torch.Tensor]:
    return {name: tensor * scale for name, tensor in collect_parameters(model).items()}


async def until_generated(engine: EmbeddedEngine, count: int) -> None:
    while (await engine.load_figures()).num_generated_tokens < count:
        await asyncio.sleep(0)


# ---- numbers


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_crowd_that_comes_and_goes_gets_the_numbers_of_one_by_one(model: Any, temperature: float) -> None:
    requests = crowd(num=60, temperature=temperature)
    engine = EmbeddedEngine(model, store=MemoryStore(), max_batch=7)
    for request, answer in zip(requests, on(engine, lambda: staggered(engine, requests)), strict=True):
        expected = scored(model, request.token_ids, answer.token_ids, temperature=temperature)
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        if temperature == 0:
            best_TV = reference(model, request.token_ids, answer.token_ids)
            assert answer.token_ids == best_TV.argmax(dim=-1).tolist()


def test_a_seed_gives_the_same_tokens_alone_and_in_company(model: Any) -> None:
    requests = crowd(num=30, temperature=1.0)
    together = EmbeddedEngine(model, store=MemoryStore(), max_batch=9)
    alone = EmbeddedEngine(model, store=MemoryStore(), max_batch=1, prefix_bytes=0)
    in_company = on(together, lambda: staggered(together, requests))
    one_by_one = on(alone, lambda: staggered(alone, requests))
    assert [answer.token_ids for answer in in_company] == [answer.token_ids for answer in one_by_one]


def test_the_next_turn_computes_only_its_new_tokens(model: Any) -> None:
    widths: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    engine = EmbeddedEngine(model, store=MemoryStore())

    async def turns() -> tuple[list[int], Completion]:
        prompt = [5 + n for n in range(40)]
        first = await engine.generate(ask("1", token_ids=prompt, max_new_tokens=3))
        prompt = [*prompt, *first.token_ids, 2, 50, 51, 3]
        widths.clear()
        return prompt, await engine.generate(ask("2", token_ids=prompt, max_new_tokens=3))

    prompt, second = on(engine, turns)
    assert widths == [5, 1, 1]  # the last token of the answer before, and four new ones
    assert second.logprobs == pytest.approx(scored(model, prompt, second.token_ids), abs=1e-4)


def test_sampling_follows_the_probabilities() -> None:
    logits_V = torch.tensor([0.0, 1.0, -1.0, float("-inf"), 2.0])
    num = 20_000
    drawn_from = compute_logprobs(
        logits_V.expand(num, -1), temperatures=[0.5] * num, top_ps=[1.0] * num, top_ks=[0] * num
    )
    ids, logprobs = sample_tokens(drawn_from, temperatures=[0.5] * num, seeds=list(range(num)), positions=[9] * num)
    expected_V = torch.softmax(logits_V / 0.5, dim=-1)
    counts_V = torch.bincount(torch.tensor(ids), minlength=5)
    assert counts_V[3] == 0
    assert torch.allclose(counts_V / num, expected_V, atol=0.01)
    assert logprobs[0] == pytest.approx(float(expected_V.log()[ids[0]]), abs=1e-5)


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_a_uniform_depends_on_its_own_seed_and_position_only(pairs: list[tuple[int, int]]) -> None:
    together = draw_uniforms([seed for seed, _ in pairs], [position for _, position in pairs])
    alone = [draw_uniforms([seed], [position])[0] for seed, position in pairs]
    assert together.tolist() == alone
    assert all(0 <= u <= 1 - 2.0**-52 for u in alone)


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(100), np.arange(100))
    grid = draw_uniforms(seeds.ravel().tolist(), positions.ravel().tolist()).reshape(100, 100)
    for shifted in (grid[1:, :-1], grid[:-1, 1:]):
        assert abs(np.corrcoef(grid[:-1, :-1].ravel(), shifted.ravel())[0, 1]) < 0.05


# ---- weights


def test_new_weights_in_mid_generation_are_recorded_per_token(model: Any, tiny_model_dir: Path) -> None:
    store = MemoryStore()
    store.publish(another(model, scale=1.5), WeightVersion(version=4, step=1))
    engine = EmbeddedEngine(model, store=store)
    requests = [ask(f"r{n}", max_new_tokens=300, seed=n, token_ids=[5 + n] * (3 + 20 * n)) for n in range(3)]

    async def body() -> list[Completion]:
        answers = [asyncio.create_task(engine.generate(request)) for request in requests]
        await until_generated(engine, 60)
        async with pause_steps(engine):
            await engine.load_version(4)
        return await asyncio.gather(*answers)

    answers = on(engine, body)
    old = load_model(tiny_model_dir, device="cpu")
    for request, answer in zip(requests, answers, strict=True):
        switch = answer.versions.index(4)
        assert answer.versions == [0] * switch + [4] * (300 - switch)
        assert 0 < switch < 300
        before, after = (scored(m, request.token_ids, answer.token_ids) for m in (old, model))
        assert answer.logprobs == pytest.approx(before[:switch] + after[switch:], abs=1e-4)


@pytest.mark.parametrize("carrier", ["window", "files"])
def test_rounded_weights_are_used_bit_for_bit_and_logprobs_are_theirs(
    model: Any, tiny_model_dir: Path, tmp_path: Path, carrier: str
) -> None:
    masters = another(model, scale=1.1)
    layout = TensorLayout.pack((name, "bfloat16", tuple(tensor.shape)) for name, tensor in masters.items())
    campaign = CampaignDir(tmp_path / "campaign")
    window = WindowStore(
        WindowKey(campaign=campaign.root, node="n", directory=tmp_path), job=campaign.job(0), layout=layout
    )
    window.publish(masters, WeightVersion(version=1, step=1))
    store: WeightSource = window
    if carrier == "files":
        store = FileStore(campaign.weights)
        window.make_saver(store, WeightVersion(version=1, step=1))()
    engine = EmbeddedEngine(model, store=store)

    async def body() -> Completion:
        answer = asyncio.create_task(engine.generate(ask(max_new_tokens=200)))
        await until_generated(engine, 5)
        await engine.load_version(1)
        return await answer

    answer = on(engine, body)
    window.unlink()
    window.close()
    for name, tensor in collect_parameters(model).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, masters[name].bfloat16().float()), name
    assert not all(torch.equal(tensor, masters[name]) for name, tensor in collect_parameters(model).items())
    trainers = load_model(tiny_model_dir, device="cpu")
    copy_weights(trainers, {name: tensor.bfloat16() for name, tensor in masters.items()})
    switch = answer.versions.index(1)
    expected = scored(trainers, ask().token_ids, answer.token_ids)
    assert answer.logprobs[switch:] == pytest.approx(expected[switch:], abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_experts_are_loaded_from_a_version_with_the_names_of_the_models_files(tmp_path: Path, family: str) -> None:
    directories = [make_family_model(tmp_path / f"{seed}", family, seed=seed) for seed in (0, 1)]
    model = load_model(directories[0], device="cpu")
    newer = load_file(directories[1] / "model.safetensors")
    store = MemoryStore()
    store.publish(newer, WeightVersion(version=1, step=1))
    engine = EmbeddedEngine(model, store=store)

    async def body() -> Completion:
        await engine.load_version(1)
        return await engine.generate(ask(token_ids=[5, 9, 3], max_new_tokens=20))

    answer = on(engine, body)
    expected = load_model(directories[1], device="cpu")
    assert answer.logprobs == pytest.approx(scored(expected, [5, 9, 3], answer.token_ids), abs=1e-4)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("family", SCALED_FAMILIES)
def test_scaled_logits_are_scaled_in_prompts_in_later_tokens_and_after_an_update(tmp_path: Path, family: str) -> None:
    model = load_model(make_family_model(tmp_path / "model", family), device="cpu")
    store = MemoryStore()
    store.publish(another(model, scale=1.5), WeightVersion(version=1, step=1))
    engine = EmbeddedEngine(model, store=store)
    requests = [ask(f"r{n}", token_ids=[5, 9, 3 + n], max_new_tokens=60, seed=n) for n in range(2)]

    async def body() -> list[Completion]:
        answers = [asyncio.create_task(engine.generate(request)) for request in requests]
        await until_generated(engine, 30)
        await engine.load_version(1)
        return await asyncio.gather(*answers)

    answers = on(engine, body)
    old = load_model(tmp_path / "model", device="cpu")
    for request, answer in zip(requests, answers, strict=True):
        switch = answer.versions.index(1)
        assert 0 < switch < 60
        before, after = (scored(m, request.token_ids, answer.token_ids) for m in (old, model))
        assert answer.logprobs == pytest.approx(before[:switch] + after[switch:], abs=1e-4)


def test_weights_that_do_not_fit_are_refused_and_generation_continues_with_the_old(model: Any) -> None:
    store = MemoryStore()
    store.publish(
        {name: tensor for name, tensor in collect_parameters(model).items() if "lm_head" not in name},
        WeightVersion(version=1, step=1),
    )
    engine = EmbeddedEngine(model, store=store)

    async def body() -> Completion:
        answer = asyncio.create_task(engine.generate(ask(max_new_tokens=200)))
        await until_generated(engine, 5)
        with pytest.raises(WeightsError, match=r"lm_head\.weight"):
            await engine.load_version(1)
        return await answer

    answer = on(engine, body)
    assert answer.versions == [0] * 200
    assert answer.logprobs == pytest.approx(scored(model, ask().token_ids, answer.token_ids), abs=1e-4)


def test_an_engine_never_goes_back_to_an_older_version(model: Any) -> None:
    store = MemoryStore()
    for version in (1, 2):
        store.publish(another(model, scale=1.0), WeightVersion(version=version, step=version))
    engine = EmbeddedEngine(model, store=store)

    async def body() -> None:
        await engine.load_version(2)
        with pytest.raises(WeightsError, match="never go back"):
            await engine.load_version(1)

    on(engine, body)
    assert engine.version == 2


def test_weights_overwritten_while_they_are_copied_are_never_generated_with(model: Any) -> None:
    store = MemoryStore()
    for version in (1, 2):
        store.publish(another(model, scale=float(version)), WeightVersion(version=version, step=version))
    load = store.read_version

    @contextmanager
    def overtaken(version: int) -> Iterator[dict[str, torch.Tensor]]:
        with load(version) as tensors:
            yield tensors
        if version == 1:
            raise WeightsError("version 1 was overwritten while it was read")

    store.read_version = overtaken  # type: ignore[method-assign]
    store.is_intact = lambda version: version != 1  # type: ignore[method-assign]
    engine = EmbeddedEngine(model, store=store)

    async def body() -> Completion:
        answer = asyncio.create_task(engine.generate(ask(max_new_tokens=300)))
        await until_generated(engine, 5)
        with pytest.raises(WeightsError, match="overwritten"):
            await engine.load_version(1)
        stood = (await engine.load_figures()).num_generated_tokens
        await asyncio.sleep(0.05)
        assert (await engine.load_figures()).num_generated_tokens == stood
        await engine.load_version(2)
        return await answer

    assert set(on(engine, body).versions) == {0, 2}


def test_generation_continues_with_the_new_weights_in_the_store_while_they_are_copied(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    store.publish(another(model, scale=1.5), WeightVersion(version=1, step=1))
    own = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    engine = EmbeddedEngine(model, store=store)
    copied, copy = threading.Event(), BorrowedWeights.copy

    def slowly(loan: BorrowedWeights) -> None:
        copied.wait(60)
        copy(loan)

    monkeypatch.setattr(BorrowedWeights, "copy", slowly)

    async def body() -> Completion:
        answer = asyncio.create_task(engine.generate(ask(max_new_tokens=400)))
        await until_generated(engine, 5)
        load = asyncio.create_task(engine.load_version(1))
        while engine.version == 0:
            await asyncio.sleep(0)
        await until_generated(engine, (await engine.load_figures()).num_generated_tokens + 3)
        assert not load.done()
        copied.set()
        await load
        return await answer

    answer = on(engine, body)
    switch = answer.versions.index(1)
    assert answer.logprobs[switch:] == pytest.approx(
        scored(model, ask().token_ids, answer.token_ids)[switch:], abs=1e-4
    )
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == own


def test_requests_dropped_between_an_update_and_the_next_step_leave_the_others_right(model: Any) -> None:
    store = MemoryStore()
    store.publish(another(model, scale=1.5), WeightVersion(version=1, step=1))
    engine = EmbeddedEngine(model, store=store)
    requests = [ask(f"r{n}", max_new_tokens=60, seed=n, token_ids=[5 + n] * (3 + n)) for n in range(3)]

    async def body() -> list[Completion]:
        answers = [asyncio.create_task(engine.generate(request)) for request in requests]
        await until_generated(engine, 9)
        async with pause_steps(engine):
            await engine.load_version(1)
            await engine.abort("r0")
        return [*await asyncio.gather(*answers), await engine.generate(ask("next", token_ids=[5] * 40))]

    aborted, *others = on(engine, body)
    assert aborted.finish_reason == "aborted"
    for request, answer in zip([*requests[1:], ask(token_ids=[5] * 40)], others, strict=True):
        switch = answer.versions.index(1)
        wanted = scored(model, request.token_ids, answer.token_ids)
        assert answer.logprobs[switch:] == pytest.approx(wanted[switch:], abs=1e-4)


def test_a_turn_continues_after_a_sleep_with_the_weights_that_were_loaded_meanwhile(model: Any) -> None:
    store = MemoryStore()
    store.publish(another(model, scale=1.5), WeightVersion(version=1, step=1))
    engine = EmbeddedEngine(model, store=store)

    async def body() -> Completion:
        answer = asyncio.create_task(engine.generate(ask(max_new_tokens=300)))
        await until_generated(engine, 5)
        await engine.sleep()
        asleep = await engine.load_figures()
        late = asyncio.create_task(engine.generate(ask("late")))
        while not (await engine.load_figures()).num_waiting:
            await asyncio.sleep(0)
        await engine.abort("late")
        assert (await late).finish_reason == "aborted"
        await engine.wake_weights()
        await engine.load_version(1)
        assert asleep.is_asleep
        assert (await engine.load_figures()).num_generated_tokens == asleep.num_generated_tokens
        assert engine._batch._slots._kv_KSHTD.numel() == 0
        await engine.resume()
        assert not (await engine.load_figures()).is_asleep
        return await answer

    answer = on(engine, body)
    switch = answer.versions.index(1)
    assert (len(answer.versions), set(answer.versions)) == (300, {0, 1})
    wanted = scored(model, ask().token_ids, answer.token_ids)
    assert answer.logprobs[switch:] == pytest.approx(wanted[switch:], abs=1e-4)


def test_damaged_weights_fail_requests_and_good_ones_repair_the_engine(model: Any) -> None:
    store = MemoryStore()
    good = another(model, scale=1.0)
    store.publish({name: tensor * float("nan") for name, tensor in good.items()}, WeightVersion(version=1, step=1))
    store.publish(good, WeightVersion(version=2, step=2))
    engine = EmbeddedEngine(model, store=store)

    long = ask("long", token_ids=[7] * 50, max_new_tokens=400)

    async def body() -> list[Completion]:
        await engine.load_version(1)
        failures = await asyncio.gather(
            *[engine.generate(msgspec.structs.replace(long, request_id=f"r{n}")) for n in range(2)],
            return_exceptions=True,
        )
        assert ["version 1 of the weights gives" in str(failure) for failure in failures] == [True, True]
        await engine.load_version(2)
        running = asyncio.create_task(engine.generate(long))
        await until_generated(engine, 4)
        return [await engine.generate(ask()), await running]

    for request, answer in zip((ask(), long), on(engine, body), strict=True):
        assert answer.logprobs == pytest.approx(scored(model, request.token_ids, answer.token_ids), abs=1e-4)


def test_kv_of_the_old_weights_is_not_used_after_an_update(model: Any) -> None:
    store = MemoryStore()
    store.publish(another(model, scale=1.5), WeightVersion(version=1, step=1))
    engine = EmbeddedEngine(model, store=store)

    async def body() -> Completion:
        handle = await engine.prefill(ask("p"))
        await engine.generate(ask("kept"))
        await engine.load_version(1)
        return await engine.generate(ask(kv=handle))

    answer = on(engine, body)
    assert not answer.remote_prefill
    assert answer.logprobs == pytest.approx(scored(model, ask().token_ids, answer.token_ids), abs=1e-4)


# ---- pause, abort, failure


def test_a_paused_engine_keeps_its_requests(model: Any) -> None:
    engine = EmbeddedEngine(model, store=MemoryStore())

    async def body() -> Completion:
        running = asyncio.create_task(engine.generate(ask("a", max_new_tokens=400)))
        await until_generated(engine, 5)
        async with pause_steps(engine):
            waiting = asyncio.create_task(engine.generate(ask("b")))
            before = await engine.load_figures()
            for _ in range(50):
                await asyncio.sleep(0)
            after = await engine.load_figures()
            assert after.num_generated_tokens == before.num_generated_tokens < 400
            assert (after.num_running, after.num_waiting) == (1, 1)
        return [await running, await waiting]

    assert [len(answer.token_ids) for answer in on(engine, body)] == [400, 12]


def test_where_requests_wait_the_lowest_priority_goes_first_and_equals_in_their_order(model: Any) -> None:
    engine = EmbeddedEngine(model, store=MemoryStore(), max_batch=1)
    ended: list[str] = []

    async def served(name: str, priority: int) -> None:
        await engine.generate(msgspec.structs.replace(ask(name), priority=priority))
        ended.append(name)

    async def body() -> None:
        async with pause_steps(engine):
            turns = [asyncio.create_task(served(*turn)) for turn in (("last", 2), ("b", 1), ("c", 1), ("first", 0))]
            while (await engine.load_figures()).num_waiting < len(turns):
                await asyncio.sleep(0)
        await asyncio.gather(*turns)

    on(engine, body)
    assert ended == ["first", "b", "c", "last"]


def test_requests_can_be_aborted_while_the_engine_is_paused(model: Any) -> None:
    engine = EmbeddedEngine(model, store=MemoryStore())

    async def body() -> list[Completion]:
        running = asyncio.create_task(engine.generate(ask("a", max_new_tokens=400)))
        await until_generated(engine, 5)
        async with pause_steps(engine):
            waiting = asyncio.create_task(engine.generate(ask("b")))
            await asyncio.sleep(0)
            await engine.abort("a")
            await engine.abort("b")
            return [await running, await waiting]

    running, waiting = on(engine, body)
    assert (running.finish_reason, waiting.finish_reason) == ("aborted", "aborted")
    assert len(running.token_ids) >= 5
    assert waiting.token_ids == []


def test_an_engine_that_cannot_step_fails_every_request_with_the_reason(model: Any) -> None:
    def out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    engine = EmbeddedEngine(model, store=MemoryStore(), max_batch=2)

    async def body() -> list[Any]:
        model.base_model.register_forward_pre_hook(out_of_memory)
        answers = await asyncio.gather(*[engine.generate(ask(f"r{n}")) for n in range(4)], return_exceptions=True)
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.wait_until_failed()
        with pytest.raises(EngineError, match="not running"):
            await engine.generate(ask())
        return answers

    for answer in on(engine, body):
        assert isinstance(answer, EngineError)
        assert "out of memory" in str(answer)


def test_stopping_the_engine_fails_its_requests(model: Any) -> None:
    engine = EmbeddedEngine(model, store=MemoryStore())

    async def run() -> None:
        async with engine:
            answer = asyncio.create_task(engine.generate(ask(max_new_tokens=500)))
            await until_generated(engine, 3)
        with pytest.raises(EngineError, match="was stopped"):
            await answer

    asyncio.run(run())


def test_a_model_with_sliding_windows_is_refused(tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir, device="cpu")
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(EngineError, match="sliding_attention"):
        EmbeddedEngine(model, store=MemoryStore())


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no causal LM"):
        load_model(tmp_path)


def test_weights_of_another_shape_and_pickled_ones_are_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.norm.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"do not fit its config\.json: download both again"):
        load_model(tmp_path)
    file.unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(EngineError, match="no causal LM"):
        load_model(tmp_path)


# ---- handed-over and kept KV


@pytest.mark.parametrize(
    "data", [b"", b"garbage", pack_kv(RowKv(token_ids=[1], kv_KHTD=torch.zeros(4, 1, 1, 32), version=0))]
)
def test_kv_that_is_damaged_or_foreign_is_recomputed(model: Any, data: bytes) -> None:
    async def fetch(_: KvHandle) -> bytes:
        return data

    engine = EmbeddedEngine(model, store=MemoryStore(), fetch_kv=fetch)
    handle = KvHandle(url="http://elsewhere/kv/x", token="t", version=0, num_tokens=5)
    answer = on(engine, lambda: engine.generate(ask(kv=handle)))
    assert not answer.remote_prefill
    assert answer.logprobs == pytest.approx(scored(model, ask().token_ids, answer.token_ids), abs=1e-4)


def test_kv_of_another_shape_is_recomputed(model: Any) -> None:
    foreign = RowKv(token_ids=ask().token_ids[:-1], kv_KHTD=torch.zeros(8, 1, 5, 32), version=0)

    async def fetch(_: KvHandle) -> bytes:
        return pack_kv(foreign)

    engine = EmbeddedEngine(model, store=MemoryStore(), fetch_kv=fetch)
    handle = KvHandle(url="http://elsewhere/kv/x", token="t", version=0, num_tokens=5)
    assert not on(engine, lambda: engine.generate(ask(kv=handle))).remote_prefill


def test_kv_that_weights_overtake_on_its_way_is_recomputed(model: Any) -> None:
    store = MemoryStore()
    store.publish(another(model, scale=1.5), WeightVersion(version=1, step=1))

    async def fetch(_: KvHandle) -> bytes:
        packed = await engine.take_kv(handle.url.removeprefix(LOCAL_URL_PREFIX))
        await engine.load_version(1)
        assert packed is not None
        return packed

    engine = EmbeddedEngine(model, store=store, fetch_kv=fetch)
    handle = KvHandle(url="", token="", version=0, num_tokens=0)

    async def body() -> Completion:
        nonlocal handle
        handle = await engine.prefill(ask("p"))
        return await engine.generate(ask(kv=msgspec.structs.replace(handle, url="http://elsewhere/kv/x")))

    answer = on(engine, body)
    assert not answer.remote_prefill
    assert answer.logprobs == pytest.approx(scored(model, ask().token_ids, answer.token_ids), abs=1e-4)


def test_a_request_aborted_while_its_kv_is_fetched_ends(model: Any) -> None:
    fetching, go_on = asyncio.Event(), asyncio.Event()

    async def fetch(_: KvHandle) -> bytes:
        fetching.set()
        await go_on.wait()
        return b""

    engine = EmbeddedEngine(model, store=MemoryStore(), fetch_kv=fetch)
    handle = KvHandle(url="http://elsewhere/kv/x", token="t", version=0, num_tokens=5)

    async def body() -> Completion:
        answer = asyncio.create_task(engine.generate(ask(kv=handle)))
        await fetching.wait()
        await engine.abort("r")
        async with pause_steps(engine):
            go_on.set()
            await answer
            assert (await engine.load_figures()).num_waiting == 0
        return answer.result()

    answer = on(engine, body)
    assert (answer.finish_reason, answer.token_ids) == ("aborted", [])


def row_kv(token_ids: list[int]) -> RowKv:
    return RowKv(token_ids=token_ids, kv_KHTD=torch.randn(4, 1, len(token_ids), 2), version=3)


def test_kv_comes_back_from_the_wire_bit_for_bit() -> None:
    sent = row_kv([4, 5, 6])
    got = unpack_kv(pack_kv(sent))
    assert (got.token_ids, got.version) == (sent.token_ids, sent.version)
    assert torch.equal(got.kv_KHTD, sent.kv_KHTD)


@given(st.binary(max_size=200) | st.integers(1, 300).map(lambda n: pack_kv(row_kv([1, 2]))[:-n]))
def test_torn_kv_is_an_engine_error(data: bytes) -> None:
    with pytest.raises(EngineError):
        unpack_kv(data)


def test_kv_that_is_not_finite_is_an_engine_error() -> None:
    bad = row_kv([1, 2])
    bad.kv_KHTD[0, 0, 0, 0] = float("nan")
    with pytest.raises(EngineError, match="NaN"):
        unpack_kv(pack_kv(bad))


def test_held_kv_is_given_out_once_and_forgotten_when_old() -> None:
    now = 0.0
    store = HandoverStore(ttl_s=60, max_bytes=1 << 20, clock=lambda: now)
    once, old = store.put(row_kv([1])), store.put(row_kv([2]))
    assert store.take(once) is not None
    assert store.take(once) is None
    now = 60.0
    assert store.take(old) is None


def test_held_kv_makes_room_for_newer() -> None:
    size = row_kv([1, 2]).num_bytes
    store = HandoverStore(ttl_s=60, max_bytes=2 * size)
    names = [store.put(row_kv([n, n])) for n in range(3)]
    assert [store.take(name) is not None for name in names] == [False, True, True]


def test_the_longest_kept_prefix_is_found() -> None:
    cache = PrefixCache(max_bytes=1 << 20)
    for token_ids in ([1, 2], [1, 2, 3], [1, 2, 4, 5], [9]):
        cache.put(row_kv(token_ids))
    found = [cache.find_longest(ids) for ids in ([1, 2, 3, 4], [1, 2], [1], [9, 1])]
    assert [kv and kv.token_ids for kv in found] == [[1, 2, 3], [1, 2], None, [9]]


def test_kv_that_is_still_to_be_kept_outlives_kv_that_is_not() -> None:
    now = 0.0
    cache = PrefixCache(max_bytes=2 * row_kv([1]).num_bytes, clock=lambda: now)
    cache.put(row_kv([1]), keep_s=10.0)
    cache.put(row_kv([2]))
    cache.put(row_kv([3]))
    assert [cache.find_longest([n]) is not None for n in (1, 2, 3)] == [True, False, True]
    now = 11.0
    cache.find_longest([3])
    cache.put(row_kv([4]))
    assert [cache.find_longest([n]) is not None for n in (1, 3, 4)] == [False, True, True]


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=30))
def test_kept_prefixes_stay_within_their_bytes(sequences: list[list[int]]) -> None:
    limit = 5 * row_kv([0]).num_bytes
    cache = PrefixCache(max_bytes=limit)
    for token_ids in sequences:
        cache.put(row_kv(token_ids))
        kept = cache._kept.values()
        assert cache._num_bytes == sum(kv.num_bytes for kv in kept) <= limit
        assert cache._lengths == {n: c for n in range(0, 20, 4) if (c := sum(len(k) == n for k in cache._kept))}
