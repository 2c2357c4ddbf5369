"""The limits that a rank starts with, what it records when memory runs out, and what is reported as left out."""

from dataclasses import replace

import msgspec
import pytest

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import FaultReported, RowsSkipped
from hpcrl.campaign_dir.train_limits import MemoryShortage, lower_limits, write_train_limits
from hpcrl.roles.memory_limits import SkippedRows, limit_memory, record_shortage
from hpcrl.trainers.base import StepMetrics
from hpcrl.trainers.memory_error import StepMemoryError
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.plans import plan_recipe
from tests.unit.roles.test_train import make_context

LARGE = ("model.num_params=8_000_000_000", "train.sharding=full", "train.precision=bf16")
CONTEXT = 4096


@pytest.fixture
def context(tmp_path, tiny_model_dir):
    return with_recipe(make_context(tmp_path, tiny_model_dir, "train.tokens_per_micro_batch=1000"))


def with_recipe(context):
    context.campaign.recipe.write_bytes(msgspec.json.encode(context.recipe))
    return context


def settings(context):
    train = limit_memory(context, SINGLE_RANK).worker.recipe.train
    return train.tokens_per_micro_batch, train.max_row_tokens


def run_out(context, num_tokens, *, num_rows, fitting_tokens=0):
    error = StepMemoryError("OutOfMemoryError: full", num_rows=num_rows, num_tokens=num_tokens)
    error.step, error.fitting_tokens = 5, fitting_tokens
    return record_shortage(limit_memory(context, SINGLE_RANK), error, rank=0)


def events_of(context, kind):
    return [event for event in EventReader(context.campaign.events).poll() if isinstance(event, kind)]


def metrics(*, num_too_long, too_long_tokens, num_tokens, step=1):
    nothing = dict.fromkeys(StepMetrics.__struct_fields__[:22])
    counts = {"num_too_long": num_too_long, "too_long_tokens": {"lake": too_long_tokens}, "num_tokens": num_tokens}
    return StepMetrics(**nothing | {"step": step, "version": 0} | counts)


def test_a_rank_has_the_limits_of_the_recipe_until_memory_runs_out(context):
    assert settings(context) == (1000, "auto")
    run_out(context, 900, num_rows=4)
    assert settings(context) == (450, "auto")
    run_out(context, 3000, num_rows=1, fitting_tokens=2000)
    assert settings(context) == (450, 2000)
    assert not events_of(context, FaultReported)


def test_a_rank_reads_the_micro_batch_that_the_plan_has_chosen(tmp_path, tiny_model_dir):
    context = with_recipe(make_context(tmp_path, tiny_model_dir, "train.tokens_per_micro_batch=auto"))
    assert (
        settings(replace(context, plan=msgspec.structs.replace(context.plan, tokens_per_micro_batch=5000)))[0] == 5000
    )
    assert settings(context)[0] == context.plan.tokens_per_micro_batch == 16384


def test_a_limit_of_the_recipe_holds_where_it_is_lower(tmp_path, tiny_model_dir):
    context = with_recipe(make_context(tmp_path, tiny_model_dir, "train.max_row_tokens=500"))
    run_out(context, 9000, num_rows=1, fitting_tokens=8000)
    assert settings(context)[1] == 500


def test_a_rank_leaves_out_rows_for_which_its_gpu_has_no_room_by_the_plan(context):
    memory = plan_recipe(*LARGE, "resources.train.num_workers=16", site="perlmutter").train_memory
    assert memory is not None
    assert memory.row_limit is None  # the number of weights alone does not give activations
    for row_limit, limit in ((None, "auto"), (12_345, 12_345)):
        known = msgspec.structs.replace(memory, row_limit=row_limit)
        context.plan = msgspec.structs.replace(context.plan, train_memory=known)
        assert settings(context)[1] == limit


@pytest.mark.parametrize("content", [b"{", b'{"recipe_digest": "of another", "tokens_per_micro_batch": 7}'])
def test_a_record_that_is_damaged_or_of_another_recipe_is_reported_and_written_again(context, content):
    context.campaign.train_limits.write_bytes(content)
    assert settings(context) == (1000, "auto")
    (fault,) = events_of(context, FaultReported)
    assert fault.what == "train-limits"
    assert str(context.campaign.train_limits) in fault.detail
    run_out(context, 900, num_rows=4)
    assert settings(context) == (450, "auto")


def test_two_ranks_that_run_out_together_count_once_and_have_the_lower_limits(context):
    started = limit_memory(context, SINGLE_RANK)
    other = MemoryShortage(step=5, rank=1, num_rows=1, num_tokens=3000)
    write_train_limits(context.campaign.train_limits, lower_limits(started.limits, other, micro_batch=1000, advice=""))
    error = StepMemoryError("full", num_rows=4, num_tokens=900)
    limits = record_shortage(started, error, rank=0)
    assert (limits.num_changes, limits.tokens_per_micro_batch, limits.max_row_tokens) == (1, 450, 1500)
    assert settings(context) == (450, 1500)


def test_the_last_shortage_names_settings_that_need_less_memory(context):
    run_out(context, 900, num_rows=4)
    failure = run_out(context, 400, num_rows=2).failure
    assert (
        "in step 5 on rank 0 with 2 rows of 400 tokens, after it had set train.tokens_per_micro_batch = 450" in failure
    )
    for change in (
        "more memory (resources.train.mem_gib_per_worker)",
        "train.recompute = true",
        "more ranks (resources.train.num_workers)",
        "train.tokens_per_micro_batch = 200 at the most",
    ):
        assert change in failure


def test_rows_that_are_left_out_are_reported_in_each_step_and_warned_of_if_they_are_many(context):
    run_out(context, 3000, num_rows=1)
    limited = limit_memory(context, SINGLE_RANK).worker
    skipped = SkippedRows(limited, max_length=CONTEXT)
    skipped.note_step(metrics(num_too_long=0, too_long_tokens=0, num_tokens=950))
    assert not events_of(context, RowsSkipped)
    skipped.note_step(metrics(num_too_long=1, too_long_tokens=20, num_tokens=980, step=2))
    (event,) = events_of(context, RowsSkipped)
    assert (event.step, event.num, event.num_tokens, event.token_counts) == (2, 1, 20, {"lake": 20})
    assert (event.share, event.limit) == (0.02, 1500)
    assert event.reason == "the limit for the memory of the trainer (train.max_row_tokens)"
    assert not events_of(context, FaultReported)
    for step in range(3, 20):
        skipped.note_step(metrics(num_too_long=1, too_long_tokens=100, num_tokens=900, step=step))
    faults = [event.detail for event in events_of(context, FaultReported)]
    assert len(events_of(context, RowsSkipped)) == 18
    assert len(faults) == 2  # the first and the tenth step with so much
    assert "rows with 4.1% of the tokens were left out since the trainer started" in faults[0]
    assert "set engine.max_model_len = 1500 to play nothing longer" in faults[0]


def test_rows_longer_than_the_models_context_are_reported_as_such(context):
    skipped = SkippedRows(limit_memory(context, SINGLE_RANK).worker, max_length=CONTEXT)
    skipped.note_step(metrics(num_too_long=2, too_long_tokens=50, num_tokens=50))
    (event,) = events_of(context, RowsSkipped)
    assert (event.limit, event.reason, event.share) == (CONTEXT, "the context of the model", 0.5)
