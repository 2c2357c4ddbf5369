"""Play and show episodes of domains: `python -m hpcrl.trial DIRECTORY --episodes N [--json] DOMAIN ...`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_FAILED, run_for_code
from hpcrl.system.output_encoding import follow_locale
from hpcrl.system.processes import do_nothing


def main(argv: Sequence[str]) -> int:
    """Play the episodes in the directory of a campaign that has no job; 1 if a domain has no good one."""
    parser = argparse.ArgumentParser(prog="hpcrl.trial")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("domains", nargs="+")
    arguments = parser.parse_args(argv)
    return run_for_code(lambda: _run_trial(arguments))


def _run_trial(arguments: argparse.Namespace) -> int:
    from hpcrl.system.terminal import is_terminal, print_json, print_to_stderr
    from hpcrl.trial.player import play_domains
    from hpcrl.trial.report import is_good, list_results, show_trials

    campaign = CampaignDir(arguments.directory)
    show = print_to_stderr if is_terminal(sys.stderr) else do_nothing
    trials = play_domains(campaign, domains=arguments.domains, num_episodes=arguments.episodes, show=show)
    if arguments.json:
        print_json(list_results(trials))
    else:
        show_trials(trials, campaign=campaign)
    return EXIT_DONE if all(map(is_good, trials)) else EXIT_FAILED


if __name__ == "__main__":
    follow_locale()
    sys.exit(main(sys.argv[1:]))
