"""The supervision of a vLLM server, with a fake one: it starts, fails, hangs, and ends."""

import asyncio
import dataclasses
import itertools
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import EngineConfig
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.embedded.engine import load_model
from hpcrl.engines.sim.engine import make_sim_engine
from hpcrl.engines.vllm.engine import VllmEngine
from hpcrl.engines.vllm.protocol import build_sampling_params, parse_metrics
from hpcrl.engines.vllm.server import VllmLaunch, VllmServer, build_command, build_environment, find_cause
from hpcrl.errors import EngineError, WeightsError
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.system.processes import list_descendants
from tests.support.fakes.vllm_server import METRICS, UPDATE
from tests.support.plans import plan_recipe

FAKE = (sys.executable, str(Path(__file__).parents[3] / "support" / "fakes" / "vllm_server.py"))
REQUEST = GenerateRequest(request_id="r", token_ids=[1, 2], max_new_tokens=1)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make temporary directories under a short path, since they hold sockets."""
    with tempfile.TemporaryDirectory(prefix="hv-", dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


@pytest.fixture
def launch(tmp_path: Path, scratch: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> VllmLaunch:
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "asked"))
    return VllmLaunch(program=FAKE, model=tiny_model_dir, log=tmp_path / "log", start_timeout_s=120.0)


def with_engine(launch: VllmLaunch, body: Callable[[VllmEngine], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        run = CampaignDir(Path("/none"))
        async with VllmEngine(launch, place=WorkerPlace(run.job(0), "n")) as engine:
            return await body(engine)

    return asyncio.run(run())


def test_an_answer_of_the_server_is_a_completion(launch: VllmLaunch) -> None:
    answer = with_engine(launch, lambda engine: engine.generate(REQUEST))
    assert (answer.token_ids, answer.logprobs, answer.versions) == ([1], [-0.5], [0])
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("behaviour", "complaint"),
    [
        ("dies", r"ended with 1: no such GPU; all of it is in .*/log"),
        ("empty", "asked for one token"),
    ],
)
def test_a_server_that_does_not_come_up_is_an_engine_error_with_the_reason(
    launch: VllmLaunch, monkeypatch: pytest.MonkeyPatch, behaviour: str, complaint: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM", behaviour)
    with pytest.raises(EngineError, match=complaint):
        with_engine(launch, lambda engine: engine.generate(REQUEST))


def test_a_server_that_never_passes_a_health_check_is_an_engine_error(
    launch: VllmLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "unwell")
    with pytest.raises(EngineError, match="vLLM was not up after 3 s"):
        with_engine(dataclasses.replace(launch, start_timeout_s=3.0), lambda engine: engine.generate(REQUEST))


@pytest.mark.parametrize(
    ("behaviour", "complaint"),
    [
        ("breaks", "with 500: EngineCore has died"),
        ("nonsense", "invalid answer"),
        ("nan", "not finite"),
    ],
)
def test_a_server_that_answers_nonsense_is_an_engine_error(
    launch: VllmLaunch, monkeypatch: pytest.MonkeyPatch, behaviour: str, complaint: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM", behaviour)
    with pytest.raises(EngineError, match=complaint):
        with_engine(launch, lambda engine: engine.generate(REQUEST))


def test_a_caller_that_goes_away_has_its_request_aborted_at_a_silent_server(
    launch: VllmLaunch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hangs")

    async def body(engine: VllmEngine) -> None:
        asked = asyncio.create_task(engine.generate(REQUEST))
        while (await engine.load_figures()).num_running + (await engine.load_figures()).num_waiting == 0:
            await asyncio.sleep(0.01)
        asked.cancel()
        while "/abort_requests" not in (tmp_path / "asked").read_text():
            await asyncio.sleep(0.01)
        assert (await engine.load_figures()).num_running == 0

    with_engine(launch, body)


def test_a_server_that_is_killed_fails_its_requests_and_the_engine(
    launch: VllmLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hangs")

    async def body(engine: VllmEngine) -> None:
        asked = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0)
        os.killpg(engine.server.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="did not answer"):
            await asked
        with pytest.raises(EngineError, match="the vLLM server ended with -9"):
            await engine.wait_until_failed()

    with_engine(launch, body)


def test_nothing_of_a_server_is_left_when_its_engine_ends(
    launch: VllmLaunch, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "leaves")
    before = set(list_descendants())

    async def body(engine: VllmEngine) -> list[int]:
        return [pid for pid in list_descendants() if pid not in before]

    started = with_engine(launch, body)
    assert len(started) == 3, "keeper, server and what the server left"
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert not list(scratch.iterdir())


def test_the_server_listens_in_a_directory_that_no_other_user_can_enter(launch: VllmLaunch, scratch: Path) -> None:
    async def body(_: VllmEngine) -> int:
        (own,) = scratch.iterdir()
        assert stat.S_ISSOCK((own / "s").stat().st_mode)
        return stat.S_IMODE(own.stat().st_mode)

    assert with_engine(launch, body) == 0o700
    assert stat.S_IMODE(launch.log.stat().st_mode) == 0o600


def test_a_directory_without_a_model_is_refused_before_anything_is_started(launch: VllmLaunch, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="holds no model"):
        with_engine(dataclasses.replace(launch, model=tmp_path / "nothing"), lambda engine: engine.generate(REQUEST))
    assert not (tmp_path / "asked").exists()


def test_a_vllm_that_hpcrl_is_not_tested_with_is_refused_before_anything_is_started(
    launch: VllmLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.1.0")
    real = dataclasses.replace(launch, program=VllmLaunch.program)
    with pytest.raises(EngineError, match=r"has vllm 0\.1\.0, and hpcrl is tested with vllm.*any_vllm_version = true"):
        with_engine(real, lambda engine: engine.generate(REQUEST))
    assert not launch.log.exists()


def test_a_tokenizer_that_does_not_fit_its_model_is_refused_by_name_before_anything_is_started(
    launch: VllmLaunch, tmp_path: Path
) -> None:
    model = tmp_path / "odd"
    shutil.copytree(launch.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    with pytest.raises(EngineError, match=r"odd/tokenizer.json has ids up to 99, but the model .* has only 0\.\.49"):
        with_engine(dataclasses.replace(launch, model=model), lambda engine: engine.generate(REQUEST))
    assert not (tmp_path / "asked").exists()
    with pytest.raises(EngineError, match="has ids up to 99"):
        load_model(model)
    with pytest.raises(EngineError, match="has ids up to 99"):
        make_sim_engine(model, EngineConfig(), gpu=GPU_CATALOGUE["h100"], num_gpus=1)


def test_a_temporary_directory_too_deep_for_sockets_is_refused(
    launch: VllmLaunch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(EngineError, match="set TMPDIR to a shorter path"):
        with_engine(launch, lambda engine: engine.generate(REQUEST))
    assert not list(deep.iterdir())


def test_a_version_is_made_ready_before_generation_stops_and_every_rank_is_waited_for(
    launch: VllmLaunch, tmp_path: Path
) -> None:
    two_ranks = dataclasses.replace(launch, tensor_parallel=2)

    async def body(engine: VllmEngine) -> int:
        await engine.load_version(7)
        return engine.version

    assert with_engine(two_ranks, body) == 7
    assert asked_for(tmp_path)[-1 - len(UPDATE) :] == ["/init_weight_transfer_engine", *UPDATE]


def test_a_version_that_one_rank_refuses_is_named_and_generation_does_not_stop(
    launch: VllmLaunch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FINDING", "tensor 'x' is damaged")

    async def body(engine: VllmEngine) -> int:
        with pytest.raises(WeightsError, match="version 7 does not fit and is not loaded: tensor 'x' is damaged"):
            await engine.load_version(7)
        return engine.version

    assert with_engine(dataclasses.replace(launch, tensor_parallel=2), body) == 0
    assert not {*UPDATE, "/pause"} & {*asked_for(tmp_path)}


def asked_for(tmp_path: Path) -> list[str]:
    return (tmp_path / "asked").read_text().splitlines()


def test_prefill_without_a_connector_is_refused(launch: VllmLaunch) -> None:
    with pytest.raises(EngineError, match="kv_connector"):
        with_engine(launch, lambda engine: engine.prefill(REQUEST))


def test_sizes_of_the_plan_become_arguments(launch: VllmLaunch, tmp_path: Path) -> None:
    given = build_command(
        dataclasses.replace(launch, tensor_parallel=4, pipeline_parallel=2, max_model_len=99), scratch=tmp_path
    )
    pairs = dict(itertools.pairwise(given))
    assert pairs["--tensor-parallel-size"] == "4"
    assert pairs["--pipeline-parallel-size"] == "2"
    assert pairs["--max-model-len"] == "99"
    assert "--kv-transfer-config" not in given


def test_rounded_weights_and_copies_of_the_recipe_become_arguments(tmp_path: Path) -> None:
    role = msgspec.structs.replace(plan_recipe(recipe="quickstart-vllm").role("decode"), gpus_per_worker=8)
    engine = EngineConfig(backend="vllm", quantization="fp8", data_parallel=2, pipeline_parallel=2)
    launch = VllmLaunch.from_config(engine, role=role, model=tmp_path, log=tmp_path)
    pairs = dict(itertools.pairwise(build_command(launch, scratch=tmp_path)))
    assert pairs["--quantization"] == "fp8_per_tensor"
    assert (pairs["--tensor-parallel-size"], pairs["--data-parallel-size"]) == ("2", "2")


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_whole_experts_of_ranks_become_an_argument(tmp_path: Path, expert_parallel: bool) -> None:
    role = msgspec.structs.replace(plan_recipe(recipe="quickstart-vllm").role("decode"), gpus_per_worker=8)
    engine = EngineConfig(backend="vllm", expert_parallel=expert_parallel)
    launch = VllmLaunch.from_config(engine, role=role, model=tmp_path, log=tmp_path)
    assert ("--enable-expert-parallel" in build_command(launch, scratch=tmp_path)) == expert_parallel


LLAMA_8B = {"num_hidden_layers": 32, "hidden_size": 4096, "num_key_value_heads": 8, "intermediate_size": 14336}


@pytest.mark.parametrize(
    ("fields", "engine", "kv_bytes"),
    [
        ({}, {}, "268435456"),
        ({"max_position_embeddings": 8192}, {}, str(4 * 64 * 8192 * 4 * 2 * 2 * 2 * 16)),
        (LLAMA_8B, {"max_model_len": 1024}, None),
        ({"max_position_embeddings": None}, {}, None),
        ({"num_hidden_layers": "two"}, {}, None),
        ({}, {"vllm_args": ["--gpu-memory-utilization=0.5"]}, None),
    ],
    ids=["tiny", "small", "large", "no context", "no model", "sized by the user"],
)
def test_a_small_model_does_not_get_the_kv_of_a_whole_gpu(
    tmp_path: Path, fields: dict[str, Any], engine: dict[str, Any], kv_bytes: str | None
) -> None:
    known = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    known |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 99, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(known | fields))
    role = plan_recipe(recipe="quickstart-vllm").role("decode")
    for num_gpus, expected in ((1, kv_bytes), (0, None)):
        launch = VllmLaunch.from_config(
            EngineConfig(backend="vllm", max_batch=64, **engine),
            role=msgspec.structs.replace(role, gpus_per_worker=num_gpus),
            model=tmp_path,
            log=tmp_path,
        )
        pairs = dict(itertools.pairwise(build_command(launch, scratch=tmp_path)))
        assert pairs.get("--kv-cache-memory-bytes") == expected


@pytest.mark.parametrize(("rank", "room"), [(1, "1"), (5, "8"), (16, "16"), (200, "256"), (513, "513")])
def test_a_server_has_room_for_adapters_of_the_recipes_rank(
    launch: VllmLaunch, tmp_path: Path, rank: int, room: str
) -> None:
    given = build_command(dataclasses.replace(launch, lora_rank=rank), scratch=tmp_path)
    assert dict(itertools.pairwise(given))["--max-lora-rank"] == room
    assert "--enable-lora" in given
    assert "--enable-lora" not in build_command(launch, scratch=tmp_path)


def test_another_connector_is_named_to_vllm_with_its_options(launch: VllmLaunch, tmp_path: Path) -> None:
    nixl = dataclasses.replace(launch, kv_connector="NixlConnector", kv_options={"backends": ["UCX"]})
    given = build_command(nixl, scratch=tmp_path)
    config = given[given.index("--kv-transfer-config") + 1]
    assert '"kv_connector": "NixlConnector"' in config
    assert '"backends": ["UCX"]' in config
    assert "module_path" not in config


def test_only_our_plugin_is_loaded_and_threads_are_those_of_the_plan(launch: VllmLaunch, tmp_path: Path) -> None:
    given = build_environment(dataclasses.replace(launch, num_cpus=7), scratch=tmp_path, inherited={"HOME": "/h"})
    assert (given["VLLM_PLUGINS"], given["OMP_NUM_THREADS"], given["HOME"]) == ("hpcrl", "7", "/h")


def test_a_seed_leaves_the_batch_only_where_an_agent_or_the_recipe_wants_it(launch: VllmLaunch) -> None:
    asked = msgspec.structs.replace(REQUEST, seed=(1 << 63) + 5, needs_seed=True)
    assert "seed" not in build_sampling_params(REQUEST, max_new_tokens=1)
    assert build_sampling_params(asked, max_new_tokens=1)["seed"] == 5
    assert build_sampling_params(REQUEST, max_new_tokens=1, has_seeds=True)["seed"] == 0


def test_figures_are_read_from_the_metrics() -> None:
    assert parse_metrics(METRICS) == (3, 100, 0.25, 2000, 400, 300, 2)
    copy = METRICS.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75")
    assert parse_metrics(METRICS + copy) == (6, 200, 0.5, 4000, 800, 600, 4)


def test_the_server_of_a_judge_has_its_name_and_no_routes_that_change_it(launch: VllmLaunch, scratch: Path) -> None:
    judge = dataclasses.replace(launch, judge="grader", extra_args=("--runner", "pooling"))
    command = build_command(judge, scratch=scratch)
    assert command[command.index("--served-model-name") + 1] == "grader"
    assert command[-2:] == ["--runner", "pooling"]
    assert not {"--weight-transfer-config", "--kv-transfer-config", "--enable-scale-out"} & {*command}
    environment = build_environment(judge, scratch=scratch, inherited={})
    assert environment["VLLM_SERVER_DEV_MODE"] == "0"
    assert "VLLM_PLUGINS" not in environment


def test_a_judge_is_up_once_it_is_healthy_and_generates_nothing(
    launch: VllmLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "empty")  # a server of the policy would be refused for this

    async def run() -> bool:
        async with VllmServer(dataclasses.replace(launch, judge="grader")) as server:
            return await server.is_well()

    assert asyncio.run(run())


def test_the_cause_of_an_end_is_the_first_error_of_a_process_of_this_start(tmp_path):
    log = tmp_path / "log"
    error = "(EngineCore pid=7) ERROR 11-26 15:26:19 [core.py:1510] "
    log.write_text(f"{error}ValueError: of an earlier start\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("(EngineCore pid=9) INFO 11-26 15:27:01 [core.py:133] RuntimeError: is no error here\n")
        file.write(f"{error}EngineCore failed to start.\n{error}Traceback (most recent call last):\n")
        file.write(f"{error}    import flashinfer\n{error}ModuleNotFoundError: No module named 'flashinfer'\n")
        file.write(f"{error}torch.OutOfMemoryError: that came after it\n")
        file.write("RuntimeError: Engine core initialization failed. See root cause above.\n")
    assert find_cause(log, start=start) == "ModuleNotFoundError: No module named 'flashinfer'"
    assert find_cause(log, start=0) == "ValueError: of an earlier start"
    log.write_text("vllm: error: unrecognized arguments: --fast\n")
    assert find_cause(log, start=0) == "vllm: error: unrecognized arguments: --fast"
    assert find_cause(tmp_path / "none", start=0) == "it has no log"
