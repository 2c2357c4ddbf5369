"""Plan, prepare and submit: `hpcrl plan`, `hpcrl stage`, `hpcrl image`, `hpcrl submit`.

run_plan, run_stage, run_image, run_submit    the commands
print_plan                                    the plan on a console
"""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpcrl import __version__
from hpcrl.campaign.request import CampaignRequest, load_files, load_request
from hpcrl.campaign.running_jobs import read_submission
from hpcrl.campaign.submission import dry_run, preview_scripts, submit
from hpcrl.campaign.submission_checks import check_plan
from hpcrl.commands.interpreters import run_suggestions
from hpcrl.config.pipeline import RENDERERS, make_running_pipeline
from hpcrl.config.recipe import Recipe
from hpcrl.config.toml import list_known_names
from hpcrl.errors import HpcrlError, PlanError
from hpcrl.plan.plan import Plan
from hpcrl.plan.suggestions import show_suggestions, suggest_fitting, suggest_plans
from hpcrl.system.terminal import (
    PIPE_WIDTH,
    PipeConsole,
    print_json,
    print_json_text,
    print_line,
    print_note,
    show_wait,
)


def run_plan(arguments: argparse.Namespace) -> int:
    try:
        request = _load_request(arguments)
    except PlanError as error:
        if not arguments.suggest:
            raise
        return print_fitting(arguments, refusal=str(error))
    for note in check_plan(request):
        print_note(note)
    if arguments.suggest:
        return _print_suggestions(arguments, request)
    if arguments.json:
        print_json_text(request.plan.to_json())
    elif arguments.dag:
        _show_dag(request.recipe, how=arguments.dag)
    else:
        _show_plan(request.plan, preview_scripts(request, name=f"{request.recipe.name}-1"))
    return 0


def run_submit(arguments: argparse.Namespace) -> int:
    request = _load_request(arguments)
    if arguments.dry_run:
        opinion = dry_run(request, name=arguments.name, show_note=print_note)
        _show_plan(request.plan, preview_scripts(request, name=arguments.name or f"{request.recipe.name}-1"))
        print_line(f"dry run: nothing was submitted. {request.site.name}: {opinion}")
        return 0
    campaign_dir = submit(request, name=arguments.name, show_note=print_note)
    job = read_submission(campaign_dir.job(0))
    print_line(
        f"campaign {campaign_dir.name}: {request.recipe.name} on {request.site.name}, job {job.id}, "
        f"in {campaign_dir.root}"
    )
    if arguments.watch:
        from hpcrl.commands.monitoring import watch_campaign

        return watch_campaign(campaign_dir.name)
    print_line(f"watch it with `hpcrl monitor {campaign_dir.name}`")
    return 0


def run_stage(arguments: argparse.Namespace) -> int:
    from hpcrl.staging.stage import stage_recipe

    return stage_recipe(arguments.recipe, site=_require_site(arguments), settings=tuple(arguments.settings))


def run_image(arguments: argparse.Namespace) -> int:
    from hpcrl.config.site import load_site
    from hpcrl.staging.image_definition import build_image, choose_image, write_definition

    settings = tuple(setting.removeprefix("site.") for setting in arguments.settings)
    site = load_site(_require_site(arguments), settings=settings)
    choice = choose_image(site, maker=arguments.gpu, base=arguments.base, wheel=arguments.wheel)
    directory = arguments.output.absolute()
    path = write_definition(choice, directory)
    print_line(f"{path} starts from {choice.base}")
    if choice.wheel is None:
        print_note(
            f"it installs hpcrl {__version__} of the package index; for another, `pip wheel --no-deps .` in a checkout "
            "makes a wheel, which --wheel takes"
        )
    if arguments.build:
        image = build_image(choice, directory)
        print_line(f"next, in your own {site.name}.toml:")
        print_line(f'  container = "{choice.tool}"')
        print_line(f'  image = "{image}"')
    return 0


def _require_site(arguments: argparse.Namespace) -> str:
    if arguments.site is None:
        raise HpcrlError(f"--site is missing: give one of {', '.join(list_known_names('sites'))}, or a file")
    return str(arguments.site)


def _load_request(arguments: argparse.Namespace) -> CampaignRequest:
    site = _require_site(arguments)
    with show_wait("the plan is made"):
        return load_request(arguments.recipe, site=site, settings=tuple(arguments.settings))


def _print_suggestions(arguments: argparse.Namespace, request: CampaignRequest) -> int:
    """Print the size of the plan that was made, and of others; with numpy, what a campaign takes under each."""
    if request.recipe.has_rollouts and find_spec("numpy"):
        return run_suggestions(arguments)
    made, suggestions = suggest_plans(request.recipe, request.site, request.plan)
    if arguments.json:
        print_json([made, *suggestions])
        return 0
    for line in show_suggestions(suggestions, made, site=request.site.name):
        print_line(line)
    return 0


def print_fitting(arguments: argparse.Namespace, *, refusal: str) -> int:
    """Print plans for a recipe that is refused as it stands."""
    recipe, site = load_files(arguments.recipe, site=arguments.site, settings=tuple(arguments.settings))
    with show_wait("other plans are made"):
        suggestions = suggest_fitting(recipe, site, refusal=refusal)
    print_note(refusal)
    if arguments.json:
        print_json(suggestions)
        return 0
    for suggestion in suggestions:
        print_line(f"fits      {suggestion.describe()}")
    return 0


def _show_dag(recipe: Recipe, *, how: str) -> None:
    print_line(RENDERERS[how](make_running_pipeline(recipe)))


def _show_plan(plan: Plan, scripts: Sequence[str]) -> None:
    """Print a plan and its batch scripts."""
    console = PipeConsole()
    console.width = max(console.width, PIPE_WIDTH)  # a narrower terminal wraps the lines: nothing is cut
    print_plan(plan, console)
    for script in scripts:
        console.print(f"\n[dim]{escape(script.rstrip())}[/]", soft_wrap=True)  # not wrapped, so that it can be copied


def print_plan(plan: Plan, console: Console) -> None:
    """Print the place of every role, compromises and cost."""
    console.print(f"[bold]{plan.recipe}[/] on [bold]{plan.site}[/]")
    console.print(f"layout    {plan.layout}: {plan.layout_reason}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading, align in (("role", "left"), ("component", "right"), ("partition", "left"), ("nodes", "right")):
        table.add_column(heading, justify=align, no_wrap=True)  # type: ignore[arg-type]
    for heading in ("workers", "GPUs each", "cores each", "GiB each"):
        table.add_column(heading, justify="right", no_wrap=True)
    for role in plan.roles:
        component = plan.components[role.component]
        gpus = f"{role.gpus_per_worker} {component.gpu}" if role.gpus_per_worker else "-"
        where = (str(component.index), component.partition, str(component.nodes))
        times = f"{role.nodes_per_engine} x " * (role.nodes_per_engine > 1)  # on each of its nodes a worker has these
        each = (gpus, str(role.cpus_per_worker), f"{role.mem_gib_per_worker:g}")
        table.add_row(role.role, *where, str(role.num_whole), *(times + part for part in each))
    console.print(table)
    lines = plan.train_memory.describe() if plan.train_memory is not None else []
    for line in [*lines, *(line for memory in plan.engine_memory for line in memory.describe())]:
        console.print(f"memory    {line}", soft_wrap=True)
    for size in plan.sizes:
        console.print(f"sizes     {size}", soft_wrap=True)
    for fallback in plan.fallbacks:
        console.print(f"[yellow]fallback[/]  {fallback}", soft_wrap=True)
    for warning in plan.warnings:
        console.print(f"[yellow]warning[/]   {warning}", soft_wrap=True)
    cost = plan.cost
    chain = f", at most {plan.num_jobs} jobs in a row" if plan.num_jobs > 1 else ""
    console.print(
        f"cost      at most {cost.node_hours:g} node-hours and {cost.gpu_hours:g} GPU-hours a job "
        f"(walltime {cost.walltime_min} min){chain}",
        soft_wrap=True,
    )
