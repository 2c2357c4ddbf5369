"""Learning: what balance gains, what our loop and checkpoints cost, beside the bare thing in the same run.

balance       tokens of the busiest rank over the mean, Karmarkar-Karp and in turn
loop          `TorchTrainer.train_step` beside a bare loop over the same micro-batches of the same model
checkpoint    how long training stands still for a checkpoint, at one in ten steps

python -m bench.learning [--full]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench import figures
from bench.figures import Figure
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.learn.batch import MicroBatch, make_rows, micro_batches
from hpcrl.learn.partition import balanced, imbalance, naive
from hpcrl.recipe import TinyModel, Train
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.net import load_causal
from hpcrl.trainers.torch import TorchTrainer

NUM_RANKS = 8
EVERY = 10
"""Steps between two checkpoints."""
LENGTH = 256


def measure(full: bool) -> list[Figure]:
    torch.set_num_threads(1)
    return [*balance(), *costs(rounds=24 if full else 8)]


def balance() -> list[Figure]:
    """Long-tailed lengths, as agents have them, over eight ranks."""
    rng = np.random.default_rng(0)
    ours, theirs = [], []
    for _ in range(20):
        lengths = rng.lognormal(7, 1, 256).tolist()
        ours.append(imbalance(lengths, balanced(lengths, num_parts=NUM_RANKS)))
        theirs.append(imbalance(lengths, naive(len(lengths), num_parts=NUM_RANKS)))
    return [
        Figure(name="max/mean tokens of 8 ranks, in turn", value=statistics.mean(theirs)),
        Figure(name="max/mean tokens of 8 ranks, balanced", value=statistics.mean(ours), bar=1.02, better="lower"),
    ]


def costs(*, rounds: int) -> list[Figure]:
    """Our step and the bare one in turn, so that both have the same machine; medians."""
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(scratch) / "model"
        make_tiny_model(model_dir, TinyModel(hidden_size=128, num_layers=2, context_length=LENGTH), seed=0)
        train = Train(num_steps=100, groups_per_step=4, learning_rate=1e-4, tokens_per_micro_batch=2048)
        trainer = TorchTrainer(model_dir, train)
        bare = _Bare(model_dir, train)
        ours, theirs, stalls = [], [], []
        for step in range(-1, rounds):
            episodes = _episodes(step + 1)
            mine = _seconds(partial(trainer.train_step, episodes, step=1, version=0))
            its = _seconds(partial(bare.step, _micros(episodes, train)))
            stall = _seconds(trainer.snapshot)
            if step >= 0:  # the first round warms up
                ours.append(mine)
                theirs.append(its)
                stalls.append(stall)
    overhead = statistics.median(mine / its for mine, its in zip(ours, theirs, strict=True))
    exposed = statistics.median(stalls) / (EVERY * statistics.median(ours))
    return [
        Figure(name="our step over a bare one", value=overhead, bar=1.05, better="lower"),
        Figure(name="share that a checkpoint every 10 steps stops", value=exposed, bar=0.05, better="lower"),
    ]


class _Bare:
    """Forward, backward, clip, step: no advantages, no clip, no figures."""

    def __init__(self, model_dir: Path, train: Train) -> None:
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


def _micros(episodes: list[Trajectory], train: Train) -> list[MicroBatch]:
    rows, _ = make_rows(episodes, credits=[[1.0]] * len(episodes), max_length=LENGTH)
    return micro_batches(rows, tokens_per_micro_batch=train.tokens_per_micro_batch)


def _episodes(seed: int) -> list[Trajectory]:
    """Four groups of eight, half of each episode said by the model."""
    rng = np.random.default_rng(seed)
    return [_episode(group, index, rng=rng) for group in range(4) for index in range(8)]


def _episode(group: int, index: int, *, rng: np.random.Generator) -> Trajectory:
    length = int(rng.integers(LENGTH // 2, LENGTH))
    said = np.arange(length) % 32 >= 16
    return Trajectory(
        id=f"bench/{group}/{index}",
        group=f"bench/{group}",
        domain="bench",
        seed=0,
        status="done",
        producer="bench",
        created=0.0,
        start_version=0,
        end_version=0,
        turns=[],
        reward=float(index % 2),
        token_ids=rng.integers(0, 100, length, dtype=np.int32),
        logprobs=np.where(said, -4.6, 0.0).astype(np.float32),
        versions=np.zeros(length, np.int32),
        loss_mask=said,
    )


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(figures.main("learning", measure))
