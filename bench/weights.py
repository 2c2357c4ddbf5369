"""Measure weight transfer against the speed of memory, disk and link: `python -m bench.weights`.

fan_out       one trainer, four readers on its node; the trainer's stall; the total memory
rounding      the same versions in float32, as the trainer holds them, and rounded to bfloat16 as they are copied
engine_stall  the embedded engine's longest silence during an update, against a pause and a reload from disk
deltas        the share of a version that real AdamW steps change, and the time to code and send it
"""

import asyncio
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.figures import Figure, main
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.embedded.engine import EmbeddedEngine
from hpcrl.testing.engines import pause_steps
from hpcrl.weights.couriers import delta_codec
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.model_update import collect_parameters
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.file import make_window_key, unlink_recorded_windows

NUM_READERS = 4
CHUNK_MIB = 16
BAR_COPY = 1.3
SPAWN = multiprocessing.get_context("spawn")


def measure(full: bool) -> list[Figure]:
    """Run all measurements; `--full` adds 2 GiB."""
    figures = fan_out("512 MiB", qwen2_shapes(hidden=896, inner=4864, kv=128, num_layers=9), rounds=15)
    if full:
        shapes = qwen2_shapes(hidden=1536, inner=8960, kv=256, num_layers=18)
        figures += fan_out("2 GiB", shapes, rounds=8)
    small = qwen2_shapes(hidden=896, inner=4864, kv=128, num_layers=4, vocabulary=32000)
    figures += rounding(small, rounds=10 if full else 6)
    figures += engine_stall(rounds=4 if full else 3)
    return figures + deltas()


# ---- one node


def qwen2_shapes(*, hidden: int, inner: int, kv: int, num_layers: int, vocabulary: int = 151936) -> dict[str, Any]:
    """Return the shapes of a Qwen2 (0.5B: 896, 4864, 128; 1.5B: 1536, 8960, 256) with `num_layers` layers."""
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes: dict[str, Any] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def random_bfloat16(shapes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Make tensors with random bits, since only bytes matter here."""
    dice = np.random.default_rng(0)
    return {
        name: torch.from_numpy(dice.integers(0, 1 << 15, size=shape, dtype=np.int16)).view(torch.bfloat16)
        for name, shape in shapes.items()
    }


def fan_out(size: str, shapes: dict[str, Any], *, rounds: int) -> list[Figure]:
    """Measure publication, in turns with a memcpy of the same bytes.

    The time runs from the call of `stage` in the trainer until all readers have mapped views of a checked version. It
    is compared with one thread that copies the same tensors from private memory to private memory. `stage` has
    NUM_HASH_THREADS threads.
    """
    tensors = random_bfloat16(shapes)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with scratch_run() as campaign, readers(campaign) as pipes:
        store = WindowStore(make_window_key(campaign, node="bench"), job=campaign.job(0))
        spare = {name: tensor.clone() for name, tensor in tensors.items()}
        copies, stalls, visible, totals = [], [], [], []
        private = 0
        for version in range(rounds + 1):
            copies.append(seconds(lambda: copy_all(tensors, spare)))
            before = anonymous_nbytes()
            start = time.perf_counter()
            staged = store.stage(tensors, WeightVersion(version=version, step=version))
            stalls.append(time.perf_counter() - start)
            store.commit(staged)
            visible.append(time.perf_counter() - start)
            answers = [pipe.recv() for pipe in pipes]
            totals.append(max(at for at, _ in answers) - start)
            private = max(private, anonymous_nbytes() - before + sum(grown for _, grown in answers))
        shared = make_window_key(campaign, node="bench").path.stat().st_blocks * 512
        store.close()
    copies, stalls, visible, totals = copies[1:], stalls[1:], visible[1:], totals[1:]  # the first touches new memory
    limit = 2 * nbytes + 2 * (CHUNK_MIB << 20)
    return [
        Figure(
            name=f"{size}: fan-out to 4 readers, checked / one memcpy",
            value=min(totals) / min(copies),
            bar=BAR_COPY,
            better="lower",
        ),
        Figure(
            name=f"{size}: the same, median of {rounds} / median memcpy",
            value=median(totals) / median(copies),
            better="lower",
        ),
        Figure(
            name=f"{size}: trainer's stall per publish / one memcpy",
            value=min(stalls) / min(copies),
            bar=BAR_COPY,
            better="lower",
        ),
        Figure(name=f"{size}: one memcpy", value=nbytes / min(copies) / 1e9, unit="GB/s"),
        Figure(name=f"{size}: committed after / one memcpy", value=min(visible) / min(copies), better="lower"),
        Figure(
            name=f"{size}: memory of the node / (2 versions + 2 chunks)",
            value=(shared + private) / limit,
            bar=1.0,
            better="lower",
        ),
    ]


def rounding(shapes: dict[str, Any], *, rounds: int) -> list[Figure]:
    """Measure both ways to publish a trainer's float32 weights, in turns: the same weights and readers, the same files.

    Readers map and check; the files are durable. A link between nodes carries the bytes of one version.
    """
    torch.manual_seed(0)
    masters = {name: torch.randn(shape) for name, shape in shapes.items()}
    layouts = {
        dtype: TensorLayout.pack((name, dtype, shape) for name, shape in shapes.items())
        for dtype in ("float32", "bfloat16")
    }
    with ExitStack() as stack:
        publish = {dtype: stack.enter_context(publication(layout)) for dtype, layout in layouts.items()}
        taken = [{dtype: publish[dtype](masters, version) for dtype in layouts} for version in range(rounds + 1)]
    ratio = {
        stage: min(one["float32"][stage] for one in taken[1:]) / min(one["bfloat16"][stage] for one in taken[1:])
        for stage in taken[0]["float32"]
    }  # the first touches new memory
    sizes = [layout.nbytes for layout in layouts.values()]
    return [
        Figure(name="float32 / bfloat16: bytes of a version", value=sizes[0] / sizes[1], bar=1.99),
        Figure(name="float32 / bfloat16: trainer's stall, weights on the CPU", value=ratio["stall"]),
        Figure(name="float32 / bfloat16: until 4 readers have it, checked", value=ratio["readers"]),
        Figure(name="float32 / bfloat16: until it is in files", value=ratio["files"]),
    ]


Publish = Callable[[dict[str, torch.Tensor], int], dict[str, float]]
"""A function that publishes a version, and returns the seconds of each stage."""


@contextmanager
def publication(layout: TensorLayout) -> Iterator[Publish]:
    """Start the readers of a new campaign, whose versions have this layout."""
    with scratch_run() as campaign, readers(campaign) as pipes:
        store = WindowStore(make_window_key(campaign, node="bench"), job=campaign.job(0), layout=layout)
        files = FileStore(campaign.weights)

        def publish(masters: dict[str, torch.Tensor], number: int) -> dict[str, float]:
            version, taken = WeightVersion(version=number, step=number), {}
            start = time.perf_counter()
            staged = store.stage(masters, version)
            taken["stall"] = time.perf_counter() - start
            store.commit(staged)
            taken["readers"] = max(pipe.recv()[0] for pipe in pipes) - start
            taken["files"] = seconds(store.make_saver(files, version))
            files.prune(keep=1)
            return taken

        yield publish
        store.close()


def copy_all(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    """Copy each tensor with one memcpy."""
    for name, tensor in source.items():
        np.copyto(target[name].view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())


@contextmanager
def readers(campaign: CampaignDir) -> Iterator[list[Connection]]:
    """Start processes that report when they had a version, whole and checked, and the private memory it took."""
    pipes, processes = [], []
    for _ in range(NUM_READERS):
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=read_versions, args=(campaign.root, there), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()  # its imports are done
    try:
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def read_versions(root: Path, pipe: Connection) -> None:
    """Run a reader forever."""
    store = WindowStore(make_window_key(CampaignDir(root), node="bench"), job=CampaignDir(root).job(0))
    before, seen = anonymous_nbytes(), -1
    pipe.send("ready")
    while True:
        manifest = store.newest()
        if manifest is None or manifest.version == seen:
            time.sleep(0.0005)
            continue
        with store.read_version(manifest.version):
            at = time.perf_counter()
        seen = manifest.version
        pipe.send((at, anonymous_nbytes() - before))


# ---- an engine


def engine_stall(*, rounds: int) -> list[Figure]:
    """Measure a request that runs while versions arrive, through the window and as files not in the page cache.

    The model is that of the 512 MiB above, in float32. Both ways recompute the KV of the request.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM  # not in every reader process

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=9,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    tensors = {name: tensor.clone() for name, tensor in collect_parameters(model).items()}
    spare = {name: tensor.clone() for name, tensor in tensors.items()}
    copy_s = min(seconds(lambda: copy_all(tensors, spare)) for _ in range(5))
    with scratch_run() as campaign:
        window = WindowStore(make_window_key(campaign, node="bench"), job=campaign.job(0))
        files = FileStore(campaign.weights)
        by_window, by_files, step_s = asyncio.run(updates(model, tensors, window, files, rounds=rounds))
        window.close()
    shortest = {name: min(stall for stall, _ in seen) for name, seen in (("window", by_window), ("disk", by_files))}
    gaps = {name: min(gap for _, gap in seen) for name, seen in (("window", by_window), ("disk", by_files))}
    return [
        Figure(
            name="embedded: longest gap between tokens in an update, pause + reload from disk / window",
            value=gaps["disk"] / gaps["window"],
            bar=5.0,
        ),
        Figure(name="embedded: that gap by the window / one memcpy", value=gaps["window"] / copy_s, better="lower"),
        Figure(name="embedded: that gap by the window", value=gaps["window"] * 1e3, unit="ms", better="lower"),
        Figure(name="embedded: an ordinary step", value=step_s * 1e3, unit="ms", better="lower"),
        Figure(name="embedded: taking weights into use, disk / window", value=shortest["disk"] / shortest["window"]),
    ]


Update = tuple[float, float]
"""How long generation paused to load weights, and the longest time between two tokens meanwhile.

The latter is what a user waits for: a step under way, the pause, the KV computed again, the next token.
"""


async def updates(
    model: Any, tensors: dict[str, torch.Tensor], window: WindowStore, files: FileStore, *, rounds: int
) -> tuple[list[Update], list[Update], float]:
    """Measure updates of a running request by the window, then by pause and reload, and the time of a step."""
    by_window, by_files, version = [], [], 0
    async with EmbeddedEngine(model, store=window) as engine, running(engine):
        for version in range(1, rounds + 1):
            await asyncio.to_thread(window.publish, tensors, WeightVersion(version=version, step=0))
            by_window.append(await watched(engine, engine.load_version(version)))
    async with EmbeddedEngine(model, store=files) as engine, running(engine):
        for version in range(1, rounds + 1):
            await asyncio.to_thread(files.publish, tensors, WeightVersion(version=version, step=0))
            forget(files.directory)
            by_files.append(await watched(engine, reload(engine, version)))
        steps = [await watched(engine, asyncio.sleep(0, 0.0)) for _ in range(5)]
    return by_window, by_files, min(gap for _, gap in steps)


@asynccontextmanager
async def running(engine: EmbeddedEngine) -> AsyncIterator[None]:
    """Run a request that does not end by itself."""
    request = GenerateRequest(request_id="long", token_ids=[1, 2, 3, 4], max_new_tokens=4000)
    task = asyncio.create_task(engine.generate(request))
    await watched(engine, reload_nothing())
    yield
    await engine.abort("long")
    await task


async def reload_nothing() -> float:
    """Wait for the first tokens."""
    await asyncio.sleep(0.5)
    return 0.0


async def reload(engine: EmbeddedEngine, version: int) -> float:
    """Update as engines do without our weight transfer: pause, read the files, resume."""
    async with pause_steps(engine):
        start = time.perf_counter()
        await engine.load_version(version)
        return time.perf_counter() - start


async def watched(engine: EmbeddedEngine, update: Coroutine[Any, Any, float]) -> Update:
    """Return the update's own time, and the longest time without a new token until two tokens after it."""
    started = asyncio.create_task(update)
    longest, last, after = 0.0, time.perf_counter(), 0
    count = (await engine.load_figures()).num_generated_tokens
    while after < 2:
        await asyncio.sleep(0.0005)
        now, figures = time.perf_counter(), await engine.load_figures()
        if figures.num_generated_tokens != count:
            longest, last, count = max(longest, now - last), now, figures.num_generated_tokens
            after += started.done()
    return started.result(), longest


def forget(directory: Path) -> None:
    """Drop versions from the page cache, as if another node had written them."""
    for path in directory.glob("v*/*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# ---- deltas


def deltas() -> list[Figure]:
    """Measure the density with real steps, and the speed with a large version of 1 % changed values."""
    figures = []
    for rate in (1e-6, 3e-6, 1e-5):
        changed, share = adamw_delta(rate)
        figures.append(
            Figure(
                name=f"delta, AdamW lr {rate:g}, {changed:.1%} changed: full / delta",
                value=1 / share,
                bar=20.0 if changed <= 0.015 else None,
            )
        )
    return figures + coding_speed()


def adamw_delta(rate: float) -> tuple[float, float]:
    """Return the share of bfloat16 values that a step changes, and the share of bytes in its delta."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # not in every reader process

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    versions = []
    for _ in range(12):
        ids = torch.randint(512, (8, 32))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        versions.append({name: tensor.bfloat16() for name, tensor in collect_parameters(model).items()})
    layout = TensorLayout.from_tensors(versions[0])
    num = sum(tensor.numel() for tensor in versions[0].values())
    changed = sum(int((versions[-1][name] != old).sum()) for name, old in versions[-2].items()) / num
    old, new = (flat(version, layout) for version in versions[-2:])
    delta = delta_codec.encode_delta(memoryview(old), memoryview(new), layout, base=0, version=1)
    return changed, (len(delta) if delta is not None else layout.nbytes) / layout.nbytes


def flat(tensors: dict[str, torch.Tensor], layout: TensorLayout) -> Any:
    """Return all tensors as a slot holds them."""
    data = np.zeros(layout.nbytes, np.uint8)
    for place in layout.tensors:
        data[place.offset : place.offset + place.nbytes] = tensors[place.name].reshape(-1).view(torch.uint8).numpy()
    return data


def coding_speed() -> list[Figure]:
    """Measure the codec with 1 % changed values anywhere in a 512 MiB version."""
    layout = TensorLayout.from_tensors(
        tensors := random_bfloat16(qwen2_shapes(hidden=896, inner=4864, kv=128, num_layers=9))
    )
    old = flat(tensors, layout)
    del tensors
    new = old.copy()
    values = new.view(np.uint16)
    values[np.random.default_rng(1).integers(0, len(values), len(values) // 100)] ^= 1
    start = time.perf_counter()
    delta = delta_codec.encode_delta(memoryview(old), memoryview(new), layout, base=0, version=1)
    encode_s = time.perf_counter() - start
    assert delta is not None
    apply_s = seconds(lambda: delta_codec.apply_delta(delta, memoryview(old), layout, base=0))
    assert (old == new).all()
    return [
        Figure(name="delta, 512 MiB, 1% changed anywhere: full / delta", value=layout.nbytes / len(delta), bar=20.0),
        Figure(name="delta: encode, of the full version", value=layout.nbytes / encode_s / 1e9, unit="GB/s"),
        Figure(name="delta: apply, of the full version", value=layout.nbytes / apply_s / 1e9, unit="GB/s"),
    ]


# ---- shared


@contextmanager
def scratch_run() -> Iterator[CampaignDir]:
    """Yield a campaign directory whose windows are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as directory:
        campaign = CampaignDir(Path(directory) / "campaign")
        try:
            yield campaign
        finally:
            unlink_recorded_windows(campaign.job(0))


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def anonymous_nbytes() -> int:
    """Return the private memory of this process."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


if __name__ == "__main__":
    sys.exit(main("weights", measure))
