"""The driver after the trainer ran out of memory: what it reports, what it lowers itself, and when it ends the job."""

import pytest

from hpcrl.campaign_dir.events import MemoryRanOut
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_limits import (
    MemoryShortage,
    TrainLimits,
    lower_limits,
    make_recipe_digest,
    read_train_limits,
    write_train_limits,
)
from hpcrl.errors import HpcrlError
from hpcrl.job.memory_watch import TrainerMemoryWatch
from hpcrl.system.exit_codes import EXIT_FAILED, EXIT_OUT_OF_MEMORY
from tests.support.plans import make_recipe

BOUND = 16384


class WatchedCampaign:
    """A campaign directory, and the driver's watch over it."""

    def __init__(self, root, *, has_gpus=False):
        self.campaign = CampaignDir(root)
        self.campaign.recipe.write_text("{}")
        self.has_gpus = has_gpus
        self.events = []
        self.start_job()

    def start_job(self):
        self.watch = TrainerMemoryWatch(
            self.campaign, recipe=make_recipe(), has_gpus=self.has_gpus, emit=self.events.append
        )
        self.watch.note_limits()

    def limits(self):
        return read_train_limits(self.campaign.train_limits, recipe_digest=make_recipe_digest(self.campaign.recipe))[0]

    def run_out(self, num_tokens, *, num_rows):
        """Record a shortage as a rank does."""
        shortage = MemoryShortage(step=4, rank=2, num_rows=num_rows, num_tokens=num_tokens)
        lowered = lower_limits(self.limits(), shortage, micro_batch=BOUND, advice="choose larger GPUs")
        write_train_limits(self.campaign.train_limits, lowered)


@pytest.fixture
def watched(tmp_path):
    return WatchedCampaign(tmp_path)


@pytest.mark.parametrize("code", [EXIT_OUT_OF_MEMORY, EXIT_FAILED, 128 + 9], ids=["own-code", "of-another", "killed"])
def test_a_recorded_shortage_is_reported_once_whatever_the_exit_code(watched, code):
    watched.run_out(900, num_rows=4)
    assert watched.watch.report_shortage(code)
    (shortage,) = watched.events
    assert (shortage.step, shortage.rank, shortage.tokens_per_micro_batch) == (4, 2, 450)
    assert shortage.reason == (
        "the trainer ran out of memory in step 4 on rank 2 with 4 rows of 900 tokens: it continues from the last "
        "checkpoint with train.tokens_per_micro_batch = 450"
    )
    assert not watched.watch.report_shortage(EXIT_FAILED)


def test_limits_of_an_earlier_job_are_not_a_reason_for_a_later_failure(watched):
    watched.run_out(900, num_rows=4)
    watched.start_job()
    assert not watched.watch.report_shortage(EXIT_FAILED)
    assert watched.events == []


def test_the_job_ends_with_the_reason_once_nothing_is_left_to_lower(watched):
    watched.run_out(900, num_rows=4)
    watched.watch.report_shortage(EXIT_OUT_OF_MEMORY)
    watched.run_out(400, num_rows=4)
    with pytest.raises(HpcrlError, match="nothing is left to lower: choose larger GPUs, and submit the recipe again"):
        watched.watch.report_shortage(EXIT_OUT_OF_MEMORY)
    assert [type(event) for event in watched.events] == [MemoryRanOut, MemoryRanOut]


def test_a_rank_that_the_kernel_ended_continues_once_with_half_the_micro_batch(watched):
    assert watched.watch.report_shortage(EXIT_OUT_OF_MEMORY)
    assert watched.limits().tokens_per_micro_batch == BOUND // 2
    assert watched.events[0].reason.startswith("the trainer ran out of memory: it continues")
    assert not watched.watch.report_shortage(EXIT_OUT_OF_MEMORY)  # from now on it is a failure like others


def test_micro_batches_on_gpus_are_as_they_were_after_the_host_ran_out_of_memory(tmp_path):
    watched = WatchedCampaign(tmp_path, has_gpus=True)
    assert not watched.watch.report_shortage(EXIT_OUT_OF_MEMORY)
    assert watched.limits() == TrainLimits(recipe_digest=make_recipe_digest(watched.campaign.recipe))


def test_a_file_that_was_damaged_while_the_job_ran_hides_no_later_shortage(watched):
    watched.run_out(900, num_rows=4)
    watched.start_job()
    watched.campaign.train_limits.write_bytes(b"{")
    watched.run_out(800, num_rows=4)
    assert watched.watch.report_shortage(EXIT_OUT_OF_MEMORY)
    assert watched.events[0].tokens_per_micro_batch == 400
