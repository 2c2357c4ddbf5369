"""Run the couriers of several simulated nodes on one machine, for benches and tests.

CourierFleet, fleet       the couriers of some nodes - in a block, after which nothing is left of them
courier_pids, processes   the processes of a campaign
wait_until                wait for a condition
make_content, publish     the content of a test version - publish one, as a trainer does
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.errors import WeightsError
from hpcrl.testing.event_lines import read_events
from hpcrl.weights.couriers.protocol import CourierStatus
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.window.file import WindowKey, unlink_recorded_windows
from hpcrl.weights.window.window import Window

MPIEXEC = Path(sys.executable).with_name("mpiexec")
OPEN_MPI = (
    "OMPI_ALLOW_RUN_AS_ROOT=1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
)
"""Settings that Open MPI needs: CI runs as root, with more nodes than cores. MPICH ignores them."""
WAIT_S = 180.0
STOP_TIMEOUT_S = 10.0


@dataclass
class CourierFleet:
    """The couriers, one per node; the first node, or the first few, are the trainer's."""

    campaign: CampaignDir
    nodes: tuple[str, ...]
    silent_s: float = 10.0
    wire: str = "mpi"
    codec: str = "full"
    num_sources: int = 1
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Words put before the courier's command on a node."""
    num_starts: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    windows: list[Window] = field(default_factory=list)
    """The trainer's windows, closed with the fleet."""

    @property
    def job(self) -> JobDir:
        return self.campaign.job(0)

    @property
    def sources(self) -> tuple[str, ...]:
        """The trainer's nodes."""
        return self.nodes[: self.num_sources]

    @property
    def receivers(self) -> tuple[str, ...]:
        return self.nodes[self.num_sources :]

    def key(self, node: str) -> WindowKey:
        return WindowKey(campaign=self.campaign.root, node=node, part=self.num_sources > 1 and node in self.sources)

    def start(self) -> None:
        """Start the couriers, and wait until they serve."""
        self.launch()
        wait_until(lambda: self.read_status() is not None or not self.alive(), what="the couriers report their status")
        standing = self.read_status()
        assert standing is not None, self.account()
        assert standing.ready, self.account()

    def launch(self) -> None:
        """Start one run of the step; like one of srun's, it ends when one of its ranks fails."""
        self.num_starts += 1
        arguments = [str(self.campaign.root), "0", ",".join(self.nodes), ",".join(self.sources)]
        arguments.append(f"--silent-s={self.silent_s:g}")
        arguments += [
            f"--wire={self.wire}",
            "--interface=lo",
            f"--incarnation={self.num_starts}",
            f"--codec={self.codec}",
        ]
        courier = [sys.executable, "-m", "hpcrl.weights.couriers", *arguments]
        commands = {node: [*self.before.get(node, ()), *courier] for node in self.nodes}
        with self.job.log("couriers").open("ab") as log:
            self.process = subprocess.Popen(
                _by_mpiexec(commands) if self.wire == "mpi" else _by_shell(commands),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def read_status(self) -> CourierStatus | None:
        return CourierStatus.read(self.job.courier_status(str(self.num_starts)))

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_for_end(self) -> None:
        """Wait until the whole step has ended by itself."""
        wait_until(lambda: not self.alive(), what="the step has ended")

    def stop(self) -> None:
        """End the step: mpiexec first, which then removes its files."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def pids(self) -> dict[str, int]:
        """Return the courier's process id on every node."""
        return courier_pids(self.campaign)

    def signal(self, node: str, number: int) -> None:
        os.kill(self.pids()[node], number)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.campaign.events) if event["event"] == name]

    def log(self) -> str:
        return self.job.log("couriers").read_text()

    def trainer(self, layout: TensorLayout, *, node: int = 0) -> Window:
        """Create the trainer's end of its window on a node."""
        window = Window.create(self.key(self.nodes[node]), layout, job=self.job)
        self.windows.append(window)
        return window

    def newest(self, node: str) -> int:
        """Return the newest version that an engine on that node can read; -1 if there is none."""
        window = Window.open(self.key(node), job=0)
        if window is None:
            return -1
        try:
            manifest = window.newest()
            return -1 if manifest is None else manifest.version
        finally:
            window.close()

    @contextmanager
    def delay_version(self, node: str, version: int) -> Iterator[None]:
        """Hold a version on a node as a slow engine does: its place is written LEASE_TIMEOUT_S later."""
        window = Window.open(self.key(node), job=0)
        assert window is not None
        with contextlib.closing(window), contextlib.ExitStack() as holds:
            holds.enter_context(window.read_unchecked(version))
            yield
            with contextlib.suppress(WeightsError):  # the writer waited its time, and wrote: a slow machine does that
                holds.close()

    def read(self, node: str, version: int) -> bytes:
        """Read all bytes of a version on a node."""
        window = Window.open(self.key(node), job=0)
        assert window is not None
        with contextlib.closing(window), window.read_version(version) as data:
            return bytes(data)

    def has_arrived(self, version: int) -> bool:
        return all(self.newest(node) == version for node in self.receivers)

    def wait_for(self, version: int) -> None:
        """Wait until every node has a version; fail if the couriers have ended."""

        def check_arrival() -> bool:
            alive = self.alive()
            there = self.has_arrived(version)
            assert there or alive, f"the couriers ended before version {version} was everywhere: {self.account()}"
            return there

        wait_until(check_arrival, what=lambda: f"version {version} is everywhere: {self.account()}")

    def wait_for_start(self, version: int, *, held_up: str) -> None:
        """Wait until the couriers send a version that the node `held_up` cannot receive yet."""
        wait_until(lambda: all(self.newest(node) == version for node in self.sources), what="the trainer has published")
        time.sleep(0.5)
        assert self.newest(held_up) < version

    def transfers(self, version: int) -> list[dict[str, Any]]:
        """Return the events of all transfers, once a version's is there: it arrives everywhere a moment before."""
        wait_until(
            lambda: any(event["version"] == version for event in self.events("courier")),
            what=lambda: f"the transfer of version {version} is logged: {self.account()}",
        )
        return self.events("courier")

    def account(self) -> str:
        """Describe the couriers' state, to find out why a test failed."""
        code = None if self.process is None else self.process.poll()
        newest = {node: self.newest(node) for node in self.nodes}
        return f"code {code}, {newest}, {self.read_status()}, {self.events('fault')}, log:\n{self.log()}"


@contextmanager
def fleet(
    root: Path, *nodes: str, silent_s: float = 10.0, wire: str = "mpi", codec: str = "full", num_sources: int = 1
) -> Iterator[CourierFleet]:
    """Yield couriers for these nodes, not yet started; nothing is left of them afterwards."""
    couriers = CourierFleet(
        campaign=CampaignDir(root), nodes=nodes, silent_s=silent_s, wire=wire, codec=codec, num_sources=num_sources
    )
    for folder in (couriers.campaign.events, couriers.campaign.weights, couriers.job.logs):
        folder.mkdir(parents=True, mode=0o700)
    try:
        yield couriers
    finally:
        couriers.stop()
        for window in couriers.windows:
            window.close()
        unlink_recorded_windows(couriers.job)
        shutil.rmtree(root, ignore_errors=True)


def _by_mpiexec(commands: dict[str, list[str]]) -> list[str]:
    command = ["env", *OPEN_MPI, str(MPIEXEC)]
    for index, (node, courier) in enumerate(commands.items()):
        command += [*([":"] if index else []), "-n", "1", "env", f"SLURMD_NODENAME={node}", *courier]
    return command


def _by_shell(commands: dict[str, list[str]]) -> list[str]:
    """Build a shell command: mpiexec does not end the others when one ends that never called MPI."""
    lines = [f"{shlex.join(['env', f'SLURMD_NODENAME={node}', *courier])} &" for node, courier in commands.items()]
    waiting = ["wait -n || { sleep 0.2; kill -KILL 0; }"] * len(lines)
    return ["bash", "-c", "\n".join([*lines, *waiting])]


def courier_pids(campaign: CampaignDir) -> dict[str, int]:
    """Return the courier's process id on every node of a campaign."""
    return processes(campaign, "hpcrl.weights.couriers", by="SLURMD_NODENAME")


def processes(campaign: CampaignDir, *program: str, by: str) -> dict[str, int]:
    """Find the processes of a campaign that run `python -m PROGRAM...`, by a variable of their environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except (OSError, UnicodeDecodeError):
                continue
            if (
                arguments[1:2] == ["-m"]
                and arguments[2:][: len(program)] == [*program]
                and str(campaign.root) in arguments
            ):
                value = next(one for one in environment if one.startswith(f"{by}=")).partition("=")[2]
                found[value] = int(entry.name)
    return found


def wait_until(fact: Callable[[], bool], *, what: str | Callable[[], str], timeout_s: float = WAIT_S) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + timeout_s
    while not fact():
        if time.monotonic() >= deadline:
            raise AssertionError(f"still not true after {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)


def make_content(layout: TensorLayout, version: int) -> bytes:
    """Return the content of a version: every 8 bytes are its number, so that a mixed version is detected."""
    return version.to_bytes(8, "little") * (layout.nbytes // 8)


def publish(window: Window, version: int) -> None:
    """Publish a version, as the trainer does."""
    window.start_version(version, step=version)[:] = make_content(window.layout, version)
    window.commit()
