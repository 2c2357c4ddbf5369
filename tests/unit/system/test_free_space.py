"""The space that a user may still fill: on the file system, and by the programs that report quotas."""

import math
from pathlib import Path

import pytest

from hpcrl.system.free_space import FreeSpace, find_free_space, read_quotas

QUOTA = """Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/export/home/of/many/people
                   7000   10000   12000       0     130       0       0       0
      /dev/sdb1      10       0       0       0     900    1000    1100       0
"""
LFS = "      /scratch  7340032*  5242880 10485760     6d23h  130  0  0  -\n"


def make_program(folder: Path, name: str, *, output: str, code: int = 0) -> None:
    """Put a program on PATH that prints this, and its words into a file."""
    (folder / "output").write_text(output)
    program = folder / name
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/{name}.words\ncat {folder}/output\nexit {code}\n')
    program.chmod(0o755)


def test_a_quota_leaves_the_difference_between_its_limit_and_what_is_used() -> None:
    assert read_quotas(QUOTA) == [FreeSpace(3000 * 1024, math.inf), FreeSpace(math.inf, 100)]


def test_a_quota_that_is_exceeded_leaves_nothing_though_its_grace_is_not_over() -> None:
    assert read_quotas(LFS) == [FreeSpace(0, math.inf)]


@pytest.mark.parametrize("output", ["", "Disk quotas for user ada (uid 1000): none\n", "\x00\xff 1 2 3", "1 " * 7])
def test_output_without_limits_limits_nothing(output: str) -> None:
    assert read_quotas(output) == []


def test_the_least_of_file_system_and_quotas_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    make_program(tmp_path, "lfs", output="/scratch 1000 2000 0 - 5 0 0 -\n")
    space = find_free_space(tmp_path)
    assert space.num_bytes == 1000 * 1024
    assert space.source.startswith("`lfs quota -q -u ")
    assert [line.split()[2] for line in (tmp_path / "lfs.words").read_text().splitlines()] == ["-u", "-g"]


def test_without_programs_only_the_file_system_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_free_space(tmp_path).source == "the file system"
