"""The checks of the campaigns' file system, from a login node or a node.

check_rates   how many small files are written durably, and opened, in a second
check_hdf5    whether segments can be written
check_lag     how late a file of another node is seen
make_signal   make that file, on the other node
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hpcrl.doctor.result import CheckResult, fail_check, pass_check, warn_check
from hpcrl.system.files import publish_file

MIN_FSYNCS_PER_S = 20.0
MIN_OPENS_PER_S = 100.0
NUM_FILES = 20
NUM_BYTES = 4096
LAG_TIMEOUT_S = 90.0
MAX_LAG_S = 5.0
SIGNAL_POLL_INTERVAL_S = 0.1
SIGNAL_DELAY_S = 3.0
"""The time between a node's first look for a file and the making of it: file systems remember that it was absent."""
MAX_CHECKS_S = 600.0
"""The time that the other node may take before it looks."""
HDF5_TIMEOUT_S = 60.0
HDF5_PROBE = """
import h5py, sys
with h5py.File(sys.argv[1], "w") as file:
    file["x"] = [1]
with h5py.File(sys.argv[1]) as file:
    assert file["x"][0] == 1
"""


def check_rates(existing: Path) -> Iterator[CheckResult]:
    """Check how fast small files are written and synced there, and opened again; raise OSError if they cannot be."""
    with tempfile.TemporaryDirectory(prefix=".hpcrl-doctor-", dir=existing) as folder:
        paths = [Path(folder) / str(number) for number in range(NUM_FILES)]
        started = time.monotonic()
        for path in paths:
            with path.open("wb") as file:
                file.write(b"x" * NUM_BYTES)
                file.flush()
                os.fsync(file.fileno())
        written = time.monotonic()
        for path in paths:
            path.read_bytes()
        opened = time.monotonic()
    change = "set campaigns_dir to a faster file system, or rollout.seal_after_s higher"
    yield _judge_rate("fsync-rate", NUM_FILES / max(written - started, 1e-6), MIN_FSYNCS_PER_S, existing, change)
    change = "set campaigns_dir to a faster file system: every role looks for new files"
    yield _judge_rate("open-rate", NUM_FILES / max(opened - written, 1e-6), MIN_OPENS_PER_S, existing, change)


def _judge_rate(name: str, rate: float, least: float, existing: Path, change: str) -> CheckResult:
    if rate < least:
        return warn_check(name, f"{rate:.3g} files/s in {existing}", change)
    return pass_check(name, f"{rate:.0f} files/s")


def check_hdf5(folder: Path) -> CheckResult:
    """Check that segments can be written to the campaigns' file system."""
    path = folder / f"probe-{os.getpid()}.h5"
    change = 'export HDF5_USE_FILE_LOCKING=FALSE: environment.HDF5_USE_FILE_LOCKING = "FALSE"'
    command = [sys.executable, "-c", HDF5_PROBE, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HDF5_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return fail_check("hdf5", f"no file was written within {HDF5_TIMEOUT_S:g} s", change)
    finally:
        path.unlink(missing_ok=True)
    if done.returncode:
        return fail_check("hdf5", done.stderr.strip().rpartition("\n")[2], change)
    return pass_check("hdf5", "a file was written and read")


def make_signal(signal_file: Path) -> None:
    """Make the file that another node waits for, some time after that has looked for it."""
    looked, deadline = signal_file.with_suffix(".looked"), time.monotonic() + MAX_CHECKS_S
    while not looked.exists() and time.monotonic() < deadline:
        time.sleep(SIGNAL_POLL_INTERVAL_S)
    time.sleep(SIGNAL_DELAY_S)
    if not signal_file.exists():
        publish_file(signal_file, str(time.time()))


def check_lag(signal_file: Path) -> CheckResult:
    """Wait for a file of another node, after it was seen to be absent, and compare its time with now."""
    deadline = time.monotonic() + LAG_TIMEOUT_S
    signal_file.exists()
    signal_file.with_suffix(".looked").touch()
    while not signal_file.exists():
        if time.monotonic() > deadline:
            change = "set campaigns_dir to a file system that all nodes share"
            return fail_check("file-lag", f"{signal_file} was not seen within {LAG_TIMEOUT_S:g} s", change)
        time.sleep(SIGNAL_POLL_INTERVAL_S)
    lag_s = max(time.time() - float(signal_file.read_text() or time.time()), 0.0)
    if lag_s > MAX_LAG_S:
        change = (
            "set campaigns_dir to a file system that shows new files earlier; raise job.drain_s above twice the lag"
        )
        return warn_check("file-lag", f"{lag_s:.1f} s", change)
    return pass_check("file-lag", f"{lag_s:.1f} s")
