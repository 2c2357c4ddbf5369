"""Files are complete or absent; events survive a torn line; endpoints come and go."""

import os
import stat
from pathlib import Path

import pytest

from hpcrl.campaign_dir.endpoints import (
    announce_endpoint,
    list_endpoints,
    make_token,
    withdraw_endpoint,
)
from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import DrainStarted, JobStarted
from hpcrl.system.files import make_private_dir, publish_file, read_error_line, remove_path, staged_path
from hpcrl.testing.event_lines import read_events
from tests.support.endpoints import make_endpoint


def test_a_published_file_is_private_and_complete(tmp_path: Path) -> None:
    publish_file(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failed_publication_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    publish_file(tmp_path / "a", "old")

    def fill() -> None:
        with staged_path(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fill()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_a_staged_directory_never_replaces_an_existing_one(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "kept").write_text("")

    def fill() -> None:
        with staged_path(tmp_path / "v") as temporary:
            temporary.mkdir()

    with pytest.raises(OSError, match="not empty"):
        fill()
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


def test_remove_path_removes_a_link_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    remove_path(tmp_path / "link")
    assert (tmp_path / "real").is_dir()


def test_events_are_read_once_and_a_torn_line_waits(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "w.jsonl", worker="w")
    log.emit(JobStarted())
    reader = EventReader(tmp_path)
    assert [type(event) for event in reader.poll()] == [JobStarted]
    with (tmp_path / "w.jsonl").open("a") as file:
        file.write('{"time": 1, "event": "dra')
    assert list(reader.poll()) == []
    with (tmp_path / "w.jsonl").open("a") as file:
        file.write('ining"}\nnot json\n')
    assert [type(event) for event in reader.poll()] == [DrainStarted]
    log.close()


def test_events_of_all_processes_come_in_order_of_time(tmp_path: Path) -> None:
    first, second = (EventLog(tmp_path / f"{name}.jsonl", worker=name) for name in "ba")
    first.emit(JobStarted())
    second.emit(DrainStarted())
    assert [event["time"] for event in read_events(tmp_path)] == sorted(e["time"] for e in read_events(tmp_path))
    assert {event["worker"] for event in read_events(tmp_path)} == {"a", "b"}


def test_an_endpoint_is_private_and_can_be_withdrawn_twice(tmp_path: Path) -> None:
    endpoint = make_endpoint("w", token=make_token())
    path = announce_endpoint(tmp_path, endpoint)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list_endpoints(tmp_path) == [endpoint]
    withdraw_endpoint(tmp_path, "w")
    withdraw_endpoint(tmp_path, "w")
    assert list_endpoints(tmp_path) == []


def test_the_beat_moves_the_files_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "w.jsonl")
    os.utime(tmp_path / "w.jsonl", (1, 1))
    log.beat()
    assert (tmp_path / "w.jsonl").stat().st_mtime > 1


def test_a_private_directory_and_its_new_parents_are_private(tmp_path: Path) -> None:
    made = make_private_dir(tmp_path / "a" / "b")
    assert make_private_dir(made) == made
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made, made.parent)] == [0o700, 0o700]


def test_a_private_directory_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(NotADirectoryError):
        make_private_dir(tmp_path / "a")


CUDA_ERROR = """[rank9]: Traceback (most recent call last):
[rank9]:   File "train.py", line 1, in <module>
[rank9]:     step()
[rank9]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered
[rank9]: CUDA kernel errors might be asynchronously reported at some other API call.
[rank9]: Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

"""
NCCL_ERROR = """terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0] Process group watchdog thread terminated with exception: NCCL error: remote process exited
Exception raised from run at ProcessGroupNCCL.cpp:2060 (most recent call first):
frame #0: c10::Error::Error + 0x96 (0x7f in libc10.so)
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("step 1\n", "step 1"),
        ("", ""),
        (CUDA_ERROR, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
        ("x" * 100_000 + "\n" + CUDA_ERROR.replace("[rank9]: ", ""), CUDA_ERROR.splitlines()[3][len("[rank9]: ") :]),
        (
            CUDA_ERROR + NCCL_ERROR,
            "[PG ID 0] Process group watchdog thread terminated with exception: NCCL error: remote process exited",
        ),
    ],
)
def test_the_error_of_a_process_is_found_above_the_hints_that_follow_it(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "log").write_text(text)
    assert read_error_line(tmp_path / "log") == error


def test_a_process_without_a_log_has_no_error(tmp_path: Path) -> None:
    assert read_error_line(tmp_path / "log") == "it has no log"
