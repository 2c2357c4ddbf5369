"""The relay between MPICH and Slurm: it lowers one limit, and ends once MPI has started."""

import os
import socket
from collections.abc import Iterator

import pytest

from hpcrl.system.processes import list_descendants
from hpcrl.weights.couriers.mpi_transport import MAX_VALUE_NBYTES, limit_value_size


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Slurm's end of the connection that a rank is given."""
    end, given = socket.socketpair()
    end.settimeout(30)
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmi2")
    monkeypatch.setenv("PMI_FD", str(given.fileno()))
    yield end
    end.close()
    given.close()


def asked(slurm: socket.socket, command: bytes, answer: bytes) -> bytes:
    """Return what MPI receives when it sends `command`, which must reach Slurm unchanged, and Slurm sends `answer`."""
    fd = int(os.environ["PMI_FD"])
    os.write(fd, command)
    assert slurm.recv(1 << 16) == command
    slurm.sendall(answer)
    return os.read(fd, 1 << 16)


@pytest.mark.parametrize(("most", "reported"), [(1024, MAX_VALUE_NBYTES), (4096, MAX_VALUE_NBYTES), (256, 256)])
def test_mpi_sends_no_more_than_slurm_can_read(slurm: socket.socket, most: int, reported: int) -> None:
    with limit_value_size():
        answer = asked(
            slurm, b"cmd=get_maxes\n", b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=%d\n" % most
        )
    assert answer == b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=%d\n" % reported


def test_all_else_is_passed_on_as_it_is(slurm: socket.socket) -> None:
    with limit_value_size():
        for line in (b"cmd=put kvsname=1.0 key=a value=vallen_max=5000\n", b"cmd=barrier_in\n"):
            assert asked(slurm, line, b"cmd=get_result rc=0 value=vallen_max=5000\n").endswith(b"vallen_max=5000\n")


def test_mpi_is_connected_to_slurm_itself_after_its_start(slurm: socket.socket) -> None:
    before = list_descendants()
    with limit_value_size():
        fd = int(os.environ["PMI_FD"])
        assert len(list_descendants()) == len(before) + 1
    assert list_descendants() == before
    assert asked(slurm, b"cmd=get_maxes\n", b"cmd=maxes vallen_max=1024\n") == b"cmd=maxes vallen_max=1024\n"
    os.close(fd)


def test_a_world_of_another_kind_is_left_alone(slurm: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmix")
    before = os.environ["PMI_FD"], list_descendants()
    with limit_value_size():
        assert (os.environ["PMI_FD"], list_descendants()) == before
