"""Simulate a campaign: `python -m hpcrl.simulation RECIPE --site SITE ...`, as `hpcrl simulate` runs it."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.commands.arguments import add_simulation
from hpcrl.errors import ConfigError, PlanError
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_FAILED, run_for_code
from hpcrl.system.files import is_table_path
from hpcrl.system.output_encoding import follow_locale

if TYPE_CHECKING:
    from hpcrl.campaign.request import CampaignRequest
    from hpcrl.config.recipe import Recipe
    from hpcrl.simulation.campaign import SimulationSettings
    from hpcrl.simulation.result import SimulationResult
    from hpcrl.simulation.sizes import CampaignSizes
    from hpcrl.simulation.workload import EpisodeSource, LatencySettings


MAX_SIMULATED = 100_000
"""GPUs, and steps."""
MAX_SIGMA = 5.0
LATENCIES = ("env_s", "env_sigma", "reset_s")
"""The options for what recorded episodes have themselves."""


def main(argv: Sequence[str]) -> int:
    """Simulate and print the figures; 1 if the jobs ended before the last step."""
    parser = argparse.ArgumentParser(prog="hpcrl simulate")
    add_simulation(parser)
    arguments = parser.parse_args(argv)
    return run_for_code(lambda: _run_simulation(arguments))


def _run_simulation(arguments: argparse.Namespace) -> int:
    from hpcrl.simulation.result import describe_result
    from hpcrl.system.terminal import print_json, print_line, show_wait

    _check_numbers(arguments)
    _check_combinations(arguments)
    if arguments.suggest:
        return _print_suggestions(arguments)
    with show_wait("the campaign is simulated"):
        result = _simulate(arguments)
    if arguments.json:
        print_json(result)
    else:
        for line in describe_result(result):
            print_line(line)
    return EXIT_DONE if result.is_complete else EXIT_FAILED


def _simulate(arguments: argparse.Namespace) -> "SimulationResult":
    import msgspec

    from hpcrl.simulation.campaign import simulate_campaign
    from hpcrl.simulation.sizes import find_sizes
    from hpcrl.simulation.timeline import check_timeline_path, write_timeline
    from hpcrl.simulation.workload import DrawnEpisodes

    if arguments.timeline is not None:
        check_timeline_path(arguments.timeline)
    request, notes = _load_request(arguments)
    sizes = find_sizes(request)
    source = _choose_source(arguments, request.recipe)
    result = simulate_campaign(request, sizes, source, _read_settings(arguments))
    cuts = source.describe_cuts() if isinstance(source, DrawnEpisodes) else []
    assumed = [*notes, *sizes.notes, *_note_assumptions(arguments, sizes), *cuts]
    result = msgspec.structs.replace(result, notes=assumed)
    if arguments.timeline is not None:
        write_timeline(result, arguments.timeline)
    return result


def _load_request(arguments: argparse.Namespace) -> "tuple[CampaignRequest, list[str]]":
    """Load the request, and with `--gpus` plan it for these; return also what is to be noted."""
    from hpcrl.campaign.request import load_files, load_request
    from hpcrl.simulation.scaling import plan_for_gpus

    settings = tuple(arguments.settings)
    if arguments.gpus is None:
        return load_request(arguments.recipe, site=arguments.site, settings=settings), []
    return plan_for_gpus(*load_files(arguments.recipe, site=arguments.site, settings=settings), arguments.gpus)


def _note_assumptions(arguments: argparse.Namespace, sizes: "CampaignSizes") -> list[str]:
    """Return a line for each assumption that an option replaces."""
    notes = []
    if arguments.train_s is None:
        gpu = sizes.train.gpu
        share = f"{1 / gpu.fit.train:.0%} of the FLOP/s of {gpu.name}"
        besides = ", besides what ranks send each other" if sizes.train_links else ""
        notes += [f"training reaches {share}{besides} (hpcrl calibrate, --train-s)", *_note_links(sizes)]
    if arguments.traces is None:
        latencies = _read_latencies(arguments)
        times = f"environments start in {latencies.reset_s:g} s and take {latencies.env_s:g} s for a step, on average"
        notes.append(f"{times} (hpcrl simulate: --reset-s, --env-s, or recorded ones: --traces)")
    elif is_table_path(Path(arguments.traces)):
        notes.append(f"environments start in {arguments.reset_s or 0.0:g} s, of which the file has nothing (--reset-s)")
    return notes


def _note_links(sizes: "CampaignSizes") -> list[str]:
    """Return a line for the links between ranks, if there are several on GPUs."""
    links = sizes.train_links
    if links is None:
        return []
    within = "at once" if links.link == math.inf else f"at {links.link / 1e9:g} GB/s"
    line = f"ranks send each other all of it {within} within a node"
    if sizes.train.num_workers > links.ranks_per_node:
        line += f", and at {links.port / 1e9:g} GB/s each to other nodes (site.network.gbit_per_gpu)"
    return [line]


def _read_settings(arguments: argparse.Namespace) -> "SimulationSettings":
    from hpcrl.simulation.campaign import SimulationSettings
    from hpcrl.simulation.simulated_worker import FaultSettings

    return SimulationSettings(
        seed=arguments.seed,
        num_steps=arguments.steps,
        reward_s=arguments.reward_s,
        train_s=arguments.train_s,
        faults=FaultSettings(env_share=arguments.env_faults, engine_hours=arguments.engine_hours),
    )


def _read_latencies(arguments: argparse.Namespace) -> "LatencySettings":
    from hpcrl.simulation.workload import LatencySettings

    given = {name: value for name in LATENCIES if (value := getattr(arguments, name)) is not None}
    return LatencySettings(**given)


def _print_suggestions(arguments: argparse.Namespace) -> int:
    """Print the plan and others, with the time and cost of the campaign under each."""
    from hpcrl.campaign.request import load_request
    from hpcrl.commands.planning import print_fitting
    from hpcrl.plan.suggestions import choose_frontier, show_suggestions, suggest_plans
    from hpcrl.simulation.frontier import MIN_STEPS, time_plans
    from hpcrl.simulation.sizes import find_sizes
    from hpcrl.system.terminal import print_json, print_line, print_note

    for name in ("gpus", "traces", "timeline"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} and --suggest: other plans have other sizes, and drawn episodes")
    if arguments.steps is not None and arguments.steps < MIN_STEPS:
        raise ConfigError(f"--steps {arguments.steps} and --suggest: give {MIN_STEPS} at least: steps differ")
    try:
        request = load_request(arguments.recipe, site=arguments.site, settings=tuple(arguments.settings))
    except PlanError as error:
        return print_fitting(arguments, refusal=str(error))
    try:
        sizes = find_sizes(request)
        notes = [f"assumed   {note}" for note in [*sizes.notes, *_note_assumptions(arguments, sizes)]]
        made, *others = time_plans(request, _read_latencies(arguments), _read_settings(arguments))
        suggestions = choose_frontier(made, others)
    except ConfigError as error:
        print_note(f"other plans are listed without the campaign's time and cost: {error}")
        notes = []
        made, suggestions = suggest_plans(request.recipe, request.site, request.plan)
    if arguments.json:
        print_json([made, *suggestions])
        return EXIT_DONE
    for line in [*show_suggestions(suggestions, made, site=request.site.name), *notes]:
        print_line(line)
    return EXIT_DONE


def _choose_source(arguments: argparse.Namespace, recipe: "Recipe") -> "EpisodeSource":
    from hpcrl.simulation.recorded import read_campaign_traces
    from hpcrl.simulation.workload import DrawnEpisodes, RecordedEpisodes, fit_episodes, read_traces

    if arguments.traces is None:
        return DrawnEpisodes(recipe, _read_latencies(arguments), seed=arguments.seed)
    path = Path(arguments.traces)
    if is_table_path(path):
        reset_s = arguments.reset_s or 0.0
        scripts = [one._replace(reset_s=reset_s) for one in read_traces(path, skips_invalid=arguments.skip_invalid)]
        return RecordedEpisodes(fit_episodes(scripts, recipe), arguments.seed)
    return read_campaign_traces(arguments.traces, seed=arguments.seed)


def _check_combinations(arguments: argparse.Namespace) -> None:
    """Refuse options that would change nothing."""
    has_table = arguments.traces is not None and is_table_path(Path(arguments.traces))
    recorded = [name for name in LATENCIES if name != "reset_s" or not has_table]  # of which a table has none
    given = [f"--{name.replace('_', '-')}" for name in recorded if getattr(arguments, name) is not None]
    if given and arguments.traces is not None:
        raise ConfigError(f"{given[0]} and --traces: recorded episodes have their own times: remove one of them")
    if arguments.skip_invalid and not has_table:
        raise ConfigError("--skip-invalid is for the calls of a CSV file: name one with --traces")


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse numbers that cannot be."""
    for name in ("gpus", "steps"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name} {value}: give a number from 1")
        if value is not None and value > MAX_SIMULATED:
            raise ConfigError(f"--{name} {value}: at most {MAX_SIMULATED} are simulated")
    for name in ("env_s", "env_sigma", "reset_s", "reward_s", "train_s"):
        if (value := getattr(arguments, name)) is not None and not 0 <= value < 1e9:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: give a number from 0 to below 1e+09")
    if arguments.env_sigma is not None and arguments.env_sigma > MAX_SIGMA:
        raise ConfigError(f"--env-sigma {arguments.env_sigma:g}: give {MAX_SIGMA:g} at most; 1 is a long tail already")
    if arguments.traces is not None and not arguments.traces.strip():
        raise ConfigError("--traces is empty: name a CSV file or a campaign")
    if not 0 <= arguments.env_faults < 1:
        raise ConfigError(f"--env-faults {arguments.env_faults:g}: give a share from 0 to below 1")
    if arguments.engine_hours is not None and not arguments.engine_hours > 0:  # nor is NaN
        raise ConfigError(f"--engine-hours {arguments.engine_hours:g}: give a number above 0")


if __name__ == "__main__":
    follow_locale()
    sys.exit(main(sys.argv[1:]))
