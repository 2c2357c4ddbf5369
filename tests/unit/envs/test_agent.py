"""An agent program as an environment: real processes, in a sandbox where there is one, against a scripted model."""

import asyncio
import os
import re
import sys
import time
from dataclasses import replace

import pytest

from hpcrl.config.program import AGENT_PROGRAM, RENAMED_OPTIONS
from hpcrl.config.recipe import DomainConfig
from hpcrl.envs.agent import AgentProgram, find_reward
from hpcrl.envs.base import is_program_domain, make_program
from hpcrl.envs.isolation.sandbox import SandboxSpec, choose_sandbox, wrap_command
from hpcrl.envs.program_options import _TYPE_WORDS, _list_option_types
from hpcrl.errors import ConfigError, EngineError, EnvFault, PolicyFailure
from hpcrl.models import chat_template, jinja_template
from hpcrl.models.jinja_template import compile_template
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.system.processes import is_alive, read_start_ticks
from tests.support.programs import ASK, OneWordModel, needs_bubblewrap, play


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def test_a_program_is_an_episode(template, sandbox):
    code = "assert task == {'seed': 5, 'level': 3}\nask('1+1=?')\nprint('thinking')\nprint(json.dumps({'reward': 0.5}))"
    trajectory = play(template, code, sandbox=sandbox, task={"level": 3})
    assert (trajectory.status, trajectory.extra) == ("done", {})
    assert "".join(map(template.decode_token, trajectory.token_ids.tolist())) == "<user>1+1=?<agent>=2<eos>"
    assert [turn.reward for turn in trajectory.turns] == [0.5]
    assert (trajectory.id, trajectory.group, trajectory.seed) == ("sums/1/0", "sums/1", 5)


def test_a_reward_can_be_posted_with_the_key_that_is_read_once(template):
    code = (
        "ask('a')\nkey = os.read(int(os.environ['HPCRL_REWARD_KEY_FD']), 100).decode()\n"
        "assert not os.read(int(os.environ['HPCRL_REWARD_KEY_FD']), 100)\n"
        "os.environ['OPENAI_API_KEY'] = key\npost('/hpcrl/reward', {'reward': 0.25})\nprint('bye')"
    )
    trajectory = play(template, code, posts_reward=True)
    assert (trajectory.extra, trajectory.status, trajectory.turns[-1].reward) == ({}, "done", 0.25)


def test_the_key_of_the_model_posts_no_reward(template):
    code = (
        "ask('a')\nassert 'HPCRL_REWARD_KEY_FD' not in os.environ\n"
        "try:\n    post('/hpcrl/reward', {'reward': 1})\n"
        "except urllib.error.HTTPError as error:\n    assert error.code == 403 and b'posts_reward' in error.read()\n"
        "    print(0.0)"
    )
    trajectory = play(template, code)
    assert (trajectory.extra, trajectory.status, trajectory.turns[-1].reward) == ({}, "done", 0.0)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("ask('a')\nprint('{\"reward\": 1}')\nraise SystemExit(3)", "code 3"),
        ("ask('a')\nraise ValueError('lost')", "ValueError: lost"),
        ("ask('a')\nprint('done')", "neither printed nor posted a reward"),
        ("ask('a')\nprint('\"1.0\"')", "neither printed nor posted a reward"),
        ("ask('a')\nprint('[1, 2]')", "neither printed nor posted a reward"),
        ("ask('a')\nos.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
)
def test_a_program_that_fails_after_a_turn_has_the_outcome_exit(template, code, why):
    trajectory = play(template, code, retries=1)
    assert (trajectory.status, trajectory.outcome) == ("done", "exit")
    assert why in trajectory.extra["reason"]
    assert [turn.reward for turn in trajectory.turns] == [0.0]
    trajectory = play(template, code, limits={"faults": frozenset({"exit"})})
    assert (trajectory.status, trajectory.outcome) == ("env-fault", "")
    assert why in trajectory.extra["fault"]


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "1" + "0" * 400])
def test_a_reward_that_is_not_a_finite_number_is_a_reward_error(template, reward):
    trajectory = play(
        template, f"ask('a')\nprint('{{{{\"reward\": {reward}}}}}')".replace("{{", "{").replace("}}", "}")
    )
    assert (trajectory.status, trajectory.outcome) == ("done", "reward-error")
    assert "finite number" in trajectory.extra["reason"]


@pytest.mark.parametrize("code", ["print(1.0)", "raise SystemExit(3)"])
def test_a_program_that_never_calls_the_model_is_a_fault_and_never_scored(template, code):
    trajectory = play(template, code)
    assert (trajectory.status, trajectory.outcome, trajectory.reward) == ("env-fault", "", None)


@pytest.mark.parametrize(
    ("text", "limits", "outcome"),
    [("b", {"max_turns": 1}, "max-turns"), ("b" * 80, {}, "overflow")],
)
def test_a_program_that_fails_when_it_is_asked_to_end_has_reached_that_limit(template, text, limits, outcome):
    trajectory = play(template, f"ask('a')\nask('{text}')", limits=limits)
    assert (trajectory.status, trajectory.outcome, len(trajectory.turns)) == ("truncated", outcome, 1)


REFUSED = """
def ask_refused(text):
    try:
        ask(text)
    except urllib.error.HTTPError as error:
        assert error.code == 400
"""


def test_a_program_that_runs_too_long_after_a_refused_call_has_the_outcome_of_its_time(template):
    code = f"{REFUSED}ask('a')\nask_refused('{'b' * 80}')\nimport time\ntime.sleep(600)"
    trajectory = play(template, code, timeout_s=3.0)
    assert (trajectory.status, trajectory.outcome) == ("truncated", "timeout")


SPINS = (
    "{% for m in messages %}{% if 'spin' in m.content %}{% for i in range(100000) %}{% for j in range(100000) %}"
    "{% endfor %}{% endfor %}{% endif %}{% if 'grow' in m.content %}{% for i in range(90000) %}abcdefghij{% endfor %}"
    "{% endif %}{% endfor %}"
)


def test_a_conversation_for_which_the_template_loops_is_a_fault_of_its_episode(template, monkeypatch):
    monkeypatch.setattr(jinja_template, "MAX_RENDER_S", 0.2)
    monkeypatch.setattr(jinja_template, "RENDER_WATCH_INTERVAL_S", 0.02)
    looping = replace(template, compiled=compile_template(SPINS + template.text, source=template.source))
    trajectory = play(looping, f"{REFUSED}ask('a')\nask_refused('spin')\nprint(1)", retries=5)
    assert (trajectory.status, trajectory.extra["attempts"]) == ("env-fault", 1)
    assert "its chat template did not render a conversation in 0.2 s" in trajectory.extra["fault"]
    assert play(looping, "ask('a')\nprint(1)").turns[-1].reward == 1.0


def test_a_prompt_that_the_template_makes_too_long_is_refused_before_it_is_tokenised(template, monkeypatch):
    compiled = compile_template(SPINS + template.text, source=template.source)
    growing = replace(template, compiled=compiled, remembered_ids={})  # other tests have tokenised the same texts
    sizes, tokenize = [], chat_template.tokenize_text

    def note_size(tokenizer, text):
        sizes.append(len(text))
        return tokenize(tokenizer, text)

    monkeypatch.setattr(chat_template, "tokenize_text", note_size)
    trajectory = play(growing, f"{REFUSED}ask('a')\nask_refused('grow')\nprint(1)")
    assert (trajectory.status, trajectory.outcome) == ("truncated", "overflow")
    assert max(sizes) < 1000


def test_a_program_that_shortens_its_conversation_keeps_its_reward(template):
    trajectory = play(template, f"{REFUSED}ask('a')\nask_refused('{'b' * 80}')\nask('b')\nprint(0.5)")
    assert (trajectory.status, trajectory.outcome, trajectory.extra) == ("done", "", {})
    assert trajectory.turns[-1].reward == 0.5


def test_a_program_whose_calls_were_all_refused_is_a_fault_with_the_reason(template):
    code = f"{REFUSED}for _ in range(9):\n    ask_refused('{'b' * 80}')\nprint(0.5)"
    trajectory = play(template, code, limits={"max_turns": 1})
    assert (trajectory.status, trajectory.outcome) == ("env-fault", "")
    assert "the model answered no call of the program" in trajectory.extra["fault"]
    assert "maximum context length is 64" in trajectory.extra["fault"]


def test_a_program_that_cannot_be_found_is_a_fault(template):
    async def run():
        program = AgentProgram(command=["no-such-program"], sandbox="none")
        async with ModelProxy(OneWordModel(template), template=template) as proxy:
            await program.run(1, proxy.model_access("t"))

    with pytest.raises(EnvFault, match="no-such-program"):
        asyncio.run(run())


def test_a_program_that_hangs_is_ended_with_all_its_children(template, tmp_path):
    mark = tmp_path / "pids"
    code = (
        "ask('a')\nimport subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(mark)!r}, 'w').write(f'{{child.pid}} {{os.getpid()}}')\ntime.sleep(600)"
    )
    trajectory = play(template, code, timeout_s=3.0)
    assert (trajectory.status, trajectory.outcome) == ("truncated", "timeout")
    assert "timeout_s = 3 s" in trajectory.extra["reason"]
    for pid in map(int, mark.read_text().split()):
        assert not is_alive(pid, read_start_ticks(pid))


def test_children_left_behind_are_ended(template, tmp_path):
    mark = tmp_path / "pid"
    code = (
        "ask('a')\nimport subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(mark)!r}, 'w').write(str(child.pid))\nprint(1)"
    )
    assert play(template, code).status == "done"
    assert not is_alive(int(mark.read_text()), read_start_ticks(int(mark.read_text())))


def test_more_output_than_fits_in_memory_does_no_harm(template):
    code = "ask('a')\nfor _ in range(320): sys.stdout.write('x' * (1 << 20))\nprint()\nprint(1)"
    trajectory = play(template, code, max_memory_mb=256)
    assert (trajectory.status, trajectory.turns[-1].reward) == ("done", 1.0)


def test_memory_is_limited(template):
    trajectory = play(template, "ask('a')\nhoard = bytearray(1 << 30)\nprint(1)", max_memory_mb=256)
    assert trajectory.outcome == "exit"
    assert "MemoryError" in trajectory.extra["reason"]


def test_an_engine_that_fails_a_program_is_a_policy_fault(template):
    trajectory = play(template, "ask('a')\nprint(1)", error=EngineError("no decode worker"))
    assert (trajectory.status, trajectory.extra["fault"]) == ("policy-fault", "no decode worker")


def test_a_stale_episode_ends_its_program(template):
    asked = iter([0, 0, 0, 2])
    started_s = time.monotonic()
    trajectory = play(template, "ask('a')\nimport time\ntime.sleep(600)", newest=lambda: next(asked, 2))
    assert trajectory.status == "aborted-stale"
    assert len(trajectory.turns) == 1
    assert time.monotonic() - started_s < 200


def test_a_program_that_used_up_its_turns_is_truncated(template):
    code = "ask('a')\ntry:\n    ask('b')\nexcept Exception:\n    print(0.5)"
    assert play(template, code, limits={"max_turns": 1}).status == "truncated"


def test_a_fault_restarts_the_program(template, tmp_path):
    mark = tmp_path / "been"
    first = f"if not os.path.exists({str(mark)!r}):\n    open({str(mark)!r}, 'w')\n    raise SystemExit(1)\n"
    trajectory = play(template, f"{first}ask('a')\nprint(1)", retries=1)
    assert (trajectory.status, trajectory.extra["attempts"], len(trajectory.turns)) == ("done", 2, 1)


def test_cancelling_ends_the_program(template, tmp_path):
    mark = tmp_path / "pid"
    code = f"open({str(mark)!r}, 'w').write(str(os.getpid()))\nimport time\ntime.sleep(600)"

    async def run():
        async with ModelProxy(OneWordModel(template), template=template) as proxy:
            program = AgentProgram(command=["python", "-c", ASK + code], sandbox="none")
            running = asyncio.create_task(program.run(1, proxy.model_access("t")))
            async with asyncio.timeout(120):
                while not mark.exists() or not mark.read_text():
                    await asyncio.sleep(0.05)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(run())
    assert not is_alive(int(mark.read_text()), read_start_ticks(int(mark.read_text())))


@needs_bubblewrap
def test_a_sandbox_hides_files_processes_network_and_environment(template, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("x")
    monkeypatch.setenv("MY_SECRET", "x")
    code = (
        "import socket\nask('a')\n"
        f"seen = [os.path.exists({str(secret)!r}), os.path.exists('/proc/{os.getpid()}/cmdline') and "
        f"b'pytest' in open('/proc/{os.getpid()}/cmdline', 'rb').read(), 'MY_SECRET' in os.environ,\n"
        "    [name for _, name in socket.if_nameindex()] != ['lo']]\n"
        "try:\n    open('/usr/x', 'w')\nexcept OSError:\n    pass\nelse:\n    seen.append(True)\n"
        "open('here', 'w').write('own')\nprint(float(any(seen)))"
    )
    trajectory = play(template, code, sandbox="bubblewrap")
    assert (trajectory.status, trajectory.extra) == ("done", {})
    assert trajectory.turns[-1].reward == 0.0


def test_code_without_a_sandbox_runs_only_if_that_is_allowed(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("hpcrl.envs.isolation.sandbox._find_bubblewrap_problem", lambda: "bwrap is not installed")
    with pytest.raises(EnvFault, match='sandbox = "none"'):
        choose_sandbox("auto", image=None)
    assert choose_sandbox("none", image=None) == "none"


def test_apptainer_is_preferred_where_there_is_an_image(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert choose_sandbox("auto", image="agent.sif") == "apptainer"
    command = wrap_command(["x"], SandboxSpec(kind="apptainer", workdir="/w", readable=("/r",), image="agent.sif"))
    assert command[-2:] == ["agent.sif", "x"]
    assert "/r:/r:ro" in command
    assert "--containall" in command


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("1\n", 1.0),
        ('x\n{"reward": -0.5}\n \n', -0.5),
        ("The model's answer:\n42\nit is wrong\n", None),
        ('{"reward": 1}\nbye\n', None),
        ("true\n", None),
        ("", None),
        ("{}\n[1]\n", None),
        ("2\n1", 1.0),
    ],
)
def test_the_reward_is_the_last_line(output, reward):
    assert find_reward(output) == reward


@needs_bubblewrap
def test_a_path_that_this_node_lacks_is_a_fault_that_names_it(template):
    trajectory = play(template, "ask('a')\nprint(1)", sandbox="bubblewrap", readable=["/none/agents"])
    assert trajectory.status == "env-fault"
    assert trajectory.extra["fault"].endswith("readable has '/none/agents', which is not on this node")


@pytest.mark.parametrize("reward", ["true", '"0.5"', "null", "[1]"])
def test_a_reward_that_is_not_a_number_is_named(reward):
    with pytest.raises(PolicyFailure, match=re.escape(f"the reported reward is {reward}: it must be a finite number")):
        find_reward(f'{{"reward": {reward}}}')


@pytest.mark.parametrize("printed", ["inf", "-inf", "nan", "+Infinity"])
def test_a_number_that_is_not_finite_is_a_fault_as_python_prints_it(printed):
    with pytest.raises(PolicyFailure, match=re.escape(f"the reported reward is {printed}: it must be a finite number")):
        find_reward(f"{printed}\n")


def test_the_fields_of_a_row_go_before_those_of_the_recipe_which_has_no_seed():
    fields = AgentProgram(command=["x"], task={"a": 1, "b": 1})._make_fields(7, {"seed": 7, "b": 2})
    assert fields == {"seed": 7, "a": 1, "b": 2}
    with pytest.raises(ConfigError, match="task has a field 'seed'"):
        make_program("hpcrl.envs.agent:AgentProgram", {"command": ["x"], "task": {"seed": 1}}, what="domains.x.env")


def test_a_misspelled_option_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"domains\.x\.env = .* has no option 'commands': did you mean 'command'\? it has"
    ):
        make_program("hpcrl.envs.agent:AgentProgram", {"commands": ["x"]}, what="domains.x.env")


@pytest.mark.parametrize(("old", "new"), RENAMED_OPTIONS[AGENT_PROGRAM].items())
def test_an_old_option_is_refused_with_its_new_name_which_exists(old, new):
    with pytest.raises(ConfigError, match=f"the option '{old}' is now called '{new}': use the new name"):
        make_program(AGENT_PROGRAM, {"command": ["x"], old: 4}, what="domains.x.env")
    make_program(AGENT_PROGRAM, {"command": ["x"], new: 4096}, what="domains.x.env")


@pytest.mark.parametrize(
    "options",
    [
        {"command": "agent.py"},
        {"command": []},
        {"command": ["x"], "readable": "/project/me"},  # a list of its letters would show "/"
        {"command": ["x"], "sandbox": "jail"},
        {"command": ["x"], "timeout_s": 0},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError):
        make_program("hpcrl.envs.agent:AgentProgram", options, what="domains.x.env")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"environment": {"A": True}}, "environment = {'A': True}: give a table of strings and numbers"),
        ({"environment": {"A=B": "1"}}, "environment has 'A=B' = '1': the name of a variable"),
        ({"posts_reward": "false"}, "posts_reward = 'false': give true or false"),
        ({"task": "x"}, "task = 'x': give a table"),
        ({"timeout_s": "abc"}, "timeout_s = 'abc': give a number"),
        ({"judge": ["x"], "judge_timeout_s": "5"}, "judge_timeout_s = '5': give a number"),
        ({"max_processes": "x"}, "max_processes = 'x': give a whole number"),
        ({"max_disk_mb": True}, "max_disk_mb = True: give a whole number"),
        ({"judge_fields": "x"}, "judge_fields = 'x': give a list of strings"),
        ({"image": 3}, "image = 3: give a string"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_in_one_line(options, why):
    with pytest.raises(ConfigError, match=f"^AgentProgram: {re.escape(why)}[^\n]*$"):
        make_program("hpcrl.envs.agent:AgentProgram", {"command": ["x"], **options}, what="domains.x.env")


def test_a_number_is_a_variable_of_the_program(template):
    code = "ask('a')\nprint(float([os.environ['PORT'], os.environ['RATE']] == ['8080', '0.5']))"
    trajectory = play(template, code, environment={"PORT": 8080, "RATE": 0.5})
    assert (trajectory.extra, trajectory.turns[-1].reward) == ({}, 1.0)


def test_every_option_has_a_type_that_can_be_described():
    assert all(
        any(kind in (known, known | None) for known, _ in _TYPE_WORDS)
        for kind in _list_option_types(choices=False).values()
    )


def test_a_program_is_distinguished_from_other_environments():
    assert is_program_domain(DomainConfig(env="hpcrl.envs.agent:AgentProgram"))
    assert not is_program_domain(
        DomainConfig(env="hpcrl.envs.agent:AgentProgram", python="python3", isolation="process")
    )
    assert not is_program_domain(DomainConfig(env="hpcrl.envs.arithmetic:Arithmetic"))
    assert not is_program_domain(DomainConfig(env="no.such:Thing"))


def test_the_interpreter_is_ours(template):
    trajectory = play(template, f"ask('a')\nprint(float(sys.executable == {sys.executable!r}))")
    assert trajectory.turns[-1].reward == 1.0


def test_the_reason_of_a_program_that_failed_starts_with_a_whole_word(template):
    code = "import sys\nsys.exit('a ' + 'long' * 10 + ' word ' * 80 + 'and the reason')"
    (reason,) = re.findall("ended with code 1: (.*)", play(template, code).extra["fault"])
    assert re.fullmatch(r"\.\.\. (word )+and the reason", reason)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("path", "sandbox", "is_advised"),
    [("{}/a.json", "bubblewrap", True), ("a.json", "bubblewrap", False), ("{}/none.json", "none", False)],
)
def test_a_file_that_a_program_misses_may_be_one_that_the_sandbox_hides(template, tmp_path, path, sandbox, is_advised):
    (tmp_path / "a.json").touch()
    fault = play(template, f"open({path.format(tmp_path)!r})", sandbox=sandbox).extra["fault"]
    assert "FileNotFoundError" in fault
    assert fault.endswith("(if it is there, the sandbox does not show it: add it to readable)") == is_advised
