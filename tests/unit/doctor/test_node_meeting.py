"""Nodes of a doctor's jobs that try to reach each other, as processes here."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.doctor.node_meeting import MeetingFiles, collect_links, introduce_nodes, judge_term
from tests.support.campaigns import until

NODE = """
import sys
from pathlib import Path
from hpcrl.doctor import node_meeting
from hpcrl.doctor.node_meeting import MeetingFiles, NodeMeeting
node_meeting.MIN_TERM_S = float(sys.argv[3])
meeting = NodeMeeting(MeetingFiles(Path(sys.argv[1]), sys.argv[2]))
meeting.open("127.0.0.1")
meeting.attend()
"""


def start_node(files: MeetingFiles, *, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", NODE, str(files.folder), files.label, str(seconds)])


def test_nodes_reach_each_other_and_one_that_is_closed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.doctor.node_meeting.MIN_TERM_S", 2.0)
    files = [MeetingFiles(tmp_path, label) for label in ("env", "train", "gone")]
    processes = [start_node(one, seconds=2.0) for one in files]
    try:
        until(lambda: all(one.address.exists() for one in files), what="all listen")
        processes[2].kill()
        processes[2].wait()
        assert introduce_nodes([*files, MeetingFiles(tmp_path, "never there")]) == files
        until(lambda: all(one.links.exists() for one in files[:2]), what="two have tried")
        [reached, failed] = collect_links(files[0])
        assert (reached.state, reached.found) == ("ok", "train reached")
        assert (failed.state, failed.name) == ("failed", "route to gone")
        assert "partitions.gone.interface" in failed.change
        assert collect_links(files[2]) == []

        for process in processes[:2]:
            process.send_signal(signal.SIGTERM)
        until(lambda: files[1].alive.exists(), what="it notes that it is alive")
        processes[1].kill()
        assert processes[0].wait(30) == 0
        assert judge_term(files[0]).state == "ok"
        assert "SIGTERM reached the step, which was ended" in judge_term(files[1]).found
        assert judge_term(files[2]).found == "SIGTERM of scancel did not reach the step"
    finally:
        for process in processes:
            process.kill()
