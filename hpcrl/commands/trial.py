"""Play a few episodes of each domain of a recipe on this machine, and show them, without a campaign: `hpcrl try`.

try_recipe        plays and shows them
MAX_EPISODES      how many, at most
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission import write_description
from hpcrl.campaign.submission_checks import check_request
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import Recipe
from hpcrl.config.toml import suggest_name
from hpcrl.errors import ConfigError
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, describe_end
from hpcrl.system.files import make_private_dir
from hpcrl.system.interrupts import run_process
from hpcrl.system.terminal import is_terminal, print_note, print_to_stderr
from hpcrl.system.variables import PROGRESS_BARS_VARIABLE

MAX_EPISODES = 100


def run_try(arguments: argparse.Namespace) -> int:
    return try_recipe(
        arguments.recipe,
        site=arguments.site,
        settings=tuple(arguments.settings),
        domains=arguments.domain,
        num_episodes=arguments.episodes,
        as_json=arguments.json,
    )


def try_recipe(
    recipe: str,
    *,
    site: str,
    settings: tuple[str, ...],
    domains: Sequence[str] = (),
    num_episodes: int,
    as_json: bool = False,
) -> int:
    """Play `num_episodes` of each of these domains (by default of all); return 1 if one has no good episode."""
    if not 1 <= num_episodes <= MAX_EPISODES:
        raise ConfigError(f"-n {num_episodes}: give a number from 1 to {MAX_EPISODES}")
    request = load_request(recipe, site=site, settings=settings)
    chosen = _choose_domains(request.recipe, domains)
    for note in check_request(request):
        print_note(note)
    with tempfile.TemporaryDirectory(prefix="hpcrl-try-") as folder:
        campaign = CampaignDir(Path(folder) / "try")
        make_private_dir(campaign.root)
        write_description(campaign, request)
        options = ["--episodes", str(num_episodes), *(["--json"] if as_json else [])]
        words = [request.site.choose_python(), "-m", "hpcrl.trial", str(campaign.root), *options, *chosen]
        if is_terminal(sys.stderr):  # a line, as what is played may write to the terminal too
            print_to_stderr(f"the model is loaded, then episodes of {', '.join(chosen)} are played")
        environment = {PROGRESS_BARS_VARIABLE: "1", **os.environ}
        code = run_process(words, environment=environment)
        if code not in (EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED):
            print_to_stderr(
                f"hpcrl: the trial {describe_end(code)}: the environments of {', '.join(chosen)} run in it, "
                'and one may have ended it: domains.NAME.isolation = "process" keeps them apart'
            )
            return EXIT_FAILED
        return code


def _choose_domains(recipe: Recipe, wanted: Sequence[str]) -> list[str]:
    for name in wanted:
        if name not in recipe.domains:
            known = list(recipe.domains)
            hint = suggest_name(name, known)
            raise ConfigError(f"recipe {recipe.name!r} has no domain {name!r}: {hint}it has {', '.join(known)}")
    chosen = list(dict.fromkeys(wanted)) or list(recipe.domains)
    if not chosen:
        raise ConfigError(f"recipe {recipe.name!r} has no [domains]: nothing can be played")
    judged = [name for name in chosen if recipe.domains[name].judges]
    if judged and wanted:
        raise ConfigError(f"domains.{judged[0]} needs judges, which only a campaign serves: try another domain")
    for name in judged:
        print_note(f"domain {name} is left out: it needs judges, which only a campaign serves")
        chosen.remove(name)
    if not chosen:
        raise ConfigError(f"every domain of recipe {recipe.name!r} needs judges, which only a campaign serves")
    return chosen
