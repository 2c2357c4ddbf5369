"""The limits of the trainer's memory: what a rank starts with, and what it records when memory runs out.

limit_memory      the same settings on every rank, lower where memory ran out before
MemoryContext     a rank's context, and the limits that its settings have
record_shortage   record what ran out, so that all ranks can start again with lower limits
SkippedRows       report the rows that a step leaves out, and warn if they are many
MAX_SKIPPED_SHARE, WARN_TIMES    when that is
"""

from dataclasses import dataclass, replace

import msgspec

from hpcrl.campaign_dir.events import FaultReported, RowsSkipped
from hpcrl.campaign_dir.train_limits import (
    MemoryShortage,
    TrainLimits,
    join_limits,
    lower_limits,
    make_recipe_digest,
    read_train_limits,
    write_train_limits,
)
from hpcrl.learn.distribute import find_row_limit
from hpcrl.plan.trainer_memory import advise_on_shortage
from hpcrl.roles.context import WorkerContext
from hpcrl.trainers.base import StepMetrics
from hpcrl.trainers.memory_error import StepMemoryError
from hpcrl.trainers.world import World

MAX_SKIPPED_SHARE = 0.03
"""The share of the tokens that may be left out before a fault is reported: what is long is missing then."""
WARN_TIMES = (1, 10, 100, 1000, 10_000)
"""The steps with too large a share that report it: the first, the tenth, and so on."""


@dataclass(frozen=True)
class MemoryContext:
    """A rank's context with the settings that it uses, and the limits that were recorded for them."""

    worker: WorkerContext
    limits: TrainLimits


def limit_memory(context: WorkerContext, world: World) -> MemoryContext:
    """Lower the settings of this rank as the campaign has recorded; rank 0 reads the record, so that all agree."""
    record = b""
    if world.rank == 0:
        digest = make_recipe_digest(context.campaign.recipe)
        limits, problem = read_train_limits(context.campaign.train_limits, recipe_digest=digest)
        if problem:
            context.events.emit(FaultReported(what="train-limits", detail=problem))
        record = msgspec.json.encode(limits)
    limits = msgspec.json.decode(world.broadcast(record), type=TrainLimits)
    train, memory = context.recipe.train, context.plan.train_memory
    max_row_tokens, micro_batch = train.max_row_tokens, context.plan.tokens_per_micro_batch
    if max_row_tokens == "auto" and memory is not None and memory.row_limit is not None:
        max_row_tokens = memory.row_limit
    if limits.max_row_tokens is not None:
        found = limits.max_row_tokens
        max_row_tokens = found if max_row_tokens == "auto" else min(max_row_tokens, found)
    if limits.tokens_per_micro_batch is not None:
        micro_batch = min(micro_batch, limits.tokens_per_micro_batch)
    train = msgspec.structs.replace(train, tokens_per_micro_batch=micro_batch, max_row_tokens=max_row_tokens)
    return MemoryContext(replace(context, recipe=msgspec.structs.replace(context.recipe, train=train)), limits)


def record_shortage(context: MemoryContext, error: StepMemoryError, *, rank: int) -> TrainLimits:
    """Record what ran out on this rank, durably; if another rank has done so meanwhile, the lower limits hold."""
    worker, before = context.worker, context.limits
    shortage = MemoryShortage(
        step=error.step,
        rank=rank,
        num_rows=error.num_rows,
        num_tokens=error.num_tokens,
        fitting_tokens=error.fitting_tokens,
        detail=error.detail[:1000],
    )
    advice = advise_on_shortage(
        worker.recipe,
        has_gpus=bool(worker.role_plan.gpus_per_worker),
        num_rows=error.num_rows,
        num_tokens=error.num_tokens,
    )
    micro_batch = worker.recipe.train.micro_batch_tokens
    limits = lower_limits(before, shortage, micro_batch=micro_batch, advice=advice)
    other, _ = read_train_limits(worker.campaign.train_limits, recipe_digest=before.recipe_digest)
    if other.num_changes > before.num_changes:
        limits = join_limits(limits, other)
    write_train_limits(worker.campaign.train_limits, limits)
    return limits


class SkippedRows:
    """The rows that steps have left out since the trainer started."""

    def __init__(self, context: WorkerContext, *, max_length: int) -> None:
        """Prepare to count; `max_length` is the context of the model."""
        self._context = context
        self._limit = find_row_limit(context.recipe.train, max_length=max_length)
        self._reason, self._fix = "the context of the model", "let episodes be shorter"
        if self._limit < max_length:
            self._reason = "the limit for the memory of the trainer (train.max_row_tokens)"
            self._fix = (
                f"set engine.max_model_len = {self._limit} to play nothing longer, or give the trainer more memory"
            )
        self._num_steps = self._num_rows = self._num_tokens = self._num_trained = 0

    def note_step(self, metrics: StepMetrics) -> None:
        """Report the rows that this step left out; report a fault too if they are many."""
        num_tokens = sum(metrics.too_long_tokens.values())
        self._num_trained += metrics.num_tokens
        if not metrics.num_too_long:
            return
        self._num_rows += metrics.num_too_long
        self._num_tokens += num_tokens
        self._context.events.emit(
            RowsSkipped(
                step=metrics.step,
                version=metrics.version,
                num=metrics.num_too_long,
                num_tokens=num_tokens,
                token_counts=metrics.too_long_tokens,
                share=round(num_tokens / max(num_tokens + metrics.num_tokens, 1), 4),
                limit=self._limit,
                reason=self._reason,
            )
        )
        share = self._num_tokens / max(self._num_tokens + self._num_trained, 1)
        if share > MAX_SKIPPED_SHARE:
            self._num_steps += 1
            if self._num_steps in WARN_TIMES:
                self._context.events.emit(FaultReported(what="rows", detail=self._describe(share)))

    def _describe(self, share: float) -> str:
        return (
            f"{self._num_rows} rows with {share:.1%} of the tokens were left out since the trainer started, as they "
            f"are longer than {self._limit} tokens, {self._reason}: what is long is not learned; {self._fix}"
        )
