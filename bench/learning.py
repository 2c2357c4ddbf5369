"""Learning: what balance gains, what our loop and checkpoints cost, beside the bare thing in the same run.

balance       tokens of the busiest rank over the mean, Karmarkar-Karp and in turn
loop          `TorchTrainer.train_step` beside a bare loop over the same micro-batches of the same model
checkpoint    ten steps with a checkpoint, written behind them, beside ten without
logits        peak memory of log-probs and their gradient by chunks, beside whole logits: counted, nothing is allocated
context       memory of the tokens of a row on each of four ranks that divide it, beside one rank with all: counted
data path     ranks that read their own rows beside a controller that scatters: see bench/data_path.py

python -m bench.learning [--full]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from bench import data_path, figures
from bench.figures import Figure
from bench.memory_steps import make_model
from bench.peers.records import make_record
from hpcrl.config.recipe import TinyModel, TrainConfig
from hpcrl.hardware.train_memory import RankSetup
from hpcrl.learn.batch import MicroBatch, make_micro_batches
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.learn.distribute import balance_parts, compute_imbalance
from hpcrl.learn.loss import logprobs_and_entropy
from hpcrl.learn.token_head import HeadForm, compute_from_hidden
from hpcrl.models.tiny import make_tiny_model
from hpcrl.spool.record import Trajectory
from hpcrl.testing.fake_steps import make_micro_batch, measure_micro_batch
from hpcrl.testing.learning import load_causal, make_rows
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers import checkpoint
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.world import World

NUM_RANKS = 8
EVERY = 10
"""Steps between two checkpoints."""
LENGTH = 256
NUM_TOKENS, HIDDEN, VOCABULARY = 8192, 4096, 151_936
"""Qwen3-8B's output layer."""
ROW_TOKENS = 2048
ROW_MODEL = {
    **{"model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1024},
}
"""The model of the row that ranks divide."""


def measure(full: bool) -> list[Figure]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        pair = _Pair(Path(scratch))
        costs = [loop(pair, rounds=60 if full else 24), *checkpoints(pair, rounds=8 if full else 3)]
    return [*balance(), *costs, logits(), context(), *data_path.measure(full)]


def logits() -> Figure:
    """Count the bytes that are alive at once beside the inputs, gradients included, for a head in bf16."""
    peaks = []
    for compute in (compute_whole, compute_from_hidden):
        with FakeTensorMode():
            hidden = torch.empty(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            targets = torch.empty(NUM_TOKENS, dtype=torch.long)
            tracker = MemTracker()
            with tracker:
                logprobs, _ = compute(
                    hidden, weight, targets, form=HeadForm(), temperature=0.9, has_entropy_bonus=False
                )
                torch.autograd.grad(logprobs.sum(), (hidden, weight))
            snapshot = tracker.get_tracker_snapshot("peak")
        inputs = hidden.nbytes + weight.nbytes  # the tracker counts them too: both ways keep them for the gradient
        peaks.append(sum(each["Total"] for each in snapshot.values()) - inputs)
    return Figure(
        name="peak memory of log-probs by chunks / of whole logits",
        value=peaks[1] / peaks[0],
        bar=1 / 8,
        better="lower",
    )


def context() -> Figure:
    """Count what the tokens of a row need at the peak of a step with data, on one rank and on four that divide it."""
    function = "bench.learning:measure_row"
    alone, divided = (max(run_ranks(num_ranks, function)) for num_ranks in (1, 4))
    return Figure(
        name="activation memory of each of 4 ranks that divide a row / of one",
        value=divided / alone,
        bar=0.3,
        better="lower",
    )


def measure_row(world: World) -> float:
    """Measure the bytes of this rank at the peak for the tokens of a row, by one of half the length."""
    setup = RankSetup(num_ranks=world.size, context_parallel=world.size)
    model = make_model(ROW_MODEL, setup, world=world)
    peaks = []
    for num_tokens in (ROW_TOKENS, ROW_TOKENS // 2):
        micro = make_micro_batch(num_tokens, is_packed=False, has_mask=True)
        peaks.append(max(peak.passing for peak in measure_micro_batch(model, model.module, micro)))
    return 2 * (peaks[0] - peaks[1])


def compute_whole(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, form: HeadForm, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `compute_from_hidden` does, from all logits at once."""
    return logprobs_and_entropy(form.apply(hidden @ weight.T), targets, **options)


def balance() -> list[Figure]:
    """Long-tailed lengths, as agents have them, over eight ranks."""
    rng = np.random.default_rng(0)
    ours, theirs = [], []
    for _ in range(20):
        lengths = rng.lognormal(7, 1, 256).tolist()
        ours.append(compute_imbalance(lengths, balance_parts(lengths, num_parts=NUM_RANKS)))
        theirs.append(
            compute_imbalance(lengths, [list(range(rank, len(lengths), NUM_RANKS)) for rank in range(NUM_RANKS)])
        )
    return [
        Figure(name="max/mean tokens of 8 ranks, in turn", value=statistics.mean(theirs)),
        Figure(name="max/mean tokens of 8 ranks, balanced", value=statistics.mean(ours), bar=1.02, better="lower"),
    ]


class _Pair:
    """Our trainer and the bare loop, on the same model."""

    def __init__(self, scratch: Path) -> None:
        self.checkpoints = scratch / "checkpoints"
        model_dir = scratch / "model"
        make_tiny_model(model_dir, TinyModel(hidden_size=128, num_layers=2, context_length=LENGTH), seed=0)
        self.train = TrainConfig(num_steps=100, groups_per_step=4, learning_rate=1e-4, tokens_per_micro_batch=2048)
        self.ours = TorchTrainer(model_dir, self.train)
        self.bare = _Bare(model_dir, self.train)


def loop(pair: _Pair, *, rounds: int) -> Figure:
    """Our step and the bare one, each first as often as the other; the median of the rounds' ratios."""
    ratios = []
    for number in range(rounds):
        episodes = _episodes(number)
        micros = _micros(episodes, pair.train)  # the bare loop is given what ours has to make of the episodes
        works: list[Callable[[], object]] = [
            partial(pair.ours.train_step, episodes, step=1, version=0),
            partial(pair.bare.step, micros),
        ]
        first = number % 2
        seconds = {index: _seconds(works[index]) for index in (first, 1 - first)}
        if number > 1:  # the first two warm up
            ratios.append(seconds[0] / seconds[1])
    return Figure(name="our step over a bare one", value=statistics.median(ratios), bar=1.05, better="lower")


def checkpoints(pair: _Pair, *, rounds: int) -> list[Figure]:
    """What the step waits for, and what the writing behind it costs besides, both as shares of the ten steps."""
    stalls: list[float] = []
    plain: list[float] = []
    saving: list[float] = []
    with ThreadPoolExecutor(1) as behind:
        for number in range(2 * rounds):
            saved = number % 2 == 1
            started_at, writing = time.perf_counter(), None
            for step in range(EVERY):
                pair.ours.train_step(_episodes(step), step=1, version=0)
                if saved and not step:
                    stall = time.perf_counter()
                    writing = behind.submit(checkpoint.commit_checkpoint, pair.checkpoints, _moment(pair.ours, number))
                    stalls.append(time.perf_counter() - stall)
            if writing is not None:
                writing.result()
            (saving if saved else plain).append(time.perf_counter() - started_at)
    exposed = statistics.median(stalls) / statistics.median(plain)
    total = statistics.median(mine / its for mine, its in zip(saving, plain, strict=True))
    return [
        Figure(name="share that a checkpoint every 10 steps stops", value=exposed, bar=0.05, better="lower"),
        Figure(name="10 steps with a checkpoint over 10 without", value=total, better="lower"),
    ]


def _moment(trainer: TorchTrainer, step: int) -> checkpoint.PendingCheckpoint:
    return checkpoint.PendingCheckpoint(
        step=step, version=step, state=trainer.snapshot(), consumed=ConsumedTrajectories().encode(), extra={}
    )


class _Bare:
    """Forward, backward, clip, step: no advantages, no clip, no figures."""

    def __init__(self, model_dir: Path, train: TrainConfig) -> None:
        self._model = load_causal(model_dir).eval()
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=train.learning_rate, fused=True, weight_decay=0.0)

    def step(self, micros: list[MicroBatch]) -> None:
        for micro in micros:
            logits = self._model(micro.inputs_BT, use_cache=False).logits[micro.mask_BT]
            logprobs = logits.log_softmax(-1).gather(-1, micro.targets_N.unsqueeze(-1))
            (-(logprobs.squeeze(-1) * micro.advantages_N).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _micros(episodes: list[Trajectory], train: TrainConfig) -> list[MicroBatch]:
    rows, _ = make_rows(episodes, credits=[[1.0]] * len(episodes), max_length=LENGTH)
    return make_micro_batches(rows, tokens_per_micro_batch=train.micro_batch_tokens)


def _episodes(seed: int) -> list[Trajectory]:
    """Four groups of eight, half of each episode generated by the model."""
    rng = np.random.default_rng(seed)
    return [_episode(group, index, rng=rng) for group in range(4) for index in range(8)]


def _episode(group: int, index: int, *, rng: np.random.Generator) -> Trajectory:
    length = int(rng.integers(LENGTH // 2, LENGTH))
    generated = np.arange(length) % 32 >= 16
    token_ids = rng.integers(0, 100, length, dtype=np.int32)
    return make_record(f"bench/{group}/{index}", token_ids, loss_mask=generated, reward=float(index % 2))


def _seconds(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


if __name__ == "__main__":
    sys.exit(figures.main("learning", measure))
