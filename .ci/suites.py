"""Run all suites: the fast ones, then the slow ones, two at a time; after each, once more what failed.

Campaigns wait for processes to start and for walltimes to end: one suite leaves half of two cores idle, and three at a
time saturate them and take as long as two. The price is that a test may find the machine busy at a bad moment. Such a
test gets a second run, alone, and is named at the end; what fails twice fails the run.

    suites.py ARGUMENT ...  the arguments of pytest for the fast suites
"""

import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def list_files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py" for name in names)


def omit_files(folder: str, files: Sequence[str]) -> tuple[str, ...]:
    return (folder, *(f"--ignore={path}" for path in files))


LAB = list_files("tests/slurm", "job_ends", "jobs_in_a_row", "campaign", "reward_jobs", "one_allocation", "node_loss")
"""About half of tests/slurm; each half has a lab."""
E2E = list_files("tests/e2e", "local", "report_page", "train_ranks", "memory_campaign", "teacher_campaign")
"""About half of tests/e2e; two of these files have one campaign."""
SLOW = (
    LAB,
    omit_files("tests/slurm", LAB),
    ("tests/vllm",),
    E2E,
    omit_files("tests/e2e", E2E),
    ("tests/mpi", "tests/gpu", "bench"),
)
"""The slow suites: whichever comes next starts when one has ended, so the short ones come last.

A suite of the lab waits much and computes little, so it runs beside one that computes.
"""
NUM_AT_ONCE = 2
MAX_REPEATED = 3
"""More failures than this are not the machine's: they are not repeated."""

NUM_SLOWEST = 20
REASON_CHARS = 300

TESTS_FAILED = 1


def make_command(arguments: Sequence[str], cache: Path) -> list[str]:
    written = ("--junit-xml", str(cache.with_suffix(".xml")), "--override-ini", f"cache_dir={cache}")
    return [sys.executable, "-m", "pytest", *arguments, *written]


def list_failures(cache: Path, *, kind: str = "cache/lastfailed") -> list[str]:
    """Return the tests that failed, or what failed besides, from pytest's own cache."""
    path = cache / "v" / kind
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


def list_failed(reports: Iterable[Path]) -> list[str]:
    """Return the tests that failed in any of these runs, each with the start of its reason, and what failed besides."""
    found = []
    for report in reports:
        besides = list_failures(report.with_suffix(""), kind="hpcrl/failures")
        found += [f"{report.parent.name}/{report.stem}: {reason}" for reason in besides]
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                for fault in (*case.iter("failure"), *case.iter("error")):
                    reason = " ".join((fault.get("message") or "").split())[:REASON_CHARS]
                    name = f"{case.get('classname')}::{case.get('name')}"
                    found.append(f"{report.parent.name}/{report.stem} {name}: {reason}")
    return found


def run_together(suites: Sequence[Sequence[str]], home: Path) -> list[int]:
    """Run suites, a few at a time; the output of the others follows that of the first one."""
    logs = [home / f"{number}.log" for number in range(1, len(suites))]

    def run_suite(number: int) -> int:
        start, command = time.monotonic(), make_command(suites[number], home / str(number))
        if number == 0:
            code = subprocess.run(command, check=False).returncode
        else:
            with logs[number - 1].open("w") as output:
                code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        print(f"{time.monotonic() - start:8.0f} s  {' '.join(suites[number])}", flush=True)
        return code

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        codes = list(pool.map(run_suite, range(len(suites))))
    for log in logs:
        sys.stdout.write(log.read_text())
    sys.stdout.flush()
    return codes


def run_suites(suites: Sequence[Sequence[str]], home: Path) -> int:
    """Run suites, and what failed once more; return the exit code."""
    home.mkdir()
    codes = run_together(suites, home)
    if not any(codes):
        return 0
    failures = [name for number in range(len(suites)) for name in list_failures(home / str(number))]
    if not set(codes) <= {0, TESTS_FAILED} or not 0 < len(failures) <= MAX_REPEATED:
        return 1
    print(f"{len(failures)} failed and run once more, alone:", *failures, sep="\n  ", flush=True)
    code = subprocess.run(make_command(failures, home / "again"), check=False).returncode
    if code == 0:
        print("failed beside others and passed alone", *failures, sep="\n  ", flush=True)
    return code


def main(fast: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="hpcrl-tests-") as directory:
        home = Path(directory)
        code = run_suites([fast], home / "fast") or run_suites(SLOW, home / "slow")
        slowest = list_slowest(home.glob("*/*.xml"))
        print(f"the slowest {len(slowest)} tests of all suites, with their fixtures:", *slowest, sep="\n", flush=True)
        failed = list_failed(sorted(home.glob("*/*.xml")))
        if failed:  # comes last, as a log is often kept from its end
            print(f"{len(failed)} failures, second runs included (exit code {code}):", *failed, sep="\n", flush=True)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
