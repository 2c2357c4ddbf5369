"""The sections of the check of GPUs, each in a separate process: `python -m bench.gpu.sections NAME DEVICE`.

Each returns figures, and what it did not run. On CPUs sizes are small, and no figure has a bar.
"""

import contextlib
import functools
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from bench.figures import Figure
from bench.learning import compute_whole
from bench.memory import MODELS, SCALED_DOWN
from bench.memory_steps import StepCase, StepCost, make_model, measure_ranks
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.hardware.architecture import ModelArchitecture, read_architecture
from hpcrl.hardware.memory_model import GIB
from hpcrl.hardware.train_memory import RankSetup, estimate_rank_memory
from hpcrl.learn.batch import MicroBatch, TrainingRow, make_micro_batches, make_packed_batches
from hpcrl.learn.token_head import HeadForm, compute_from_hidden
from hpcrl.testing.fake_steps import run_passes
from hpcrl.trainers.token_model import compute_token_logprobs
from hpcrl.trainers.world import World
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.file import SHARED_MEMORY, make_window_key, unlink_recorded_windows

USABLE_SHARE = 0.85
"""The share of a device's free memory that a measured model may take by the memory model."""
LAYER_PAIRS = ((4, 6), (2, 4), (1, 2))
"""Numbers of layers from which all are extrapolated, the best pair first."""
MAX_MEMORY_ERROR = 1.05
MAX_WINDOW_SHARE = 0.5
"""The share of free shared memory that the window may take."""
NUM_VERSIONS = 2
"""The versions that a window has room for."""


@dataclass(frozen=True)
class SectionSizes:
    """The sizes of all sections on one kind of device."""

    models: dict[str, dict[str, Any]]
    num_tokens: int
    num_timed: int
    product_size: int
    """Rows and columns of the matrices whose product is a device's rate."""
    publish_shapes: tuple[tuple[int, int], ...]
    small_model: dict[str, Any]
    head_sizes: tuple[int, int, int]
    """Tokens, hidden size and vocabulary of the output layer."""
    row_tokens: int
    """The tokens of a micro-batch of several rows."""
    has_bars: bool


SMALL_MODEL = SCALED_DOWN | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 8192}
TINY_MODEL = SCALED_DOWN | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512}
SIZES = {
    "cuda": SectionSizes(
        models=MODELS,
        num_tokens=8192,
        num_timed=3,
        product_size=8192,
        publish_shapes=((151936, 2048), *((2048, 2048), (6144, 2048), (2048, 6144)) * 20),
        small_model=SMALL_MODEL | {"head_dim": 64},
        head_sizes=(8192, 4096, 151_936),
        row_tokens=8192,
        has_bars=True,
    ),
    "cpu": SectionSizes(
        models={"tiny": TINY_MODEL},
        num_tokens=64,
        num_timed=1,
        product_size=256,
        publish_shapes=((512, 256),) * 8,
        small_model=TINY_MODEL | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        head_sizes=(384, 8, 1 << 17),
        row_tokens=256,
        has_bars=False,
    ),
}


@dataclass(frozen=True)
class CheckedDevice:
    """The first device of its type, and what is measured there."""

    type: str

    @property
    def sizes(self) -> SectionSizes:
        return SIZES[self.type]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, 0)

    @functools.cached_property
    def num_devices(self) -> int:
        return 1 if self.type == "cpu" else torch.cuda.device_count()

    def count_free_bytes(self) -> float:
        return float("inf") if self.type == "cpu" else torch.cuda.mem_get_info(self.device)[0]

    def synchronize(self) -> None:
        if self.type != "cpu":
            torch.cuda.synchronize()

    def time_work(self, work: Callable[[], object]) -> float:
        """Return the median time of several calls, after one that warms up."""
        taken = []
        for _ in range(self.sizes.num_timed + 1):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def count_peak(self, work: Callable[[], object]) -> int:
        """Count the bytes that are alive at once because of a call."""
        if self.type != "cpu":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            work()
            return torch.cuda.max_memory_allocated() - before
        tracker = MemTracker()
        with tracker:
            work()
        return sum(each["Total"] for each in tracker.get_tracker_snapshot("peak").values())

    def make_figure(self, name: str, value: float, **options: Any) -> Figure:
        found = Figure(name=name, value=value, **options)
        return found if self.sizes.has_bars else replace(found, bar=None)


class SectionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a section, and what it did not run."""

    figures: list[Figure]
    not_run: list[str] = []


def main() -> None:
    name, kind = sys.argv[1:]
    found = SECTIONS[name](CheckedDevice(kind))
    figures = [asdict(figure) | {"ok": figure.ok} for figure in found.figures]
    print(json.dumps({"figures": figures, "not_run": found.not_run}))


# ---- memory


def check_memory(checked: CheckedDevice) -> SectionResult:
    """Compare steps of real models, on all devices, with the memory model, and with the rate of matrix products."""
    sizes, num_ranks = checked.sizes, checked.num_devices
    setup = RankSetup(num_ranks=num_ranks, is_sharded=num_ranks > 1, is_bf16=checked.type == "cuda", has_recompute=True)
    rate, not_run = measure_product_rate(checked), []
    figures: list[Figure] = []
    for name, fields in sizes.models.items():
        num_bytes = checked.count_free_bytes() * USABLE_SHARE
        pair = choose_layers(fields, setup, sizes.num_tokens, num_bytes=num_bytes)
        if pair is None:
            not_run.append(f"{name}: two of its layers do not fit on a device")
            continue
        few, more = (measure_cut(checked, fields, setup, num_layers=num) for num in pair)
        shape = read_architecture(fields)
        whole = extrapolate(few, more, num_layers=pair, wanted=shape.num_layers)
        measured = {f"{name}, {pair[1]} layers": (pair[1], more), name: (shape.num_layers, whole)}
        for title, (num_layers, cost) in measured.items():
            cut = read_architecture(fields | {"num_hidden_layers": num_layers})
            ratio = estimate_rank_memory(cut, setup, num_tokens=sizes.num_tokens).total / cost.num_bytes
            unit = f"of {cost.num_bytes / GIB:.1f} GiB"
            figures.append(checked.make_figure(f"{title}: memory model / measured", ratio, unit=unit))
        step_rate = count_operations(shape, sizes.num_tokens) / whole.step_s
        figures += [
            checked.make_figure(
                f"{name}: error of the model", max(ratio, 1 / ratio), bar=MAX_MEMORY_ERROR, better="lower"
            ),
            checked.make_figure(f"{name}: step", whole.step_s, unit=f"s for {sizes.num_tokens} tokens", better="lower"),
            checked.make_figure(f"{name}: rate of a step / of matrix products", step_rate / rate),
        ]
    if num_ranks == 1:
        not_run.append("FSDP2: it needs two devices; this one had the whole of each model (world size 1)")
    return SectionResult(figures=figures, not_run=not_run)


def measure_cut(checked: CheckedDevice, fields: dict[str, Any], setup: RankSetup, *, num_layers: int) -> StepCost:
    """Measure steps of a model with fewer layers."""
    sizes = checked.sizes
    case = StepCase(
        fields=fields | {"num_hidden_layers": num_layers},
        setup=setup,
        num_tokens=sizes.num_tokens,
        device=checked.type,
        num_timed=sizes.num_timed,
    )
    return measure_ranks(case)


def choose_layers(
    fields: dict[str, Any], setup: RankSetup, num_tokens: int, *, num_bytes: float
) -> tuple[int, int] | None:
    """Choose the numbers of layers that fit, by the memory model."""
    for pair in LAYER_PAIRS:
        shape = read_architecture(fields | {"num_hidden_layers": pair[1]})
        if estimate_rank_memory(shape, setup, num_tokens=num_tokens).total <= num_bytes:
            return pair
    return None


def extrapolate(few: StepCost, more: StepCost, *, num_layers: tuple[int, int], wanted: int) -> StepCost:
    """Extrapolate a step to all layers: each adds the same."""
    missing = (wanted - num_layers[0]) / (num_layers[1] - num_layers[0])
    return StepCost(
        num_bytes=round(few.num_bytes + missing * (more.num_bytes - few.num_bytes)),
        step_s=few.step_s + missing * (more.step_s - few.step_s),
    )


def count_operations(shape: ModelArchitecture, num_tokens: int) -> float:
    """Count the operations of a step that are not done twice, without those of attention between tokens."""
    unused = shape.num_expert_params
    if shape.num_experts:
        unused -= shape.num_expert_params * shape.experts_per_token // shape.num_experts
    return 6.0 * (shape.num_params - unused - shape.embedding_params * (not shape.is_tied)) * num_tokens


def measure_product_rate(checked: CheckedDevice) -> float:
    """Measure the operations a second of a product of two large matrices, in the precision of a step."""
    size = checked.sizes.product_size
    dtype = torch.float32 if checked.type == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, device=checked.device).to(dtype) for _ in range(2))
    return 2 * size**3 / checked.time_work(lambda: left @ right)


# ---- publish


def check_publish(checked: CheckedDevice) -> SectionResult:
    """Compare a publication in bfloat16 with a bare copy of the same bytes into pinned memory."""
    free = shutil.disk_usage(SHARED_MEMORY).free * MAX_WINDOW_SHARE
    most = free / (NUM_VERSIONS * torch.bfloat16.itemsize)
    sizes = itertools.accumulate(math.prod(shape) for shape in checked.sizes.publish_shapes)
    shapes = [shape for shape, size in zip(checked.sizes.publish_shapes, sizes, strict=True) if size <= most]
    tensors = {f"layer.{number}": torch.randn(shape, device=checked.device) for number, shape in enumerate(shapes)}
    layout = TensorLayout.pack((name, "bfloat16", tuple(tensor.shape)) for name, tensor in tensors.items())
    rounded = torch.cat([tensor.flatten().to(torch.bfloat16) for tensor in tensors.values()])
    bare = torch.empty(rounded.shape, dtype=rounded.dtype, pin_memory=checked.type == "cuda")
    with open_scratch_store(layout) as store:
        versions = iter(range(1, 100))

        def publish() -> None:
            number = next(versions)
            store.commit(store.stage(tensors, WeightVersion(version=number, step=number)))

        publish()  # the first touches new memory
        publish()
        published_s, bare_s = checked.time_work(publish), checked.time_work(lambda: bare.copy_(rounded))
        with store.read_version(store.newest_started() or 0) as found:
            is_equal = all(torch.equal(found[name], tensors[name].to(torch.bfloat16).cpu()) for name in tensors)
    size = f"GB/s, {layout.nbytes / GIB:.1f} GiB"
    return SectionResult(
        figures=[
            checked.make_figure("publish / bare pinned copy", published_s / bare_s, better="lower"),
            checked.make_figure("published", layout.nbytes / published_s / 1e9, unit=size),
            checked.make_figure("bare copy", layout.nbytes / bare_s / 1e9, unit=size),
            checked.make_figure("share of equal versions", float(is_equal), bar=1.0),
        ]
    )


@contextlib.contextmanager
def open_scratch_store(layout: TensorLayout) -> Iterator[WindowStore]:
    """Open the window of a campaign that exists for this check."""
    with tempfile.TemporaryDirectory() as directory:
        campaign = CampaignDir(Path(directory, "gpu-check"))
        job = campaign.job(0)
        store = WindowStore(make_window_key(campaign, node="check"), job=job, layout=layout)
        try:
            yield store
        finally:
            store.close()
            unlink_recorded_windows(job)


# ---- parity


def check_parity(checked: CheckedDevice) -> SectionResult:
    """Compare the loss and the gradient of a model with those of the CPU in float32."""
    fields, figures = checked.sizes.small_model, []
    rows = draw_rows(fields["vocab_size"], num_tokens=checked.sizes.row_tokens)
    micro = make_micro_batches(rows, tokens_per_micro_batch=checked.sizes.row_tokens)[0]
    expected = compute_loss(fields, RankSetup(), micro, device=torch.device("cpu"))
    for precision, bar in (("fp32", 1e-3), ("bf16", 5e-2)):
        found = compute_loss(fields, RankSetup(is_bf16=precision == "bf16"), micro, device=checked.device)
        loss = abs(found.loss - expected.loss) / abs(expected.loss)
        gradient = float((found.gradient - expected.gradient).norm() / expected.gradient.norm())
        figures += [
            checked.make_figure(f"{precision}: difference of the loss", loss, bar=bar, better="lower"),
            checked.make_figure(f"{precision}: difference of the gradient", gradient, bar=bar, better="lower"),
        ]
    return SectionResult(figures=figures)


@dataclass(frozen=True)
class LossGradient:
    """The mean log-prob of a micro-batch, and its gradient by all weights."""

    loss: float
    gradient: Tensor


def compute_loss(fields: dict[str, Any], setup: RankSetup, micro: MicroBatch, *, device: torch.device) -> LossGradient:
    model = make_model(fields, setup, world=World(device=device), is_random=True)
    logprobs_N, _ = compute_token_logprobs(model, micro.to(device), temperature=1.0)
    loss = -logprobs_N.mean()
    model.backward(loss)
    gradients = [parameter.grad for parameter in model.parameters if parameter.grad is not None]
    return LossGradient(float(loss.detach()), torch.cat([each.flatten().double().cpu() for each in gradients]))


def draw_rows(vocabulary: int, *, num_tokens: int) -> list[TrainingRow]:
    """Draw rows of very different lengths, with this many tokens together; the second half of each is trained."""
    dice, rows, left = np.random.default_rng(0), [], num_tokens
    while left > 1:
        length = min(left, max(2, int(dice.lognormal(np.log(num_tokens / 16), 1.0))))
        left -= length
        mask = np.arange(length) >= length // 2
        num = int(mask.sum())
        tokens = dice.integers(0, vocabulary, length + 1, dtype=np.int32)
        zeros = np.zeros(num, np.float32)
        rows.append(
            TrainingRow(
                inputs=tokens[:-1],
                mask=mask,
                targets=tokens[1:][mask],
                behaviour=zeros,
                credit=zeros,
                versions=np.zeros(num, np.int32),
            )
        )
    return rows


# ---- chunked


def check_chunked(checked: CheckedDevice) -> SectionResult:
    """Compare log-probs by chunks of logits with whole logits, gradients included, for a real output layer."""
    num_tokens, hidden_size, vocabulary = checked.sizes.head_sizes
    dtype = torch.bfloat16 if checked.type == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, device=checked.device).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, device=checked.device) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (num_tokens,), device=checked.device)
    found: dict[str, tuple[Tensor, ...]] = {}
    figures, costs = [], {}
    for name, compute in (("chunked", compute_from_hidden), ("whole", compute_whole)):

        def work(name: str = name, compute: Callable[..., Any] = compute) -> None:
            logprobs, _ = compute(hidden, weight, targets, form=HeadForm(), temperature=1.0, has_entropy_bonus=False)
            found[name] = torch.autograd.grad(logprobs.mean(), (hidden, weight))

        costs[name] = (checked.count_peak(work), checked.time_work(work))
    memory, seconds = (costs["chunked"][part] / costs["whole"][part] for part in range(2))
    difference = max(
        float((mine.double() - its.double()).norm() / its.double().norm())
        for mine, its in zip(found["chunked"], found["whole"], strict=True)
    )
    figures = [
        checked.make_figure("memory / of whole logits", memory, bar=1 / 4, better="lower"),
        checked.make_figure("time / of whole logits", seconds, bar=1.5, better="lower"),
        checked.make_figure("difference of the gradients", difference, bar=2e-2, better="lower"),
    ]
    return SectionResult(figures=figures)


# ---- packed


def check_packed(checked: CheckedDevice) -> SectionResult:
    """Compare rows behind each other in one row with the same rows padded, forward and backward."""
    sizes, fields = checked.sizes, checked.sizes.small_model
    rows = draw_rows(fields["vocab_size"], num_tokens=sizes.row_tokens)
    model = make_model(
        fields, RankSetup(is_bf16=checked.type == "cuda"), world=World(device=checked.device), is_random=True
    )
    peaks, seconds, logprobs = [], [], []
    for make_batches in (make_packed_batches, make_micro_batches):
        micros = [micro.to(checked.device) for micro in make_batches(rows, tokens_per_micro_batch=sizes.row_tokens)]

        def work(micros: list[MicroBatch] = micros) -> None:
            for micro in micros:
                for _ in run_passes(model, micro):
                    pass

        with torch.no_grad():
            parts = [compute_token_logprobs(model, micro, temperature=1.0)[0] for micro in micros]
            logprobs.append(torch.cat(parts))
        peaks.append(checked.count_peak(functools.partial(work, micros[:1])))  # the largest
        seconds.append(checked.time_work(work))
    difference = float((logprobs[0] - logprobs[1]).abs().max())
    figures = [
        checked.make_figure("time / of padded rows", seconds[0] / seconds[1], better="lower"),
        checked.make_figure("memory / of padded rows", peaks[0] / peaks[1], better="lower"),
        checked.make_figure("largest difference of a log-prob", difference, bar=0.2, better="lower"),
    ]
    return SectionResult(figures=figures)


SECTIONS: dict[str, Callable[[CheckedDevice], SectionResult]] = {
    "memory": check_memory,
    "publish": check_publish,
    "parity": check_parity,
    "chunked": check_chunked,
    "packed": check_packed,
}

if __name__ == "__main__":
    main()
