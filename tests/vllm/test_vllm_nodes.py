"""vLLM engines in several parts: on two nodes, for which two groups of processes stand, and with two copies."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.engines.embedded.engine import load_model
from hpcrl.engines.vllm.engine import VllmEngine
from hpcrl.engines.vllm.engine_group import EngineGroup
from hpcrl.engines.vllm.engine_part import run_part
from hpcrl.engines.vllm.server import VllmLaunch
from hpcrl.errors import EngineError
from hpcrl.weights.model_update import collect_parameters
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.versions import WeightVersion
from tests.support.listening_sockets import choose_exposed, list_listening
from tests.support.served import greedy

if TYPE_CHECKING:
    from tests.support.served import Place

pytestmark = pytest.mark.long
HOSTS = ("127.0.0.2", "127.0.0.3")
"""The addresses of the nodes."""
SEEN: dict[str, set[str]] = {}
"""The addresses at which processes have listened, by their command lines."""
WATCH_INTERVAL_S = 0.3
PROMPTS = [[2, *range(10, 10 + number), 3] for number in (4, 20, 50, 7)]


@pytest.fixture(scope="module", params=["nodes", "copies"])
def divided(request: pytest.FixtureRequest, vllm_place: "Place") -> Iterator[VllmEngine]:
    """Return an engine whose layers are divided between two nodes, or one with two copies of the model."""
    plain = dataclasses.replace(vllm_place.launch(request.param), kv_connector=None, kv_dir=None, node="here")
    if request.param == "copies":
        launches = [dataclasses.replace(plain, data_parallel=2)]
    else:
        group = EngineGroup(directory=vllm_place.root / "groups", name=request.param, num_nodes=2)
        place = {"host": HOSTS[0], "interface": "lo"}
        first = dataclasses.replace(plain, tensor_parallel=2, group=group, **place)
        other = {"host": HOSTS[1], "node": "there", "log": vllm_place.job.log("part")}
        launches = [first, dataclasses.replace(first, node_rank=1, **other)]
    stack = contextlib.AsyncExitStack()
    try:
        yield vllm_place.do(stack.enter_async_context(start_engine(vllm_place, launches)), timeout_s=900)
    finally:
        vllm_place.do(stack.aclose())


@contextlib.asynccontextmanager
async def start_engine(place: "Place", launches: list[VllmLaunch]) -> AsyncIterator[VllmEngine]:
    first, *further = launches
    ending = asyncio.Event()
    parts = [asyncio.create_task(run_part(launch, is_ending=ending.is_set)) for launch in further]
    parts.append(asyncio.create_task(watch_sockets(ending)))
    try:
        async with VllmEngine(first, place=WorkerPlace(place.job, "here")) as engine:
            yield engine
    finally:
        ending.set()
        await asyncio.gather(*parts)


async def watch_sockets(ending: asyncio.Event) -> None:
    """Note where processes of engines listen, also while they start: some of vLLM's stores are closed then."""
    while not ending.is_set():
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        for words, addresses in (await asyncio.to_thread(list_listening, children)).items():
            SEEN.setdefault(words, set()).update(addresses)
        await asyncio.sleep(WATCH_INTERVAL_S)


def ask_all(place: "Place", engine: VllmEngine) -> list[Completion]:
    async def body() -> list[Completion]:
        requests = [
            GenerateRequest(request_id=f"r{number}", token_ids=prompt, max_new_tokens=12, temperature=0.0)
            for number, prompt in enumerate(PROMPTS)
        ]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return place.do(body())


def assert_like(model: Any, answers: list[Completion], *, version: int) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.versions == [version] * 12
        assert answer.token_ids == greedy(model, prompt, answer.token_ids)


def test_a_divided_engine_has_the_tokens_of_transformers_also_after_an_update(
    divided: VllmEngine, vllm_place: "Place", trained: Any
) -> None:
    """The part that is on another node has no window there, and reads the file."""
    assert_like(load_model(vllm_place.model, device="cpu"), ask_all(vllm_place, divided), version=0)
    newer = load_model(trained.initial, device="cpu")
    FileStore(vllm_place.campaign.weights).publish(collect_parameters(newer), WeightVersion(version=1, step=1))
    vllm_place.do(divided.load_version(1))
    assert_like(newer, ask_all(vllm_place, divided), version=1)


def test_no_process_of_a_divided_engine_listens_on_all_interfaces(divided: VllmEngine) -> None:
    everywhere = set().union(*SEEN.values())
    assert everywhere
    if divided.server.launch.group is not None:
        assert HOSTS[0] in everywhere, "the parts meet there"
    assert choose_exposed(SEEN) == {}


def test_the_end_of_a_part_ends_the_engine_with_its_reason(divided: VllmEngine, vllm_place: "Place") -> None:
    if divided.server.launch.group is None:
        pytest.skip("copies on one node end with their server")
    (part,) = [
        process.pid
        for process in psutil.Process(os.getpid()).children()
        if "hpcrl.engines.vllm.headless" in process.cmdline()
    ]
    os.killpg(part, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"nodes has lost a node: part 1 ended with|the vLLM server ended with"):
        vllm_place.do(divided.wait_until_failed())
