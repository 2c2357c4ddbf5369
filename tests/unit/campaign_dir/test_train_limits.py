"""The limits of a trainer that ran out of memory: what is lowered, how often, and the file that keeps it."""

import random

import pytest

from hpcrl.campaign_dir.train_limits import (
    MemoryShortage,
    TrainLimits,
    join_limits,
    lower_limits,
    make_recipe_digest,
    read_train_limits,
    write_train_limits,
)

BOUND = 1000
ADVICE = "choose larger GPUs"


def fall_short(num_tokens, *, num_rows, fitting_tokens=0):
    return MemoryShortage(step=3, rank=1, num_rows=num_rows, num_tokens=num_tokens, fitting_tokens=fitting_tokens)


def lower(shortage, limits=None, *, micro_batch=BOUND):
    limits = limits or TrainLimits(recipe_digest="r")
    return lower_limits(limits, shortage, micro_batch=limits.tokens_per_micro_batch or micro_batch, advice=ADVICE)


@pytest.mark.parametrize(
    ("shortage", "micro_batch", "row"),
    [
        (fall_short(900, num_rows=4), 450, None),
        (fall_short(8000, num_rows=4), 500, None),  # padded to the shape of another
        (fall_short(0, num_rows=0), 500, None),
        (fall_short(700, num_rows=1), 350, 350),
        (fall_short(700, num_rows=1, fitting_tokens=680), 350, 680),
        (fall_short(700, num_rows=1, fitting_tokens=900), 350, 699),
        (fall_short(6000, num_rows=1), None, 3000),
        (fall_short(6000, num_rows=1, fitting_tokens=5900), None, 5900),
        (fall_short(1500, num_rows=1), 750, 750),
    ],
    ids=[
        "rows",
        "padded",
        "unknown",
        "row",
        "row-that-fit",
        "row-shorter",
        "long-row",
        "long-row-that-fit",
        "medium-row",
    ],
)
def test_the_first_shortage_halves_the_micro_batch_or_leaves_out_rows_that_long(shortage, micro_batch, row):
    limits = lower(shortage)
    assert (limits.tokens_per_micro_batch, limits.max_row_tokens, limits.failure) == (micro_batch, row, "")
    assert limits.num_changes == 1


def test_a_halved_micro_batch_that_is_too_large_ends_the_campaign_with_a_change_that_helps():
    limits = lower(fall_short(400, num_rows=3), lower(fall_short(900, num_rows=4)))
    assert limits.failure == (
        "the trainer ran out of memory in step 3 on rank 1 with 3 rows of 400 tokens, after it had set "
        "train.tokens_per_micro_batch = 450 because it had run out before, and nothing is left to lower: "
        "choose larger GPUs, and submit the recipe again"
    )


def test_a_row_longer_than_the_halved_micro_batch_is_left_out_and_all_others_are_kept():
    halved = lower(fall_short(900, num_rows=4))
    fitting = lower(fall_short(800, num_rows=1, fitting_tokens=760), halved)
    assert (fitting.tokens_per_micro_batch, fitting.max_row_tokens, fitting.failure) == (450, 760, "")
    last = lower(fall_short(760, num_rows=1, fitting_tokens=750), fitting)
    assert (last.tokens_per_micro_batch, last.max_row_tokens, last.failure) == (450, 450, "")
    assert lower(fall_short(450, num_rows=1), last).failure


@pytest.mark.parametrize("seed", range(50))
def test_whatever_runs_out_there_are_at_most_four_starts_with_lower_limits(seed):
    draw, limits = random.Random(seed), TrainLimits(recipe_digest="r")
    while not limits.failure:
        longest = limits.max_row_tokens or 10 * BOUND
        num_rows = draw.choice([0, 1, 1, 5])
        bound = limits.tokens_per_micro_batch or BOUND
        num_tokens = draw.randint(1, longest if num_rows == 1 else bound) if num_rows else 0
        fitting_tokens = draw.choice([0, draw.randint(1, longest)])
        before, limits = limits, lower(fall_short(num_tokens, num_rows=num_rows, fitting_tokens=fitting_tokens), limits)
        if not limits.failure:
            assert (limits.tokens_per_micro_batch or BOUND) <= bound
            assert (limits.max_row_tokens or 10 * BOUND) <= longest
            assert limits.describe() != before.describe()
    assert limits.num_changes <= 5


def test_two_ranks_that_run_out_together_have_the_lower_of_their_limits():
    rows, row = lower(fall_short(900, num_rows=4)), lower(fall_short(6000, num_rows=1))
    for joined in (join_limits(rows, row), join_limits(row, rows)):
        assert (joined.num_changes, joined.tokens_per_micro_batch, joined.max_row_tokens) == (1, 450, 3000)


def test_written_limits_are_read_again_by_a_recipe_that_needs_the_same_memory(tmp_path):
    path, recipe = tmp_path / "train-limits.json", tmp_path / "recipe.json"
    recipe.write_text("{}")
    digest = make_recipe_digest(recipe)
    assert read_train_limits(path, recipe_digest=digest) == (TrainLimits(recipe_digest=digest), "")
    limits = lower(fall_short(900, num_rows=4), TrainLimits(recipe_digest=digest))
    write_train_limits(path, limits)
    assert read_train_limits(path, recipe_digest=digest) == (limits, "")
    recipe.write_text('{"name": "other", "job": {"num_jobs": 3}, "train": {"num_steps": 9, "learning_rate": 1e-5}}')
    assert make_recipe_digest(recipe) == digest, "this changes nothing about the memory that it needs"
    recipe.write_text('{"train": {"rows": "packed"}}')
    other = make_recipe_digest(recipe)
    unlimited, problem = read_train_limits(path, recipe_digest=other)
    assert unlimited == TrainLimits(recipe_digest=other)
    assert "is of another recipe than this campaign's" in problem


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\x00", b"[]", b'{"recipe_digest": "r", "tokens_per_micro_batch": 0}', b"null"]
)
def test_a_damaged_file_is_named_and_the_limits_are_those_of_the_recipe(tmp_path, content):
    path = tmp_path / "train-limits.json"
    path.write_bytes(content)
    limits, problem = read_train_limits(path, recipe_digest="r")
    assert limits == TrainLimits(recipe_digest="r")
    assert problem.startswith(f"{path} cannot be read (")
