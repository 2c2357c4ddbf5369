"""The ranks of a step on one node."""

import json
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
        f"process {pids[1]} was ended: it has stood still for 5 s (job.silence_timeout_s); its stacks are in its log",
        f"rank 1 of the trainer failed with code {EXIT_HUNG}",
    ]
    assert not Path(f"/proc/{pids[0]}").exists()


FORKED = """
import json, os, sys, time
from pathlib import Path
import hpcrl.roles.__main__ as program
from hpcrl.job.ranks import ROLE_WORDS, main

def import_role(campaign, role):
    program.is_imported = True
    {more}

def run():
    rank = sys.argv[4]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PARSL_WORKER_RANK")
    state = [sys.argv[1:], [os.environ[name] for name in names], os.getppid(), program.is_imported]
    Path("rank-" + rank).write_text(json.dumps(state))
    {work}

program.import_role, program.main = import_role, run
print(os.getpid(), flush=True)
sys.exit(main(5, 3, 2, [sys.executable, *ROLE_WORDS, "train", "/campaign", "0"]))
"""


def test_ranks_of_a_role_are_forked_with_what_it_needs_and_end_with_their_code(tmp_path: Path) -> None:
    script = FORKED.format(more="", work=f"return {EXIT_DRAINED}")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (EXIT_DRAINED, "")
    for local, rank in enumerate("34"):
        arguments, place, parent, is_imported = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert arguments == ["train", "/campaign", "0", rank]
        assert place == [rank, str(local), "5", str(local)]
        assert (parent, is_imported) == (int(done.stdout), True)


def test_a_forked_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    work = "while rank == '3' or not Path('rank-3').exists(): time.sleep(0.01)\n    raise RuntimeError('no such model')"
    script = FORKED.format(more="", work=work)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: no such model\n")
    assert done.stdout.splitlines()[1:] == ["rank 4 of the trainer failed with code 1"]


def test_ranks_are_started_anew_where_the_imports_have_started_a_thread(tmp_path: Path) -> None:
    more = "import threading; threading.Thread(target=time.sleep, args=(300,), daemon=True).start()"
    script = FORKED.format(more=more, work="return 0")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, "the ranks are real, and there is no such campaign"
    assert "/campaign" in done.stderr
    assert not list(tmp_path.glob("rank-*"))
