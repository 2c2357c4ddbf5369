"""How long a vLLM engine is silent when it takes new weights: `python -m bench.vllm_weights`.

ours      our weight-transfer engine: checked while tokens are generated, then loaded from the window of the node
theirs    vLLM's own pause, reload_weights from files that are already on disk and in the page cache, resume

Both keep the running requests and compute their KV anew. The same server does both in turns, and one stream of tokens
is watched; its longest silence while weights change is what counts. On a CPU a step is a pass over all weights, and no
silence is shorter than the step that ends before the pause and the one that computes KV anew after it; so the time from
pause to resume, and the usual time between two tokens, are told besides.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from bench.figures import Figure, main
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.embedded import load_model
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.engines.vllm import Origin, VllmEngine
from hpcrl.engines.vllm_server import Launch
from hpcrl.files import private_dir
from hpcrl.recipe import TinyModel
from hpcrl.rundir import RunDir
from hpcrl.weights.fit import parameters_of
from hpcrl.weights.store import WindowStore
from hpcrl.weights.window import window_key

BAR = 5.0
SHAPE = TinyModel(hidden_size=1024, num_layers=8, num_heads=8, num_kv_heads=2, context_length=2048)
PROMPT = [2, 45, 78, 5, 36, 3]
CALM_S = 1.0
"""Tokens that are awaited before and after an update."""


def measure(full: bool) -> list[Figure]:
    """A model of some 280 MB; `--full` takes more rounds of it."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_measure(Path(directory), rounds=8 if full else 3))


async def _measure(root: Path, *, rounds: int) -> list[Figure]:
    run = RunDir(root / "campaign")
    job = run.job(0)
    for private in (job.logs, run.weights):
        private_dir(private)
    make_tiny_model(run.model, SHAPE, seed=0)
    tensors = {name: tensor.clone() for name, tensor in parameters_of(load_model(run.model)).items()}
    disk = root / "disk"
    disk.mkdir()
    save_file(tensors, disk / "model.safetensors")
    window = WindowStore(window_key(run, node="here"), job=job)
    launch = Launch(
        model=run.model, log=job.log("vllm"), dtype="float32", extra_args=("--enforce-eager", "--block-size", "32")
    )
    origin = Origin(campaign=run.root, job=0, node="here")
    ours, theirs, copies = [], [], []  # of both: how long the stream was silent, from pause to resume, between tokens
    try:
        async with VllmEngine(launch, origin=origin) as engine:
            for version in range(1, rounds + 1):
                window.publish(tensors, version=version, step=version)
                ours.append(await _silence(engine, engine.load_version(version)))
                theirs.append(await _silence(engine, _reload(engine, disk)))
                copies.append(_copy_s(tensors))
    finally:
        window.unlink()
        window.close()
    size = f"{sum(tensor.nbytes for tensor in tensors.values()) / 1e6:.0f} MB"
    mine, my_pause, usual = map(median, zip(*ours, strict=True))
    other, other_pause, _ = map(median, zip(*theirs, strict=True))
    copy = median(copies)
    return [
        Figure(name=f"longest silence, {size}: vLLM's reload from disk / ours", value=other / mine, bar=BAR),
        Figure(name="longest silence: ours / one memcpy of the weights", value=mine / copy, better="lower"),
        Figure(name="pause to resume: vLLM's reload from disk / ours", value=other_pause / my_pause),
        Figure(name="longest silence: ours", value=1e3 * mine, unit="ms", better="lower"),
        Figure(name="longest silence: vLLM's reload from disk", value=1e3 * other, unit="ms", better="lower"),
        Figure(name="pause to resume: ours", value=1e3 * my_pause, unit="ms", better="lower"),
        Figure(name="between two tokens, usually", value=1e3 * usual, unit="ms", better="lower"),
    ]


async def _silence(engine: VllmEngine, update: Awaitable[float]) -> tuple[float, float, float]:
    """The longest time between two tokens of a stream while an update runs in the middle of it.

    And the time from pause to resume, as the update tells, and the median time between two tokens.
    """
    heard: list[float] = []
    request = GenerateRequest(request_id="watched", token_ids=PROMPT, max_new_tokens=2000, temperature=0.0)

    async def listen() -> None:
        async for _ in engine.stream(request):
            heard.append(time.monotonic())

    listening = asyncio.create_task(listen())
    while len(heard) < 20:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    paused_s = await update
    ended = time.monotonic()
    while heard[-1] < ended:
        await asyncio.sleep(0.01)
    await engine.abort("watched")
    await listening
    during = [moment for moment in heard if moment >= began - CALM_S]
    gaps = [after - before for before, after in pairwise(during)]
    return max(gaps), paused_s, median(gaps)


async def _reload(engine: VllmEngine, disk: Path) -> float:
    """What vLLM offers by itself."""
    server = engine.server
    began = time.monotonic()
    await server.post("/pause", mode="keep", clear_cache="false")
    await server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(disk)}})
    await server.post("/reset_prefix_cache", reset_running_requests="true")
    await server.post("/resume")
    return time.monotonic() - began


def _copy_s(tensors: dict[str, torch.Tensor]) -> float:
    targets = [torch.empty_like(tensor).fill_(0) for tensor in tensors.values()]
    began = time.monotonic()
    for target, tensor in zip(targets, tensors.values(), strict=True):
        target.copy_(tensor)
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main("vllm_weights", measure))
