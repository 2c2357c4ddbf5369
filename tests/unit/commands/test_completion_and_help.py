"""Help, completion, schemas and the manual page agree with the commands that there are."""

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import msgspec
import pytest

from hpcrl.cli import load_command, main, make_parser
from hpcrl.commands.completion import SHELLS, find_candidates, make_script
from hpcrl.commands.examples import EXAMPLES, find_parsers
from hpcrl.commands.schemas import JSON_OUTPUTS, make_schema
from hpcrl.commands.topics import TOPICS, make_man_page
from hpcrl.config.key_table import list_keys
from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from tests.support.printed_json import load_checked
from tests.unit.commands.conftest import CampaignMaker


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = make_parser()
    return {"": parser} | find_parsers(parser)


@pytest.mark.parametrize("name", commands())
def test_the_help_of_a_command_ends_with_examples_that_it_accepts(name: str) -> None:
    assert EXAMPLES[name]
    assert all(example in commands()[name].format_help() for example in EXAMPLES[name])
    for example in EXAMPLES[name]:
        words = shlex.split(re.sub(r'^eval "\$\((.*)\)"$', r"\1", example.rpartition(" && ")[2]).partition(" > ")[0])
        assert words[0] == "hpcrl"
        assert callable(load_command(make_parser().parse_args(words[1:]).run))


def test_examples_are_of_commands_that_exist() -> None:
    assert set(EXAMPLES) <= set(commands())


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_has_a_text(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", topic]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_help_of_a_table_has_its_keys_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "recipe", "rollout"]) == 0
    keys = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert "rollout.group_size  (integer >= 2, required)" in keys
    assert all(line.startswith("rollout") for line in keys)


def test_an_unknown_topic_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "exit-code"]) == 2
    assert "did you mean 'exit-codes'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["recipe router", "recipe group_size", "site slurm_partition"])
def test_a_table_or_key_is_no_topic_and_is_suggested_as_part_of_one(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["help", words.split()[1]]) == 2
    assert f"did you mean `hpcrl help {words}`?" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "nearest"), [("submit nope", "submit"), ("exit-codes 4", "exit-codes")])
def test_no_word_after_a_topic_is_ignored(words: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *words.split()]) == 2
    assert f"no topic {words!r}: did you mean {nearest!r}" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "command"), [([], "hpcrl"), (["traj"], "hpcrl traj"), (["plan"], "hpcrl plan")])
def test_a_command_without_its_words_names_its_help(
    words: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f"`{command} --help` explains them" in capsys.readouterr().err


def test_a_topic_that_is_like_no_other_is_refused_without_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "nope"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Recipe, Site])
def test_every_key_that_a_file_may_have_is_listed_once(kind: type[msgspec.Struct]) -> None:
    keys = [key.key for key in list_keys(kind)]
    assert len(keys) == len(set(keys))
    assert {field.encode_name for field in msgspec.structs.fields(kind)} == {key.partition(".")[0] for key in keys}


@pytest.mark.parametrize("kind", [Recipe, Site])
def test_every_key_has_a_meaning(kind: type[msgspec.Struct]) -> None:
    assert [key.key for key in list_keys(kind) if not key.meaning] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["moni"], ["monitor"]),
        (["traj", "sh"], ["show"]),
        (["monitor", "--o"], ["--once"]),
        (["submit", "quickstart", "--site", "lo"], ["local"]),
        (["submit", "quickstart-v"], ["quickstart-vllm"]),
        (["plan", "quickstart", "--dag", "me"], ["mermaid"]),
        (["logs", "one", "tr"], ["train"]),
        (["events", "one", "--kind", "check"], ["checkpoint"]),
        (["logs", "one", "dr"], ["driver"]),
        (["site", "show", "fronti"], ["frontier"]),
        (["site", "new", ""], []),
        (["schema", "traj-v"], ["traj-verify"]),
        (["schema", "lab"], []),
        (["lab", "up", "--like", "fronti"], ["frontier"]),
        (["lab", "break", "dec"], ["decode1", "decode2"]),
        (["lab", "restore", "slurm"], ["slurmctld"]),
        (["lab", "up", ""], []),
        (["help", "exit"], ["exit-codes"]),
        (["help", "moni"], ["monitor"]),
        (["nonsense", ""], []),
        (["monitor", "one", ""], []),
    ],
)
def test_completion_offers_what_may_follow(home: Path, words: list[str], expected: list[str]) -> None:
    assert find_candidates(make_parser(), words) == expected


def test_completion_offers_the_campaigns_that_there_are(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("alpha")
    make_campaign("beta")
    assert find_candidates(make_parser(), ["compare", "alpha", ""]) == ["alpha", "beta"]
    assert main(["__complete", "resume", "al"]) == 0
    assert capsys.readouterr().out == "alpha\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_is_valid(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(make_script(shell))
    done = subprocess.run([program, "-n", str(script)], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_bash_completes_a_command(home: Path, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    lines = [
        make_script("bash"),
        "COMP_WORDS=(hpcrl moni) COMP_CWORD=1",
        "_hpcrl",
        'echo "${COMPREPLY[@]}"',
    ]
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "hpcrl").write_text(f'#!/bin/sh\nexec {sys.executable} -m hpcrl.cli "$@"\n')
    (bin_dir / "hpcrl").chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "monitor\n"


def test_every_command_with_json_has_a_schema() -> None:
    with_json = {
        name.replace(" ", "-")
        for name, parser in find_parsers(make_parser()).items()
        if "--json" in parser._option_string_actions
    }
    assert with_json | {"plan-suggest"} == JSON_OUTPUTS.keys()


@pytest.mark.parametrize("name", JSON_OUTPUTS)
def test_a_schema_is_one(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(make_schema(name))


@pytest.mark.parametrize("name", sorted(JSON_OUTPUTS.keys() - {"events"}))
def test_a_schema_names_the_fields_of_its_struct(name: str) -> None:
    output = JSON_OUTPUTS[name]
    module, _, attribute = output.type.partition(":")
    fields = msgspec.structs.fields(getattr(importlib.import_module(module), attribute))
    tables = make_schema(name)["$defs"]
    assert tables[attribute]["properties"].keys() == {field.encode_name for field in fields} - {*output.dropped}
    assert all(table["properties"] for table in tables.values() if table.get("type") == "object" and "title" in table)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan", ["plan", "quickstart", "--site", "local", "--json"]),
        ("plan-suggest", ["plan", "quickstart", "--site", "lab", "--suggest", "--json"]),
        ("ls", ["ls", "--json"]),
        ("monitor", ["monitor", "one", "--json"]),
        ("compare", ["compare", "one", "two", "--json"]),
        ("doctor", ["doctor", "--site", "local", "--json"]),
    ],
)
def test_the_json_of_a_command_has_its_schema(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str], name: str, words: list[str]
) -> None:
    make_campaign("one"), make_campaign("two")
    assert main(words) == 0
    load_checked(capsys.readouterr().out, name)


@pytest.mark.parametrize(("name", "words"), [("traj-stats", ["traj", "stats"]), ("report", ["report"])])
def test_the_json_of_a_command_that_becomes_another_program_has_its_schema(
    make_campaign: CampaignMaker, name: str, words: list[str]
) -> None:
    make_campaign("one")
    command = [sys.executable, "-m", "hpcrl.cli", *words, "one", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    load_checked(done.stdout, name)


def test_every_line_of_events_has_their_schema(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    assert main(["events", "one", "--json"]) == 0
    for line in capsys.readouterr().out.splitlines():
        load_checked(line, "events")


def test_an_event_of_a_newer_version_has_the_schema_and_a_damaged_one_of_a_known_kind_does_not() -> None:
    load_checked('{"event": "quantum-leap", "qubits": [1]}', "events")
    with pytest.raises(jsonschema.ValidationError):
        load_checked('{"time": 1.0, "event": "step", "step": "many"}', "events")


def test_the_schema_of_the_monitor_allows_no_detail() -> None:
    fields = make_schema("monitor")["$defs"]["CampaignSnapshot"]["properties"]
    assert "state" in fields
    assert "detail" not in fields


def test_the_manual_page_has_every_command() -> None:
    page = make_man_page(make_parser())
    assert page.startswith(".TH HPCRL 1")
    names = set(commands())
    for name in (one for one in names if one and not any(other.startswith(f"{one} ") for other in names)):
        assert f".SS hpcrl {name}\n" in page.replace("\\-", "-")
    assert ".SH EXIT STATUS" in page
