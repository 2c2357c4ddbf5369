"""Run the slow suites in two series at once, then once more, alone, what failed; what fails twice fails the run.

Campaigns wait for processes to start and for walltimes to end: one series leaves half of two cores idle. The price is
that a test may find the machine busy at a bad moment. Such a test gets a second run and is named at the end.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SERIES = (("tests/slurm", "tests/mpi"), ("tests/e2e", "tests/vllm", "tests/gpu", "bench"))
MAX_REPEATED = 3
"""More failures than this are not the machine's: they are not repeated."""

TESTS_FAILED = 1


def make_command(folders: tuple[str, ...], cache: Path) -> list[str]:
    return [sys.executable, "-m", "pytest", *folders, "--durations", "10", "--override-ini", f"cache_dir={cache}"]


def list_failures(cache: Path) -> list[str]:
    """Return the tests that failed, from pytest's own cache."""
    path = cache / "v/cache/lastfailed"
    return list(json.loads(path.read_text())) if path.exists() else []


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


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="hpcrl-tests-") as directory:
        home = Path(directory)
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


if __name__ == "__main__":
    sys.exit(main())
