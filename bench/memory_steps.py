"""The memory that a rank takes for a step with data, on a CPU: `python -m bench.memory_steps RANK STORE CASE`.

CASE is a JSON object with the fields of a model's config.json, a RankSetup, and the tokens of the micro-batch. The
process makes the model and an optimizer step, then measures the most resident memory during a second micro-batch, less
what it had before the model was made. Small allocations stay with the process, so models must be large enough.

    StepCase          a case
    measure_ranks     start all ranks of a case; return the most that one takes
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.hardware.train_memory import RankSetup

KIB = 1024
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Settings under which freed tensors do not count as resident memory."""


class StepCase(msgspec.Struct, frozen=True, kw_only=True):
    """A model in training, and the tokens of its micro-batch."""

    fields: dict[str, Any]
    setup: RankSetup
    num_tokens: int


def measure_ranks(case: StepCase) -> int:
    """Run a step of all ranks on this machine; return the bytes of the one that takes most."""
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
    return max(int(answer) for answer in answers)


def main() -> None:
    rank, store, case = int(sys.argv[1]), sys.argv[2], msgspec.json.decode(sys.argv[3], type=StepCase)
    print(_measure_step(case, rank=rank, store=store))


def _measure_step(case: StepCase, *, rank: int, store: str) -> int:
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    from hpcrl.testing.fake_steps import make_micro_batch, make_settings, run_passes
    from hpcrl.trainers.model_files import make_empty
    from hpcrl.trainers.token_model import TokenModel
    from hpcrl.trainers.torch_model import TrainedModel
    from hpcrl.trainers.world import World

    setup, world = case.setup, World()
    torch.set_num_threads(1)
    if setup.num_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=setup.num_ranks)
        world = World(rank=rank, size=setup.num_ranks, group=dist.group.WORLD)

    def fill(target: torch.nn.Module, device: torch.device) -> None:
        target.to_empty(device=device)
        for tensor in (*target.parameters(), *target.buffers()):
            with torch.no_grad():
                (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(1e-3)

    def make_model(fields: dict[str, Any]) -> TrainedModel:
        module = make_empty(AutoConfig.for_model(**fields), AutoModelForCausalLM, dtype=torch.float32)
        return TrainedModel(
            module, train=make_settings(setup), world=world, learning_rate=1e-4, called=TokenModel(module), fill=fill
        )

    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    _make_step(make_model(case.fields | small), make_micro_batch(64, is_packed=setup.is_packed), run_passes)
    before = _read_resident("VmRSS")
    model, micro = make_model(case.fields), make_micro_batch(case.num_tokens, is_packed=setup.is_packed)
    _make_step(model, micro, run_passes)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the most resident memory is that from now on
    for _ in run_passes(model, micro):
        pass
    return _read_resident("VmHWM") - before


def _make_step(model: Any, micro: Any, run_passes: Any) -> None:
    for _ in run_passes(model, micro):
        pass
    model.optimizer.step()


def _read_resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
