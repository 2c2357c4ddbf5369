"""The ranks of a step on one node."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpcrl.system.exit_codes import EXIT_DRAINED, EXIT_HUNG

RANKS = (sys.executable, "-m", "hpcrl.job.ranks", "2", "0", "2", sys.executable, "-c")
BEAT = """
import os, sys, time
from pathlib import Path
from hpcrl.system.pulse import start_pulse
start_pulse(rank=int(sys.argv[1]), silence_s=5.0)
Path("rank-" + sys.argv[1]).write_text(str(os.getpid()))
time.sleep(300)
"""


def test_ranks_that_drained_end_with_their_code(tmp_path: Path) -> None:
    done = subprocess.run([*RANKS, f"raise SystemExit({EXIT_DRAINED})"], cwd=tmp_path, check=False, timeout=60)
    assert done.returncode == EXIT_DRAINED


def test_all_ranks_end_when_one_stands_still(tmp_path: Path) -> None:
    environ = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = subprocess.Popen([*RANKS, BEAT], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
    files = [tmp_path / f"rank-{rank}" for rank in (0, 1)]
    while not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    os.kill(pids[1], signal.SIGSTOP)
    output, _ = ranks.communicate(timeout=120)
    assert ranks.returncode == EXIT_HUNG
    assert output.splitlines() == [
        f"process {pids[1]} was ended: it has stood still for 5 s (job.silence_timeout_s); its stacks are in its log"
    ]
    assert not Path(f"/proc/{pids[0]}").exists()
