"""The command line (`main`). Every command imports its modules when it runs, so that `hpcrl --help` starts fast."""

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl import __version__
from hpcrl.commands.arguments import add_commands, add_logs, add_settings
from hpcrl.commands.completion import COMPLETE_COMMAND
from hpcrl.commands.examples import add_examples
from hpcrl.errors import HpcrlError
from hpcrl.system.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE

if TYPE_CHECKING:
    from hpcrl.campaign.lifecycle import CampaignRequest
    from hpcrl.campaign_dir.paths import CampaignDir
    from hpcrl.config.recipe import Recipe
    from hpcrl.lab.conf import LabCluster
    from hpcrl.plan.plan import Plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error that the user can fix gives one message and exit code 2, never a traceback."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == [COMPLETE_COMMAND]:
        return _complete_words(words[1:])
    arguments = make_parser().parse_args(words, argparse.Namespace(words=words, make_parser=make_parser))
    try:
        code: int = arguments.run(arguments)
    except HpcrlError as error:
        print(f"hpcrl: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    except BrokenPipeError:  # the reader of the output has exited, as `| head` does
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcrl", description="Agentic-RL campaigns as one heterogeneous Slurm job: plan, submit, train, survive."
    )
    parser.add_argument("--version", action="version", version=f"hpcrl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_planning(commands)
    _add_campaign(commands)
    _add_export(commands)
    _add_gc(commands)
    _add_traj(commands)
    _add_report(commands)
    _add_site(commands)
    _add_doctor(commands)
    _add_lab(commands)
    add_commands(commands)
    add_examples(parser)
    return parser


def _complete_words(words: Sequence[str]) -> int:
    from hpcrl.commands.completion import complete_words

    for candidate in complete_words(make_parser(), words):
        _print_line(candidate)
    return 0


def _add_planning(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser("plan", help="show the resources that a recipe needs on a site, and their cost")
    _add_request(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--suggest", action="store_true", help="print other plans for the recipe, with their cost")
    plan.add_argument(
        "--dag", choices=["text", "dot", "mermaid"], nargs="?", const="text", help="print the learning pipeline"
    )
    plan.set_defaults(run=_run_plan)
    submit = commands.add_parser("submit", help="start a campaign")
    _add_request(submit)
    submit.add_argument("--name", help="the campaign's name (default: the recipe's, numbered)")
    submit.add_argument("--dry-run", action="store_true", help="check everything, ask Slurm, submit nothing")
    submit.add_argument("--watch", action="store_true", help="follow the campaign until it ends")
    submit.set_defaults(run=_run_submit)


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a shipped one")
    parser.add_argument("--site", help="a site's name or file, such as local or lab (required)")
    add_settings(
        parser, help="override a key of the recipe (rollout.group_size=16) or of the site (site.account=m1234)"
    )


def _add_campaign(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    ls = commands.add_parser("ls", help="list campaigns, newest first")
    ls.add_argument("--json", action="store_true")
    ls.set_defaults(run=_run_ls)
    monitor = commands.add_parser("monitor", help="watch a campaign")
    monitor.add_argument("campaign", metavar="CAMPAIGN")
    monitor.add_argument("--once", action="store_true", help="print one frame")
    monitor.add_argument("--json", action="store_true", help="print one snapshot as JSON")
    monitor.set_defaults(run=_run_monitor)
    add_logs(commands)
    stop = commands.add_parser("stop", help="checkpoint and end a campaign")
    stop.add_argument("campaign", metavar="CAMPAIGN")
    stop.add_argument("--now", action="store_true", help="cancel its job at once")
    stop.set_defaults(run=_run_stop)
    resume = commands.add_parser("resume", help="continue from the last checkpoint in a new job")
    resume.add_argument("campaign", metavar="CAMPAIGN")
    add_settings(resume, help="change a setting of the recipe (job.walltime_min=120) or of the site (site.account=m1)")
    resume.add_argument(
        "--accept", action="store_true", help="take over changed files, edited records and another version of hpcrl"
    )
    resume.add_argument("--watch", action="store_true", help="follow the campaign until it ends")
    resume.set_defaults(run=_run_resume)
    extend = commands.add_parser("extend", help="give a campaign more steps or jobs, also while it runs")
    extend.add_argument("campaign", metavar="CAMPAIGN")
    extend.add_argument("--steps", type=int, metavar="N", help="the new number of training steps")
    extend.add_argument("--jobs", type=int, default=0, metavar="N", help="N more jobs may follow the last one")
    extend.set_defaults(run=_run_extend)


def _add_gc(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    gc = commands.add_parser("gc", help="list what campaigns no longer need on disk, and remove it with --yes")
    gc.add_argument("campaigns", metavar="CAMPAIGN", nargs="*", help="default: all campaigns")
    gc.add_argument("--archive", action="store_true", help="also the trajectories that training is done with")
    gc.add_argument("--yes", action="store_true", help="remove it")
    gc.set_defaults(run=_run_gc)


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = commands.add_parser("export", help="write a checkpoint as a model directory")
    export.add_argument("campaign", metavar="CAMPAIGN")
    export.add_argument(
        "--hf", type=Path, required=True, metavar="DIR", help="a new directory, for transformers and vLLM"
    )
    export.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")
    export.set_defaults(run=_run_export)


def _add_traj(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from hpcrl.traj.arguments import add_commands

    traj = commands.add_parser("traj", help="read, count, export and verify the trajectories of a campaign")
    add_commands(traj)
    traj.set_defaults(run=_run_traj)


def _add_report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from hpcrl.report.arguments import add_arguments

    report = commands.add_parser("report", help="write a page about campaigns: verdict, curves, time, trajectories")
    add_arguments(report)
    report.set_defaults(run=_run_report)


def _add_site(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    site = commands.add_parser("site", help="list, show and describe clusters")
    actions = site.add_subparsers(metavar="ACTION", required=True)
    actions.add_parser("ls", help="list the sites that are known by name").set_defaults(run=_run_site_ls)
    show = actions.add_parser("show", help="print the file of a site, and where it is")
    show.add_argument("name", metavar="NAME")
    show.set_defaults(run=_run_site_show)
    new = actions.add_parser("new", help="describe the cluster of this login node in a file of your own")
    new.add_argument("name", metavar="NAME")
    new.add_argument(
        "--detect", action="store_true", required=True, help="ask Slurm (sinfo, scontrol); nothing is queued"
    )
    new.set_defaults(run=_run_site_new)


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser("doctor", help="check a site file against the machine it describes")
    doctor.add_argument("--site", required=True, help="a site's name or file")
    add_settings(doctor, help="override a key of the site (account=m1234)")
    doctor.add_argument("--job", action="store_true", help="also check a node of each partition, by short jobs")
    doctor.add_argument("--timeout", type=float, default=900.0, metavar="S", help="the time to wait for them (900 s)")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=_run_doctor)


def _add_lab(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    lab = commands.add_parser("lab", help="a real Slurm on this machine, to try things out")
    lab.add_argument("action", choices=["up", "down", "status", "env", "break", "restore"])
    lab.add_argument(
        "part", nargs="?", help="break, restore: a node that loses power, or slurmctld, which falls silent"
    )
    lab.add_argument("--dir", type=Path, help="state directory (default: $HPCRL_LAB, else one per user)")
    lab.add_argument("--strict", action="store_true", help="up: nodes that share less and limit memory (as root)")
    lab.add_argument("--like", metavar="SITE", help="up: partitions, GPUs and QOS of a site, with few nodes each")
    lab.add_argument("--kill-wait", type=int, metavar="S", help="up: seconds between SIGTERM and SIGKILL (10)")
    lab.add_argument("--grace", type=int, metavar="S", help="up: the same for a job that is preempted (strict: 20)")
    lab.add_argument("--over-time-limit", type=int, metavar="MIN", help="up: minutes beyond the walltime (0)")
    lab.add_argument("--no-requeue", action="store_true", help="up: a job whose node failed is not requeued")
    lab.set_defaults(run=_run_lab)


def _load_request(arguments: argparse.Namespace) -> "CampaignRequest":
    from hpcrl.campaign import lifecycle
    from hpcrl.config.toml import list_known_names

    if arguments.site is None:
        raise HpcrlError(f"--site is missing: give one of {', '.join(list_known_names('sites'))}, or a file")
    return lifecycle.load_request(arguments.recipe, site=arguments.site, settings=tuple(arguments.settings))


def _run_plan(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import lifecycle

    request = _load_request(arguments)
    for note in lifecycle.check_plan(request):
        _print_note(note)
    if arguments.suggest:
        _print_suggestions(request, as_json=arguments.json)
    elif arguments.json:
        sys.stdout.write(request.plan.to_json().decode())
    elif arguments.dag:
        _show_dag(request.recipe, how=arguments.dag)
    else:
        _show_plan(request.plan, lifecycle.preview_script(request, name=f"{request.recipe.name}-1"))
    return 0


def _print_suggestions(request: "CampaignRequest", *, as_json: bool) -> None:
    """Print the size of the plan that was made, and of others."""
    import msgspec

    from hpcrl.plan.suggestions import show_suggestions, suggest_plans

    suggestions = suggest_plans(request.recipe, request.site, request.plan)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(suggestions), indent=2).decode() + "\n")
        return
    for line in show_suggestions(suggestions, request.plan):
        _print_line(line)


def _show_dag(recipe: "Recipe", *, how: str) -> None:
    from hpcrl.config.pipeline import RENDERERS, make_running_pipeline

    _print_line(RENDERERS[how](make_running_pipeline(recipe)))


def _run_submit(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import lifecycle

    request = _load_request(arguments)
    if arguments.dry_run:
        opinion = lifecycle.dry_run(request, show_note=_print_note)
        _show_plan(request.plan, lifecycle.preview_script(request, name=arguments.name or f"{request.recipe.name}-1"))
        _print_line(f"dry run: nothing was submitted. {request.site.name}: {opinion}")
        return 0
    campaign_dir = lifecycle.submit(request, name=arguments.name, show_note=_print_note)
    job = lifecycle.read_submission(campaign_dir.job(0))
    _print_line(
        f"campaign {campaign_dir.name}: {request.recipe.name} on {request.site.name}, job {job.id}, "
        f"in {campaign_dir.root}"
    )
    if arguments.watch:
        return _watch_campaign(campaign_dir.name)
    _print_line(f"watch it with `hpcrl monitor {campaign_dir.name}`")
    return 0


def _run_ls(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import directory
    from hpcrl.monitor.view import print_campaigns

    return print_campaigns(directory.list_campaigns(), as_json=arguments.json)


def _run_monitor(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from hpcrl.campaign import directory
    from hpcrl.monitor.collect import SnapshotCollector, make_slurm_query
    from hpcrl.monitor.snapshot import encode_snapshot
    from hpcrl.monitor.view import show_snapshot, watch_campaign
    from hpcrl.plan.records import read_site

    campaign_dir = directory.find_campaign(arguments.campaign)
    collector = SnapshotCollector(campaign_dir, query=make_slurm_query(read_site(campaign_dir, skips_unknown=True)))
    if arguments.json:
        sys.stdout.write(encode_snapshot(collector.poll()).decode())
    elif arguments.once:
        show_snapshot(collector.poll(), console=Console(highlight=False))
    else:
        watch_campaign(collector, console=Console(highlight=False), until_done=False)
    return 0


def _watch_campaign(name: str) -> int:
    """Follow a campaign to its end and print the result."""
    from rich.console import Console

    from hpcrl.campaign import directory, lifecycle
    from hpcrl.monitor.advisories import UNTRAINED_DOMAIN, describe_advisory
    from hpcrl.monitor.collect import SnapshotCollector, make_slurm_query
    from hpcrl.monitor.view import watch_campaign
    from hpcrl.plan.records import read_site

    campaign_dir = directory.find_campaign(name)
    collector = SnapshotCollector(campaign_dir, query=make_slurm_query(read_site(campaign_dir, skips_unknown=True)))
    snapshot = watch_campaign(collector, console=Console(highlight=False), until_done=True)
    untrained = [describe_advisory(one) for one in snapshot.advisories if one.name == UNTRAINED_DOMAIN]
    summary = lifecycle.final_summary(
        campaign_dir,
        state=snapshot.state,
        rewards=snapshot.reward_mean,
        losses=snapshot.detail.losses,
        untrained=untrained,
    )
    for line in summary:
        _print_line(line)
    has_failed = snapshot.state not in ("done", "stopped", "queued", "running", "draining")
    return EXIT_FAILED if has_failed or (snapshot.state == "done" and untrained) else 0


def _run_stop(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import lifecycle

    stop = lifecycle.stop_now if arguments.now else lifecycle.stop_gracefully
    _print_line(stop(arguments.campaign))
    return 0


def _run_resume(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import continuation, directory, lifecycle

    campaign_dir = continuation.resume(
        arguments.campaign, settings=tuple(arguments.settings), accept=arguments.accept, show_note=_print_note
    )
    job = directory.list_jobs(campaign_dir)[-1]
    _print_line(
        f"campaign {campaign_dir.name}: job {lifecycle.read_submission(job).id} continues from the last checkpoint"
    )
    return _watch_campaign(campaign_dir.name) if arguments.watch else 0


def _run_extend(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import continuation

    if arguments.steps is None and arguments.jobs < 1:
        raise HpcrlError("extend what? --steps N is the new number of steps, --jobs N lets N more jobs follow")
    _print_line(
        continuation.extend(arguments.campaign, steps=arguments.steps, jobs=arguments.jobs, show_note=_print_note)
    )
    return 0


def _run_traj(arguments: argparse.Namespace) -> int:
    """Replace this process by an interpreter that can read segments."""
    from hpcrl.campaign import directory

    campaign = directory.find_campaign(arguments.campaign)
    python = _find_python_with("h5py", campaign)
    sys.stdout.flush()
    try:
        os.execv(python, [python, "-m", "hpcrl.traj", str(campaign.root), *arguments.words[1:]])
    except OSError as error:
        hint = "pip install 'hpcrl[local]' here"
        raise HpcrlError(
            f"{python!r}, which would read the trajectories, cannot be run here ({error.strerror}): {hint}"
        ) from error


def _run_report(arguments: argparse.Namespace) -> int:
    """Replace this process by an interpreter that can read segments."""
    from hpcrl.campaign import directory

    campaigns = [directory.find_campaign(name) for name in arguments.campaigns]
    options = [f"--format={arguments.format}", *(f"--{name}" for name in ("json", "png") if getattr(arguments, name))]
    if arguments.output is not None:
        options.append(f"--output={arguments.output}")
    python = _find_report_python(campaigns[0])
    sys.stdout.flush()
    os.execv(python, [python, "-m", "hpcrl.report", *options, "--", *(str(campaign.root) for campaign in campaigns)])


def _find_report_python(campaign_dir: "CampaignDir") -> str:
    """Return an interpreter that reads trajectories if there is one; without it the report has none of them."""
    try:
        python = _find_python_with("h5py", campaign_dir)
    except HpcrlError:  # the campaign's records are damaged
        return sys.executable
    return python if os.access(python, os.X_OK) else sys.executable


def _find_python_with(module: str, campaign_dir: "CampaignDir") -> str:
    """Return this interpreter if it has the module, else the interpreter of the campaign's jobs."""
    from importlib.util import find_spec

    from hpcrl.plan.records import read_site

    if find_spec(module):
        return sys.executable
    return read_site(campaign_dir, skips_unknown=True).python or sys.executable


def _run_export(arguments: argparse.Namespace) -> int:
    """Run the export with an interpreter that has torch."""
    from hpcrl.campaign import directory

    campaign = directory.find_campaign(arguments.campaign)
    step = [] if arguments.step is None else [str(arguments.step)]
    words = [
        _find_python_with("torch", campaign),
        "-m",
        "hpcrl.trainers.export",
        str(campaign.root),
        str(arguments.hf.absolute()),
        *step,
    ]
    return subprocess.run(words, check=False).returncode


def _run_site_ls(arguments: argparse.Namespace) -> int:
    from hpcrl.config.site import load_site
    from hpcrl.config.toml import list_known_names

    del arguments
    names = list_known_names("sites")
    width = max(map(len, names))
    for name in names:
        try:
            description = load_site(name).description
        except HpcrlError as error:
            description = f"cannot be used: {error}"
        _print_line(f"{name:<{width}}  {description}")
    return 0


def _run_site_show(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign.own_gpus import describe_own_gpus
    from hpcrl.config.site import load_site
    from hpcrl.config.toml import find_toml

    path = find_toml("sites", arguments.name)
    _print_line(f"# {path}")
    sys.stdout.write(path.read_text())
    with contextlib.suppress(HpcrlError):  # a site that cannot be used is shown too
        for line in describe_own_gpus(load_site(arguments.name)):
            _print_line(f"# {line}")
    return 0


def _run_site_new(arguments: argparse.Namespace) -> int:
    from hpcrl.slurm.site_detection import write_site

    path, notes = write_site(arguments.name)
    for note in notes:
        _print_note(note)
    _print_line(f"{path} describes this cluster; next:")
    _print_line(f"  hpcrl plan quickstart --site {arguments.name}               # what Slurm would be asked for")
    _print_line(f"  hpcrl submit quickstart --site {arguments.name} --dry-run   # whether Slurm would accept it")
    return 0


def _run_gc(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import directory, surplus
    from hpcrl.system.terminal import format_bytes

    campaigns = [directory.find_campaign(name) for name in arguments.campaigns] or directory.list_campaigns()
    parts: list[surplus.SurplusPart] = []
    for campaign in campaigns:
        try:
            parts += surplus.find_surplus(campaign, with_archive=arguments.archive)
        except (HpcrlError, OSError, ValueError) as error:
            if arguments.campaigns:
                raise
            _print_note(f"campaign {campaign.name} is left alone: {error}")
    for part in parts:
        _print_line(f"{part.campaign.name}: {part.kind}: {len(part.paths)}, {format_bytes(part.num_bytes)}")
    total = format_bytes(sum(part.num_bytes for part in parts))
    if not arguments.yes:
        _print_line(f"{total} in all; `hpcrl gc --yes` removes it" if parts else "nothing can be removed")
        return 0
    failed = surplus.remove_surplus(parts)
    for line in failed:
        _print_note(f"not removed: {line}")
    _print_line(f"{total} in all, {'removed' if not failed else 'removed but for what is named above'}")
    return 1 if failed else 0


def _apply_settings(cluster: "LabCluster", arguments: argparse.Namespace) -> "LabCluster":
    """Return a cluster with the settings of Slurm that the command line names."""
    return dataclasses.replace(
        cluster,
        kill_wait_s=cluster.kill_wait_s if arguments.kill_wait is None else arguments.kill_wait,
        preempt_grace_s=cluster.preempt_grace_s if arguments.grace is None else arguments.grace,
        over_time_limit_min=arguments.over_time_limit or 0,
        requeues=not arguments.no_requeue,
    )


def _run_doctor(arguments: argparse.Namespace) -> int:
    from hpcrl.config.site import load_site
    from hpcrl.doctor.node_job import run_doctor

    settings = tuple(setting.removeprefix("site.") for setting in arguments.settings)
    site = load_site(arguments.site, settings=settings)
    return run_doctor(site, has_job=arguments.job, as_json=arguments.json, timeout_s=arguments.timeout)


def _run_lab(arguments: argparse.Namespace) -> int:
    from hpcrl.config.site import default_lab_dir
    from hpcrl.lab import lab, outages

    state_dir = arguments.dir or default_lab_dir()
    if (arguments.part is not None) != (arguments.action in ("break", "restore")):
        raise HpcrlError("name a node or slurmctld after `hpcrl lab break` and `hpcrl lab restore`, and only there")
    match arguments.action:
        case "break":
            outages.break_part(state_dir, arguments.part)
        case "restore":
            outages.restore_part(state_dir, arguments.part)
        case "up":
            _bring_up_lab(state_dir, arguments)
        case "down":
            _print_line(
                f"the lab in {state_dir} is {'down: everything is removed' if lab.down(state_dir) else 'not up'}"
            )
        case "status":
            _print_line(str(lab.status(state_dir)))
        case "env":
            if not lab.status(state_dir).is_up:
                raise HpcrlError(f"the lab in {state_dir} is not up: `hpcrl lab up` first")
            for name, value in lab.make_environment(state_dir).items():
                _print_line(f"export {name}={value}")
    return 0


def _bring_up_lab(state_dir: Path, arguments: argparse.Namespace) -> None:
    from hpcrl.lab import conf, lab

    if arguments.like is not None:
        _bring_up_likeness(state_dir, arguments)
        return
    cluster = conf.STRICT_CLUSTER if arguments.strict else conf.DEFAULT_CLUSTER
    _print_line(str(lab.up(state_dir, cluster=_apply_settings(cluster, arguments))))


def _bring_up_likeness(state_dir: Path, arguments: argparse.Namespace) -> None:
    from hpcrl.config.site import load_site
    from hpcrl.config.toml import find_toml
    from hpcrl.lab import lab, likeness

    site = load_site(arguments.like)
    cluster = dataclasses.replace(likeness.imitate_site(site), is_strict=arguments.strict)
    now = lab.up(state_dir, cluster=_apply_settings(cluster, arguments))
    _print_line(str(now))
    path = likeness.write_lab_site(site, source=find_toml("sites", arguments.like), root=now.state_dir)
    _print_line(f"{path} is site {site.name} for use with it; next: hpcrl submit quickstart --site {path} --watch")


def _show_plan(plan: "Plan", script: str) -> None:
    """Print a plan: the place of every role, compromises, cost, and the batch script."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{plan.recipe}[/] on [bold]{plan.site}[/]")
    console.print(f"layout    {plan.layout}: {plan.layout_reason}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading, align in (("role", "left"), ("component", "right"), ("partition", "left"), ("nodes", "right")):
        table.add_column(heading, justify=align, no_wrap=True)  # type: ignore[arg-type]
    for heading in ("ranks", "GPUs each", "cores each", "GiB each"):
        table.add_column(heading, justify="right", no_wrap=True)
    for role in plan.roles:
        component = plan.components[role.component]
        gpus = f"{role.gpus_per_worker} {component.gpu}" if role.gpus_per_worker else "-"
        where = (str(component.index), component.partition, str(component.nodes))
        each = (str(role.num_workers), gpus, str(role.cpus_per_worker), f"{role.mem_gib_per_worker:g}")
        table.add_row(role.role, *where, *each)
    console.print(table)
    for line in plan.train_memory.describe() if plan.train_memory is not None else ():
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
        f"(walltime {cost.walltime_min} min){chain}"
    )
    console.print(f"\n[dim]{escape(script.rstrip())}[/]", soft_wrap=True)  # not wrapped, so that it can be copied


def _print_line(text: str) -> None:
    print(text)  # noqa: T201 - the command's answer


def _print_note(note: str) -> None:
    print(f"hpcrl: note: {note}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
