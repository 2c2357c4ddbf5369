"""The fork server of a worker pool: it imports what the workers of a role need, once for all of them, and forks them.

start_fork_server    fork it from this process
ForkedProcess        a process that it forks, also if it was just killed
is_fork_safe         return whether a process has nothing that is broken in those that it forks
list_server_pids     the server, if one was started
ROLES_PROGRAM        the module that runs roles, and imports what they need
DEVICE_PREFIXES      what an open device is named

It is that of multiprocessing, started by a fork and with its imports made. If something has started a thread or opened
a device meanwhile, it becomes one that has imported nothing, as it does after a kill: the workers then import by
themselves.
"""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

from hpcrl.system.processes import die_with_parent

ROLES_PROGRAM = "hpcrl.roles.__main__"
DEVICE_PREFIXES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
_COLD_SERVER = "from multiprocessing.forkserver import main; main({}, {}, [])"


def start_fork_server(import_packages: Callable[[], object]) -> None:
    """Fork the server, which calls `import_packages` first; this process must have no threads yet.

    From Python 3.14 on it is multiprocessing's own, which imports nothing: its clients prove who they are by a key that
    only it can make.
    """
    if sys.version_info >= (3, 14):
        forkserver.set_forkserver_preload([])
        return
    address: str = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        alive, own_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(own_end)
            _serve(listener.detach(), alive, import_packages)
        os.close(alive)
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, own_end, pid
    forkserver.set_forkserver_preload([])  # the one that takes its place


def list_server_pids() -> list[int]:
    """Return the process id of the server, if one was started."""
    server: Any = forkserver._forkserver
    return [] if server._forkserver_pid is None else [server._forkserver_pid]


class ForkedProcess(ForkServerProcess):
    """A process that the server forks; one that was killed is replaced first."""

    def start(self) -> None:
        try:
            super().start()
        except (OSError, EOFError):
            for pid in list_server_pids():
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # multiprocessing must find that it has ended
            super().start()


def is_fork_safe() -> bool:
    """Return whether this process has no second thread and no open device, which its children could not use."""
    own = Path("/proc/self")
    links = []
    for entry in (own / "fd").iterdir():
        with contextlib.suppress(OSError):  # that of this very listing
            links.append(str(entry.readlink()))
    return len(list((own / "task").iterdir())) == 1 and not any(link.startswith(DEVICE_PREFIXES) for link in links)


def _serve(listener: int, alive: int, import_packages: Callable[[], object]) -> NoReturn:
    """Import, and fork workers until the pool has ended."""
    try:
        die_with_parent(signal.SIGKILL)
        with contextlib.suppress(Exception):  # a worker meets it again, and reports it in its own log
            import_packages()
        if is_fork_safe():
            forkserver.main(listener, alive, [])
        for descriptor in (listener, alive):
            os.set_inheritable(descriptor, True)
        os.execv(sys.executable, [sys.executable, "-c", _COLD_SERVER.format(listener, alive)])
    finally:
        os._exit(0)
