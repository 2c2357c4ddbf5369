"""The memory and the time that a rank takes for a step with data: `python -m bench.memory_steps RANK STORE CASE`.

CASE is a JSON object with the fields of a model's config.json, a RankSetup, and the tokens of the micro-batch. The
process makes the model and an optimizer step, then measures the most memory during a second micro-batch. On a CPU that
is its resident memory, less what it had before the model was made: small allocations stay with the process, so models
must be large enough. On a GPU it is what torch has allocated there.

    StepCase          a case
    StepCost          what a rank measures
    measure_ranks     start all ranks of a case; return the most that one takes
    make_model        a model in training, with values that are drawn
"""

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcrl.hardware.train_memory import RankSetup

if TYPE_CHECKING:
    from hpcrl.trainers.torch_model import TrainedModel
    from hpcrl.trainers.world import World

KIB = 1024
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Settings under which freed tensors do not count as resident memory."""


INITIAL_SPREAD = 0.02
"""The standard deviation of random weights."""


class StepCase(msgspec.Struct, frozen=True, kw_only=True):
    """A model in training, and the tokens of its micro-batch."""

    fields: dict[str, Any]
    setup: RankSetup
    num_tokens: int
    device: str = "cpu"
    """The type of the ranks' devices; rank n has the n-th."""
    num_timed: int = 0
    """Steps that are timed, after the one whose memory is measured."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a step: of all ranks, the most."""

    num_bytes: int
    step_s: float
    """The median time of a step; 0 if none was timed."""


def measure_ranks(case: StepCase) -> StepCost:
    """Run the steps of all ranks on this machine, and return the cost of the one that takes most."""
    with tempfile.TemporaryDirectory() as directory:
        store, text = str(Path(directory, "store")), msgspec.json.encode(case).decode()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.memory_steps", str(rank), store, text],
                env=os.environ | MALLOC,
                stdout=subprocess.PIPE,
            )
            for rank in range(case.setup.num_ranks)
        ]
        answers = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {case} failed")
    costs = [msgspec.json.decode(answer, type=StepCost) for answer in answers]
    return StepCost(num_bytes=max(cost.num_bytes for cost in costs), step_s=max(cost.step_s for cost in costs))


def main() -> None:
    rank, store, case = int(sys.argv[1]), sys.argv[2], msgspec.json.decode(sys.argv[3], type=StepCase)
    print(msgspec.json.encode(_measure_step(case, rank=rank, store=store)).decode())


def _measure_step(case: StepCase, *, rank: int, store: str) -> StepCost:
    import torch

    from hpcrl.testing.fake_steps import make_micro_batch

    world = _join_ranks(case, rank=rank, store=store)
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    if case.device == "cpu":
        torch.set_num_threads(1)
        few = make_micro_batch(64, is_packed=case.setup.is_packed, has_mask=True)
        _make_step(make_model(case.fields | small, case.setup, world=world), few)
    before = _read_resident("VmRSS")
    model = make_model(case.fields, case.setup, world=world)
    micro = make_micro_batch(case.num_tokens, is_packed=case.setup.is_packed, device=world.device, has_mask=True)
    _make_step(model, micro)
    _forget_peak(case.device)
    _make_passes(model, micro)
    peak = _read_resident("VmHWM") - before if case.device == "cpu" else torch.cuda.max_memory_allocated()
    times = [_time_step(model, micro, device=case.device) for _ in range(case.num_timed)]
    return StepCost(num_bytes=peak, step_s=statistics.median(times) if times else 0.0)


def make_model(fields: dict[str, Any], setup: RankSetup, *, world: "World", is_random: bool = False) -> "TrainedModel":
    """Make a model in training; its values are random ones that are the same on any device, or one small constant."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hpcrl.models.weight_files import make_empty
    from hpcrl.testing.fake_steps import make_settings
    from hpcrl.trainers.context_group import make_context_group
    from hpcrl.trainers.model_files import ModelSource
    from hpcrl.trainers.token_model import TokenModel
    from hpcrl.trainers.torch_model import TrainedModel

    dice = torch.Generator().manual_seed(0)
    module = make_empty(AutoConfig.for_model(**fields), AutoModelForCausalLM, dtype=torch.float32)
    source = ModelSource(module, {})

    def fill(target: torch.nn.Module, device: torch.device) -> None:
        source.fill(target, device)
        for parameter in target.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            with torch.no_grad():
                if is_random and local.ndim > 1:
                    local.copy_(torch.randn(local.shape, generator=dice) * INITIAL_SPREAD)
                else:
                    local.fill_(1.0 if is_random else 1e-3)

    called = TokenModel(
        module, context=make_context_group(world, size=setup.context_parallel, is_packed=setup.is_packed)
    )
    return TrainedModel(module, train=make_settings(setup), world=world, learning_rate=1e-4, called=called, fill=fill)


def _join_ranks(case: StepCase, *, rank: int, store: str) -> "World":
    import torch
    import torch.distributed as dist

    from hpcrl.trainers.world import World

    device, num_ranks = torch.device("cpu"), case.setup.num_ranks
    if case.device != "cpu":
        device = torch.device(case.device, rank)
        torch.cuda.set_device(device)
    if num_ranks == 1:
        return World(device=device)
    backend = "gloo" if case.device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    return World(rank=rank, size=num_ranks, device=device, group=dist.group.WORLD)


def _make_step(model: Any, micro: Any) -> None:
    _make_passes(model, micro)
    model.optimizer.step()


def _make_passes(model: Any, micro: Any) -> None:
    from hpcrl.testing.fake_steps import run_passes

    for _ in run_passes(model, micro):
        pass


def _time_step(model: Any, micro: Any, *, device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    _make_step(model, micro)
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def _forget_peak(device: str) -> None:
    """Count the most memory from now on."""
    import torch

    if device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    else:
        torch.cuda.reset_peak_memory_stats()


def _read_resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
