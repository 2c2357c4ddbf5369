"""The driver's part after the trainer ran out of memory: report it, and end the job if nothing is left to lower.

TrainerMemoryWatch    what the trainer has recorded, and what the kernel did
"""

from collections.abc import Callable

from hpcrl.campaign_dir.events import CampaignEvent, MemoryRanOut
from hpcrl.campaign_dir.job_end import JobError
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_limits import (
    MemoryShortage,
    TrainLimits,
    lower_limits,
    make_recipe_digest,
    read_train_limits,
    write_train_limits,
)
from hpcrl.config.recipe import Recipe
from hpcrl.plan.trainer_memory import advise_on_shortage
from hpcrl.system.exit_codes import EXIT_OUT_OF_MEMORY
from hpcrl.system.memory import KILLED


class TrainerMemoryWatch:
    """A reader of the limits that ranks record before they end for a lack of memory."""

    def __init__(
        self, campaign: CampaignDir, *, recipe: Recipe, has_gpus: bool, emit: Callable[[CampaignEvent], None]
    ) -> None:
        self._campaign = campaign
        self._recipe = recipe
        self._has_gpus = has_gpus
        self._emit = emit
        self._known: TrainLimits | None = None

    def note_limits(self) -> None:
        """Note the limits that the job starts with."""
        self._known = self._read()

    def report_shortage(self, exit_code: int) -> bool:
        """Report that the trainer ended for a lack of memory; return False if it ended for another reason.

        Such an end does not count as a failure: each lowers a limit, which is possible a few times only. Raise
        JobError if nothing was left to lower.
        """
        limits = self._read()
        if limits == self._known and exit_code == EXIT_OUT_OF_MEMORY:
            limits = self._halve_after_kill(limits)
        if limits == self._known or limits.shortage is None:
            return False
        self._known, shortage = limits, limits.shortage
        reason = limits.failure or (
            f"the trainer ran out of memory{shortage.describe()}: it continues from the last checkpoint with "
            f"{limits.describe()}"
        )
        self._emit(
            MemoryRanOut(
                step=shortage.step,
                rank=shortage.rank,
                num_rows=shortage.num_rows,
                num_tokens=shortage.num_tokens,
                tokens_per_micro_batch=limits.tokens_per_micro_batch,
                max_row_tokens=limits.max_row_tokens,
                reason=reason,
            )
        )
        if limits.failure:
            raise JobError(limits.failure, cause="memory-limits")
        return True

    def _halve_after_kill(self, limits: TrainLimits) -> TrainLimits:
        """Halve the micro-batch after the kernel ended a rank without a GPU; unchanged if that was done before.

        On GPUs it is not the micro-batch that fills the memory of the host.
        """
        if self._has_gpus or limits.tokens_per_micro_batch is not None:
            return limits
        lowered = lower_limits(
            limits,
            MemoryShortage(step=0, rank=None, detail=KILLED),
            micro_batch=self._recipe.train.micro_batch_tokens,
            advice=advise_on_shortage(self._recipe, has_gpus=self._has_gpus),
        )
        if lowered.failure:
            return limits
        write_train_limits(self._campaign.train_limits, lowered)
        return lowered

    def _read(self) -> TrainLimits:
        limits, _ = read_train_limits(
            self._campaign.train_limits, recipe_digest=make_recipe_digest(self._campaign.recipe)
        )
        return limits
