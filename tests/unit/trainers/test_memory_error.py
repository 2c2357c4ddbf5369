"""Errors for a lack of memory: what counts as one, and what a step that meets one raises."""

import errno
import subprocess
import sys

import pytest
import torch

from hpcrl.errors import TrainError
from hpcrl.learn.batch import make_micro_batches, make_packed_batches
from hpcrl.trainers.memory_error import StepMemoryError, is_out_of_memory, watch_memory
from tests.support.training_rows import make_training_row

SHORTAGES = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "python": MemoryError(),
    "host": RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: x"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "system": OSError(errno.ENOMEM, "Cannot allocate memory"),
}
OTHERS = [RuntimeError("Connection closed by peer"), OSError(errno.ENOSPC, "No space left"), ValueError("memory")]


@pytest.mark.parametrize("error", SHORTAGES.values(), ids=SHORTAGES)
def test_a_lack_of_memory_is_recognised_also_as_the_cause_of_another_error(error):
    assert is_out_of_memory(error)

    def fail():
        try:
            raise error
        except Exception as cause:
            raise TrainError("train.pipeline.loss failed") from cause

    with pytest.raises(StepMemoryError), watch_memory():
        fail()


@pytest.mark.parametrize("error", OTHERS, ids=["closed", "disk", "value"])
def test_another_error_passes_as_it_is(error):
    with pytest.raises(type(error)) as caught, watch_memory():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(("make", "num_tokens"), [(make_micro_batches, 3 * 9), (make_packed_batches, 9 + 9 + 8)])
def test_the_error_names_the_rows_and_tokens_of_the_micro_batch(make, num_tokens):
    (micro,) = make([make_training_row(length) for length in (9, 9, 8)], tokens_per_micro_batch=99)
    shortage = pytest.raises(StepMemoryError, match="OutOfMemoryError: CUDA out")
    with shortage as caught, watch_memory(), watch_memory(micro):
        raise SHORTAGES["cuda"]
    assert (caught.value.num_rows, caught.value.num_tokens) == (3, num_tokens)


REALLY_SHORT = """
import resource, sys
from pathlib import Path

import msgspec
import torch

from hpcrl.config.recipe import TrainConfig
from hpcrl.trainers.memory_error import StepMemoryError
from hpcrl.trainers.torch import TorchTrainer
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.trajectories import make_random_trajectory

torch.set_num_threads(1)
train = TrainConfig(num_steps=9, groups_per_step=2, learning_rate=1e-2, tokens_per_micro_batch=1 << 20)
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
config = Qwen2Config(vocab_size=32, num_key_value_heads=1, max_position_embeddings=4096, **sizes)
Qwen2ForCausalLM(config).save_pretrained(sys.argv[1])
trainer = TorchTrainer(Path(sys.argv[1]), train)
episodes = [
    make_random_trajectory(f"m/{n % 2}/{n}", vocabulary=32, turns=[], reward=float(n % 2), length=800, seed=n)
    for n in range(16)
]
trainer.train_step(episodes[:2], step=1, version=1)
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (160 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
try:
    trainer.train_step(episodes, step=2, version=2)
except StepMemoryError as error:
    print(error.step, error.num_rows, error.num_tokens, error.fitting_tokens, error.detail[:200])
trainer.discard_gradient()
print(all(torch.equal(before[name], tensor) for name, tensor in trainer.tensors().items()))
small = msgspec.structs.replace(train, tokens_per_micro_batch=800)
print(trainer.train_step(episodes, step=2, version=2, train=small).skipped)
"""


def test_a_step_that_really_runs_out_changes_nothing_and_succeeds_with_smaller_micro_batches(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", REALLY_SHORT, str(tmp_path / "model")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shortage, is_same, skipped = done.stdout.splitlines()
    assert shortage.startswith("2 16 12784 1598 RuntimeError: [enforce fail at alloc_cpu.cpp"), shortage
    assert "DefaultCPUAllocator: can't allocate memory" in shortage
    assert (is_same, skipped) == ("True", "None")
