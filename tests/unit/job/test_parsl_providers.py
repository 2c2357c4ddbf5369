"""The worker pools as steps on the nodes of a component."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.job import parsl_providers as blocks
from hpcrl.job.parsl_providers import JobProvider, StepProvider
from hpcrl.plan.components import RewardJobPlan
from hpcrl.system.files import make_private_dir
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


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepProvider]:
    """A provider that starts a pool on all free nodes together; commands get the names of theirs in $NODE."""
    monkeypatch.setattr(blocks, "MIN_RESTART_INTERVAL_S", 0.0)
    monkeypatch.setattr(blocks, "MIN_LOST_AGE_S", 0.0)

    def join(nodes: Sequence[str]) -> list[str]:
        return ["env", f"NODE={','.join(nodes)}"]

    made = StepProvider(prefixes={node: join([node]) for node in ("n1", "n2", "n3")}, join=join, log_dir=tmp_path)
    yield made
    made.cancel_all()


def read_starts(folder: Path, *, num: int) -> list[str]:
    """Return the nodes of each start, once there are so many."""

    def read() -> list[str]:
        return sorted(filter(None, (path.read_text().strip() for path in folder.glob("start-*"))))

    until(lambda: len(read()) == num, what="the pools have started", timeout_s=60)
    return read()


def test_joined_pools_are_one_step_on_all_nodes(joined: StepProvider, tmp_path: Path) -> None:
    assert joined.num_first_blocks == 1
    start_pool(joined, f"echo $NODE > {tmp_path}/start-$$; exec sleep 600")
    assert read_starts(tmp_path, num=1) == ["n1,n2,n3"]
    assert joined.submit("true", 1) is None
    assert (joined.num_running(), joined.num_nodes, joined.lost_nodes()) == (1, 3, [])


def test_a_joined_pool_that_is_lost_is_replaced_on_its_node_and_the_others_go_on(
    joined: StepProvider, tmp_path: Path
) -> None:
    command = f"echo $NODE > {tmp_path}/start-$$; exec sleep 600"
    start_pool(joined, command)
    joined.end_lost("n2.cluster")
    assert joined.lost_nodes() == ["n2"]
    start_pool(joined, command)
    assert read_starts(tmp_path, num=2) == ["n1,n2,n3", "n2"]
    assert (joined.num_running(), joined.lost_nodes()) == (2, [])
    joined.end_lost("n2")
    until(lambda: joined.lost_nodes() == ["n2"], what="its own step is ended")
    assert joined.drop_node("n2")
    assert (joined.num_running(), joined.lost_nodes()) == (1, [])


def test_the_last_pool_of_a_joined_step_ends_with_it_and_all_are_started_together_again(
    joined: StepProvider, tmp_path: Path
) -> None:
    command = f"echo $NODE > {tmp_path}/start-$$; exec sleep 600"
    start_pool(joined, command)
    read_starts(tmp_path, num=1)
    for node in ("n1", "n2", "n3"):
        joined.end_lost(node)
    until(lambda: joined.num_running() == 0, what="the step has ended")
    assert joined.lost_nodes() == ["n1", "n2", "n3"]
    start_pool(joined, command)
    assert read_starts(tmp_path, num=2) == ["n1,n2,n3", "n1,n2,n3"]


@pytest.fixture
def reward_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobProvider:
    """A provider whose sbatch and squeue note each call; sbatch refuses while there is a file `full`."""
    programs = make_private_dir(tmp_path / "bin")
    refuse = f"[ -e {tmp_path}/full ] && {{ echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; }}"
    for name, program in (("sbatch", f"{refuse}; echo 7"), ("squeue", "echo 7 PENDING")):
        (programs / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/calls\n{program}\n")
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    job = CampaignDir(tmp_path / "c").job(0)
    make_private_dir(job.logs)
    plan = RewardJobPlan(partition="spare", max_jobs=4, workers_per_job=1, walltime_min=10)
    return JobProvider(plan, job=job, script=lambda *_: "#!/bin/sh\n")


def count_calls(tmp_path: Path, name: str) -> int:
    return (tmp_path / "calls").read_text().split().count(name)


def test_a_slurm_that_refuses_reward_jobs_is_asked_ever_more_rarely(
    reward_jobs: JobProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("hpcrl.job.parsl_providers.time.monotonic", lambda: now)
    (tmp_path / "full").touch()
    for second in range(3600):
        now = 1000.0 + second
        assert reward_jobs.submit("true", 1) is None
    assert 5 <= count_calls(tmp_path, "sbatch") <= 12
    (tmp_path / "full").unlink()
    now += blocks.MAX_REFUSAL_PAUSE_S
    assert reward_jobs.submit("true", 1) == "7"
    (tmp_path / "full").touch()
    assert reward_jobs.submit("true", 1) is None
    (tmp_path / "full").unlink()
    now += blocks.MIN_REFUSAL_PAUSE_S
    assert reward_jobs.submit("true", 1) == "7", "the pause is short again"


def test_reward_jobs_are_counted_with_few_commands(
    reward_jobs: JobProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("hpcrl.job.parsl_providers.time.monotonic", lambda: now)
    assert reward_jobs.submit("true", 1) == "7"
    for second in range(100):
        now = 1000.0 + second
        assert reward_jobs.num_running() == 1
    assert count_calls(tmp_path, "squeue") == 10
