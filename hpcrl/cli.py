"""The command line (`main`). A command is imported when it runs, so that `hpcrl --help` starts fast."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from hpcrl import __version__
from hpcrl.commands.arguments import add_commands
from hpcrl.commands.completion import COMPLETE_COMMAND
from hpcrl.commands.examples import add_examples
from hpcrl.errors import ConfigError, HpcrlError, PlanError
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, drop_output
from hpcrl.system.file_watch import describe_outage, is_denied, is_outage
from hpcrl.system.output_encoding import follow_locale
from hpcrl.traj.arguments import IntermixedParser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error that the user can fix gives one message and exit code 2, never a traceback."""
    if argv is None:
        follow_locale()
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == [COMPLETE_COMMAND]:
        return _complete_words(words[1:])
    arguments = argparse.Namespace(words=words, make_parser=make_parser)
    try:
        arguments = make_parser().parse_args(words, arguments)
        code = load_command(arguments.run)(arguments)
        sys.stdout.flush()
        return code
    except HpcrlError as error:
        print(f"hpcrl: {_name_setting(error, arguments)}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of the output has exited, as `| head` does
            drop_output()
            return EXIT_DONE
        if not is_outage(error) and not is_denied(error):
            raise
        print(f"hpcrl: {describe_outage(error)}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class CommandParser(IntermixedParser):
    """A parser that names the nearest choice or option for an unknown one; parsers of commands are of its kind."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words of a command; unknown ones are refused with the usage of that command."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = _find_command(self, sys.argv[1:] if args is None else args)
            command.error(f"unrecognized arguments: {' '.join(unknown)}{_suggest_option(command, unknown)}")
        return found

    def error(self, message: str) -> NoReturn:
        """End with a message; where words are missing, it names the command that explains them."""
        is_missing = message.startswith("the following arguments are required")
        super().error(f"{message}: `{self.prog} --help` explains them" if is_missing else message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from hpcrl.config.toml import suggest_name

            choices = list(map(str, action.choices))
            hint = suggest_name(str(value), choices)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}: {hint}there are {', '.join(choices)}")


def _find_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command that the first words name."""
    for action in parser._actions:
        if words and isinstance(action, argparse._SubParsersAction) and words[0] in action.choices:
            return _find_command(action.choices[words[0]], words[1:])
    return parser


def _suggest_option(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    from hpcrl.config.toml import suggest_name

    names = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    hints = [suggest_name(name, [*parser._option_string_actions]) for name in names]
    return "".join(f": {hint.rstrip()}" for hint in hints if hint)


def _name_setting(error: HpcrlError, arguments: argparse.Namespace) -> str:
    """Return the message of an error, with the `-s` that has set what it is about first."""
    settings: list[str] = getattr(arguments, "settings", [])
    if not settings or not isinstance(error, ConfigError | PlanError):
        return str(error)
    from hpcrl.config.toml import name_setting

    return name_setting(str(error), settings)


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hpcrl", description="Agentic-RL campaigns as one heterogeneous Slurm job: plan, submit, train, survive."
    )
    parser.add_argument("--version", action="version", version=f"hpcrl {__version__}")
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    add_examples(parser)
    return parser


def load_command(place: str) -> Callable[[argparse.Namespace], int]:
    """Import the function of a command: `module:function` in `hpcrl/commands/`."""
    module, _, function = place.partition(":")
    run: Callable[[argparse.Namespace], int] = getattr(import_module(f"hpcrl.commands.{module}"), function)
    return run


def _complete_words(words: Sequence[str]) -> int:
    from hpcrl.commands.completion import complete_words

    for candidate in complete_words(make_parser(), words):
        print(candidate)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
