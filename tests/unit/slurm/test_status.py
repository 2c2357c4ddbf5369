"""The state of jobs, from text that real commands printed and from fake programs on PATH."""

import time
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from hpcrl.errors import SlurmError
from hpcrl.slurm.commands import expand_nodes
from hpcrl.slurm.status import (
    UNKNOWN,
    ComponentStatus,
    JobStatus,
    combine_states,
    explain_reason,
    join_component_jobs,
    parse_ended,
    parse_queue,
    query_failed_nodes,
    query_job_states,
    query_lost_nodes,
    query_restarted_nodes,
)
from hpcrl.system.processes import read_start_ticks

FAKES = Path(__file__).parents[2] / "support" / "fakes"

QUEUE = """\
12|12|RUNNING|env|2026-11-20T10:00:00|2026-11-20T11:00:00|env2|None
9+0|9|RUNNING|env|2026-11-20T10:00:00|2026-11-20T11:00:00|env[0-1]|None
9+1|10|RUNNING|prefill|2026-11-20T10:00:01|2026-11-20T10:30:00|prefill0|None
15|15|PENDING|env|2026-11-20T12:00:00|2026-11-20T13:00:00||Priority
"""
ENDED = """\
20|20|CANCELLED by 1000|0:0|env|env0
21|21+0|COMPLETED|0:0|env|env0
22|21+1|NODE_FAIL|0:0|prefill|prefill[0-1]
30|30|RUNNING|0:0|env|env1
"""


class FakeSlurm:
    """Fakes of squeue and sacct, alone on PATH, with answers that a test sets."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.env = {"PATH": f"{FAKES}:/usr/bin:/bin", "FAKE_SLURM": str(directory)}

    def answer(self, command: str, **files: str) -> None:
        for suffix, text in files.items():
            (self.directory / f"{command}.{suffix}").write_text(text)

    def calls(self, command: str) -> list[str]:
        path = self.directory / f"{command}.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path)


def test_one_squeue_asks_for_all_jobs_and_one_sacct_for_the_rest(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", out=QUEUE)
    slurm.answer("sacct", out=ENDED)

    states = query_job_states(["12", "9", "20", "21", "12"], env=slurm.env)

    assert {job: status.state for job, status in states.items()} == {
        "12": "running", "9": "running", "20": "cancelled", "21": "completed",
    }  # fmt: skip
    assert len(slurm.calls("squeue")) == 1
    assert "--jobs=12,9,20,21" in slurm.calls("squeue")[0]
    assert len(slurm.calls("sacct")) == 1
    assert "--jobs=20,21" in slurm.calls("sacct")[0]


def test_sacct_is_not_asked_when_squeue_knows_all(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", out=QUEUE)

    query_job_states(["12", "9"], env=slurm.env)

    assert slurm.calls("sacct") == []


def test_slurm_is_not_asked_about_no_jobs(slurm: FakeSlurm) -> None:
    assert query_job_states([], env=slurm.env) == {}
    assert slurm.calls("squeue") == []


def test_a_het_job_has_its_components_with_their_own_ids_partitions_and_nodes() -> None:
    job = parse_queue(QUEUE)["9"]

    assert [(part.index, part.id, part.partition, part.nodes) for part in job.components] == [
        (0, "9", "env", "env[0-1]"),
        (1, "10", "prefill", "prefill0"),
    ]
    assert job.state == "running"
    assert job.end == min(part.end for part in job.components if part.end is not None)


def test_components_come_in_order_whatever_squeue_prints_first() -> None:
    assert [part.index for part in parse_queue("\n".join(reversed(QUEUE.splitlines())))["9"].components] == [0, 1]


def test_a_waiting_job_has_its_reason_in_words_and_slurms_estimate_of_its_start() -> None:
    job = parse_queue(QUEUE)["15"]

    assert job.state == "pending"
    assert job.reason == "jobs of higher priority are ahead of it"
    assert job.start == time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))


def test_components_that_wait_for_different_reasons_give_them_by_partition() -> None:
    text = "9+0|9|PENDING|env|N/A|N/A||Resources\n9+1|10|PENDING|gpu|N/A|N/A||QOSMaxJobsPerUserLimit\n"

    job = parse_queue(text)["9"]

    assert job.reason == (
        "env: it is next and waits for nodes to become free; "
        "gpu: you are at a limit of its QOS (QOSMaxJobsPerUserLimit)"
    )
    assert job.start is None


def test_a_job_has_no_estimate_while_one_component_has_none_and_runs_since_its_last_start() -> None:
    rows = ("9+0|9|{}|env|2026-11-20T10:00:00|N/A||Priority", "9+1|10|{}|gpu|{}|N/A||Priority")
    assert parse_queue("\n".join(rows).format("PENDING", "PENDING", "N/A"))["9"].start is None
    assert parse_queue("\n".join(rows).format("RUNNING", "PENDING", "N/A"))["9"].start is not None
    known = parse_queue("\n".join(rows).format("PENDING", "PENDING", "2026-11-20T12:00:00"))["9"]
    assert known.start == time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))


def test_a_cancelled_job_does_not_give_the_reason_why_it_waited() -> None:
    assert parse_queue("8|8|CANCELLED|env|2026-11-20T10:00:00|2026-11-20T10:00:00||BeginTime\n")["8"].reason == ""


def test_a_failed_job_is_failed_and_sacct_knows_its_exit_code() -> None:
    assert (
        parse_queue("8|8|FAILED|env|N/A|N/A|env0|NonZeroExitCode\n")["8"].reason == "it ended with a non-zero exit code"
    )
    assert parse_ended("8|8|FAILED|3:0|env|env0\n")["8"].components[0].exit_code == 3


def test_squeue_that_lists_none_of_the_jobs_is_an_answer(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", err="slurm_load_jobs error: Invalid job id specified\n", code="1")
    slurm.answer("sacct", out=ENDED)

    assert query_job_states(["20"], env=slurm.env)["20"].state == "cancelled"


def test_a_job_without_an_answer_is_unknown_with_the_reason(slurm: FakeSlurm) -> None:
    slurm.answer(
        "squeue", err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", code="1"
    )
    slurm.answer("sacct", err="sacct: error: Problem talking to the database: Connection refused\n", code="1")

    status = query_job_states(["12"], env=slurm.env)["12"]

    assert status.state == "unknown"
    assert status.reason == "squeue: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def test_a_job_that_slurm_does_not_know_is_unknown(slurm: FakeSlurm) -> None:
    assert query_job_states(["77"], env=slurm.env)["77"].reason == "neither squeue nor sacct lists it"


def test_with_disabled_accounting_the_answer_of_squeue_stands(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", out=QUEUE)
    slurm.answer("sacct", err="Slurm accounting storage is disabled\n", code="1")

    states = query_job_states(["12", "20"], env=slurm.env)

    assert states["12"].state == "running"
    assert states["20"].state == "unknown"
    assert states["20"].reason == "sacct: Slurm accounting storage is disabled"


def test_sacct_is_not_believed_about_jobs_that_run(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", err="slurm_load_jobs error: Unable to contact slurm controller\n", code="1")
    slurm.answer("sacct", out=ENDED)

    states = query_job_states(["20", "30"], env=slurm.env)

    assert states["20"].state == "cancelled"
    assert states["30"].state == "unknown"


def test_a_command_that_hangs_is_ended_with_its_children_and_its_jobs_are_unknown(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", sleep="100", out=QUEUE)

    status = query_job_states(["12"], env=slurm.env, timeout_s=0.5)["12"]

    assert status.state == "unknown"
    assert status.reason == "squeue did not answer within 0.5 s"
    assert read_start_ticks(int((slurm.directory / "squeue.pid").read_text())) is None


def test_a_missing_squeue_is_an_error_with_a_fix(slurm: FakeSlurm) -> None:
    with pytest.raises(SlurmError, match=r"squeue cannot be run .*PATH=/nowhere.*load its Slurm module"):
        query_job_states(["12"], env={"PATH": "/nowhere"})


def test_a_missing_sacct_is_accounting_that_is_off(slurm: FakeSlurm, tmp_path: Path) -> None:
    only_squeue = tmp_path / "bin"
    only_squeue.mkdir()
    (only_squeue / "squeue").symlink_to(FAKES / "squeue")
    for tool in ("basename", "cat", "sleep", "sh"):
        (only_squeue / tool).symlink_to(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}")
    slurm.answer("squeue", out=QUEUE)

    states = query_job_states(["12", "20"], env={**slurm.env, "PATH": str(only_squeue)})

    assert states["12"].state == "running"
    assert states["20"].state == "unknown"


def test_text_that_is_not_a_job_id_never_reaches_slurm(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", out=QUEUE)

    states = query_job_states(["--help", "12", ""], env=slurm.env)

    assert states["--help"].state == states[""].state == "unknown"
    assert "--help" not in slurm.calls("squeue")[0]
    assert states["12"].state == "running"


def test_variables_that_change_what_slurm_prints_are_kept_from_it(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", out=QUEUE)

    query_job_states(
        ["12", "20"], env={**slurm.env, "SQUEUE_FORMAT": "%A", "SACCT_FORMAT": "State", "SLURM_TIME_FORMAT": "%s"}
    )

    assert slurm.calls("squeue")[0].endswith(" time=standard")
    assert slurm.calls("sacct")[0].endswith(" time=standard")
    assert "_FORMAT" not in slurm.calls("squeue")[0] + slurm.calls("sacct")[0]


@pytest.mark.parametrize(
    "text", ["", "\n\n", "garbage", "12|RUNNING", "|||||||", "é+0|1|2|3|4|5|6|7", "12+x|1|2|3|4|5|6|7"]
)
def test_garbage_from_slurm_is_not_a_job(text: str) -> None:
    assert parse_queue(text) == {}
    assert parse_ended(text) == {}


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        (["running", "running"], "running"),
        (["running", "node_fail"], "running"),
        (["completing", "completed"], "completing"),
        (["configuring"], "running"),
        (["pending", "pending"], "pending"),
        (["pending", "cancelled"], "pending"),
        (["completed", "completed"], "completed"),
        (["completed", "node_fail"], "completed"),
        (["cancelled", "node_fail"], "node_fail"),
        (["failed", "cancelled"], "failed"),
        (["failed", "out_of_memory"], "out_of_memory"),
        (["timeout", "cancelled"], "timeout"),
        (["cancelled", "completed"], "cancelled"),
        (["completed", "a_new_word"], "completed"),
        (["a_new_word", "completed"], "unknown"),
        ([], "unknown"),
    ],
)
def test_the_state_of_a_job_follows_from_its_components(states: list[str], whole: str) -> None:
    assert combine_states(states) == whole


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "jobs of higher priority are ahead of it"),
        ("(Resources)", "it is next and waits for nodes to become free"),
        ("ReqNodeNotAvail, UnavailableNodes:env0", "nodes that it needs are down, drained or reserved"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs", "nodes that it needs are down, drained"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "nodes that it needs are down, drained"),
        ("MaxCpuPerAccount", "you are at a limit of its account (MaxCpuPerAccount)"),
        ("MaxMemPerLimit", "it asks for more memory"),
        ("launch_failed_requeued_held", "its start failed, and it is held"),
        ("QOSMaxJobsPerUserLimit", "you are at a limit of its QOS (QOSMaxJobsPerUserLimit)"),
        ("AssocGrpGRESMinutes", "its account is at a limit (AssocGrpGRESMinutes)"),
        ("SomethingNew", "SomethingNew"),
        ("", ""),
    ],
)
def test_reasons_become_plain_words_and_unknown_ones_stay(reason: str, words: str) -> None:
    assert explain_reason(reason).startswith(words)


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("", []),
        ("login", ["login"]),
        ("env[0-1]", ["env0", "env1"]),
        ("gpu[008-010,20],login", ["gpu008", "gpu009", "gpu010", "gpu20", "login"]),
        ("r[1-2]n[0,5]", ["r1n0", "r1n5", "r2n0", "r2n5"]),
        ("broken[", ["broken["]),
        ("huge[0-9999999999]", ["huge[0-9999999999]"]),
        ("odd[-3]", ["odd[-3]"]),
        ("odd[1-2-3]", ["odd[1-2-3]"]),
    ],
)
def test_node_lists_are_expanded_as_slurm_means_them(nodelist: str, nodes: list[str]) -> None:
    assert expand_nodes(nodelist) == nodes


def test_nodes_that_drain_fail_and_only_those_that_are_down_are_lost(slurm: FakeSlurm) -> None:
    slurm.answer("sinfo", out="a mixed\nb draining\nc down*\nd allocated*\ne down\n")
    nodes = ["a", "b", "c", "d", "e"]
    assert query_failed_nodes(nodes, env=slurm.env) == ["b", "c", "d", "e"]
    assert query_lost_nodes(nodes, env=slurm.env) == ["c", "e"]
    slurm.answer("sinfo", code="1")
    assert query_lost_nodes(nodes, env=slurm.env) == []


def test_nodes_that_were_booted_or_whose_daemon_was_started_are_found(slurm: FakeSlurm) -> None:
    slurm.answer(
        "scontrol",
        out="NodeName=a Arch=x86_64 State=MIXED BootTime=2026-11-20T10:00:00 SlurmdStartTime=2026-11-20T10:00:30\n"
        "NodeName=b State=MIXED BootTime=2026-11-19T10:00:00 SlurmdStartTime=2026-11-20T11:00:00\n"
        "NodeName=c State=DOWN BootTime=None SlurmdStartTime=None\n",
    )
    since = datetime.fromisoformat("2026-11-20T10:30:00").timestamp()
    assert query_restarted_nodes(["a", "b", "c"], since=since, env=slurm.env) == ["b"]
    assert query_restarted_nodes([], since=since, env=slurm.env) == []


def test_a_job_with_separate_components_has_those_of_all_and_names_what_it_waits_for() -> None:
    first = JobStatus(id="1", state="running", components=[part("1", "running", "env")])
    others = [
        JobStatus(id="2", state="running", components=[part("2", "running", "decode")]),
        JobStatus(id="3", state="pending", components=[part("3", "pending", "gpu", reason="Priority")]),
        JobStatus(id="4", state=UNKNOWN),
    ]
    joined = join_component_jobs(first, others)
    assert [(one.index, one.id) for one in joined.components] == [(0, "1"), (1, "2"), (2, "3")]
    assert (joined.state, joined.reason) == (
        "running",
        "waiting for nodes (gpu: jobs of higher priority are ahead of it)",
    )
    assert join_component_jobs(first, others[:1]).reason == ""
    queued = msgspec.structs.replace(first, state="pending", reason="it is next")
    assert join_component_jobs(queued, others).reason.startswith("waiting for nodes (gpu: ")
    assert join_component_jobs(queued, others[:1]).reason == "it is next; meanwhile 1 of its jobs hold their nodes"
    after = [JobStatus(id="3", state="pending", components=[part("3", "pending", "gpu", reason="Dependency")])]
    assert join_component_jobs(queued, after).reason == "it is next"
    ended = msgspec.structs.replace(first, state="cancelled", reason="")
    assert (join_component_jobs(ended, others).state, join_component_jobs(ended, others).reason) == ("cancelled", "")


def part(id: str, state: str, partition: str, *, reason: str = "") -> ComponentStatus:
    return ComponentStatus(id=id, index=0, state=state, partition=partition, reason=reason)
