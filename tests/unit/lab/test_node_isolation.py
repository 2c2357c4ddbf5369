"""What the nodes of a strict lab share, and what they do not."""

from pathlib import Path

import pytest

from hpcrl.errors import LabError
from hpcrl.lab import node_isolation
from hpcrl.lab.node_isolation import check_isolation, choose_tracking, find_shared_dirs, isolate_command


def test_nodes_see_the_lab_and_the_home_of_campaigns_but_not_the_rest_of_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lab", "home", "home/inner", "data", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(node_isolation, "_NODE_TMP", tmp_path)
    monkeypatch.setenv("HPCRL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home/inner")
    found = find_shared_dirs(tmp_path / "lab", shared=[str(tmp_path / "data"), str(tmp_path / "absent")])
    assert found == [tmp_path / "data", tmp_path / "home", tmp_path / "lab"], "a directory within another is left out"


def test_a_node_runs_its_command_in_namespaces(tmp_path: Path) -> None:
    command = isolate_command(["slurmd", "-N", "env1"], root=tmp_path, node="env1", cgroup="g", shared=[Path("/a")])
    assert command[1:5] == ["--mount", "--uts", "--propagation", "private"]
    assert command[5:] == [str(tmp_path / "node.sh"), "env1", str(tmp_path), "g", "/a", "--", "slurmd", "-N", "env1"]


@pytest.mark.parametrize(
    ("writable", "expected"), [(True, "ProctrackType=proctrack/cgroup"), (False, "JobAcctGatherParams=OverMemoryKill")]
)
def test_memory_is_limited_with_and_without_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool, expected: str
) -> None:
    monkeypatch.setattr(node_isolation, "_CGROUP_ROOT", tmp_path)
    if writable:
        for controller in node_isolation.CGROUP_CONTROLLERS:
            (tmp_path / controller).mkdir()
            (tmp_path / controller / "tasks").touch()
    assert expected in choose_tracking(is_strict=True)
    assert expected not in choose_tracking(is_strict=False)


def test_a_strict_lab_of_an_ordinary_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_isolation.os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="run it as root, or leave out --strict"):
        check_isolation()
