"""The command lines of these commands. It imports nothing heavy: `hpcrl --help` reads it.

add_commands      adds the commands to those of `hpcrl`
add_logs          adds `hpcrl logs`
add_settings      adds what changes a recipe or a site
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.commands.completion import SHELLS

if TYPE_CHECKING:
    CommandParsers = argparse._SubParsersAction[Any]

NUM_EVENTS, NUM_LINES, NUM_EPISODES = 40, 40, 3


def add_commands(commands: "CommandParsers") -> None:
    """Add the commands; each runs the function that is its `run`."""
    _add_try(commands)
    _add_init(commands)
    _add_events(commands)
    _add_compare(commands)
    _add_rm(commands)
    _add_help(commands)


def add_logs(commands: "CommandParsers") -> None:
    """Add `hpcrl logs`."""
    logs = commands.add_parser("logs", help="show the logs of the last job")
    logs.add_argument("campaign", metavar="CAMPAIGN")
    logs.add_argument("role", metavar="ROLE", nargs="?", help="env, prefill, decode, reward, train, judge-NAME, driver")
    logs.add_argument("-n", "--lines", type=int, default=NUM_LINES, help=f"lines of each log (default {NUM_LINES})")
    logs.add_argument("-f", "--follow", action="store_true", help="continue with what is added, until the job ends")
    logs.set_defaults(run=_run_logs)


def add_settings(parser: argparse.ArgumentParser, *, help: str) -> None:
    """Add `-s KEY=VALUE`."""
    parser.add_argument("-s", "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help=help)


def _add_try(commands: "CommandParsers") -> None:
    trial = commands.add_parser("try", help="play a few episodes of each domain here, without a campaign")
    trial.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a shipped one")
    trial.add_argument("--site", default="local", help="the site whose Python is used (default: local)")
    trial.add_argument("--domain", action="append", default=[], metavar="NAME", help="only this one (can be repeated)")
    trial.add_argument(
        "-n", "--episodes", type=int, default=NUM_EPISODES, metavar="N", help=f"of each (default {NUM_EPISODES})"
    )
    trial.add_argument("--json", action="store_true", help="print the results as JSON")
    add_settings(trial, help="override a key of the recipe (rollout.temperature=0.5)")
    trial.set_defaults(run=_run_try)


def _add_init(commands: "CommandParsers") -> None:
    init = commands.add_parser("init", help="write a recipe and an environment to start from")
    init.add_argument("directory", metavar="DIRECTORY", type=Path, help="a new directory; its name is the recipe's")
    init.set_defaults(run=_run_init)


def _add_events(commands: "CommandParsers") -> None:
    events = commands.add_parser("events", help="print what happened in a campaign, event by event")
    events.add_argument("campaign", metavar="CAMPAIGN")
    events.add_argument("--kind", action="append", default=[], metavar="KIND", help="of this kind (can be repeated)")
    events.add_argument("--role", action="append", default=[], metavar="ROLE", help="of this role (can be repeated)")
    events.add_argument(
        "-n", "--limit", type=int, default=NUM_EVENTS, metavar="N", help=f"the newest N (default {NUM_EVENTS}; 0: all)"
    )
    events.add_argument("-f", "--follow", action="store_true", help="continue with those that are added")
    events.add_argument("--json", action="store_true", help="print a line of JSON for each")
    events.set_defaults(run=_run_events)


def _add_compare(commands: "CommandParsers") -> None:
    compare = commands.add_parser("compare", help="show two campaigns side by side, and how their recipes differ")
    compare.add_argument("campaigns", metavar="CAMPAIGN", nargs=2)
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON")
    compare.set_defaults(run=_run_compare)


def _add_rm(commands: "CommandParsers") -> None:
    rm = commands.add_parser("rm", help="remove campaigns that have ended, with all their files")
    rm.add_argument("campaigns", metavar="CAMPAIGN", nargs="+")
    rm.add_argument("-y", "--yes", action="store_true", help="do not ask")
    rm.set_defaults(run=_run_rm)


def _add_help(commands: "CommandParsers") -> None:
    topics = commands.add_parser("help", help="explain a command or a topic")
    topics.add_argument("topic", metavar="TOPIC", nargs="*", help="a command or a topic (default: list the topics)")
    topics.set_defaults(run=_run_help)
    schema = commands.add_parser("schema", help="print the JSON schema of what a command prints with --json")
    schema.add_argument("name", metavar="NAME", nargs="?", help="such as monitor (default: list the names)")
    schema.set_defaults(run=_run_schema)
    completion = commands.add_parser("completion", help="print the completion of a shell")
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_run_completion)
    man = commands.add_parser("man", help="print the manual page, in the format of man")
    man.set_defaults(run=_run_man)


def _run_try(arguments: argparse.Namespace) -> int:
    from hpcrl.commands.trial import try_recipe

    return try_recipe(
        arguments.recipe,
        site=arguments.site,
        settings=tuple(arguments.settings),
        domains=arguments.domain,
        num_episodes=arguments.episodes,
        as_json=arguments.json,
    )


def _run_init(arguments: argparse.Namespace) -> int:
    from hpcrl.commands.skeleton import describe_next, write_skeleton
    from hpcrl.system.terminal import print_line

    files = write_skeleton(arguments.directory)
    for line in describe_next(files):
        print_line(line)
    return 0


def _run_logs(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import directory
    from hpcrl.commands.campaign_logs import show_logs

    campaign = directory.find_campaign(arguments.campaign)
    show_logs(campaign, role=arguments.role, num_lines=arguments.lines, follow=arguments.follow)
    return 0


def _run_events(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import directory
    from hpcrl.commands.campaign_logs import list_events

    list_events(
        directory.find_campaign(arguments.campaign),
        kinds=arguments.kind,
        roles=arguments.role,
        limit=max(arguments.limit, 0),
        as_json=arguments.json,
        follow=arguments.follow,
    )
    return 0


def _run_compare(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import directory
    from hpcrl.commands.comparison import show_comparison

    first, second = map(directory.find_campaign, arguments.campaigns)
    show_comparison(first, second, as_json=arguments.json)
    return 0


def _run_rm(arguments: argparse.Namespace) -> int:
    from hpcrl.commands.removal import remove_campaigns

    remove_campaigns(arguments.campaigns, is_agreed=arguments.yes)
    return 0


def _run_help(arguments: argparse.Namespace) -> int:
    from hpcrl.commands.topics import show_topic

    return show_topic(arguments.topic, parser=arguments.make_parser())


def _run_schema(arguments: argparse.Namespace) -> int:
    from hpcrl.commands.schemas import show_schema

    show_schema(arguments.name)
    return 0


def _run_completion(arguments: argparse.Namespace) -> int:
    from hpcrl.commands.completion import make_script
    from hpcrl.system.terminal import print_line

    print_line(make_script(arguments.shell))
    return 0


def _run_man(arguments: argparse.Namespace) -> int:
    from hpcrl.commands.topics import make_man_page
    from hpcrl.system.terminal import print_line

    print_line(make_man_page(arguments.make_parser()))
    return 0
