"""The simulated engine in virtual time: the duration of its turns, and the effect of its KV cache."""

import asyncio
import json

import pytest

from hpcrl.config.recipe import EngineConfig, SimulatedEngineConfig
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.sim.engine import SimEngine, SimSettings, make_sim_engine
from hpcrl.errors import EngineError, EngineRefusedError, WeightsError
from hpcrl.hardware.cost_model import ModelShape, estimate_speed
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.testing.engines import pause_steps
from hpcrl.testing.virtual_time import run_virtual

SHAPE = ModelShape(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, num_dense=8_000_000_000)
PACE = estimate_speed(GPU_CATALOGUE["h100"], shape=SHAPE)
LARGE = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}
"""A model of 70 billion weights."""


def ask(name="r", num_prompt=1000, num_new=20, **fields):
    return GenerateRequest(request_id=name, token_ids=[7] * num_prompt, max_new_tokens=num_new, **fields)


def on(body, **settings):
    async def run():
        async with SimEngine(PACE, settings=SimSettings(**settings)) as engine:
            return await body(engine, asyncio.get_running_loop())

    return run_virtual(run())


def test_a_turn_takes_the_time_of_the_cost_model():
    async def body(engine, loop):
        await engine.generate(ask())
        return loop.time()

    prefill = PACE.prefill_s(999) + PACE.base_step_s(999)
    steps = sum(PACE.decode_s(1, num_kv=1000 + step) for step in range(20))
    assert on(body) == pytest.approx(prefill + steps, rel=1e-6)


def test_time_runs_at_the_speed_of_its_scale():
    async def body(engine, loop):
        await engine.generate(ask())
        return loop.time()

    assert on(body, time_scale=0.01) == pytest.approx(on(body) / 100)


def test_a_later_turn_of_a_trajectory_computes_only_its_new_tokens():
    async def body(engine, loop):
        first = await engine.generate(ask("a", trajectory="t"))
        history = [7] * 1000 + first.token_ids
        await engine.generate(
            GenerateRequest(request_id="b", token_ids=[*history, *[8] * 50], max_new_tokens=5, trajectory="t")
        )
        return engine.batch.num_prefilled

    assert on(body) == 999 + 49


def test_the_load_of_an_engine_has_the_prompt_tokens_whose_kv_it_kept():
    async def body(engine, loop):
        first = await engine.generate(ask("a", trajectory="t"))
        history = [7] * 1000 + first.token_ids
        await engine.generate(
            GenerateRequest(request_id="b", token_ids=[*history, 8], max_new_tokens=5, trajectory="t")
        )
        return await engine.load_figures(), engine.batch.num_prefilled

    figures, num_prefilled = on(body)
    assert figures.num_prefix_hits >= 1000
    assert figures.num_prefix_queries - figures.num_prefix_hits == num_prefilled


def test_kv_is_evicted_when_running_turns_need_the_room():
    async def body(engine, loop):
        await engine.generate(ask("a", trajectory="t"))
        most = PACE.kv_tokens - 10
        await engine.generate(ask("b", num_prompt=most, num_new=5))
        kept = engine.batch.prefixes.num_tokens
        await engine.generate(ask("c", trajectory="t"))
        return kept, engine.batch.num_prefilled

    kept, num_prefilled = on(body, context_length=10**7)
    assert kept == 0
    assert num_prefilled == 999 + PACE.kv_tokens - 11 + 999


def test_waiting_turns_go_by_priority():
    ended = []

    async def body(engine, loop):
        async def turn(name, priority):
            await engine.generate(ask(name, priority=priority))
            ended.append(name)

        await asyncio.gather(turn("first", 9), turn("late", 5), turn("soon", 1))

    on(body, max_batch=1)
    assert ended.index("soon") < ended.index("late")


def test_a_full_engine_refuses():
    async def body(engine, loop):
        running = [asyncio.create_task(engine.generate(ask(f"r{n}"))) for n in range(2)]
        await asyncio.sleep(0.001)
        with pytest.raises(EngineRefusedError, match="wait here already"):
            await engine.generate(ask("more"))
        await asyncio.gather(*running)

    on(body, max_batch=1, max_waiting=1)


def test_a_turn_that_can_never_fit_is_refused_with_the_numbers():
    async def body(engine, loop):
        await engine.generate(ask(num_prompt=PACE.kv_tokens))

    with pytest.raises(EngineError, match="give the worker more GPUs"):
        on(body, context_length=10**7)


def test_a_version_that_comes_in_mid_turn_is_recorded_per_token():
    async def body(engine, loop):
        turn = asyncio.create_task(engine.generate(ask(num_new=100)))
        while engine.batch.num_generated < 30:
            await asyncio.sleep(0.001)
        stall_s = await engine.load_version(1)
        return stall_s, (await turn).versions

    stall_s, versions = on(body)
    assert stall_s > 0
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert len(versions) == 100


def test_versions_do_not_go_back():
    async def body(engine, loop):
        await engine.load_version(3)
        with pytest.raises(WeightsError, match="never go back"):
            await engine.load_version(2)

    on(body)


def test_no_token_is_generated_while_the_engine_is_paused():
    async def body(engine, loop):
        async with pause_steps(engine):
            turn = asyncio.create_task(engine.generate(ask()))
            await asyncio.sleep(100)
            num_generated = engine.batch.num_generated
        return num_generated, len((await turn).token_ids)

    assert on(body) == (0, 20)


def imitate(config, *, speed=1.0):
    return EngineConfig(sim=SimulatedEngineConfig(config=str(config), speed=speed))


def test_an_engine_of_a_campaign_takes_the_models_words_and_the_pace_of_the_hardware(tiny_model_dir, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LARGE | {"num_hidden_layers": 8}))

    async def last_token_at(gpu, speed):
        async with make_sim_engine(
            tiny_model_dir, imitate(config, speed=speed), gpu=GPU_CATALOGUE[gpu], num_gpus=1
        ) as engine:
            answer = await engine.generate(ask(num_prompt=300, num_new=100))
            assert set(answer.token_ids) <= set(range(100))
            with pytest.raises(EngineError, match="context is 512"):
                await engine.generate(ask(num_prompt=500))
            return asyncio.get_running_loop().time()

    slow, fast, twice = (
        run_virtual(last_token_at(*each)) for each in (("a100-80", 1.0), ("h100", 1.0), ("a100-80", 2.0))
    )
    assert fast < slow
    assert twice == pytest.approx(slow / 2)


def test_a_model_of_unknown_size_is_refused_with_a_hint(tiny_model_dir, tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(EngineError, match=r"config.json cannot be estimated .* set engine.sim.config"):
        make_sim_engine(tiny_model_dir, imitate(config), gpu=GPU_CATALOGUE["h100"], num_gpus=1)


def test_a_model_that_does_not_fit_its_gpus_is_refused(tiny_model_dir, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LARGE))
    with pytest.raises(EngineError, match="does not fit into 1 h100"):
        make_sim_engine(tiny_model_dir, imitate(config), gpu=GPU_CATALOGUE["h100"], num_gpus=1)
