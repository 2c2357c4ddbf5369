"""Run one command of `hpcrl traj` on a campaign's directory: `python -m hpcrl.traj ROOT ACTION ...`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.exit_codes import run_for_code
from hpcrl.system.files import read_json
from hpcrl.system.output_encoding import follow_locale
from hpcrl.traj.arguments import add_commands

if TYPE_CHECKING:
    from hpcrl.traj.history import TrajectoryHistory

MAX_REPORTED_PROBLEMS = 5


def main(argv: Sequence[str]) -> int:
    """Run one command; an error that the user can fix is one message and exit code 2."""
    root, *command_words = argv
    parser = argparse.ArgumentParser(prog="hpcrl traj")
    add_commands(parser)
    arguments = parser.parse_args(command_words)
    return run_for_code(lambda: _run_command(arguments, CampaignDir(Path(root))))


def _run_command(arguments: argparse.Namespace, campaign: CampaignDir) -> int:
    if arguments.action == "verify":
        from hpcrl.traj.verify import verify_campaign

        return verify_campaign(campaign, as_json=arguments.json)
    from hpcrl.traj.history import TrajectoryHistory

    history = TrajectoryHistory(campaign, spools=(arguments.spool,)) if arguments.spool else TrajectoryHistory(campaign)
    try:
        return _run_history_command(arguments, history)
    finally:
        _report_problems(history)


def _report_problems(history: "TrajectoryHistory") -> None:
    """Print what was skipped to stderr."""
    from hpcrl.system.terminal import print_to_stderr

    problems = list(history.problems.values())
    for problem in problems[:MAX_REPORTED_PROBLEMS]:
        print_to_stderr(problem)
    if problems:
        more = f"and {len(problems) - MAX_REPORTED_PROBLEMS:,} more " if len(problems) > MAX_REPORTED_PROBLEMS else ""
        print_to_stderr(f"{more}skipped: `hpcrl traj verify {history.campaign.name}` checks everything")


def _run_history_command(arguments: argparse.Namespace, history: "TrajectoryHistory") -> int:
    from hpcrl.spool.listing import describe_lost_spools
    from hpcrl.system.terminal import print_note, show_wait
    from hpcrl.traj.history import selection_from_arguments

    selection = selection_from_arguments(arguments, known_domains=_read_domain_names(history.campaign))
    is_text = arguments.action in ("ls", "stats") and not arguments.json  # these explain why they are empty
    if not is_text and (lost := describe_lost_spools(history.campaign)):
        print_note(lost)
    match arguments.action:
        case "ls":
            from hpcrl.traj.listing import list_newest

            return list_newest(history, selection, limit=arguments.limit, as_json=arguments.json)
        case "show":
            from hpcrl.traj import show

            with show_wait("the trajectories are read"):
                found_trajectory = show.find_trajectory(
                    history, selection, id_prefix=arguments.id, best=arguments.best, worst=arguments.worst
                )
            return show.show_trajectory(
                found_trajectory,
                campaign=history.campaign,
                tokens=arguments.tokens,
                as_json=arguments.json,
                conversation=arguments.conversation,
            )
        case "stats":
            from hpcrl.traj.stats import show_stats

            return show_stats(history, selection, as_json=arguments.json)
    from hpcrl.traj.export import export_trajectories

    return export_trajectories(
        history, selection, target=arguments.target, kind=arguments.format, force=arguments.force
    )


def _read_domain_names(campaign: CampaignDir) -> list[str]:
    """Return the domains of the recipe, or none if it cannot be read."""
    try:
        return list(read_json(campaign.recipe)["domains"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


if __name__ == "__main__":
    follow_locale()
    sys.exit(main(sys.argv[1:]))
