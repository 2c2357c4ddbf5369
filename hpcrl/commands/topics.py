"""Explain a command or a topic, `hpcrl help`, and make the manual page, `hpcrl man`.

show_topic       prints a topic, a command's own help, or the list of both
make_man_page    the page in the language of man, from the parsers and topics
TOPICS           the topics, each with a line and the function that makes its text
"""

import argparse
import contextlib
import re
import textwrap
from collections.abc import Callable, Sequence

from hpcrl import __version__
from hpcrl.commands.examples import EXAMPLES, find_parsers
from hpcrl.config.toml import suggest_name
from hpcrl.errors import HpcrlError
from hpcrl.system.terminal import print_line

_EXIT_CODES = """\
0    done: the command did what it is for
1    it ran, and found a problem: a failed campaign, a damaged record, a domain without a good episode
2    it did not run, and the message has the remedy: a recipe, a name, an option, a machine
130  interrupted with Ctrl-C; what runs in jobs continues

A process of a job also ends with
3    the trainer was drained: it has saved a checkpoint, and the campaign continues in another job
4    a rank of the trainer ran out of memory
128 + N  ended by signal N"""

_STATES = """\
planned   no job yet                   done     every step was trained
queued    waits in Slurm's queue       stopped  stopped by a user, or its time was up: `hpcrl resume` continues it
running   its driver works             failed   it ended by itself, with an error
draining  completes what is started    unknown  cannot be determined now; unknown is not failed
partial   every step was made, but a domain trained nothing; JSON has `done` and `is_partial`"""

_FILES = """\
~/.hpcrl/campaigns/NAME     a campaign: its recipe, jobs, events, trajectories, weights, checkpoints; `HPCRL_HOME` moves
                            it. A site may keep it elsewhere (campaigns_dir): then this is a symbolic link
~/.config/hpcrl/recipes/    your own recipes, known by their names as the shipped ones are
~/.config/hpcrl/sites/      your own sites, likewise
/tmp/hpcrl-lab-UID          the lab, unless `HPCRL_LAB` names another directory

In the directory of a campaign:
jobs/NNN/logs/              a log of each worker (`hpcrl logs`); batch.log is the driver's
events/                     what happened, a file a process (`hpcrl events`)
spools/                     trajectories (`hpcrl traj`)
checkpoints/, weights/      for `hpcrl resume`, `hpcrl export`, and engines"""

_VARIABLES = """\
HPCRL_HOME               the directory of campaigns, in campaigns/ there (default ~/.hpcrl)
HPCRL_LAB                the directory of the lab (default: one per user)
HPCRL_SLURM_TIMEOUT_S    how long to wait for a command of Slurm
XDG_CONFIG_HOME          where hpcrl/recipes and hpcrl/sites of your own are looked for (default ~/.config)
PYTHONPATH               where your environments and rewards are found, here and in jobs"""

_TROUBLE = """\
It does not start         `hpcrl monitor NAME --once` has the state and Slurm's reason
A domain trains nothing   `hpcrl try RECIPE --domain NAME` plays three episodes of it here, and shows them
Faults                    `hpcrl events NAME --kind fault`, in full length; `hpcrl logs NAME env`
A worker fails            `hpcrl logs NAME ROLE -n 200`
It was killed             `hpcrl resume NAME` continues from the last checkpoint, if there is one
The reward does not rise  `hpcrl traj show NAME --worst` and `--best`; `hpcrl traj stats NAME`
Damaged files             `hpcrl traj verify NAME`
The disk is full          `hpcrl gc` lists what campaigns no longer need; `hpcrl rm NAME` removes one that has ended"""


def _make_recipe_text(words: Sequence[str]) -> str:
    from hpcrl.config.recipe import Recipe

    return _make_key_text(Recipe, words)


def _make_site_text(words: Sequence[str]) -> str:
    from hpcrl.config.site import Site

    return _make_key_text(Site, words)


def _make_key_text(kind: type, words: Sequence[str]) -> str:
    """Return the keys of a struct; `words` name tables or keys of it."""
    from hpcrl.config.key_table import format_keys, list_keys

    keys = list_keys(kind)
    chosen = [key for key in keys if all(f".{key.key}.".find(f".{word}.") >= 0 for word in words)]
    if not chosen:
        parts = sorted({part for key in keys for part in key.key.split(".")})
        raise HpcrlError(f"no key with {' and '.join(map(repr, words))}: {suggest_name(words[-1], parts)}see the list")
    return "\n".join(format_keys(chosen))


def _make_fixed(text: str) -> Callable[[Sequence[str]], str]:
    return lambda words: text


def _suggest_key_topic(words: Sequence[str]) -> str:
    """Return "did you mean ...? " for the name of a table or key of a recipe or a site; empty for any other."""
    for topic in _TOPICS_OF_KEYS:
        with contextlib.suppress(HpcrlError):
            TOPICS[topic][1](words)
            return f"did you mean `hpcrl help {topic} {' '.join(words)}`? "
    return ""


TOPICS: dict[str, tuple[str, Callable[[Sequence[str]], str]]] = {
    "recipe": ("every key of a recipe; `hpcrl help recipe train` those of a table", _make_recipe_text),
    "site": ("every key of a site file", _make_site_text),
    "trouble": ("where to look when something goes wrong", _make_fixed(_TROUBLE)),
    "states": ("the states of a campaign", _make_fixed(_STATES)),
    "exit-codes": ("what the exit code of a command means", _make_fixed(_EXIT_CODES)),
    "files": ("where campaigns, recipes and sites are", _make_fixed(_FILES)),
    "variables": ("environment variables that are read", _make_fixed(_VARIABLES)),
}


_MAX_TOPIC_COLUMNS = 80
_TOPICS_OF_KEYS = ("recipe", "site")
_COMMANDS_FIRST = frozenset(
    {"site ls", "site show", "site new", "site probe", "recipe ls", "recipe show", "recipe new"}
)


def run_help(arguments: argparse.Namespace) -> int:
    return show_topic(arguments.topic, parser=arguments.make_parser())


def run_man(arguments: argparse.Namespace) -> int:
    print_line(make_man_page(arguments.make_parser()))
    return 0


def show_topic(words: Sequence[str], *, parser: argparse.ArgumentParser) -> int:
    """Print what these words name: a topic, a command, or nothing, which lists both."""
    parsers = find_parsers(parser)
    if not words:
        print_line(_list_topics(parsers))
        return 0
    first, *rest = words
    command = " ".join(words)
    if command in parsers and (command in _COMMANDS_FIRST or first not in TOPICS):
        print_line(parsers[command].format_help().rstrip())
    elif first in TOPICS and (not rest or first in _TOPICS_OF_KEYS):
        print_line(TOPICS[first][1](rest))
    else:
        hint = _suggest_key_topic(words) or suggest_name(command, [*TOPICS, *parsers])
        raise HpcrlError(f"no topic {command!r}: {hint}topics are {', '.join(TOPICS)}, and each command")
    return 0


def _list_topics(parsers: dict[str, argparse.ArgumentParser]) -> str:
    width = max(map(len, TOPICS))
    lines = [f"  {name:<{width}}  {line}" for name, (line, _) in TOPICS.items()]
    names = textwrap.wrap(", ".join(parsers), _MAX_TOPIC_COLUMNS, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(["topics:", *lines, "commands:", *names])


_TOPIC_SECTIONS = {"exit-codes": "EXIT STATUS", "states": "STATES", "files": "FILES", "variables": "ENVIRONMENT"}


def make_man_page(parser: argparse.ArgumentParser) -> str:
    """Return the page: each command with its arguments and examples, then the topics that fit a page."""
    lines = [
        f'.TH HPCRL 1 "" "hpcrl {__version__}" "User Commands"',
        ".SH NAME",
        f"hpcrl \\- {_escape(parser.description or '')}",
        ".SH SYNOPSIS",
        ".B hpcrl",
        "COMMAND [ARGUMENTS]",
        ".SH COMMANDS",
    ]
    for name, inner in find_parsers(parser).items():
        if any(isinstance(action, argparse._SubParsersAction) for action in inner._actions):
            continue
        lines += [".SS " + _escape(f"hpcrl {name}"), _escape(_find_help(parser, name)), ".PP", ".nf"]
        lines += [_escape(inner.format_usage().strip()), ".fi"]
        for action in inner._actions:
            if action.dest != "help":
                lines += [".TP", f".B {_escape(_name_argument(action))}", _escape(_expand_help(action, inner))]
        lines += [".PP", "Examples:", ".nf", *(_escape(f"  {one}") for one in EXAMPLES.get(name, ())), ".fi"]
    for topic, title in _TOPIC_SECTIONS.items():
        lines += [f".SH {title}", ".nf", _escape(TOPICS[topic][1](())), ".fi"]
    return "\n".join(line for line in lines if line)


def _find_help(parser: argparse.ArgumentParser, name: str) -> str:
    text = ""
    for word in name.split():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                text = next((str(one.help) for one in action._choices_actions if one.dest == word), text)
                parser = action.choices[word]
                break
    return text


def _name_argument(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    name = " ".join(value) if isinstance(value, tuple) else str(value)
    if not action.option_strings:
        return name
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {name}")


def _expand_help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = str(action.help or "")
    choices = f"one of {', '.join(map(str, action.choices))}" if action.choices is not None else ""
    return ": ".join(filter(None, (text, choices))) or parser.prog


def _escape(text: str) -> str:
    """Escape what man would read as its own: backslashes, hyphens, and dots at the start of a line."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)
