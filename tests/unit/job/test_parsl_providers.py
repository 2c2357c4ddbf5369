"""Worker pools as steps on the nodes of a component."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.job import parsl_providers as blocks
from hpcrl.job.parsl_providers import StepProvider
from tests.support.campaigns import until


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[StepProvider]:
    """Two nodes; a command there is told on which it is."""
    made = StepProvider(prefixes={node: ["env", f"NODE={node}"] for node in ("n1", "n2")}, log_dir=tmp_path)
    yield made
    made.cancel_all()


def begin(steps: StepProvider, shell: str) -> None:
    assert steps.submit(f"sh\n-c\n{shell}", 1) is not None


def begin_two(steps: StepProvider, folder: Path, *shells: str) -> None:
    """One on each node: none may end before both have begun."""
    for shell in shells:
        begin(steps, f"until [ -e {folder}/go ]; do sleep 0.05; done; {shell}")
    (folder / "go").touch()


def test_a_node_whose_pool_has_ended_is_lost_until_another_is_begun_there(steps: StepProvider, tmp_path: Path) -> None:
    begin_two(steps, tmp_path, "exit 1", "exec sleep 600")
    until(lambda: steps.lost_nodes() == ["n1"], what="the first has ended")
    begin(steps, "exec sleep 600")
    assert steps.lost_nodes() == []
    assert steps.num_running() == 2


def test_a_pool_that_ends_at_once_is_begun_again_only_after_a_while(
    steps: StepProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MIN_RESTART_INTERVAL_S", 600.0)
    begin_two(steps, tmp_path, "exit 1", "exec sleep 600")
    until(lambda: steps.num_running() == 1, what="the first has ended")
    assert steps.lost_nodes() == []
    monkeypatch.setattr(blocks, "MIN_RESTART_INTERVAL_S", 0.0)
    assert steps.lost_nodes() == ["n1"]


def test_on_a_node_that_is_given_up_nothing_is_begun_any_more(steps: StepProvider, tmp_path: Path) -> None:
    begin_two(steps, tmp_path, "exit 1", "exit 1")
    until(lambda: steps.lost_nodes() == ["n1", "n2"], what="both have ended")
    assert steps.drop_node("n1")
    assert steps.lost_nodes() == ["n2"]
    begin(steps, f"echo $NODE > {tmp_path}/where; exec sleep 600")
    until(lambda: (tmp_path / "where").exists() and (tmp_path / "where").read_text() == "n2\n", what="n2 was taken")
    assert steps.submit("true", 1) is None, "there is no other node"


def test_the_last_node_is_not_given_up(steps: StepProvider) -> None:
    assert steps.drop_node("n2")
    assert not steps.drop_node("n1")
