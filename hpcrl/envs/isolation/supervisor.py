"""Run the stages of one episode, each in its sandbox: agent program and judge command; end what exceeds a limit.

    main             read an EpisodeStages from standard input, run them, and print an EpisodeOutcome
    run_stages       the same with values
    EpisodeStages    the stages of an episode, and the limits of each as a whole
    Stage            one sandbox: its command, and what its launcher (program_launcher) runs in it
    EpisodeOutcome   the results of the stages, or the fault that ended one
    StageFault, StageLate, StageEnded  why a stage has no result
    measure_tree     count the tasks and the memory of a process and all below it
    OUTPUT_WATCH_INTERVAL_S, DISK_WATCH_INTERVAL_S, MAX_DISK_WATCH_SHARE, FILES_PER_MB, MIN_FILES  constants

The supervisor is outside the sandboxes, so that no program can end or deceive it, and imports little, since it starts
with every episode. A stage starts when all processes of the one before have ended. Limits are enforced by the kernel
where that is possible (hpcrl.envs.isolation.sandbox); here they are watched, which always is.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.envs.isolation.program_launcher import STARTED_MARK
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants, list_descendants

OUTPUT_WATCH_INTERVAL_S = 0.1
DISK_WATCH_INTERVAL_S = 1.0
MAX_DISK_WATCH_SHARE = 0.05
"""The share of the time that counting the files of an episode may take."""
FILES_PER_MB = 256
"""Files and directories for each MB of max_disk_mb: the number of blocks of 4 KiB. A file that is not empty has
one at least; each needs a kilobyte of the kernel's memory beside it, also if it is empty."""
MIN_FILES = 10_000
"""The least number of files and directories, for small disks."""
_RESIDENT = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One command in one sandbox."""

    name: str
    """program or judge, for messages."""
    command: list[str]
    """The launcher in its sandbox."""
    launch: dict[str, Any]
    """The ProgramLaunch that the launcher is sent."""
    environment: dict[str, str]
    """The launcher's whole environment."""
    cwd: str
    timeout_s: float
    timeout_name: str


@dataclass(frozen=True, kw_only=True)
class EpisodeStages:
    """The stages of an episode, and what they may use."""

    stages: list[dict[str, Any]]
    """Each a Stage; a new one starts when all processes of the last have ended."""
    directories: list[str]
    """Made before, for this user only."""
    copy_command: list[str] = field(default_factory=list)
    """The command that fills the first of `directories`, if any."""
    copied_from: str = ""
    """The name, for messages, of what it copies."""
    max_processes: int
    max_memory_mb: int
    max_disk_mb: int
    disks: list[str]
    """The directories whose files count."""
    has_fixed_disks: bool
    """True if each is a file system of max_disk_mb, so that only the number of its files is left to watch."""


@dataclass(frozen=True, kw_only=True)
class EpisodeOutcome:
    """The outcome of an episode's stages."""

    results: list[dict[str, Any]] = field(default_factory=list)
    """A ProgramResult for each stage that ended by itself."""
    fault: str = ""
    """The reason why a stage did not."""
    full_disks: list[str] = field(default_factory=list)
    """The names of the stages that left no disk space, whether they failed or not."""
    was_ended: bool = False
    """True if that stage had started, and ended for what it did: it exceeded a limit other than its time, or ended its
    launcher."""
    was_late: bool = False
    """True if that stage exceeded its time."""


class StageFault(Exception):
    """A stage was ended, or could not be started."""


class StageLate(StageFault):
    """A stage exceeded its time."""


class StageEnded(StageFault):
    """A stage had started, and ended for what it did."""


def run_stages(episode: EpisodeStages) -> EpisodeOutcome:
    """Run the stages up to the first that does not end by itself."""
    results: list[dict[str, Any]] = []
    full_disks: list[str] = []
    try:
        _fill_directories(episode)
        for stage in episode.stages:
            result = _run_stage(Stage(**stage), episode)
            if episode.has_fixed_disks and _find_full_disk(episode) and not full_disks:
                full_disks.append(stage["name"])
                result["errors"] += f"\nno disk is left of max_disk_mb = {episode.max_disk_mb}"
            results.append(result)
    except StageFault as fault:
        return EpisodeOutcome(
            results=results,
            fault=str(fault),
            was_ended=isinstance(fault, StageEnded),
            was_late=isinstance(fault, StageLate),
            full_disks=full_disks,
        )
    return EpisodeOutcome(results=results, full_disks=full_disks)


def main() -> int:
    adopt_orphans()
    die_with_parent()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    outcome = run_stages(EpisodeStages(**json.loads(sys.stdin.buffer.read())))
    sys.stdout.write(json.dumps(asdict(outcome)))
    return 0


def measure_tree(pid: int) -> tuple[int, int]:
    """Count the tasks (processes and their threads) of a process and all below it, and their bytes of memory.

    Files of a disk do not count, memory that is shared does; what several processes have counts for each.
    """
    num_tasks = num_bytes = 0
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError, ValueError):  # it may have ended
            tasks = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - called ten times a second
            num_tasks += len(tasks)
            num_bytes += _count_memory_bytes(pid)
            for task in tasks:  # walking the tree costs less than reading all processes of a node
                waiting += map(int, _read_proc(f"{pid}/task/{task}/children").split())
    return num_tasks, num_bytes


def _measure_unshared_bytes() -> int:
    """Return the memory of all processes below this one; what several share counts once, as far as that is shown."""
    counted = ("Pss_Anon:", "Pss_Shmem:")
    total_bytes = 0
    for pid in list_descendants():
        with suppress(OSError, ValueError):
            try:
                lines = _read_proc(f"{pid}/smaps_rollup").splitlines()
                total_bytes += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(counted))
            except PermissionError:  # a process that protects its memory, as the launcher does
                total_bytes += _count_memory_bytes(pid)
    return total_bytes


def _count_memory_bytes(pid: int) -> int:
    """Return the memory of a process, with what it shares: mappings without a file, and files in memory."""
    found = _RESIDENT.findall(_read_proc(f"{pid}/status"))
    return sum(int(kib) << 10 for kib in found)


def _fill_directories(episode: EpisodeStages) -> None:
    for directory in episode.directories:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    if episode.copy_command:
        done = subprocess.run(episode.copy_command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            last = done.stderr.strip().rpartition("\n")[2][-300:]
            raise StageFault(f"{episode.copied_from} could not be copied: {last}")


def _run_stage(stage: Stage, episode: EpisodeStages) -> dict[str, Any]:
    """Run a stage to its end, or end it; then no process of it is left."""
    try:
        process = subprocess.Popen(
            stage.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=stage.environment,
            cwd=stage.cwd,
        )
    except OSError as error:
        raise StageFault(f"the sandbox of the {stage.name} cannot be started: {error}") from None
    printed: list[bytes] = []
    sent = json.dumps(stage.launch).encode()
    reader = threading.Thread(target=lambda: printed.extend(process.communicate(sent)), daemon=True)
    reader.start()
    try:
        _watch_stage(stage, episode, process.pid, reader)
    finally:
        process.kill()
        reader.join()
        end_descendants(grace_s=0.0)
    _, mark, last = printed[0].decode(errors="replace").rpartition(STARTED_MARK)
    try:
        result: dict[str, Any] = json.loads(last)
    except ValueError:
        why = printed[1].decode(errors="replace").strip()[-300:]
        fault = StageEnded if mark else StageFault
        raise fault(f"the sandbox of the {stage.name} ended with code {process.returncode}: {why}") from None
    _check_tasks(stage, episode, result["num_left_tasks"])  # it may have ended between two watches
    if episode.has_fixed_disks:
        _check_disks(stage, episode)
    return result


def _watch_stage(stage: Stage, episode: EpisodeStages, pid: int, reader: threading.Thread) -> None:
    """Wait for the end of a stage; raises StageFault once it exceeds a limit."""
    deadline = time.monotonic() + stage.timeout_s
    next_disk_watch = 0.0
    while reader.is_alive():
        reader.join(OUTPUT_WATCH_INTERVAL_S)
        if time.monotonic() > deadline:
            raise StageLate(f"the {stage.name} was still running after {stage.timeout_name} = {stage.timeout_s:g} s")
        num_tasks, num_bytes = measure_tree(pid)
        _check_tasks(stage, episode, num_tasks)
        max_bytes = episode.max_memory_mb << 20
        if num_bytes > max_bytes and (num_bytes := _measure_unshared_bytes()) > max_bytes:
            raise StageEnded(
                f"the {stage.name} was ended: its processes used {num_bytes >> 20} MiB of memory, "
                f"max_memory_mb = {episode.max_memory_mb}"
            )
        if episode.has_fixed_disks:
            _check_disks(stage, episode)
        elif time.monotonic() > next_disk_watch:
            started = time.monotonic()
            _check_disks(stage, episode)
            took_s = time.monotonic() - started
            next_disk_watch = time.monotonic() + max(DISK_WATCH_INTERVAL_S, took_s / MAX_DISK_WATCH_SHARE)


def _check_tasks(stage: Stage, episode: EpisodeStages, num_tasks: int) -> None:
    if num_tasks > episode.max_processes:
        raise StageEnded(
            f"the {stage.name} was ended: it had {num_tasks} processes and threads, "
            f"max_processes = {episode.max_processes}"
        )


def _check_disks(stage: Stage, episode: EpisodeStages) -> None:
    """Raise StageEnded for more files than max_disk_mb allows, or for more bytes where no file system limits them."""
    if episode.has_fixed_disks:
        facts = map(os.statvfs, episode.disks)
        num_bytes, num_files = 0, max(each.f_files - each.f_ffree for each in facts)
    else:
        num_bytes, num_files = _measure_files(episode.disks, "-B1"), _measure_files(episode.disks, "--inodes")
    if num_bytes > episode.max_disk_mb << 20:
        raise StageEnded(
            f"the {stage.name} was ended: its files had {num_bytes >> 20} MiB, max_disk_mb = {episode.max_disk_mb}"
        )
    if num_files > (max_files := max(MIN_FILES, episode.max_disk_mb * FILES_PER_MB)):
        raise StageEnded(
            f"the {stage.name} was ended: it had {num_files} files and directories, and max_disk_mb = "
            f"{episode.max_disk_mb} allows {max_files}"
        )


def _measure_files(directories: list[str], unit: str) -> int:
    """Return the bytes or the number of all files, by a program that follows directories of any depth."""
    done = subprocess.run(["du", "-sc", unit, "--", *directories], capture_output=True, text=True, check=False)
    last = done.stdout.strip().rpartition("\n")[2].split()[:1]
    return int(last[0]) if last else 0


def _find_full_disk(episode: EpisodeStages) -> str:
    """Return the disk that is full; "" if none is."""
    for disk in episode.disks:
        facts = os.statvfs(disk)
        if facts.f_bavail * 100 < facts.f_blocks or facts.f_ffree == 0:
            return disk
    return ""


def _read_proc(name: str) -> str:
    with open(f"/proc/{name}") as file:  # noqa: PTH123 - called ten times a second
        return file.read()


def _exit_on_signal(*_: object) -> None:
    end_descendants(grace_s=0.0)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
