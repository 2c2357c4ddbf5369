"""Measure how long a vLLM engine is silent while it loads new weights: `python -m bench.vllm_weights`.

ours      our weight-transfer engine: checked while tokens are generated, then loaded from the window of the node
theirs    vLLM's own pause, reload_weights from files that are already on disk and in the page cache, resume

Both keep the running requests and recompute their KV. The same server does both in turns, and one stream of tokens
is measured: its longest silence while weights change counts. A silence is at least the step that recomputes the KV,
which on a CPU takes longer the more tokens the stream has: so the stream is short, with the same number of tokens for
both. The time of such a step alone is reported too, and the times from pause to resume and between tokens.

Two rules were chosen after the first figures: only silences during the update count, and both ways start at the same
length of the stream.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from bench.figures import Figure, main
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import TinyModel
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.embedded.engine import load_model
from hpcrl.engines.vllm.engine import VllmEngine
from hpcrl.engines.vllm.server import VllmLaunch
from hpcrl.models.tiny import make_tiny_model
from hpcrl.system.files import make_private_dir
from hpcrl.weights.model_update import collect_parameters
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.file import make_window_key

BAR = 5.0
SHAPE = TinyModel(hidden_size=1024, num_layers=8, num_heads=8, num_kv_heads=2, context_length=2048)
PROMPT = [2, 45, 78, 5, 36, 3]
NUM_BEFORE = 5
"""Tokens of the stream when our update starts; theirs starts with the number that the stream had when ours ended."""


def measure(full: bool) -> list[Figure]:
    """Measure a model of some 280 MB; `--full` runs more rounds."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_measure(Path(directory), rounds=8 if full else 3))


async def _measure(root: Path, *, rounds: int) -> list[Figure]:
    campaign = CampaignDir(root / "campaign")
    job = campaign.job(0)
    for private in (job.logs, campaign.weights):
        make_private_dir(private)
    make_tiny_model(campaign.model, SHAPE, seed=0)
    tensors = {name: tensor.clone() for name, tensor in collect_parameters(load_model(campaign.model)).items()}
    disk = root / "disk"
    disk.mkdir()
    save_file(tensors, disk / "model.safetensors")
    window = WindowStore(make_window_key(campaign, node="here"), job=job)
    launch = VllmLaunch(
        model=campaign.model, log=job.log("vllm"), dtype="float32", extra_args=("--enforce-eager", "--block-size", "32")
    )
    place = WorkerPlace(job, "here")
    ours, theirs, copies, alone = [], [], [], []
    try:
        async with VllmEngine(launch, place=place) as engine:
            for version in range(1, rounds + 1):
                window.publish(tensors, WeightVersion(version=version, step=version))
                ours.append(await _silence(engine, engine.load_version(version), after=NUM_BEFORE))
                theirs.append(await _silence(engine, _reload(engine, disk), after=ours[-1].num_received))
                copies.append(_copy_s(tensors))
                alone.append(await _first_token_s(engine, num_tokens=len(PROMPT) + ours[-1].num_received))
    finally:
        window.unlink()
        window.close()
    size = f"{sum(tensor.nbytes for tensor in tensors.values()) / 1e6:.0f} MB"
    mine, my_pause = median(seen.silence_s for seen in ours), median(seen.paused_s for seen in ours)
    other, other_pause = median(seen.silence_s for seen in theirs), median(seen.paused_s for seen in theirs)
    usual = median(seen.usual_s for seen in ours)
    copy = median(copies)
    return [
        Figure(name=f"longest silence, {size}: vLLM's reload from disk / ours", value=other / mine, bar=BAR),
        Figure(name="longest silence: ours / one memcpy of the weights", value=mine / copy, better="lower"),
        Figure(name="pause to resume: vLLM's reload from disk / ours", value=other_pause / my_pause),
        Figure(name="longest silence: ours", value=1e3 * mine, unit="ms", better="lower"),
        Figure(name="longest silence: vLLM's reload from disk", value=1e3 * other, unit="ms", better="lower"),
        Figure(name="pause to resume: ours", value=1e3 * my_pause, unit="ms", better="lower"),
        Figure(
            name="KV of the same number of tokens, computed by itself",
            value=1e3 * median(alone),
            unit="ms",
            better="lower",
        ),
        Figure(name="between two tokens, usually", value=1e3 * usual, unit="ms", better="lower"),
    ]


class Seen(NamedTuple):
    """The effect of an update on a stream of tokens."""

    silence_s: float
    """The longest time between two tokens, from the start of the update until the first token after it."""
    paused_s: float
    """Time from pause to resume, as the update reports it."""
    usual_s: float
    """Median time between two tokens."""
    num_received: int
    """Tokens until the end of the update."""


async def _silence(engine: VllmEngine, update: Coroutine[Any, Any, float], *, after: int) -> Seen:
    """Run an update in the middle of a stream, after a number of tokens."""
    received: list[float] = []
    request = GenerateRequest(request_id="watched", token_ids=PROMPT, max_new_tokens=2000, temperature=0.0)

    async def listen() -> None:
        async for _ in engine.stream(request):
            received.append(time.monotonic())

    listening = asyncio.create_task(listen())
    while len(received) < after:
        await asyncio.sleep(0.001)
    start = time.monotonic()
    paused_s = await update
    ended, num_received = time.monotonic(), len(received)
    while received[-1] < ended or len(received) < num_received + NUM_BEFORE:
        await asyncio.sleep(0.001)
    await engine.abort("watched")
    await listening
    gaps = list(pairwise(received))
    during = [later - earlier for earlier, later in gaps if later > start and earlier < ended]
    return Seen(max(during), paused_s, median(later - earlier for earlier, later in gaps), num_received)


async def _first_token_s(engine: VllmEngine, *, num_tokens: int) -> float:
    """Return the time to compute the KV of a new prompt."""
    prompt = [random.randrange(2, 64) for _ in range(num_tokens)]
    start = time.monotonic()
    await engine.generate(GenerateRequest(request_id="alone", token_ids=prompt, max_new_tokens=1, temperature=0.0))
    return time.monotonic() - start


async def _reload(engine: VllmEngine, disk: Path) -> float:
    """Update weights by vLLM's own means; return the time from pause to resume."""
    server = engine.server
    start = time.monotonic()
    await server.post("/pause", mode="keep", clear_cache="false")
    await server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(disk)}})
    await server.post("/reset_prefix_cache", reset_running_requests="true")
    await server.post("/resume")
    return time.monotonic() - start


def _copy_s(tensors: dict[str, torch.Tensor]) -> float:
    targets = [torch.empty_like(tensor).fill_(0) for tensor in tensors.values()]
    start = time.monotonic()
    for target, tensor in zip(targets, tensors.values(), strict=True):
        target.copy_(tensor)
    return time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main("vllm_weights", measure))
