"""`hpcrl traj export` writes exact rows, completely or not at all, and replaces only its own exports."""

import json
import math
import os
import pty
import subprocess
import sys

import msgspec
import numpy as np
import pyarrow.parquet as pq  # noqa: TID251
import pytest

from hpcrl.spool.record import COLUMNS, EpisodeTurn
from hpcrl.traj import parquet
from hpcrl.traj.__main__ import main
from tests.support.campaign_spools import Spools, unscored
from tests.support.disks import largest_file
from tests.support.doc_blocks import TUTORIAL, find_blocks
from tests.support.readers import find_readers, run_reader
from tests.support.trajectories import make_lake_trajectory, make_taught_trajectory


@pytest.fixture
def filled(tmp_path, tiny_model_dir):
    spools = Spools(tmp_path / "campaign")
    spools.campaign.model.symlink_to(tiny_model_dir)
    spools.scored(*(make_lake_trajectory(group) for group in range(3)))
    spools.scored(make_lake_trajectory(3, domain="taxi"))
    spools.add("rollouts", unscored(make_lake_trajectory(4)))
    return spools


def export(spools, *words):
    return main([str(spools.campaign.root), "export", "name", *map(str, words)])


def test_an_export_to_a_file_shows_its_progress_on_a_terminal_only(filled, tmp_path):
    user, terminal = pty.openpty()
    words = [sys.executable, "-m", "hpcrl.traj", filled.campaign.root, "export", "name"]
    environment = os.environ | {"TERM": "xterm"}
    subprocess.run([*words, tmp_path / "one.jsonl"], stderr=terminal, env=environment, check=True)
    os.close(terminal)
    shown = os.read(user, 1 << 16)
    os.close(user)
    assert b"trajectories are exported" in shown
    piped = subprocess.run([*words, tmp_path / "two.jsonl"], capture_output=True, env=environment, check=True)
    assert piped.stderr.decode().splitlines() == [f"5 trajectories exported to {tmp_path / 'two.jsonl'}"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_hold_messages_and_exact_token_columns(filled, tmp_path):
    target = tmp_path / "with a space.jsonl"
    assert export(filled, target) == 0
    rows = lines(target)
    assert [row["id"] for row in rows] == ["lake/0/0", "lake/1/0", "lake/2/0", "taxi/3/0", "lake/4/0"]
    assert rows[2]["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "c"},
    ]
    assert rows[2]["reward_parts"] == [{"name": "goal", "value": 0.2}]
    assert rows[4]["reward"] is None
    for name, dtype in COLUMNS.items():
        assert np.array_equal(np.array(rows[2][name], dtype), getattr(make_lake_trajectory(2), name))


LOAD = """
import datasets, sys

load_train = datasets.load_dataset

def load_and_print(*arguments, **options):
    loaded = load_train(*arguments, **options)["train"]
    print(loaded.num_rows, len(loaded[0]["token_ids"]), loaded[2]["messages"][0]["content"])

datasets.load_dataset = load_and_print
exec(sys.argv[1], {})
"""


@pytest.mark.skipif(not find_readers(), reason="needs the readers of exports (make .venv-readers/.done)")
def test_datasets_loads_every_format_as_the_page_shows(filled, tmp_path):
    for name in ("run.parquet", "run.jsonl", "exported"):
        assert export(filled, tmp_path / name) == 0
    (block,) = find_blocks(TUTORIAL.parent / "trajectories.md", "python")
    assert run_reader(LOAD, block.text, directory=tmp_path) == 3 * ["5 11 hi"]


def test_parquet_holds_the_same_as_json_lines(filled, tmp_path):
    export(filled, tmp_path / "a.jsonl")
    export(filled, tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.field("token_ids").type.value_type == "int32"
    assert table.to_pylist() == lines(tmp_path / "a.jsonl")


def test_numbers_that_are_not_finite_stay_so_in_parquet_and_are_null_in_json(tmp_path):
    spools = Spools(tmp_path / "campaign")
    logprobs = make_lake_trajectory().logprobs.copy()
    logprobs[4] = np.nan
    spools.add("scored", make_lake_trajectory(reward=math.inf, logprobs=logprobs))
    export(spools, tmp_path / "a.jsonl")
    export(spools, tmp_path / "a.parquet")
    (row,), (typed,) = lines(tmp_path / "a.jsonl"), pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert (row["reward"], row["logprobs"][4]) == (None, None)
    assert typed["reward"] == math.inf
    assert math.isnan(typed["logprobs"][4])


def test_the_log_probs_of_a_teacher_are_exported_where_one_was_asked(tmp_path):
    spools = Spools(tmp_path / "campaign")
    taught = make_taught_trajectory(1)
    spools.scored(make_lake_trajectory(0))
    spools.scored(taught)
    for name in ("a.jsonl", "a.parquet", "exported"):
        assert export(spools, tmp_path / name) == 0
    expected = [None, [None if math.isnan(one) else one for one in taught.teacher_logprobs.tolist()]]
    assert [row["teacher_logprobs"] for row in lines(tmp_path / "a.jsonl")] == expected
    (shard,) = (tmp_path / "exported" / "data").iterdir()
    for path in (tmp_path / "a.parquet", shard):
        column = pq.read_table(path).column("teacher_logprobs")
        assert column.type.value_type == "float"
        missing, found = column.to_pylist()
        assert missing is None
        assert np.array_equal(np.array(found, np.float32), taught.teacher_logprobs, equal_nan=True)


def test_facts_of_a_newer_schema_are_kept_as_json_text(tmp_path):
    spools = Spools(tmp_path / "campaign")
    turns = [EpisodeTurn(start=4, end=7, extra={"tool": "ls"}), EpisodeTurn(start=10, end=11)]
    spools.add("scored", make_lake_trajectory(turns=turns, extra={"cost": 3}))
    export(spools, tmp_path / "a.jsonl")
    assert json.loads(lines(tmp_path / "a.jsonl")[0]["extra"]) == {"cost": 3, "turns": [{"tool": "ls"}, {}]}


def test_rows_are_written_in_groups_and_files_without_losing_any(filled, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_ROW_GROUP_ROWS", 1)
    monkeypatch.setattr("hpcrl.traj.export.MAX_SHARD_TOKENS", 2 * len(make_lake_trajectory()))
    assert export(filled, tmp_path / "exported") == 0
    files = sorted((tmp_path / "exported" / "data").glob("*.parquet"))
    found = [name for path in files for name in pq.read_table(path).column("id").to_pylist()]
    assert len(files) == 3
    assert found == ["lake/0/0", "lake/1/0", "lake/2/0", "taxi/3/0", "lake/4/0"]


def test_an_export_of_nothing_has_the_columns(tmp_path):
    spools = Spools(tmp_path / "campaign")
    for name in ("a.jsonl", "a.parquet", "directory"):
        assert export(spools, tmp_path / name) == 0
    assert (tmp_path / "a.jsonl").read_bytes() == b""
    assert pq.read_table(tmp_path / "a.parquet").schema.names == parquet.TRAJECTORY_SCHEMA.names
    assert pq.read_table(tmp_path / "directory" / "data").num_rows == 0


def test_filters_hold_for_exports_too(filled, tmp_path):
    export(filled, tmp_path / "a.jsonl", "--domain", "taxi")
    assert [row["id"] for row in lines(tmp_path / "a.jsonl")] == ["taxi/3/0"]


def test_an_export_is_readable_by_its_owner_alone(filled, tmp_path):
    for name in ("a.jsonl", "a.parquet"):
        export(filled, tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "directory"])
def test_an_export_is_replaced_only_by_force(filled, tmp_path, name, capsys):
    assert export(filled, tmp_path / name) == 0
    assert export(filled, tmp_path / name) == 2
    assert "replace it with --force" in capsys.readouterr().err
    assert export(filled, tmp_path / name, "--force") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["campaign", name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("precious", "--force"), "is not an export of hpcrl"),
        (("precious", "--format", "jsonl", "--force"), "is a directory"),
        (("a.xlsx",), "has no known suffix"),
        (("no/such/a.jsonl",), "does not exist"),
    ],
)
def test_a_bad_target_is_refused_and_nothing_is_touched(filled, tmp_path, words, message, capsys):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    assert export(filled, tmp_path / words[0], *words[1:]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["campaign", "precious"]
    assert (tmp_path / "precious" / "thesis").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "directory"])
def test_a_full_disk_leaves_nothing_and_keeps_the_old_export(filled, tmp_path, name, capsys):
    export(filled, tmp_path / name, "--domain", "taxi")
    before = {path: path.read_bytes() for path in (tmp_path / name, *(tmp_path / name).rglob("*")) if path.is_file()}
    with largest_file(300):
        code = export(filled, tmp_path / name, "--force")
    assert code == 2
    assert "File too large" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["campaign", name])


def test_a_damaged_segment_is_skipped_named_and_reported_by_the_exit_code(filled, tmp_path, capsys):
    path = sorted(filled.campaign.spool("scored").glob("*.h5"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert export(filled, tmp_path / "a.jsonl") == 1
    assert [row["id"] for row in lines(tmp_path / "a.jsonl")] == ["taxi/3/0", "lake/4/0"]
    assert path.name in capsys.readouterr().err


def test_export_without_pyarrow_prints_a_hint(filled, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "hpcrl.traj.parquet")
    monkeypatch.delattr("hpcrl.traj.parquet")
    assert export(filled, tmp_path / "a.parquet") == 2
    assert "pip install 'hpcrl[export]'" in capsys.readouterr().err
    assert export(filled, tmp_path / "a.jsonl") == 0


def test_export_without_a_tokenizer_has_empty_messages_and_reports_it(tmp_path, capsys):
    spools = Spools(tmp_path / "campaign")
    spools.scored(make_lake_trajectory())
    assert export(spools, tmp_path / "a.jsonl") == 0
    assert lines(tmp_path / "a.jsonl")[0]["messages"] == []
    assert "messages are left empty" in capsys.readouterr().err


def test_a_pipe_that_is_closed_early_is_not_an_error(filled):
    command = [sys.executable, "-m", "hpcrl.traj", str(filled.campaign.root), "export", "name", "-"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr


def test_a_number_too_large_for_its_column_is_refused(tmp_path, capsys):
    spools = Spools(tmp_path / "campaign")
    spools.add("scored", msgspec.structs.replace(make_lake_trajectory(), seed=1 << 63))
    assert export(spools, tmp_path / "a.parquet") == 2
    assert "cannot export as parquet" in capsys.readouterr().err
    assert not (tmp_path / "a.parquet").exists()
