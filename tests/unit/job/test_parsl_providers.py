"""The worker pools as steps on the nodes of a component."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.job import parsl_providers as blocks
from hpcrl.job.parsl_providers import StepProvider
from tests.support.campaigns import until


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[StepProvider]:
    """A provider on two nodes; commands get the name of their node in $NODE."""
    made = StepProvider(prefixes={node: ["env", f"NODE={node}"] for node in ("n1", "n2")}, log_dir=tmp_path)
    yield made
    made.cancel_all()


def start_pool(steps: StepProvider, shell: str) -> None:
    assert steps.submit(f"sh\n-c\n{shell}", 1) is not None


def start_two_pools(steps: StepProvider, folder: Path, *shells: str) -> None:
    """Start one pool on each node; none may end before both have started."""
    for shell in shells:
        start_pool(steps, f"until [ -e {folder}/go ]; do sleep 0.05; done; {shell}")
    (folder / "go").touch()


def test_a_node_whose_pool_has_ended_is_lost_until_another_starts_there(steps: StepProvider, tmp_path: Path) -> None:
    start_two_pools(steps, tmp_path, "exit 1", "exec sleep 600")
    until(lambda: steps.lost_nodes() == ["n1"], what="the first has ended")
    start_pool(steps, "exec sleep 600")
    assert steps.lost_nodes() == []
    assert steps.num_running() == 2


def test_a_pool_that_ends_at_once_is_restarted_only_after_a_while(
    steps: StepProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MIN_RESTART_INTERVAL_S", 600.0)
    start_two_pools(steps, tmp_path, "exit 1", "exec sleep 600")
    until(lambda: steps.num_running() == 1, what="the first has ended")
    assert steps.lost_nodes() == []
    monkeypatch.setattr(blocks, "MIN_RESTART_INTERVAL_S", 0.0)
    assert steps.lost_nodes() == ["n1"]


def test_nothing_is_started_on_a_dropped_node(steps: StepProvider, tmp_path: Path) -> None:
    start_two_pools(steps, tmp_path, "exit 1", "exit 1")
    until(lambda: steps.lost_nodes() == ["n1", "n2"], what="both have ended")
    assert steps.drop_node("n1")
    assert steps.lost_nodes() == ["n2"]
    start_pool(steps, f"echo $NODE > {tmp_path}/where; exec sleep 600")
    until(lambda: (tmp_path / "where").exists() and (tmp_path / "where").read_text() == "n2\n", what="n2 was taken")
    assert steps.submit("true", 1) is None, "no other node is left"


def test_the_last_node_is_not_dropped(steps: StepProvider) -> None:
    assert steps.drop_node("n2")
    assert not steps.drop_node("n1")


@pytest.mark.parametrize("shell", ["exec sleep 600", "trap '' TERM; while :; do sleep 1; done"])
def test_the_step_of_a_pool_that_parsl_has_lost_is_ended(
    steps: StepProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setattr(blocks, "LOST_GRACE_S", 0.5)
    monkeypatch.setattr(blocks, "MIN_LOST_AGE_S", 0.0)
    start_two_pools(steps, tmp_path, shell, "exec sleep 600")
    assert steps.lost_nodes() == []
    steps.end_lost("n1.cluster")
    until(lambda: steps.lost_nodes() == ["n1"], what="its step has ended", timeout_s=30)
    assert steps.num_running() == 1


def test_a_pool_that_has_replaced_a_lost_one_continues(steps: StepProvider, tmp_path: Path) -> None:
    start_two_pools(steps, tmp_path, "exit 1", "exec sleep 600")
    until(lambda: steps.lost_nodes() == ["n1"], what="the first has ended")
    start_pool(steps, "exec sleep 600")
    steps.end_lost("n1")  # Parsl reports the loss of the first one only now
    assert steps.num_running() == 2
    assert steps.lost_nodes() == []
