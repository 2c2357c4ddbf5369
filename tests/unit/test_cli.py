"""User errors: exit code 2, one message with the fix, no traceback, no files left behind."""

import errno
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.campaign import submission, submission_checks
from hpcrl.cli import main, make_parser
from hpcrl.system.processes import is_zombie
from tests.support.campaigns import hpcrl

Refusal = Callable[..., str]
HEAVY = ("torch", "parsl", "vllm", "mpi4py", "h5py", "numpy", "aiohttp", "transformers", "submitit", "rich")


LOOK_OFTEN = """
from hpcrl.slurm import commands
commands.LOOKUP_INTERVAL_S = 0.1  # between looks for a job whose submission was not answered
from hpcrl.campaign import submission
from hpcrl.cli import main
raise SystemExit(main())
"""


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refusal:
    """Run a command that is refused, in this process; return its message."""

    def run(*arguments: str) -> str:
        code = main(arguments)
        printed = capfd.readouterr()
        return check_refusal(code, printed.out, printed.err)

    return run


def check_refusal(code: int, output: str, message: str) -> str:
    assert code == 2, output + message
    assert output == ""
    assert "Traceback" not in message
    return message


def nothing_left(home: Path) -> bool:
    campaigns = home / "campaigns"
    return not campaigns.exists() or list(campaigns.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("submit", "quickstart", "--site", "local", "-s", "rollout.group_sise=4"), "did you mean 'group_size'?"),
        (("submit", "quickstart", "--site", "local", "-s", "rollout.group_size=x"), "expected integer, got text"),
        (("submit", "quickstrat", "--site", "local"), "did you mean 'quickstart'?"),
        (("submit", "quickstart", "--site", "locale"), "did you mean 'local'?"),
        (("submit", "quickstart", "--site", "lab", "-s", "job.walltime_min=5000"), "allows 1440"),
        (("submit", "quickstart", "--site", "lab", "-s", "resources.train.gpus_per_worker=64"), "resources.train"),
        (("submit", "quickstart", "--site", "perlmutter"), "account"),
        (
            ("submit", "quickstart", "--site", "local", "-s", "domains.lake.env=no.such:Env"),
            "put its folder into PYTHONPATH",
        ),
        (("submit", "quickstart", "--site", "local", "-s", "domains.lake.env=json:Env"), "json has no 'Env'"),
        (("submit", "quickstart", "--site", "local", "-s", "domains.lake.env=json"), "domains.lake.env"),
        (("submit", "quickstart", "--site", "local", "-s", "domains.lake.options.map=9x9"), "9x9"),
        (
            ("submit", "quickstart", "--site", "local", "-s", "domains.lake.options.size=-1"),
            "hpcrl: -s domains.lake.options.size=-1: recipe 'quickstart': domains.lake: ",
        ),
        (
            ("plan", "quickstart", "--site", "local", "-s", "seed=1", "-s", "limits.until=yesterday"),
            "hpcrl: -s limits.until=yesterday: limits.until = 'yesterday'",
        ),
        (("submit", "quickstart", "--site", "local", "--name", "a/b"), "--name 'a/b'"),
        (("plan", "quickstart", "--site", "lab", "-s", "nonsense"), "expected key=value"),
        (
            ("plan", "quickstart"),
            "--site is missing: give one of ",
        ),
        (("monitor", "missing"), "no campaign 'missing'"),
        (("resume", "missing"), "no campaign 'missing'"),
        (("stop", "missing"), "no campaign 'missing'"),
        (("logs", "missing"), "no campaign 'missing'"),
    ],
)
def test_a_user_error_gives_one_message_with_the_fix(
    home: Path, arguments: tuple[str, ...], expected: str, refused: Refusal
) -> None:
    message = refused(*arguments)
    assert expected in message
    assert len(message.splitlines()) == 1
    assert nothing_left(home)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sbmit", "quickstart"], "did you mean 'submit'? there are plan, submit"),
        (["site", "shw"], "did you mean 'show'? "),
        (["lab", "dwn"], "did you mean 'down'? "),
        (["submit", "quickstart", "--nmae", "x"], "unrecognized arguments: --nmae x: did you mean '--name'?\n"),
        (["traj", "ls", "one", "--domian=lake"], "usage: hpcrl traj ls "),
        (["traj", "ls", "one", "--domian=lake"], "unrecognized arguments: --domian=lake: did you mean '--domain'?\n"),
        (["ls", "one"], "hpcrl ls: error: unrecognized arguments: one\n"),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["logs", "one", "-f", "driver"], "role", "driver"),
        (["logs", "one", "-n", "1", "driver"], "role", "driver"),
        (["logs", "-f", "one"], "role", None),
        (["lab", "break", "--dir", "here", "lab-c1"], "part", "lab-c1"),
        (["traj", "show", "one", "--tokens", "lake/3/1"], "id", "lake/3/1"),
    ],
)
def test_a_word_that_may_be_left_out_follows_options_too(words: list[str], name: str, value: str | None) -> None:
    assert getattr(make_parser().parse_args(words), name) == value


@pytest.mark.parametrize("command", ["plan", "submit"])
def test_a_recipe_that_is_nested_too_deep_is_refused(
    home: Path, tmp_path: Path, command: str, refused: Refusal
) -> None:
    recipe = tmp_path / "deep.toml"
    recipe.write_text("x = " + "[" * 2000 + "]" * 2000)
    message = refused(command, str(recipe), "--site", "local")
    assert "deep.toml: more than 64 tables or lists are nested" in message
    assert len(message.splitlines()) == 1
    assert nothing_left(home)


def test_the_first_example_of_the_docs_is_accepted(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example names a module, so the test creates it."""
    text = Path(__file__).parents[2].joinpath("docs", "recipes.md").read_text()
    (tmp_path / "mine.toml").write_text(text.split("```toml\n")[1].split("```")[0])
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_module.py").write_text(OWN_ENV)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hpcrl("submit", str(tmp_path / "mine.toml"), "--site", "local", "--dry-run")


OWN_ENV = """
class MyEnv:
    def __init__(self, *, size: int) -> None: ...
    def reset(self, seed: int) -> str: ...
    def step(self, action: str) -> None: ...
    def close(self) -> None: ...

def my_reward(trajectory):
    return 1.0
"""


def test_a_path_without_a_model_is_refused(home: Path, tmp_path: Path, refused: Refusal) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'name = "r"\n[model]\npath = "nowhere"\n[domains.a]\nenv = "json:loads"\n[rollout]\ngroup_size = 2\n'
        "[train]\nnum_steps = 1\ngroups_per_step = 1\nlearning_rate = 0.1\n"
    )
    assert "is not a model directory" in refused("submit", str(recipe), "--site", "local")


def test_an_env_that_kills_the_interpreter_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusal
) -> None:
    (tmp_path / "breaking.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    message = refused("submit", "quickstart", "--site", "local", "-s", "domains.lake.env=breaking:Env")
    assert "domains.lake.env = 'breaking:Env': the process that checks it ended with code 7" in message
    assert nothing_left(home)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import ctypes\nprint('prints last', flush=True)\nctypes.string_at(0)", "was killed by SIGSEGV"),
        ("sys.stderr.write('Killed: all good\\n')\nos.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("os.write(2, b'ValueError: fake\\n')\nos._exit(3)", "ended with code 3, its last output: ValueError: fake"),
        ("os.write(2, b'ModuleNotFoundError: fake\\n')\nos._exit(1)", "ended with code 1, its last output: Module"),
        ("os._exit(0)", "ended with code 0"),
        (
            "class Odd(BaseException): pass\nraise Odd('license')",
            "importing dying failed (Odd: license): correct dying",
        ),
        ("os.closerange(3, 1000)\nraise RuntimeError('true reason')", "(RuntimeError: true reason): correct dying"),
        (
            "for fd in range(1, 99):\n    try: os.write(fd, b'noise')\n    except OSError: pass\n"
            "raise RuntimeError('true reason')",
            "(RuntimeError: true reason): correct dying",
        ),
        (
            "child = os.fork()\nif child: os.waitpid(child, 0)\nraise RuntimeError('true reason' if child else '')",
            "(RuntimeError: true reason): correct dying",
        ),
        ("raise RuntimeError('x' * 100_000)", f"(RuntimeError: {'x' * 1000}...): correct dying"),
        ("raise KeyboardInterrupt", "'dying:Env': KeyboardInterrupt"),
        ("class Mute(Exception):\n    def __str__(self): raise RuntimeError('x')\nraise Mute", "Mute, whose __str__"),
        ("class Odd(BaseException): pass\ndef Env(): raise Odd('license')", "'dying:Env': Odd: license"),
    ],
)
def test_an_env_whose_code_ends_its_check_is_named_with_what_ended_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, expected: str, refused: Refusal
) -> None:
    (tmp_path / "dying.py").write_text(f"import os, sys\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    message = refused("submit", "quickstart", "--site", "local", "-s", 'domains.lake={env="dying:Env"}')
    assert "domains.lake.env = 'dying:Env'" in message
    assert expected in message
    assert len(message.splitlines()) == 1


def test_a_program_that_an_env_leaves_is_ended_and_does_not_hold_up_its_check(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusal
) -> None:
    leaves = (
        "import pathlib, subprocess\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(subprocess.Popen(['sleep', '400']).pid))\n"
        "raise RuntimeError('true reason')\n"
    )
    (tmp_path / "leaving.py").write_text(leaves)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(submission_checks, "CHECK_TIMEOUT_S", 30)
    message = refused("submit", "quickstart", "--site", "local", "-s", 'domains.lake={env="leaving:Env"}')
    assert "RuntimeError: true reason" in message
    pid = int((tmp_path / "pid").read_text())
    while not is_zombie(pid):
        time.sleep(0.01)


NOISE = """
import atexit, os, sys
print("printed while it was imported")
sys.stderr.write("written to the other stream\\n")
os.system("echo printed by a program that it started")
atexit.register(print, "printed at the end")
atexit.register(os.write, 2, b"written at the end\\n")
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ValueError('the map is\\nmissing')", "importing noisy failed (ValueError: the map is; missing)"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("sys.exit(0)", "sys.exit(0)"),
        ("def Env():\n    raise KeyError('lake')", "KeyError: 'lake'"),
    ],
)
def test_an_env_that_prints_is_refused_with_the_message_of_its_exception(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, expected: str, refused: Refusal
) -> None:
    (tmp_path / "noisy.py").write_text(NOISE + code + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    setting = 'domains.lake={env="noisy:Env"}'
    message = refused("submit", "quickstart", "--site", "local", "-s", setting)
    assert expected in message
    assert "printed" not in message
    assert "written" not in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tests.support.curricula:nowhere", "tests.support.curricula has no 'nowhere'"),
        ("tests.support.curricula:empty", "ZeroDivisionError"),
    ],
)
def test_a_curriculum_that_cannot_be_used_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str, refused: Refusal
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    message = refused("submit", "quickstart", "--site", "local", "-s", f"rollout.curriculum={name}")
    assert "rollout.curriculum" in message
    assert expected in message
    assert nothing_left(home)


def test_a_plan_for_a_site_can_be_seen_on_any_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCRATCH", raising=False)
    shown = hpcrl("plan", "quickstart", "--site", "perlmutter", "-s", "site.account=m1")
    assert '#SBATCH --output="$SCRATCH/hpcrl/quickstart-1/jobs/000/logs/batch.log"' in shown.stdout
    assert "note: site.campaigns_dir: '$SCRATCH/hpcrl' names a variable that is not set here" in shown.stderr
    assert nothing_left(home)


def test_missing_slurm_commands_are_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusal
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    message = refused("submit", "quickstart", "--site", "perlmutter", "-s", "site.account=m1")
    assert "sbatch" in message
    assert nothing_left(home)


def test_a_lab_that_is_not_up_is_named_with_the_fix(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusal
) -> None:
    monkeypatch.setenv("PATH", f"{fake_slurm(tmp_path, 'exit 0')}:{os.environ['PATH']}")
    monkeypatch.setenv("HPCRL_LAB", str(tmp_path / "no-lab"))
    assert "hpcrl lab up" in refused("submit", "quickstart", "--site", "lab")
    assert nothing_left(home)


def test_a_controller_that_is_down_is_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    monkeypatch.setenv("PATH", f"{fake_slurm(tmp_path, script)}:{os.environ['PATH']}")
    message = refused_without_answer(tmp_path)
    assert "the controller is down" in message
    assert nothing_left(home)


def test_a_slurm_that_does_not_answer_times_out(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake_slurm(tmp_path, 'exec sleep 1000')}:{os.environ['PATH']}")
    monkeypatch.setenv("HPCRL_SLURM_TIMEOUT_S", "0.3")
    message = refused_without_answer(tmp_path)
    assert "did not answer" in message
    assert nothing_left(home)


def refused_without_answer(tmp_path: Path) -> str:
    """Return why a submission is refused that Slurm does not answer; the job is looked for in quick succession."""
    command = [sys.executable, "-c", LOOK_OFTEN, "submit", "quickstart", "--site", "perlmutter"]
    settings = ("-s", "site.account=m1", *here(tmp_path))
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=120, check=False)
    return check_refusal(done.returncode, done.stdout, done.stderr)


def here(tmp_path: Path) -> tuple[str, ...]:
    return ("-s", f"site.campaigns_dir={tmp_path / 'scratch'}")


def fake_slurm(tmp_path: Path, script: str) -> Path:
    """Create Slurm's commands as programs that run `script`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(stat.S_IRWXU)
    return folder


def test_the_environment_of_sbatch_is_clean_and_the_job_id_is_recorded(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"env > {tmp_path}/env; echo 'Submitted batch job 4711'"
    monkeypatch.setenv("PATH", f"{fake_slurm(tmp_path, script)}:{os.environ['PATH']}")
    monkeypatch.setenv("SBATCH_PARTITION", "stray")
    output = hpcrl("submit", "quickstart", "--site", "perlmutter", "-s", "site.account=m1", *here(tmp_path)).stdout
    assert "job 4711" in output
    assert "SBATCH_PARTITION" not in (tmp_path / "env").read_text()
    record = json.loads((home / "campaigns" / "quickstart-1" / "jobs" / "000" / "submitted.json").read_text())
    assert record["id"] == "4711"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom hpcrl.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_plan_as_json_is_deterministic(home: Path) -> None:
    first, second = (hpcrl("plan", "quickstart", "--site", "lab", "--json").stdout for _ in range(2))
    assert first == second
    assert json.loads(first)["layout"] == "hetjob"


def test_a_plan_for_people_shows_roles_cost_and_script(home: Path) -> None:
    output = hpcrl("plan", "quickstart", "--site", "lab").stdout
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.strip()}
    assert " ".join(rows["role"]) == "component partition nodes workers GPUs each cores each GiB each"
    assert rows["decode"] == ["2", "decode", "1", "1", "1", "h20", "1", "4"]
    assert rows["reward"] == ["0", "env", "1", "1", "-", "1", "1"]
    for part in ("hetjob: site lab", "1.33 node-hours and 1 GPU-hours", "#SBATCH hetjob"):
        assert part in output


def test_an_existing_name_is_refused(home: Path, refused: Refusal) -> None:
    (home / "campaigns" / "mine").mkdir(parents=True)
    assert "campaign 'mine' exists already" in refused("submit", "quickstart", "--site", "local", "--name", "mine")


def test_without_campaigns_ls_reports_that_there_are_none(home: Path) -> None:
    assert "no campaigns yet" in hpcrl("ls").stdout
    assert json.loads(hpcrl("ls", "--json").stdout) == []


def test_the_users_own_code_is_found_in_the_job_as_it_was_at_submission(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "my code"
    code.mkdir()
    (code / "mine.py").write_text("from hpcrl.envs.gymnasium_text import FrozenLake\n")
    monkeypatch.setenv("PATH", f"{fake_slurm(tmp_path, 'echo Submitted batch job 1')}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(code))
    own = ("-s", "site.account=m1", "-s", "domains.lake.env=mine:FrozenLake", *here(tmp_path))
    hpcrl("submit", "quickstart", "--site", "perlmutter", *own)
    script = next((home / "campaigns" / "quickstart-1" / "jobs" / "000").glob("*_submission.sh"))
    assert f"export PYTHONPATH='{code}'" in script.read_text()


ROWS_RECIPE = """
name = "rows"
extends = "quickstart"
[domains.lake]
env = "tests.support.row_envs:{env}"
tasks = "rows.jsonl"
"""


@pytest.mark.parametrize(
    ("env", "line", "expected"),
    [
        ("RowQuestion", '{"question": "1+1", "answer":', "rows.jsonl', line 2 is not a JSON object"),
        ("OnlySeeds", '{"question": "1+1", "answer": "2"}', "OnlySeeds cannot be given the rows of a task set"),
        ("Checked", '{"question": "1+1", "reply": "2"}', "line 2: Question: the row has no field 'answer'; it has"),
    ],
)
def test_a_task_set_that_cannot_be_used_is_refused(
    home: Path, tmp_path: Path, env: str, line: str, expected: str, refused: Refusal
) -> None:
    """The file is found beside the recipe."""
    (tmp_path / "rows.toml").write_text(ROWS_RECIPE.format(env=env))
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' + line + "\n")
    for command in (("submit", "--dry-run"), ("plan",)):
        message = refused(*command, str(tmp_path / "rows.toml"), "--site", "local")
        assert expected in message
        assert len(message.splitlines()) == 1
    assert nothing_left(home)


@pytest.mark.parametrize("command", ["plan", "submit"])
def test_a_program_that_cannot_work_is_refused_with_its_option(home: Path, command: str, refused: Refusal) -> None:
    setting = "domains.sums.options.command=['minni']"
    message = refused(command, "agent", "--site", "local", "-s", setting)
    assert "recipe 'agent': domains.sums.options.command = ['minni', ...]: no such program on PATH" in message
    assert len(message.splitlines()) == 1


def test_what_nodes_may_have_is_a_note(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake_slurm(tmp_path, 'exit 0')}:{os.environ['PATH']}")
    settings = ("-s", "site.account=m1", "-s", "domains.sums.options.command=['minni']", *here(tmp_path))
    planned = hpcrl("plan", "agent", "--site", "perlmutter", *settings)  # its prologue may set PATH
    assert "agent on perlmutter" in planned.stdout
    (line,) = planned.stderr.splitlines()
    assert line.startswith("hpcrl: note: domains.sums.options.command = ['minni', ...]: no such program on PATH")
    assert "a node may have it" in line


def test_a_plan_elsewhere_names_what_it_did_not_check(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    planned = hpcrl("plan", "code-repair", "--site", "perlmutter", "-s", "site.account=m1")
    assert "this machine has no Slurm, so it is not a login node of perlmutter" in planned.stderr


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_name_that_cannot_be_that_of_a_new_campaign_is_refused(
    home: Path, more: tuple[str, ...], refused: Refusal
) -> None:
    submission = ("submit", "quickstart", "--site", "local", *more)
    assert "letters, digits" in refused(*submission, "--name", "a name/..")
    (home / "campaigns" / "taken").mkdir(parents=True)
    assert "campaign 'taken' exists already" in refused(*submission, "--name", "taken")


@pytest.mark.parametrize("root", ["/proc/nope", "/dev/null"])
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_directory_of_campaigns_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, root: str, more: tuple[str, ...], refused: Refusal
) -> None:
    monkeypatch.setenv("HPCRL_HOME", root)
    message = refused("submit", "quickstart", "--site", "local", *more)
    assert f"campaigns cannot be stored in {root}/campaigns" in message
    assert "set $HPCRL_HOME" in message


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("Qwen/Qwen3-4B", "`hpcrl stage quickstart --site local -s model.path=Qwen/Qwen3-4B`"),
        ("Qwen/Qwen3-8B", "needs 41 GiB for 8.2 billion weights in float32"),
        ("model/config.json", "it is a file: give its directory"),
        ("/no/such/place", "it has no config.json, and does not exist"),
    ],
)
def test_a_path_without_a_model_directory_is_refused_with_what_it_is(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: str, refused: Refusal
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert expected in refused("submit", "quickstart", "--site", "local", "-s", f"model.path={path}")


@pytest.mark.parametrize(
    "words", [("plan", "quickstart", "--site", "lab"), ("ls",), ("site", "show", "lab"), ("schema", "ls")]
)
def test_a_reader_that_closes_the_output_early_is_not_an_error(home: Path, words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hpcrl.cli", *words]
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=usual)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free space, or raise the quota (`hpcrl gc`"),
        (errno.EDQUOT, "free space, or raise the quota (`hpcrl gc`"),
        (errno.EROFS, "takes no changes now"),
        (errno.ESTALE, "repeat the command when it works again"),
        (errno.EACCES, "you may not write there now: `ls -ld` shows who may"),
    ],
)
def test_a_command_on_a_file_system_that_fails_is_refused_with_the_cure(
    refused: Refusal, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), str(home))

    monkeypatch.setattr(submission, "write_records", fail)
    message = refused("submit", "quickstart", "--site", "local")
    assert message.startswith(f"hpcrl: {os.strerror(number)} ({home}): ")
    assert advice in message
    assert nothing_left(home)
