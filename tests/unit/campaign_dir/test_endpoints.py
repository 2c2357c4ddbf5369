"""Endpoints are read when they change, those of the present job only."""

import os
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.endpoints import (
    EndpointReader,
    EngineEndpoint,
    announce_endpoint,
    list_endpoints,
    withdraw_all,
    withdraw_endpoint,
)
from hpcrl.system import file_watch
from hpcrl.system.file_watch import REREAD_INTERVAL_S
from tests.support.endpoints import make_endpoint


def make_numbered_endpoint(number: int, *, job: int = 1) -> EngineEndpoint:
    return make_endpoint(f"{job:03d}-decode-{number}", url=f"http://n:{number}", job=job)


@pytest.fixture
def num_reads(monkeypatch) -> list[str]:
    """Record the endpoint files that are read."""
    names, read = [], Path.read_bytes

    def record(path):
        names.append(path.name)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", record)
    return names


def test_a_file_is_read_once_while_it_stays_the_same(tmp_path, num_reads):
    reader = EndpointReader(tmp_path, job=1)
    for number in range(3):
        announce_endpoint(tmp_path, make_numbered_endpoint(number))
    for _ in range(5):
        assert reader.poll() == [make_numbered_endpoint(number) for number in range(3)]
    assert len(num_reads) == 3


def test_files_are_not_looked_at_while_their_directory_stays_the_same(tmp_path, monkeypatch):
    now, looks, stat = [0.0], [], Path.stat

    def look(path, **options):
        looks.append(path.name)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", look)
    reader = EndpointReader(tmp_path, job=1, clock=lambda: now[0])
    for number in range(3):
        announce_endpoint(tmp_path, make_numbered_endpoint(number))
    for _ in range(10):
        assert len(reader.poll()) == 3
        now[0] += REREAD_INTERVAL_S + 1.0
    assert len(looks) == 2 * 3, "at first, and once later: the change may not have been the last in that moment"
    os.utime(announce_endpoint(tmp_path, msgspec.structs.replace(make_numbered_endpoint(0), url="http://n:9")))
    assert [one.url for one in reader.poll()] == ["http://n:9", "http://n:1", "http://n:2"]


def test_an_endpoint_that_is_expected_is_found_at_the_next_poll(tmp_path, monkeypatch):
    monkeypatch.setattr(file_watch, "PAUSE_SHARE", 0.1)
    now = [0.0]
    reader = EndpointReader(tmp_path, job=1, clock=lambda: now[0])
    for now[0] in (0.0, 0.0, 10.0):
        assert reader.poll() == []
    announce_endpoint(tmp_path, make_numbered_endpoint(0))
    assert reader.poll() == []  # after a long time without a change it looks rarely
    reader.expect_change()
    assert reader.poll() == [make_numbered_endpoint(0)]


def test_an_endpoint_that_another_replaced_is_read_again(tmp_path):
    reader = EndpointReader(tmp_path, job=1)
    announce_endpoint(tmp_path, make_numbered_endpoint(0))
    assert reader.poll() == [make_numbered_endpoint(0)]
    changed = msgspec.structs.replace(make_numbered_endpoint(0), url="http://n:9")
    stamps = (tmp_path / "001-decode-0.json").stat().st_mtime_ns
    os.utime(announce_endpoint(tmp_path, changed), ns=(stamps, stamps))
    assert reader.poll() == [changed]
    withdraw_endpoint(tmp_path, "001-decode-0")
    assert reader.poll() == []


def test_an_endpoint_in_the_inode_of_the_one_before_is_read(tmp_path):
    reader = EndpointReader(tmp_path, job=1)
    path = announce_endpoint(tmp_path, make_numbered_endpoint(0))
    assert reader.poll() == [make_numbered_endpoint(0)]
    changed = msgspec.structs.replace(make_numbered_endpoint(0), url="http://n:9")
    path.write_bytes(msgspec.json.encode(changed))  # as a file system does that gives a new file an old inode
    (tmp_path / "another").touch()
    assert reader.poll() == [changed]


def test_endpoints_of_another_job_are_left_out(tmp_path):
    announce_endpoint(tmp_path, make_numbered_endpoint(0, job=0))
    announce_endpoint(tmp_path, make_numbered_endpoint(0))
    assert EndpointReader(tmp_path, job=1).poll() == [make_numbered_endpoint(0)]


def test_a_new_driver_withdraws_the_endpoints_of_killed_engines(tmp_path):
    announce_endpoint(tmp_path, make_numbered_endpoint(0, job=0))
    withdraw_all(tmp_path)
    assert list_endpoints(tmp_path) == []
