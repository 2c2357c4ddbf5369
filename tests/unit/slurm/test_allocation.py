"""The steps of the two layouts: the srun words before a command, and the nodes of each component."""

import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import SlurmError
from hpcrl.plan.plan import Plan
from hpcrl.slurm.allocation import JobAllocation, name_step, query_schedule, read_allocation, scrub_environment
from hpcrl.slurm.component_jobs import ComponentLease
from hpcrl.system.files import make_private_dir
from tests.support.plans import plan_recipe

COMMAND = ["python", "courier.py"]
JOB = CampaignDir(Path("/campaigns/c")).job(0)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of Slurm's commands: squeue prints a file, the others nothing."""
    for name, program in (("squeue", f"cat {tmp_path}/queue"), ("scontrol", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "queue").write_text("RUNNING 2026-11-20T12:00:00 N/A\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    return tmp_path


def planned(site: str) -> Plan:
    return plan_recipe("resources.prefill.num_workers=1", site=site)


def option(command: list[str], name: str) -> str | None:
    return next((word.partition("=")[2] for word in command if word.startswith(f"--{name}=")), None)


@pytest.fixture
def in_one(answers: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], JobAllocation]:
    """Read the allocation of a plain job whose batch script runs on a node."""

    def read(nodes: str, here: str) -> JobAllocation:
        monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
        monkeypatch.setenv("SLURMD_NODENAME", here)
        return read_allocation(planned("lab-hetstep"), JOB)

    return read


def test_a_node_that_several_components_have_gets_one_process() -> None:
    components = planned("lab").components
    nodes = [["env1"], ["gpu1"], ["gpu1", "gpu2"], ["gpu1"]]
    allocation = JobAllocation(job_id="123", end_time=0.0, nodes=nodes, het=True)
    assert allocation.list_distinct_nodes(components[1:]) == {1: ["gpu1"], 2: ["gpu2"], 3: []}
    [joined] = allocation.node_step_commands(components[1:], lambda _: COMMAND, mpi="pmi2")
    groups = " ".join(joined).split(" : ")
    assert [option(group.split(), "nodelist") for group in groups] == ["gpu1", "gpu2"]
    assert [option(group.split(), "het-group") for group in groups] == ["1", "2"]


def test_nodes_of_one_allocation_are_distributed_in_order(in_one: Callable[[str, str], JobAllocation]) -> None:
    assert in_one("gpu[1-4]", "gpu1").nodes == [["gpu1"], ["gpu2"], ["gpu3"], ["gpu4"]]


def test_the_node_of_the_batch_script_goes_to_the_first_component(in_one: Callable[[str, str], JobAllocation]) -> None:
    assert in_one("gpu[1-4]", "gpu3").nodes == [["gpu3"], ["gpu1"], ["gpu2"], ["gpu4"]]


def test_too_few_nodes_for_all_components_are_refused(in_one: Callable[[str, str], JobAllocation]) -> None:
    with pytest.raises(SlurmError, match="component 3 has 0 nodes, and the plan has 1"):
        in_one("gpu[1-3]", "gpu1")


def test_steps_inside_one_allocation_name_their_nodes_and_no_het_group(
    in_one: Callable[[str, str], JobAllocation],
) -> None:
    allocation, components = in_one("gpu[1-4]", "gpu1"), planned("lab-hetstep").components
    alone = allocation.step_prefix(components[1], ["gpu2"], cpus=2, mem_gib=3, gpus=1)
    assert (option(alone, "nodelist"), option(alone, "nodes"), option(alone, "mem")) == ("gpu2", "1", "3072M")
    joined = allocation.node_step_commands(components[1:], lambda _: COMMAND, mpi="pmi2")[0]
    assert joined[-2:] == COMMAND
    assert (option(joined, "nodelist"), option(joined, "nodes"), option(joined, "ntasks")) == (
        "gpu2,gpu3,gpu4",
        "3",
        "3",
    )
    assert (option(joined, "mpi"), option(joined, "ntasks-per-node")) == ("pmi2", "1")
    assert not [word for word in alone + joined if "het-group" in word]
    left = allocation.without_node("gpu3").node_step_commands(components[1:], lambda _: COMMAND, mpi="pmi2")[0]
    assert (option(left, "nodelist"), option(left, "nodes"), option(left, "ntasks")) == ("gpu2,gpu4", "2", "2")


def test_steps_over_components_name_their_het_groups(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, node in enumerate(("env1", "prefill1", "decode1", "train1")):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{index}", node)
    plan = planned("lab")
    allocation = read_allocation(plan, JOB)
    assert allocation.nodes == [["env1"], ["prefill1"], ["decode1"], ["train1"]]
    assert (
        option(allocation.step_prefix(plan.components[2], ["decode1"], cpus=1, mem_gib=1, gpus=0), "het-group") == "2"
    )
    joined = allocation.node_step_commands(plan.components[1:], lambda _: COMMAND, mpi="pmi2")[0]
    assert joined[-2:] == COMMAND
    assert (option(joined, "het-group"), option(joined, "nodelist")) == ("1,2,3", None)


def test_after_a_node_loss_a_step_over_components_names_the_nodes_left_in_each() -> None:
    nodes = [["env1"], ["prefill1", "prefill2"], ["decode1"], ["train1"]]
    allocation = (
        JobAllocation(job_id="123", end_time=0.0, nodes=nodes, het=True)
        .without_node("prefill2")
        .without_node("decode1")
    )
    joined = allocation.node_step_commands(planned("lab").components[1:], lambda _: COMMAND, mpi="pmi2")[0]
    first, second = joined[1 : joined.index(":")], joined[joined.index(":") + 1 :]
    assert joined[0] == "srun"
    for group, index, node in ((first, "1", "prefill1"), (second, "3", "train1")):
        assert group[-2:] == COMMAND
        assert (option(group, "het-group"), option(group, "nodelist"), option(group, "ntasks")) == (index, node, "1")
        assert (option(group, "mpi"), option(group, "kill-on-bad-exit")) == ("pmi2", "1")


def test_a_job_without_the_planned_components_is_refused(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "env1")
    with pytest.raises(SlurmError, match="SLURM_JOB_NODELIST_HET_GROUP_1 is not set"):
        read_allocation(planned("lab"), JOB)


def test_variables_of_the_batch_step_do_not_leak_into_others() -> None:
    kept = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST_HET_GROUP_1": "a", "SLURMD_NODENAME": "a", "PATH": "/bin"}
    gone = {"SLURM_JOB_NODELIST": "a", "SLURM_NTASKS_PER_NODE": "1", "SBATCH_X": "1", "CUDA_VISIBLE_DEVICES": "0"}
    environ = kept | gone
    scrub_environment(environ)
    assert environ == kept


@pytest.mark.parametrize(
    ("answer", "running_end", "is_preempted"),
    [
        ("RUNNING 2026-11-20T12:00:00 N/A", "2026-11-20T12:00:00", False),
        ("RUNNING 2026-11-20T12:00:00 2026-11-20T11:59:00", "2026-11-20T12:00:00", True),
        ("COMPLETING 2026-11-20T12:00:00 N/A", None, False),
        ("RUNNING N/A N/A", None, False),
    ],
)
def test_slurm_reports_when_a_job_ends_and_whether_it_is_preempted(
    answers: Path, answer: str, running_end: str | None, is_preempted: bool
) -> None:
    (answers / "queue").write_text(f"{answer}\n")
    schedule = query_schedule("123")
    assert schedule is not None
    expected = None if running_end is None else datetime.fromisoformat(running_end).timestamp()
    assert (schedule.running_end, schedule.is_preempted) == (expected, is_preempted)


def test_a_job_starts_though_slurm_does_not_report_its_end(
    answers: Path, in_one: Callable[[str, str], JobAllocation], monkeypatch: pytest.MonkeyPatch
) -> None:
    (answers / "squeue").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2; exit 1\n")
    assert query_schedule("123") is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    assert in_one("gpu[1-4]", "gpu1").end_time == 1700000000.0
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert in_one("gpu[1-4]", "gpu1").end_time > time.time(), "its walltime from now"


def test_a_step_has_a_name_where_there_is_srun() -> None:
    assert name_step(["srun", "--nodes=1"], "x") == ["srun", "--job-name=x", "--nodes=1"]
    assert name_step([], "x") == []


@pytest.fixture
def separate(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobAllocation:
    """The allocation of a job whose four components are separate jobs, all of which have started."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "env1")
    job = CampaignDir(tmp_path / "c").job(0)
    make_private_dir(job.root)
    for index, node in enumerate(("prefill1", "decode1", "train1"), 1):
        lease = ComponentLease(slurm_id=str(123 + index), nodes=[node], time=0.0)
        job.component_lease(index).write_bytes(msgspec.json.encode(lease))
    (answers / "queue").write_text(make_schedule_rows(RUNNING, RUNNING, RUNNING, RUNNING))
    return read_allocation(planned_apart(), job)


RUNNING = "RUNNING 2026-11-20T12:00:00 N/A"


def make_schedule_rows(*states: str) -> str:
    """Return squeue's rows of jobs 123, 124, ...; it lists no job without a state."""
    return "".join(f"{state} {id}\n" for id, state in enumerate(states, 123) if state)


def planned_apart() -> Plan:
    return plan_recipe("resources.prefill.num_workers=1", "job.layout=multi-job", site="lab")


def test_steps_on_components_that_are_separate_jobs_name_their_jobs(separate: JobAllocation) -> None:
    components = planned_apart().components
    assert separate.nodes == [["env1"], ["prefill1"], ["decode1"], ["train1"]]
    alone = separate.step_prefix(components[2], ["decode1"], cpus=1, mem_gib=1, gpus=1)
    assert (option(alone, "jobid"), option(alone, "nodelist"), option(alone, "het-group")) == ("125", "decode1", None)
    commands = separate.node_step_commands(components[1:], lambda _: COMMAND, mpi="none")
    assert [(option(one, "jobid"), option(one, "nodelist")) for one in commands] == [
        ("124", "prefill1"),
        ("125", "decode1"),
        ("126", "train1"),
    ]
    assert all(one[0] == "srun" and one[-2:] == COMMAND and ":" not in one for one in commands)


def test_a_job_is_refused_whose_components_have_not_all_started(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "env1")
    with pytest.raises(SlurmError, match="component 1 has 0 nodes"):
        read_allocation(planned_apart(), CampaignDir(tmp_path / "c").job(0))


EARLIER = "RUNNING 2026-11-20T11:00:00 N/A"
PREEMPTED = "RUNNING 2026-11-20T11:00:00 2026-11-20T10:59:00"


@pytest.mark.parametrize(
    ("states", "running_end", "is_preempted", "ended"),
    [
        ((RUNNING, RUNNING, EARLIER, RUNNING), "2026-11-20T11:00:00", False, None),
        (
            (RUNNING, RUNNING, "RUNNING 2026-11-20T11:00:00 2026-11-20T10:59:00", RUNNING),
            "2026-11-20T11:00:00",
            True,
            None,
        ),
        ((RUNNING, RUNNING, "PREEMPTED 2026-11-20T11:00:00 N/A", RUNNING), None, False, (2, "preempted")),
        ((RUNNING, RUNNING, RUNNING, "PENDING N/A N/A"), None, False, (3, "pending")),
        ((RUNNING, "", RUNNING, RUNNING), None, False, (1, "no longer listed")),
    ],
)
def test_separate_jobs_end_with_the_first_of_them(
    answers: Path,
    separate: JobAllocation,
    states: tuple[str, ...],
    running_end: str | None,
    is_preempted: bool,
    ended: tuple[int, str] | None,
) -> None:
    (answers / "queue").write_text(make_schedule_rows(*states))
    schedule = separate.query_schedule()
    assert schedule is not None
    expected = None if running_end is None else datetime.fromisoformat(running_end).timestamp()
    assert (schedule.running_end, schedule.is_preempted) == (expected, is_preempted)
    assert separate.find_ended_component() == ended


def test_no_component_has_ended_when_slurm_does_not_answer(answers: Path, separate: JobAllocation) -> None:
    (answers / "queue").write_text("")
    assert separate.query_schedule() is None
    assert separate.find_ended_component() is None


def test_without_an_answer_the_job_ends_with_the_component_that_started_first(
    answers: Path, separate: JobAllocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, started = CampaignDir(tmp_path / "c").job(0), time.time() - 600
    lease = ComponentLease(slurm_id="125", nodes=["decode1"], time=started)
    job.component_lease(2).write_bytes(msgspec.json.encode(lease))
    for index in (1, 3):
        lease = ComponentLease(
            slurm_id=str(123 + index), nodes=[["prefill1"], ["train1"]][index // 2], time=time.time()
        )
        job.component_lease(index).write_bytes(msgspec.json.encode(lease))
    (answers / "queue").write_text("")
    plan = planned_apart()
    assert read_allocation(plan, job).end_time == pytest.approx(started + plan.cost.walltime_min * 60, abs=5)


def test_a_node_belongs_to_the_separate_job_of_its_component(separate: JobAllocation) -> None:
    assert [separate.name_separate_job(node) for node in ("train1", "env1", "other")] == ["train", None, None]
