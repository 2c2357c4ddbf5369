"""Make the manual page of hpcrl from its parsers and topics: `hpcrl man`.

make_man_page     returns it in the language of man
"""

import argparse
import re

from hpcrl import __version__
from hpcrl.commands.examples import EXAMPLES, find_parsers
from hpcrl.commands.topics import TOPICS

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
