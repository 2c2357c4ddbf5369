"""Run the slow suites in two series at once, then once more, alone, what failed; what fails twice fails the run.

Campaigns wait for processes to start and for walltimes to end: one series leaves half of two cores idle. The price is
that a test may find the machine busy at a bad moment. Such a test gets a second run and is named at the end.

    slow.py [REPORT ...]  the last lines list the slowest tests, also those of these JUnit reports of earlier runs
"""

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

SERIES = (("tests/slurm", "tests/mpi"), ("tests/e2e", "tests/vllm", "tests/gpu", "bench"))
MAX_REPEATED = 3
"""More failures than this are not the machine's: they are not repeated."""

NUM_SLOWEST = 20

TESTS_FAILED = 1


def make_command(folders: tuple[str, ...], cache: Path) -> list[str]:
    written = ("--junit-xml", str(cache.with_suffix(".xml")), "--override-ini", f"cache_dir={cache}")
    return [sys.executable, "-m", "pytest", *folders, *written]


def list_failures(cache: Path) -> list[str]:
    """Return the tests that failed, from pytest's own cache."""
    path = cache / "v/cache/lastfailed"
    return list(json.loads(path.read_text())) if path.exists() else []


def list_slowest(reports: Iterable[Path]) -> list[str]:
    """Return the slowest tests of all reports, with their fixtures; one that ran again counts with its longer run."""
    times: dict[str, float] = {}
    for report in reports:
        if report.exists():  # a run that was killed leaves none
            for case in ElementTree.parse(report).iter("testcase"):
                name, time_s = f"{case.get('classname')}::{case.get('name')}", float(case.get("time", 0))
                times[name] = max(times.get(name, 0.0), time_s)
    slowest = sorted(times, key=lambda name: -times[name])[:NUM_SLOWEST]
    return [f"{times[name]:8.1f} s  {name}" for name in slowest]


def run_both(home: Path) -> list[int]:
    """Run the two series at once; the second one's output follows the first one's."""
    log = home / "second.log"
    with log.open("w") as output:
        second = subprocess.Popen(make_command(SERIES[1], home / "1"), stdout=output, stderr=subprocess.STDOUT)
        try:
            first = subprocess.run(make_command(SERIES[0], home / "0"), check=False)
            second.wait()
        finally:
            second.terminate()
    sys.stdout.write(log.read_text())
    sys.stdout.flush()
    return [first.returncode, second.returncode]


def run_all(home: Path) -> int:
    """Run both series, and what failed once more; return the exit code."""
    codes = run_both(home)
    if not any(codes):
        return 0
    failures = [name for number in range(len(SERIES)) for name in list_failures(home / str(number))]
    if not set(codes) <= {0, TESTS_FAILED} or not 0 < len(failures) <= MAX_REPEATED:
        return 1
    print(f"{len(failures)} failed and run once more, alone:", *failures, sep="\n  ", flush=True)
    code = subprocess.run(make_command(tuple(failures), home / "again"), check=False).returncode
    if code == 0:
        print("failed beside the other series and passed alone", *failures, sep="\n  ", flush=True)
    return code


def main(reports: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="hpcrl-tests-") as directory:
        home = Path(directory)
        code = run_all(home)
        slowest = list_slowest([*map(Path, reports), *home.glob("*.xml")])
        print(f"the slowest {len(slowest)} tests of all suites, with their fixtures:", *slowest, sep="\n", flush=True)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
