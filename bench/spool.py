"""Compare the spool with raw files and other stores, on the same trajectories in one run: `python -m bench.spool`.

    append    durable writes, against raw files, LMDB, Arrow IPC, Parquet, zarr, msgpack
    read      complete trajectories at random, hot, against a raw memmap
    find      a poll with a long history, against an empty history
    memory    the peak memory of a writer, against its batch

Contenders that write take turns, each in a new directory on one disk, after a sync and in an order that changes with
every round; the first round warms up and is not counted. Ratios are of lower quartiles over the same rounds: slow
rounds show what else the machine did, the fastest may be luck. Medians are shown beside the ratios with raw files.
Where only memory is read the fastest round counts, as noise only adds time there.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.figures import Figure, main
from bench.peers import memory, raw, records, stores, transferqueue
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import COLUMNS, Trajectory, pack_trajectory
from hpcrl.spool.segment import read_segment
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter

APPEND_BARS = {64: 0.75, 256: 0.85}
RAW_SEGMENTS = "raw segment files"
PEER_BARS = {256: 1.0}
CLOSE_PEERS = ("LMDB", "Arrow IPC")
"""The peers close enough to a bar to need the same number of rounds as the raw files."""
BAR_READ = 0.70
BAR_FIND = 2.0
BAR_MEMORY = 3.0
MIB = 1 << 20

Contender = Callable[[Path], None]


def measure(full: bool) -> list[Figure]:
    batch = records.trajectories()
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-", ignore_cleanup_errors=True) as scratch:
        root = Path(scratch)
        return [
            *_append_figures(root, batch, full=full),
            *_read_figures(root, batch, full=full),
            *_find_figures(root, full=full),
            *_memory_figures(root),
            *(_transferqueue_figures(root) if full else []),
        ]


# Append


def _append_figures(root: Path, batch: list[Trajectory], *, full: bool) -> list[Figure]:
    others, missing = stores.available()
    print("\n".join(missing), end="\n" if missing else "", file=sys.stderr)
    figures = []
    for per_batch, bar in APPEND_BARS.items():
        limits = _limits(batch, per_batch)
        peers = {name: _bound(store, batch, per_batch) for name, store in others.items()}
        close = limits | {name: peers.pop(name) for name in CLOSE_PEERS if name in peers}
        bars = {name: PEER_BARS.get(per_batch) for name in others} | {RAW_SEGMENTS: bar}
        label = f"append, fsync every {per_batch}: spool"
        seconds = _take_turns(root, close, rounds=47 if full else 20)
        figures += _ratios(label, seconds, bars)
        figures += [
            Figure(
                name=f"{label} / {RAW_SEGMENTS}, medians",
                value=median(seconds[RAW_SEGMENTS]) / median(seconds["spool"]),
            ),
            Figure(name=label, value=records.num_bytes(batch) / 1e6 / _typical(seconds["spool"]), unit="MB/s"),
        ]
        if full or per_batch in PEER_BARS:
            figures += _ratios(
                label, _take_turns(root, {"spool": limits["spool"]} | peers, rounds=8 if full else 4), bars
            )
    return figures


def _ratios(label: str, seconds: dict[str, list[float]], bars: dict[str, float | None]) -> list[Figure]:
    spool = _typical(seconds["spool"])
    ratios = {name: _typical(values) / spool for name, values in seconds.items() if name != "spool"}
    return [Figure(name=f"{label} / {name}", value=ratio, bar=bars.get(name)) for name, ratio in ratios.items()]


def _limits(batch: list[Trajectory], per_batch: int) -> dict[str, Contender]:
    ready = raw.ready([pack_trajectory(one) for one in batch], per_batch)
    return {
        "spool": lambda directory: write_spool(directory, batch, per_batch),
        RAW_SEGMENTS: lambda directory: raw.write_segments(directory, ready),
        "raw append-only file": lambda directory: raw.write_append(directory, ready),
    }


def _bound(store: stores.Store, batch: list[Trajectory], per_batch: int) -> Contender:
    return lambda directory: store(directory, batch, per_batch)


def write_spool(directory: Path, batch: list[Trajectory], per_batch: int) -> None:
    """Write as an env worker does: append each trajectory, flush when the batch is due."""
    writer = DiskSpoolWriter(
        directory, producer="000-env-0", batching=BatchLimits(max_count=per_batch, max_bytes=1 << 40, max_age_s=1e9)
    )
    for one in batch:
        writer.append(one)
        writer.flush_due()
    writer.close()


def _take_turns(root: Path, contenders: dict[str, Contender], *, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round."""
    rng = random.Random(1)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name in rng.sample(list(contenders), len(contenders)):
            seconds[name].append(_seconds(root, contenders[name]))
    return {name: values[1:] for name, values in seconds.items()}


def _typical(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def _seconds(root: Path, contender: Contender) -> float:
    directory = Path(tempfile.mkdtemp(dir=root))
    os.sync()
    started = time.perf_counter()
    contender(directory)
    seconds = time.perf_counter() - started
    shutil.rmtree(directory)
    return seconds


# Reads

Read = Callable[[int], Any]
"""A function that returns the columns of a trajectory by its index."""


def _read_figures(root: Path, batch: list[Trajectory], *, full: bool) -> list[Figure]:
    """Copy every column of each trajectory to an array, as when a micro-batch is filled."""
    order = random.Random(2).sample(range(len(batch)), len(batch))
    target = {name: np.empty(max(map(len, batch)), dtype) for name, dtype in COLUMNS.items()}

    def copying(read: Read) -> Callable[[], None]:
        def run() -> None:
            for index in order:
                one = read(index)
                for name, column in target.items():
                    column[: len(one[name])] = one[name]

        return run

    readers = {name: copying(read) for name, read in _readers(root, batch).items()}
    best = _fastest(readers, rounds=100 if full else 30)
    spool, raw_memmap = best.pop("spool"), best.pop("raw memmap")
    label = "random read, hot: spool"
    return [
        Figure(name=label, value=records.num_bytes(batch) / 1e9 / spool, unit="GB/s"),
        Figure(name=f"{label} / raw memmap", value=raw_memmap / spool, bar=BAR_READ),
        *(Figure(name=f"{label} / {name}", value=seconds / spool) for name, seconds in best.items()),
    ]


def _readers(root: Path, batch: list[Trajectory]) -> dict[str, Read]:
    """Return the readers; their files are mapped and, after the first round, in memory."""
    per_batch = 256
    where = {name: root / f"read-{name}" for name in ("spool", "raw memmap", *CLOSE_PEERS)}
    for directory in where.values():
        directory.mkdir()
    write_spool(where["spool"], batch, per_batch)
    segments = [read_segment(path) for path in sorted(where["spool"].glob("*.h5"))]

    def from_spool(index: int) -> dict[str, Any]:
        one = segments[index // per_batch][index % per_batch]
        return {name: getattr(one, name) for name in COLUMNS}

    readers: dict[str, Read] = {"spool": from_spool, "raw memmap": _raw_reader(where["raw memmap"], batch)}
    others, _ = stores.available()
    for name in CLOSE_PEERS:
        if name in others:
            others[name](where[name], batch, per_batch)
            readers[name] = stores.reader(name, where[name], batch, per_batch)
    return readers


def _raw_reader(directory: Path, batch: list[Trajectory]) -> Read:
    """Read from one mapped file per column."""
    columns = {}
    for name, dtype in COLUMNS.items():
        np.concatenate([getattr(one, name) for one in batch]).tofile(directory / name)
        columns[name] = np.memmap(directory / name, dtype, "r")
    edges = np.cumsum([0, *(len(one) for one in batch)]).tolist()
    return lambda index: {name: column[edges[index] : edges[index + 1]] for name, column in columns.items()}


def _fastest(contenders: dict[str, Callable[[], None]], *, rounds: int) -> dict[str, float]:
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


# Finding new rows


def _find_figures(root: Path, *, full: bool) -> list[Figure]:
    """Let two readers poll in turn, every 20 ms, while segments arrive as from one env worker."""
    num_segments, per_segment = 1000, 1000 if full else 100
    spools = {"empty": root / "empty", "history": root / "history"}
    for number in range(num_segments):
        write_spool(spools["history"], _small(number * per_segment, per_segment), per_segment)
    readers = {name: DiskSpoolReader(where, on_damage=_refuse) for name, where in spools.items()}
    spools["empty"].mkdir()
    assert len(_drain(readers["history"])) == num_segments * per_segment
    finding: dict[tuple[str, int], list[float]] = {}
    idle: dict[str, list[float]] = {name: [] for name in spools}
    num_rounds, num_found = 40 if full else 20, dict.fromkeys(spools, 0)
    for number in range(num_rounds):
        for where in spools.values():
            write_spool(where, _small(10_000_000 + number * 8, 8), 8)
        turns = list(readers.items()) if number % 2 else list(readers.items())[::-1]
        for _ in range(25):
            time.sleep(0.02)
            for turn, (name, reader) in enumerate(turns):
                started = time.perf_counter()
                found = reader.poll()
                seconds = time.perf_counter() - started
                (finding.setdefault((name, turn), []) if found else idle[name]).append(seconds)
                num_found[name] += len(found)
    assert set(num_found.values()) == {num_rounds * 8}, num_found
    label = f"with {num_segments:,} segments ({num_segments * per_segment:,} trajectories)"
    return [
        Figure(
            name=f"poll that finds 8 new, {label} / empty",
            value=_over_both_turns(finding, "history") / _over_both_turns(finding, "empty"),
            bar=BAR_FIND,
            better="lower",
        ),
        Figure(
            name=f"polls for a second that find nothing, {label} / empty",
            value=fmean(idle["history"]) / fmean(idle["empty"]),
            bar=BAR_FIND,
            better="lower",
        ),
    ]


def _over_both_turns(finding: dict[tuple[str, int], list[float]], name: str) -> float:
    """Average over both turns: the first poll after a pause has cold caches, and each reader is first equally often."""
    return fmean(median(finding[name, turn]) for turn in (0, 1))


def _small(first: int, num: int) -> list[Trajectory]:
    return records.trajectories(num, mean_tokens=64, first=first)


def _drain(reader: DiskSpoolReader) -> list[Trajectory]:
    found = reader.poll()
    while more := reader.poll():
        found += more
    return found


def _refuse(path: Path, reason: str) -> None:
    raise AssertionError(f"{path}: {reason}")


# Memory


def _memory_figures(root: Path) -> list[Figure]:
    command = [sys.executable, "-m", "bench.peers.memory", str(root / "memory")]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    name = f"writer's peak memory / its batch of {memory.BATCH_MIB} MiB"
    return [Figure(name=name, value=float(done.stdout), bar=BAR_MEMORY, better="lower")]


# In memory


def _transferqueue_figures(root: Path) -> list[Figure]:
    """Measure TransferQueue, without a bar: unlike the spool, it is not durable."""
    done = subprocess.run([sys.executable, "-m", "bench.peers.transferqueue"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print("TransferQueue is left out: see above; pip install 'hpcrl[bench]'", file=sys.stderr)
        return []
    put, get = map(float, done.stdout.split()[-2:])
    shape = f"{transferqueue.NUM_SAMPLES} x {transferqueue.NUM_FIELDS} x {transferqueue.LENGTH}"
    batch = records.of_lengths([transferqueue.LENGTH] * transferqueue.NUM_SAMPLES)
    seconds = _take_turns(root, {"spool": lambda directory: write_spool(directory, batch, len(batch))}, rounds=20)
    spool = records.num_bytes(batch) / 1e6 / _typical(seconds["spool"])
    return [
        Figure(name=f"TransferQueue put, {shape}, in memory, not durable", value=put, unit="MB/s"),
        Figure(name=f"TransferQueue get, {shape}, in memory, not durable", value=get, unit="MB/s"),
        Figure(name="the same tokens in 4 columns: spool, durable", value=spool, unit="MB/s"),
    ]


if __name__ == "__main__":
    sys.exit(main("spool", measure))
