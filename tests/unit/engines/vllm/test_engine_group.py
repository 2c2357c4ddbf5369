"""The parts of an engine over several nodes: where they meet, and how the first notices that one is gone."""

import dataclasses
from pathlib import Path

import pytest

from hpcrl.engines.vllm import engine_group
from hpcrl.engines.vllm.engine_group import EngineGroup, GroupWatch
from hpcrl.engines.vllm.server import VllmLaunch, build_command, build_environment
from hpcrl.errors import EngineError

HERE = Path("/scratch")


@pytest.fixture
def group(tmp_path: Path) -> EngineGroup:
    return EngineGroup(directory=tmp_path / "groups", name="000-decode-0", num_nodes=2)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_group, "CHECK_INTERVAL_S", 0.0)


def test_the_newest_meeting_is_the_one_to_join(group: EngineGroup) -> None:
    assert group.read_meeting() is None
    first, second = group.open_meeting("127.0.0.1"), group.open_meeting("127.0.0.1")
    assert first.id != second.id
    assert group.read_meeting() == second


def test_a_part_that_was_started_again_ends_the_meeting_for_all(group: EngineGroup) -> None:
    watch = GroupWatch(group, group.open_meeting("127.0.0.1"))
    assert group.join(watch.meeting, node_rank=1)
    watch.check()
    assert not group.join(watch.meeting, node_rank=1)
    with pytest.raises(EngineError, match=r"000-decode-0 has lost a node: part 1 was started again"):
        watch.check()
    assert group.join(group.open_meeting("127.0.0.1"), node_rank=1), "the next meeting is another"


def test_a_part_that_is_silent_since_it_joined_is_lost(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = GroupWatch(group, group.open_meeting("127.0.0.1"))
    monkeypatch.setattr(engine_group, "MAX_PART_SILENCE_S", -1.0)
    watch.check()  # it has not joined yet
    group.join(watch.meeting, node_rank=1)
    watch.check()
    group.beat_path(watch.meeting, node_rank=1).write_text("7")
    watch.check()
    with pytest.raises(EngineError, match="part 1 of the vLLM engine 000-decode-0 has been silent"):
        watch.check()


def test_the_parts_of_an_engine_have_the_same_addresses_and_one_of_them_serves(group: EngineGroup) -> None:
    first = VllmLaunch(model=HERE, log=HERE, group=group, tensor_parallel=4, data_parallel=2, host="10.0.0.1", node="a")
    second = dataclasses.replace(first, node_rank=1, host="10.0.0.2", node="b")
    meeting = group.open_meeting("127.0.0.1")
    serving, further = (build_command(launch, scratch=HERE, meeting=meeting) for launch in (first, second))
    assert serving[serving.index("--nnodes") :][:4] == ["--nnodes", "2", "--node-rank", "0"]
    assert further[further.index("--nnodes") :][:4] == ["--nnodes", "2", "--node-rank", "1"]
    for option, value in (("--master-port", meeting.port), ("--data-parallel-rpc-port", meeting.rpc_port)):
        assert serving[serving.index(option) + 1] == further[further.index(option) + 1] == str(value)
    assert "--uds" in serving
    assert "--uds" not in further
    environment = build_environment(second, scratch=HERE, inherited={})
    assert (environment["VLLM_HOST_IP"], environment["HPCRL_NODE"]) == ("10.0.0.2", "b")


def test_the_parts_of_an_engine_communicate_by_the_interface_of_their_addresses(group: EngineGroup) -> None:
    """By themselves gloo and NCCL choose one, by the name of the host or the kind of the interface."""
    launch = VllmLaunch(model=HERE, log=HERE, group=group, host="10.0.0.1", interface="hsn0")
    environment = build_environment(launch, scratch=HERE, inherited={"NCCL_SOCKET_IFNAME": "hsn"})
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("hsn0", "hsn")
    alone = build_environment(dataclasses.replace(launch, group=None), scratch=HERE, inherited={})
    assert alone["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in alone


def test_an_engine_on_one_node_does_not_meet(tmp_path: Path) -> None:
    assert "--nnodes" not in build_command(VllmLaunch(model=HERE, log=HERE, data_parallel=2), scratch=HERE)
