"""The lower limits of a trainer that ran out of memory; they hold for the rest of its campaign, in every job.

TrainLimits       the content of train-limits.json
MemoryShortage    the moment in which memory ran out
lower_limits      the limits after a shortage: pure
join_limits       those of two ranks that ran out at the same time: pure
make_recipe_digest                       the mark of the recipe that limits belong to
read_train_limits, write_train_limits    the file

The micro-batch is halved once. Beyond that only rows that are too long can be left out, and that a few times, so
that a trainer is started again for a lack of memory at most four times in a campaign, and then has failed.
"""

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hpcrl.errors import show_error
from hpcrl.system.files import publish_json

MEMORY_SETTINGS = frozenset(
    {
        *("trainer", "sharding", "tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel"),
        "pipeline_chunks",
        *("precision", "recompute", "offload", "compile", "tokens_per_micro_batch", "max_row_tokens", "rows"),
        *("lora_rank", "kl", "kl_in", "advantage", "pipeline"),
    }
)
"""The keys of [train] that decide how much memory it needs."""
TokenLimit = Annotated[int, Meta(ge=1)]


class MemoryShortage(msgspec.Struct, frozen=True, kw_only=True):
    """The moment in which a rank ran out of memory."""

    step: int
    """The training step; 0 if it is not known."""
    rank: int | None
    """The rank; None if the kernel ended it, and nothing else is known."""
    num_rows: int = 0
    """The rows of the micro-batch; 0 if none was being computed."""
    num_tokens: int = 0
    """Its tokens, padding included."""
    fitting_tokens: int = 0
    """The tokens of the largest micro-batch that the trainer has had room for since it started."""
    detail: str = ""
    """The message of the error."""

    def describe(self) -> str:
        """Describe the moment to a person."""
        where = f" in step {self.step}" if self.step else ""
        where += f" on rank {self.rank}" if self.rank is not None else ""
        if self.num_rows == 1:
            return f"{where} with a single row of {self.num_tokens} tokens"
        return f"{where} with {self.num_rows} rows of {self.num_tokens} tokens" if self.num_rows else where


class TrainLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a trainer, where they are lower than those of its recipe and plan."""

    recipe_digest: str
    """The mark of the recipe that they were found with."""
    num_changes: int = 0
    tokens_per_micro_batch: TokenLimit | None = None
    """The halved micro-batch; None as long as it is that of the recipe."""
    max_row_tokens: TokenLimit | None = None
    """Longer rows are left out; None as long as all fit."""
    shortage: MemoryShortage | None = None
    """The last one."""
    failure: str = ""
    """The reason why the trainer has failed for good, if nothing is left to lower."""

    def describe_shortage(self) -> str:
        """Describe where memory ran out last."""
        return self.shortage.describe() if self.shortage is not None else ""

    def describe(self) -> str:
        """Describe what is lower than the recipe has it."""
        micro_batch, row = self.tokens_per_micro_batch, self.max_row_tokens
        parts = [f"train.tokens_per_micro_batch = {micro_batch}"] if micro_batch is not None else []
        return " and ".join([*parts, *([f"train.max_row_tokens = {row}"] if row is not None else [])])


def lower_limits(limits: TrainLimits, shortage: MemoryShortage, *, micro_batch: int, advice: str) -> TrainLimits:
    """Return the limits after a shortage; `micro_batch` is the number of tokens that was the limit when it occurred.

    A row is never divided: if one alone was too long, rows that long are left out from now on.
    """
    num, is_alone = shortage.num_tokens, shortage.num_rows == 1
    half = (num if is_alone else min(num or micro_batch, micro_batch)) // 2
    can_halve = limits.tokens_per_micro_batch is None and 0 < half < micro_batch
    if can_halve:
        micro_batch = half
    changed: dict[str, int] = {"tokens_per_micro_batch": micro_batch} if can_halve else {}
    if is_alone and num > micro_batch:
        fitting = max(num // 2, min(shortage.fitting_tokens, num - 1))
        changed["max_row_tokens"] = micro_batch if limits.max_row_tokens is not None else max(micro_batch, fitting)
    failure = "" if changed else _explain_failure(limits, shortage, advice)
    return msgspec.structs.replace(
        limits, num_changes=limits.num_changes + 1, shortage=shortage, failure=failure, **changed
    )


def _explain_failure(limits: TrainLimits, shortage: MemoryShortage, advice: str) -> str:
    lowered = limits.describe()
    after = f", after it had set {lowered} because it had run out before" if lowered else ""
    return (
        f"the trainer ran out of memory{shortage.describe()}{after}, and nothing is left to lower: {advice}, and "
        "submit the recipe again"
    )


def join_limits(one: TrainLimits, other: TrainLimits) -> TrainLimits:
    """Return the lower of the limits that two ranks found at the same time."""

    def choose(left: int | None, right: int | None) -> int | None:
        return min((limit for limit in (left, right) if limit is not None), default=None)

    return msgspec.structs.replace(
        one,
        num_changes=max(one.num_changes, other.num_changes),
        tokens_per_micro_batch=choose(one.tokens_per_micro_batch, other.tokens_per_micro_batch),
        max_row_tokens=choose(one.max_row_tokens, other.max_row_tokens),
        failure=one.failure or other.failure,
    )


def make_recipe_digest(recipe: Path) -> str:
    """Return the mark of what decides, in a recipe file, how much memory its trainer needs."""
    table = msgspec.json.decode(recipe.read_bytes())
    train = {key: value for key, value in table.get("train", {}).items() if key in MEMORY_SETTINGS}
    ranks, models = table.get("resources", {}).get("train"), (table.get("model"), table.get("teacher"))
    return hashlib.sha256(msgspec.json.encode((models, train, ranks), order="sorted")).hexdigest()


def write_train_limits(path: Path, limits: TrainLimits) -> None:
    """Publish the limits; they are durable when this returns."""
    publish_json(path, msgspec.to_builtins(limits))


def read_train_limits(path: Path, *, recipe_digest: str) -> tuple[TrainLimits, str]:
    """Read the limits, and why a file that exists is not used; without one, the limits are those of the recipe."""
    unlimited = TrainLimits(recipe_digest=recipe_digest)
    try:
        limits = msgspec.json.decode(path.read_bytes(), type=TrainLimits)
    except FileNotFoundError:
        return unlimited, ""
    except (OSError, ValueError) as error:
        return unlimited, f"{path} cannot be read ({show_error(error)}): the limits are those of the recipe again"
    if limits.recipe_digest != recipe_digest:
        return unlimited, f"{path} is of another recipe than this campaign's: the limits are those of the recipe"
    return limits, ""
