"""Measure how much a writer in a separate process raises the memory of that process.

Prints peak resident memory (VmHWM, minus the resident memory after a first small spool was written) as a multiple of
`BatchLimits.max_bytes`. Trajectories are made one by one and not kept, so that only the writer holds them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from bench.peers import records
from hpcrl.errors import SpoolError
from hpcrl.spool.record import Trajectory
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter

BATCH_MIB = 32


def main(directory: Path) -> None:
    _write(directory / "warm", batch_mib=4, num_batches=2)
    before = _resident("VmRSS")
    _forget_peak()
    _write(directory / "measured", batch_mib=BATCH_MIB, num_batches=6)
    print((_resident("VmHWM") - before) / (BATCH_MIB << 20))


def _write(directory: Path, *, batch_mib: int, num_batches: int) -> None:
    batching = BatchLimits(max_bytes=batch_mib << 20, max_count=1 << 30, max_age_s=1e9)
    writer = DiskSpoolWriter(directory, producer="000-env-0", batching=batching)
    for one in _stream(num_batches * batch_mib):
        try:
            writer.append(one)
        except SpoolError:  # no room: the only time that the producer waits for the disk
            writer.flush()
            writer.append(one)
        writer.flush_due()
    writer.close()


def _stream(mib: int) -> Iterator[Trajectory]:
    number = written = 0
    while written < mib << 20:
        (one,) = records.trajectories(1, first=number)
        number, written = number + 1, written + records.num_bytes([one])
        yield one


def _resident(what: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
