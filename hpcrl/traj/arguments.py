"""The command line of `hpcrl traj`.

It imports nothing heavy: a login node checks it before an interpreter with h5py is started.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.campaign_dir.paths import SPOOLS
from hpcrl.spool.status import STATUSES

FORMATS = ("parquet", "jsonl", "hf", "inspect")
DEFAULT_LIMIT = 20

if TYPE_CHECKING:
    SubcommandParsers = argparse._SubParsersAction[Any]


class IntermixedParser(argparse.ArgumentParser):
    """A parser that takes a word that may be left out after options too: `show CAMPAIGN --tokens ID`."""

    _is_mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._is_mixing or all(action.nargs != "?" for action in self._get_positional_actions()):
            return super().parse_known_args(args, namespace)
        self._is_mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_mixing = False


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the five commands to `parser`; the results are in `action` and `campaign`."""
    commands = parser.add_subparsers(metavar="ACTION", required=True, dest="action", parser_class=IntermixedParser)
    _add_ls(commands)
    _add_show(commands)
    _add_stats(commands)
    _add_export(commands)
    _add_verify(commands)


def _add_ls(commands: "SubcommandParsers") -> None:
    ls = _add_command(commands, "ls", "list trajectories, newest first")
    _add_filters(ls)
    ls.add_argument(
        "-n",
        "--limit",
        type=_parse_count,
        default=DEFAULT_LIMIT,
        metavar="N",
        help=f"how many (default {DEFAULT_LIMIT}; 0: all)",
    )


def _add_show(commands: "SubcommandParsers") -> None:
    show = _add_command(commands, "show", "read one trajectory as a conversation")
    show.add_argument("id", metavar="ID", nargs="?", help="its id or the start of its id (default: the newest)")
    which = show.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the one with the highest reward")
    which.add_argument("--worst", action="store_true", help="the one with the lowest reward")
    _add_filters(show)
    show.add_argument(
        "--conversation",
        type=_parse_count,
        metavar="N",
        help="of an episode with several: its number in the tree (default: the one in which most was generated)",
    )
    show.add_argument("--tokens", action="store_true", help="every token with id, log-probability and version")


def _add_stats(commands: "SubcommandParsers") -> None:
    _add_filters(_add_command(commands, "stats", "show the figures of every domain"))


def _add_export(commands: "SubcommandParsers") -> None:
    export = commands.add_parser("export", help="write trajectories for other tools")
    export.add_argument("campaign", metavar="CAMPAIGN")
    export.add_argument(
        "target", metavar="TARGET", type=Path, help="a file (parquet, jsonl) or a directory (hf, inspect)"
    )
    export.add_argument("--format", choices=FORMATS, help="default: by the suffix of TARGET; without a suffix, hf")
    export.add_argument("--force", action="store_true", help="replace an existing export")
    _add_filters(export)


def _add_verify(commands: "SubcommandParsers") -> None:
    _add_command(commands, "verify", "check every segment; exit code 1 if damage is found")


def _add_command(commands: "SubcommandParsers", name: str, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_text)
    parser.add_argument("campaign", metavar="CAMPAIGN")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_filters(parser: argparse.ArgumentParser) -> None:
    filters = parser.add_argument_group("which trajectories")
    filters.add_argument("--domain", action="append", metavar="NAME", help="of this domain (can be repeated)")
    filters.add_argument("--group", metavar="DOMAIN/NUMBER", help="of this group")
    filters.add_argument("--status", action="append", choices=STATUSES, help="with this status (can be repeated)")
    filters.add_argument("--min-version", type=_parse_count, metavar="N", help="started with version N or newer")
    filters.add_argument("--max-version", type=_parse_count, metavar="N", help="started with version N or older")
    filters.add_argument("--spool", choices=SPOOLS, help="from one spool (default: all, each trajectory once)")


def _parse_count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value
