"""The rows of task sets: what is copied into a campaign, what is refused, and what an environment is given."""

import asyncio
import json
import subprocess
import sys
import tracemalloc

import msgspec
import pyarrow as pa  # noqa: TID251
import pyarrow.parquet as pq  # noqa: TID251
import pytest

from hpcrl.config.recipe import DomainConfig, TaskSetConfig
from hpcrl.envs.base import adapt_env, check_signatures
from hpcrl.envs.pool import EnvPool
from hpcrl.envs.process import ProcessEnv, ProcessLimits
from hpcrl.envs.question import Question as AnsweredQuestion
from hpcrl.envs.task_set import MAX_ROW_BYTES, TaskRows, check_task_set, import_task_set
from hpcrl.errors import ConfigError, EnvFault
from tests.support.plans import make_recipe
from tests.support.row_envs import OnlySeeds, RowQuestion

LIMITS = ProcessLimits(memory_bytes=512 << 20)


class AskingProgram:
    sampling, trains = "recipe", "longest"

    async def run(self, seed, access): ...


def imported(tmp_path, *, only_held_out=False, **config):
    """Return the rows to train on and the held-out ones."""
    target = tmp_path / "campaign"
    target.mkdir(exist_ok=True)
    import_task_set(TaskSetConfig(**config), domain="sums", directory=target, only_held_out=only_held_out)
    splits = [TaskRows(target, domain="sums", split=split) for split in ("train", "held-out")]
    return tuple([split.read_row(number) for number in range(len(split))] for split in splits)


def refusal(tmp_path, **config):
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, **config)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def written(tmp_path, data, name="rows.jsonl"):
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


def numbered(tmp_path, count, name="rows.jsonl"):
    return written(tmp_path, b"".join(b'{"n": %d}\n' % number for number in range(count)), name)


def test_lines_of_json_become_rows_whatever_their_blanks_and_endings(tmp_path):
    data = b'\xef\xbb\xbf{"question": "1+1", "answer": "2"}\r\n\n  {"nested": {"a": [1, null]}}  \n{"last": "\xc3\xa9"}'
    rows, held_out = imported(tmp_path, path=written(tmp_path, data))
    assert rows == [{"question": "1+1", "answer": "2"}, {"nested": {"a": [1, None]}}, {"last": "\u00e9"}]
    assert held_out == []


def test_parquet_rows_are_the_same_as_those_of_json_lines(tmp_path):
    rows = [{"question": f"{number}+1", "answer": number + 1, "tags": ["a", None]} for number in range(700)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=300)
    lines = written(tmp_path, "\n".join(map(json.dumps, rows)).encode())
    assert imported(tmp_path, path=str(tmp_path / "rows.parquet"))[0] == rows
    assert imported(tmp_path / "campaign", path=lines)[0] == rows


def test_several_files_follow_each_other(tmp_path):
    files = [numbered(tmp_path, 2, "a.jsonl"), numbered(tmp_path, 1, "b.jsonl")]
    assert [row["n"] for row in imported(tmp_path, path=files)[0]] == [0, 1, 0]


def test_a_range_of_rows_is_used(tmp_path):
    assert [row["n"] for row in imported(tmp_path, path=numbered(tmp_path, 9), rows=(2, 5))[0]] == [2, 3, 4]


def test_held_out_rows_are_spread_over_the_file_and_never_trained_on(tmp_path):
    rows, held_out = imported(tmp_path, path=numbered(tmp_path, 10), held_out_rows=3)
    assert [row["n"] for row in held_out] == [3, 6, 9]
    assert [row["n"] for row in rows] == [0, 1, 2, 4, 5, 7, 8]


def test_a_separate_file_may_be_held_out(tmp_path):
    rows, held_out = imported(
        tmp_path, path=numbered(tmp_path, 2), held_out_path=written(tmp_path, b'{"n": "test"}', "test.jsonl")
    )
    assert ([row["n"] for row in rows], held_out) == ([0, 1], [{"n": "test"}])


def test_all_rows_of_a_domain_that_is_only_evaluated_are_held_out(tmp_path):
    rows, held_out = imported(tmp_path, path=numbered(tmp_path, 2), only_held_out=True)
    assert (rows, [row["n"] for row in held_out]) == ([], [0, 1])


def test_the_campaign_keeps_its_rows_when_the_file_changes(tmp_path):
    path = numbered(tmp_path, 3)
    imported(tmp_path, path=path)
    written(tmp_path, b"now something else")
    assert TaskRows(tmp_path / "campaign", domain="sums", split="train").read_row(2) == {"n": 2}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"n": 1}\n{"n": \n', "line 2 is not a JSON object"),
        (b"[1, 2]\n", "line 1 is not a JSON object"),
        (b'{"n": 1}\n\n{"n": 2} {"n": 3}\n', "line 3 is not a JSON object"),
        (b'{"n": "\xff"}\n', "line 1 is not a JSON object"),
        (b'{"n": NaN}\n', "line 1 is not a JSON object"),
        (b'{"n": ' + b"[" * 100_000, "line 1 is not a JSON object"),
        (bytes(range(256)) * 9, "line 1 is not a JSON object"),
        (b'{"n": "' + b"x" * MAX_ROW_BYTES + b'"}\n', "line 1 is longer than 8 MiB"),
        (b"", "has no rows: a row is a line with a JSON object"),
        (b"\n \n", "has no rows"),
    ],
    ids=["torn", "a list", "two objects", "no UTF-8", "NaN", "deep", "binary", "long", "empty", "blank"],
)
def test_a_broken_file_is_refused_with_the_line(tmp_path, data, message):
    assert message in refusal(tmp_path, path=written(tmp_path, data))


def test_files_that_cannot_be_read_are_named(tmp_path):
    missing, folder = str(tmp_path / "no.jsonl"), tmp_path / "folder.jsonl"
    folder.mkdir()
    assert f"domains.sums.tasks.path = {missing!r} cannot be read: No such file" in refusal(tmp_path, path=missing)
    assert "cannot be read: Is a directory" in refusal(tmp_path / "campaign", path=str(folder))


def test_an_empty_parquet_file_is_refused_without_a_hint_about_lines(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), path)
    with pytest.raises(ConfigError, match=r"rows\.parquet' has no rows$"):
        imported(tmp_path, path=str(path))


def test_other_kinds_of_files_and_broken_parquet_are_refused(tmp_path):
    assert "must end in .jsonl" in refusal(tmp_path, path=written(tmp_path, b"a,b\n", "rows.csv"))
    broken = written(tmp_path, b"PAR1 no", "rows.parquet")
    assert "cannot be read as Parquet" in refusal(tmp_path / "campaign", path=broken)


def test_ranges_and_splits_without_rows_are_refused(tmp_path):
    path = numbered(tmp_path, 4)
    for config, message in (
        ({"rows": (4, 9)}, "has no rows in rows = [4, 9]"),
        ({"rows": (2, 2)}, "rows = [2, 2] has no rows"),
        ({"held_out_rows": 4}, "leaves nothing to train on: there are 4 rows"),
        ({"held_out_path": written(tmp_path, b"", "none.jsonl")}, "held_out_path"),
    ):
        directory = tmp_path / message[:3].strip()
        directory.mkdir(exist_ok=True)
        assert message in refusal(directory, path=path, **config)


def test_rows_that_are_damaged_later_are_a_fault_of_the_environment(tmp_path):
    imported(tmp_path, path=numbered(tmp_path, 3))
    rows = TaskRows(tmp_path / "campaign", domain="sums", split="train")
    with pytest.raises(EnvFault, match=r"row 3 of .* cannot be read"):
        rows.read_row(3)
    written(tmp_path / "campaign", b"{}", "sums.jsonl")
    with pytest.raises(EnvFault, match="fewer than 26 bytes"):
        rows.read_row(2)
    with pytest.raises(EnvFault, match="cannot be read"):
        len(TaskRows(tmp_path, domain="sums", split="train"))


@pytest.mark.parametrize("seed", ['"7"', "7.5", "-1", "true", "null", "9223372036854775808"])
def test_the_seed_of_a_row_that_is_not_a_seed_is_refused(tmp_path, seed):
    message = refusal(tmp_path, path=written(tmp_path, b'{"seed": 7}\n{"seed": %s}\n' % seed.encode()))
    assert "rows.jsonl', line 2: seed = " in message
    assert "a whole number from 0 to" in message


def check_set(path, seen, **config):
    check_task_set(TaskSetConfig(path=path, **config), domain="sums", check=lambda row: seen.append(row["n"]))


def test_a_check_sees_the_rows_that_are_used_and_copies_none(tmp_path):
    seen = []
    check_set(numbered(tmp_path, 9), seen, rows=(2, 5), held_out_path=numbered(tmp_path, 1, "held.jsonl"))
    assert seen == [2, 3, 4, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "held.jsonl"}


@pytest.mark.parametrize(
    ("data", "config", "why"),
    [
        (b"", {}, "has no rows: a row is a line"),
        (b'{"n": 1}\n', {"rows": (1, 2)}, r"has no rows in rows = \[1, 2\]"),
        (b'{"n": 1}\n', {"held_out_rows": 1}, "leaves nothing to train on: there are 1 rows"),
        (b'{"n": 1}\n{"n":\n', {}, "line 2 is not a JSON object"),
    ],
)
def test_a_check_refuses_what_submission_refuses(tmp_path, data, config, why):
    path = written(tmp_path, data)
    with pytest.raises(ConfigError, match=why):
        check_set(path, [], **config)
    with pytest.raises(ConfigError, match=why):
        imported(tmp_path, path=path, **config)


def test_reading_one_of_many_rows_holds_only_that_row_in_memory(tmp_path):
    imported(tmp_path, path=numbered(tmp_path, 20_000))
    tracemalloc.start()
    try:
        rows = TaskRows(tmp_path / "campaign", domain="sums", split="train")
        assert rows.read_row(19_999) == {"n": 19_999}
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_a_file_alone_is_a_table_with_its_path():
    domain = msgspec.convert({"env": "m:E", "tasks": "rows.jsonl"}, DomainConfig)
    assert domain.task_set == TaskSetConfig(path="rows.jsonl")


def asked(env):
    async def run():
        seen = await env.reset(5, task={"question": "1+1", "answer": "2"})
        step = await env.step("2")
        await env.close()
        return seen, step.reward

    return asyncio.run(run())


def test_a_row_reaches_an_environment_in_this_process():
    assert asked(adapt_env(RowQuestion())) == ("1+1 (5)", 1.0)


def test_a_row_reaches_an_environment_in_a_separate_process():
    async def run():
        env = await ProcessEnv.start("tests.support.row_envs:RowQuestion", {}, limits=LIMITS, has_tasks=True)
        seen = await env.reset(5, task={"question": "1+1", "answer": "2"})
        await env.close()
        return seen

    assert asyncio.run(run()) == "1+1 (5)"


def test_a_prepared_environment_was_reset_to_its_row():
    async def run():
        async def make():
            return adapt_env(RowQuestion())

        pool = EnvPool(make, create_timeout_s=30, reset_timeout_s=30, max_starting=2)
        pool.prepare(5, count=1, task={"question": "1+1", "answer": "2"})
        prepared, fresh = await pool.take(5), await pool.take(6, {"question": "2+2", "answer": "4"})
        seen = [await prepared.reset(5), await fresh.reset(6)]
        await prepared.close()
        await fresh.close()
        return seen

    assert asyncio.run(run()) == ["1+1 (5)", "2+2 (6)"]


@pytest.mark.parametrize("env", [OnlySeeds(), AskingProgram()])
def test_an_environment_that_takes_no_row_is_refused(env):
    with pytest.raises(ConfigError, match=r"needs (reset\(seed, task\)|run\(seed, access, task\))"):
        check_signatures(env, has_tasks=True)


def test_an_environment_in_a_process_that_takes_no_row_is_refused():
    async def run():
        await ProcessEnv.start("tests.support.row_envs:OnlySeeds", {}, limits=LIMITS, has_tasks=True)

    with pytest.raises(EnvFault, match="cannot be given the rows of a task set"):
        asyncio.run(run())


def test_the_login_node_needs_neither_numpy_nor_pyarrow_to_copy_rows():
    code = "import sys, hpcrl.envs.task_set; print({'numpy', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("pattern", "text", "reward"),
    [
        (None, " 12\n", 1.0),
        (None, "so 12", 0.0),
        (r"-?\d+", "first 3, then 12.", 1.0),
        (r"<answer>(.*?)</answer>", "<answer>3</answer> no, <answer> 12 </answer>", 1.0),
        (r"<answer>(.*?)</answer>", "12", 0.0),
        (r"(x)?12", "12", 0.0),
    ],
)
def test_an_answer_is_what_the_pattern_finds_last(pattern, text, reward):
    env = AnsweredQuestion(question="ask", pattern=pattern)
    first, steps = asyncio.run(play_question(env, {"ask": "5+7=", "answer": 12}, text))
    assert (first, steps.reward, steps.done) == ("5+7=", reward, True)


async def play_question(env, row, text):
    return await env.reset(0, task=row), await env.step(text)


def test_a_row_without_the_field_of_the_question_is_a_fault_that_names_it():
    with pytest.raises(ConfigError, match="no field 'question'; it has answer, q"):
        asyncio.run(AnsweredQuestion().reset(0, task={"q": "1+1", "answer": "2"}))
    with pytest.raises(ConfigError, match="not a regular expression"):
        AnsweredQuestion(pattern="(")


@pytest.mark.parametrize(
    ("text", "reward"),
    [("It is 1,072 dollars", 1.0), ("so 5 + 1067 = 1072.0", 1.0), ("1,072 or 3", 0.0), ("none", 0.0)],
)
def test_the_last_number_is_compared_with_the_number_of_the_row(text, reward):
    pattern = make_recipe(name="qwen3-8b-math").domains["math"].options
    question = AnsweredQuestion(**pattern)
    row = {"question": "How much?", "answer": "It costs <<5+1067=1072>>.\n#### 1,072"}

    async def play():
        await question.reset(0, row)
        return (await question.step(text)).reward

    assert asyncio.run(play()) == reward


def test_a_row_whose_answer_is_not_found_is_refused():
    with pytest.raises(ConfigError, match="answer_pattern matches nothing"):
        AnsweredQuestion(answer_pattern="#### (.+)").check_task({"question": "?", "answer": "72"})
