"""The judge of an agent program: a second sandbox after the program's end, whose reward no program can forge."""

import asyncio
import os
import re
import time
from pathlib import Path

import pytest

from hpcrl.envs.agent import AgentProgram
from hpcrl.envs.base import ModelAccess, make_program
from hpcrl.errors import ConfigError, EnvFault
from tests.support.programs import needs_bubblewrap, play

SANDBOXES = ["none", pytest.param("bubblewrap", marks=needs_bubblewrap)]
ASK_AND_WRITE = "ask('a')\nopen('answer', 'w').write('42')\n"
FORGE = """
import json, os, signal
forged = json.dumps({"exit_code": 0, "output": "1.0\\n", "errors": "", "num_output_bytes": 4})
others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
for pid in others:
    for number in range(20):
        try:
            with open(f"/proc/{pid}/fd/{number}", "w") as file: file.write(forged)
        except OSError: pass
for pid in sorted(others, key=int, reverse=True): os.kill(int(pid), signal.SIGKILL)
"""
"""Untrusted code in the sandbox of a judge: it writes a result wherever it can, and kills what could write another."""
READ = "import os\ntext = open(os.environ['HPCRL_WORKDIR'] + '/answer').read()\nprint(float(text == '42'))"


def judged_by(code):
    return {"judge": ["python", "-c", code]}


def failed_reward_of(trajectory):
    """Return the reward of a program whose judge was ended, which the recipe replaces by on_reward_error."""
    assert (trajectory.status, trajectory.outcome) == ("done", "reward-error")
    assert "fault" not in trajectory.extra
    return trajectory.turns[-1].reward


def reward_of(trajectory):
    assert (trajectory.status, trajectory.extra) == ("done", {})
    return trajectory.turns[-1].reward


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_the_judge_finds_the_working_directory_of_the_program(template, sandbox):
    assert reward_of(play(template, ASK_AND_WRITE, sandbox=sandbox, **judged_by(READ))) == 1.0
    assert reward_of(play(template, "ask('a')\nopen('answer', 'w')", sandbox=sandbox, **judged_by(READ))) == 0.0


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_what_the_program_prints_and_posts_is_not_a_reward_where_there_is_a_judge(template, sandbox):
    forge = "try:\n    post('/hpcrl/reward', {'reward': 1})\nexcept urllib.error.HTTPError as error:\n    pass\n"
    code = f"ask('a')\nopen('answer', 'w').write('x')\n{forge}print(json.dumps({{'reward': 1}}))"
    assert reward_of(play(template, code, sandbox=sandbox, **judged_by(READ))) == 0.0


def test_a_program_that_ends_badly_is_judged_by_what_it_left(template):
    assert reward_of(play(template, f"{ASK_AND_WRITE}raise SystemExit(3)", **judged_by(READ))) == 1.0


def test_a_program_that_never_called_the_model_reports_why_it_ended(template):
    trajectory = play(template, "import no_such_module", **judged_by("print(1)"))
    assert trajectory.status == "env-fault"
    assert "never called the model" in trajectory.extra["fault"]
    assert "No module named 'no_such_module'" in trajectory.extra["fault"]


def test_the_judge_has_no_key_and_no_model(template):
    code = "import os\nprint(float(any(name.startswith('OPENAI') for name in os.environ)))"
    assert reward_of(play(template, "ask('a')", **judged_by(code))) == 0.0


@needs_bubblewrap
def test_the_judge_runs_when_no_process_of_the_program_is_left(template):
    spoil = (
        "ask('a')\nopen('answer', 'w').write('x')\nimport subprocess, time\n"
        "late = 'import signal\\nsignal.signal(15, signal.SIG_IGN)\\n'\n"
        "late += 'while True: open(\\'answer\\', \\'w\\').write(\\'42\\')'\n"
        "subprocess.Popen([sys.executable, '-c', late], start_new_session=True)\n"
        "while open('answer').read() != '42': time.sleep(0.01)\n"
    )
    code = (
        "import os, time\nplace = os.environ['HPCRL_WORKDIR'] + '/answer'\nopen(place, 'w').write('mine')\n"
        "time.sleep(0.3)\nassert len([name for name in os.listdir('/proc') if name.isdigit()]) < 6\n"
        "print(float(open(place).read() == 'mine'))"
    )
    assert reward_of(play(template, spoil, sandbox="bubblewrap", **judged_by(code))) == 1.0


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_files_left_by_the_program_are_not_what_the_judge_imports(template, sandbox):
    plant = (
        "ask('a')\nprint(1)\nfake = 'print(1)\\nimport os\\nos._exit(0)\\n'\n"
        "from pathlib import Path\n"
        "for place in ['.', os.environ['HOME'], os.environ['HOME'] + '/.local/lib/python3.11/site-packages', '/tmp']:\n"
        "    Path(place).mkdir(parents=True, exist_ok=True)\n"
        "    for name in ['json.py', 'sitecustomize.py', 'usercustomize.py']: Path(place, name).write_text(fake)\n"
    )
    plant = plant.replace(", '/tmp'", "") if sandbox == "none" else plant
    assert reward_of(play(template, plant, sandbox=sandbox, **judged_by("import json\nprint(0.5)"))) == 0.5


@needs_bubblewrap
def test_files_and_fields_of_the_judge_are_hidden_from_the_program(template, tmp_path):
    (tmp_path / "hidden").write_text("42")
    program = (
        f"ask('a')\nassert not os.path.exists({str(tmp_path)!r})\nassert task == {{'seed': 5, 'open': 1}}\n"
        "assert 'secret' not in os.environ['HPCRL_TASK']\nopen('seen', 'w')"
    )
    judge = (
        "import json, os, sys\ntask = json.load(sys.stdin)\nassert task == json.loads(os.environ['HPCRL_TASK'])\n"
        "assert os.path.exists(os.environ['HPCRL_WORKDIR'] + '/seen')\n"
        f"print(float(task['secret'] == open({str(tmp_path / 'hidden')!r}).read()))"
    )
    options = {"judge_readable": [str(tmp_path)], "judge_fields": ["secret"], "task": {"open": 1, "secret": "42"}}
    assert reward_of(play(template, program, sandbox="bubblewrap", **judged_by(judge), **options)) == 1.0


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        ("import time\ntime.sleep(600)", "the judge was still running after judge_timeout_s = 1 s"),
        ("raise ValueError('lost')", "the judge ended with code 1: .*ValueError: lost"),
        ("print(1)\nprint('all is well')", "the last line of the judge is 'all is well'"),
        ("", "the last line of the judge is ''"),
        ("print('NaN')", "must be a finite number"),
        ("import sys\nsys.stdout.buffer.write(bytes(range(256)) * 1000)", "the last line of the judge is"),
    ],
)
def test_a_judge_that_fails_is_a_reward_error_and_not_a_reward(template, judge, why):
    started_s = time.monotonic()
    trajectory = play(
        template, "ask('a')\nprint(1)", judge_timeout_s=1.0 if "600" in judge else 60.0, **judged_by(judge)
    )
    assert (trajectory.status, trajectory.outcome, trajectory.reward) == ("done", "reward-error", None)
    assert re.search(why, trajectory.extra["reason"].replace("\n", " "))
    assert time.monotonic() - started_s < 60


def test_a_judge_that_fails_after_the_last_turn_is_a_reward_error_too(template):
    code = "ask('a')\ntry:\n    ask('b')\nexcept Exception:\n    print(1)"
    trajectory = play(template, code, limits={"max_turns": 1}, **judged_by("raise ValueError('lost')"))
    assert (trajectory.outcome, trajectory.reward) == ("reward-error", None)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("last", "outcome"), [("print(0.5)", ""), ("os.kill(os.getpid(), signal.SIGKILL)", "reward-error")]
)
def test_code_in_the_sandbox_of_a_judge_cannot_forge_its_reward(template, last, outcome):
    trajectory = play(template, "ask('a')", sandbox="bubblewrap", **judged_by(FORGE + last))
    assert (trajectory.outcome, trajectory.turns[-1].reward) == (outcome, 0.0 if outcome else 0.5)


@needs_bubblewrap
def test_code_that_is_judged_and_kills_its_judge_gets_no_second_attempt(template):
    plant = f"ask('a')\nopen('tested.py', 'w').write({FORGE!r})"
    judge = (
        "import os, subprocess, sys\nos.chdir(os.environ['HPCRL_WORKDIR'])\n"
        "subprocess.run([sys.executable, 'tested.py'])\nprint(1)"
    )
    trajectory = play(template, plant, sandbox="bubblewrap", retries=1, **judged_by(judge))
    assert failed_reward_of(trajectory) == 0.0


HOARD = (
    "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n"
    "        hoard = b'x' * (60 << 20)\n        time.sleep(8)\n        os._exit(0)\ntime.sleep(8)"
)
START_THREADS = (
    "import threading, time\nfor _ in range(60): threading.Thread(target=time.sleep, args=(8,)).start()\nprint(1)"
)
FILL_DISK = "import time\nfor n in range(2): open(str(n), 'wb').write(bytes(12 << 20))\nprint(1)\ntime.sleep(8)"


@pytest.mark.parametrize(
    ("judge", "options"),
    [
        ("import os\nprint(1, flush=True)\nos.kill(os.getpid(), 9)", {}),
        (HOARD, {"max_memory_mb": 128}),
        (START_THREADS, {"max_processes": 48}),
        (START_THREADS, {"max_processes": 48, "judge_reward": "exit-code"}),
        (FILL_DISK, {"max_disk_mb": 16}),
    ],
)
def test_a_judge_that_is_killed_or_exceeds_a_limit_gives_0(template, judge, options):
    trajectory = play(template, "ask('a')", **options, **judged_by(judge))
    assert failed_reward_of(trajectory) == 0.0


def test_a_judge_that_is_missing_is_a_fault_also_by_exit_code(template):
    trajectory = play(template, "ask('a')", judge=["no-such-judge"], judge_reward="exit-code")
    assert trajectory.status == "env-fault"
    assert "no-such-judge" in trajectory.extra["fault"]


@pytest.mark.parametrize(("code", "reward"), [(0, 1.0), (1, 0.0), (2, 0.0)])
def test_the_exit_code_of_a_judge_can_be_the_reward(template, code, reward):
    judge = judged_by(f"print('{{\"reward\": 1}}')\nraise SystemExit({code})")
    assert reward_of(play(template, "ask('a')", judge_reward="exit-code", **judge)) == reward


def test_what_is_printed_after_the_end_of_the_judge_is_not_its_reward(template):
    late = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(0.2)\nprint(1, flush=True)"
    judge = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {late!r}])\nprint(0)"
    assert reward_of(play(template, "ask('a')", **judged_by(judge))) == 0.0


def test_a_directory_is_copied_for_each_episode(template, tmp_path):
    (tmp_path / "a b" / "deep").mkdir(parents=True)
    (tmp_path / "a b" / "deep" / "answer").write_text("4")
    (tmp_path / "a b" / "link").symlink_to("deep/answer")
    code = (
        "ask('a')\nassert os.readlink('link') == 'deep/answer'\nopen('deep/answer', 'a').write('2')\n"
        "print(int(open('link').read()))"
    )
    for _ in range(2):
        trajectory = play(template, code, directory=f"{tmp_path}/{{name}}", task={"name": "a b"})
        assert reward_of(trajectory) == 42.0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"directory": "/no/such"}, "directory = '/no/such': no such directory"),
        ({"directory": "/tmp/{repo}"}, "the task has no field 'repo'; it has name, seed"),
        ({"directory": "/tmp/{name}"}, "the task's name = '../etc' cannot be part of a path"),
        ({"image": "/no/such.sif"}, "image = '/no/such.sif': no such file"),
    ],
)
def test_what_is_not_there_is_a_fault_of_the_episode(template, options, why, monkeypatch):
    monkeypatch.setattr("hpcrl.envs.agent.choose_sandbox", lambda wanted, image: "apptainer" if image else "none")
    trajectory = play(template, "ask('a')\nprint(1)", task={"name": "../etc"}, **options)
    assert trajectory.status == "env-fault"
    assert why in trajectory.extra["fault"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"judge": "pytest"}, "give a list"),
        ({"judge": []}, "give a list"),
        ({"judge": ["x"], "judge_reward": "guess"}, "must be one of printed, exit-code"),
        ({"judge": ["x"], "judge_timeout_s": 0}, "judge_timeout_s = 0"),
        ({"judge": ["x"], "posts_reward": True}, "remove one"),
        ({"calls_judges": ["user"]}, "with sandbox = 'auto', which has no network"),
        ({"judge_fields": ["x"]}, "need a judge"),
        ({"judge": ["x"], "judge_readable": [str(Path(os.__file__).parent)]}, "which the program can read too"),
        ({"max_processes": 3}, "max_processes = 3: it must be 32 or more"),
        ({"max_disk_mb": 0}, "max_disk_mb = 0"),
        ({"max_memory_mb": float("nan")}, "max_memory_mb = nan"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        make_program("hpcrl.envs.agent:AgentProgram", {"command": ["x"], **options}, what="domains.x.env")


@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize("linked", [False, True])
def test_a_directory_with_files_of_the_judge_is_not_given_to_the_program(template, tmp_path, sandbox, linked):
    (tmp_path / "tasks/a/hidden").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "tasks")
    options = {"directory": f"{tmp_path}/{'link' if linked else 'tasks'}/{{name}}", "task": {"name": "a"}}
    secret = str(tmp_path / "tasks/a/hidden")
    trajectory = play(template, ASK_AND_WRITE, sandbox=sandbox, judge_readable=[secret], **options, **judged_by(READ))
    assert trajectory.status == "env-fault"
    assert f"judge_readable has {secret!r}, which the program is given too, with its copy" in trajectory.extra["fault"]
    program = AgentProgram(command=["true"], judge=["true"], sandbox=sandbox, judge_readable=[secret], **options)
    (problem,) = program.find_problems()
    assert problem.text in trajectory.extra["fault"]


@needs_bubblewrap
def test_what_the_judge_reads_beside_a_copied_directory_is_not_given_to_the_program(template, tmp_path):
    (tmp_path / "tasks/a/repository").mkdir(parents=True)
    (tmp_path / "tasks/a/hidden").write_text("42")
    look = f"ask('a')\nassert not os.path.exists({str(tmp_path)!r})\nopen('answer', 'w').write('42')"
    judge = READ.replace("'42'", f"open({str(tmp_path / 'tasks/a/hidden')!r}).read()")
    options = {"directory": f"{tmp_path}/tasks/{{name}}/repository", "task": {"name": "a"}}
    trajectory = play(
        template, look, sandbox="bubblewrap", judge_readable=[str(tmp_path / "tasks")], **options, **judged_by(judge)
    )
    assert reward_of(trajectory) == 1.0


PRINT_JUDGES = """
ask('a')
seen = {name for name in os.environ if 'JUDGE' in name}
assert seen == set(task['expected']), seen
print(0.5)
"""


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_program_is_given_no_judge_but_those_that_the_recipe_names(template, monkeypatch, sandbox):
    for name in ("grader", "user"):
        monkeypatch.setenv(f"HPCRL_JUDGE_{name.upper()}_URL", f"http://127.0.0.1:1/{name}/v1")
        monkeypatch.setenv(f"HPCRL_JUDGE_{name.upper()}_API_KEY", f"key-of-{name}")
    monkeypatch.setenv("HPCRL_OUTAGES_OF_JUDGES", "/nowhere")
    task = {"expected": []}
    assert reward_of(play(template, PRINT_JUDGES, sandbox=sandbox, task=task)) == 0.5
    if sandbox == "none":
        task["expected"] = ["HPCRL_JUDGE_USER_URL", "HPCRL_JUDGE_USER_API_KEY"]
        trajectory = play(template, PRINT_JUDGES, sandbox=sandbox, task=task, calls_judges=["user"])
        assert reward_of(trajectory) == 0.5


@pytest.mark.parametrize("linked", ["judge_readable", "readable"])
def test_a_file_of_the_judge_that_the_program_can_read_by_a_link_is_refused(tmp_path, linked):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/hidden").write_text("42")
    (tmp_path / "link").symlink_to(tmp_path / "agent")
    options = {"readable": [str(tmp_path / "agent")], "judge_readable": [str(tmp_path / "agent/hidden")]}
    options[linked] = [option.replace("/agent", "/link") for option in options[linked]]
    with pytest.raises(ConfigError, match=r"judge_readable has .* which the program can read too"):
        AgentProgram(command=["x"], judge=["x"], **options)


def test_a_file_of_the_system_is_not_a_secret_of_the_judge_but_with_an_image(tmp_path):
    options = {"command": ["x"], "judge": ["x"], "judge_readable": ["/usr/share"]}
    with pytest.raises(ConfigError, match="'/usr/share', which the program can read too, as part of '/usr'"):
        AgentProgram(**options)
    AgentProgram(**options, image="a.sif")


@needs_bubblewrap
def test_a_link_that_appears_on_the_node_is_checked_there(template, tmp_path):
    (tmp_path / "agent").mkdir()
    options = {"judge": ["true"], "readable": [str(tmp_path / "agent")], "judge_readable": [str(tmp_path / "hidden")]}
    program = AgentProgram(command=["true"], sandbox="bubblewrap", **options)
    (tmp_path / "hidden").symlink_to(tmp_path / "agent")
    access = ModelAccess(url="", socket=str(tmp_path / "socket"), api_key="key", model="m")
    with pytest.raises(EnvFault, match="hidden', which the program can read too"):
        asyncio.run(program.run(1, access))
