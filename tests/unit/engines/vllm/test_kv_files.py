"""KV files in a directory: their names, and the limit on its size."""

import os
import time
from pathlib import Path

import pytest

from hpcrl.engines.vllm import kv_files
from hpcrl.engines.vllm.kv_files import (
    choose_parent,
    digest_tokens,
    is_handover_name,
    make_handover_name,
    name_job_directory,
    prune_directory,
    read_shard_name,
    shard_path,
)
from hpcrl.errors import EngineError


def test_a_new_name_is_a_name_and_new() -> None:
    assert is_handover_name(make_handover_name())
    assert make_handover_name() != make_handover_name()


@pytest.mark.parametrize("name", ["", "..", "a" * 21, "a" * 23, "../" + "a" * 19, "a" * 21 + "\n", None, 7])
def test_a_name_that_could_point_elsewhere_is_refused(name: object) -> None:
    assert not is_handover_name(name)


def test_prompts_that_differ_have_different_digests() -> None:
    assert len({digest_tokens(prompt) for prompt in ([1, 2], [2, 1], [1], [1, 2, 0], [258])}) == 5


def left(directory: Path, *, age_s: float, size: int = 10) -> Path:
    path = shard_path(directory, make_handover_name(), rank=0)
    path.write_bytes(b"x" * size)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_old_files_are_removed_and_new_ones_stay(tmp_path: Path) -> None:
    old, new = left(tmp_path, age_s=500), left(tmp_path, age_s=0)
    assert prune_directory(tmp_path, max_bytes=1000, ttl_s=100) == 1
    assert not old.exists()
    assert new.exists()


def test_the_oldest_go_until_the_rest_fits(tmp_path: Path) -> None:
    paths = [left(tmp_path, age_s=age) for age in (30, 20, 10)]
    assert prune_directory(tmp_path, max_bytes=25, ttl_s=100) == 1
    assert [path.exists() for path in paths] == [False, True, True]


def test_a_directory_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        prune_directory(tmp_path / "nowhere", max_bytes=1, ttl_s=1)


def test_a_file_is_fetched_by_the_name_of_its_handover_and_its_rank_only(tmp_path: Path) -> None:
    path = left(tmp_path, age_s=0)
    name = path.name.partition(".")[0]
    assert read_shard_name(tmp_path, f"{name}.0") == path
    assert {read_shard_name(tmp_path, odd) for odd in (f"{name}.1", name, f"{name}.x", f"../{name}.0", "")} == {None}


def test_kv_is_never_stored_where_other_nodes_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_files.tempfile, "tempdir", str(tmp_path))
    assert choose_parent(None, beside="") == tmp_path
    assert choose_parent(None, beside=str(tmp_path / "campaign")) == Path("/dev/shm")
    assert choose_parent("/dev/shm", beside=str(tmp_path)) == Path("/dev/shm")
    with pytest.raises(EngineError, match=r"inference\.kv_dir = .* is on a file system that other nodes see"):
        choose_parent(str(tmp_path / "kv"), beside=str(tmp_path / "campaign"))


def test_two_jobs_have_two_directories(tmp_path: Path) -> None:
    assert len({name_job_directory(tmp_path / job) for job in ("000", "001")}) == 2
