"""The command line. Every command imports what it needs when it runs, so that `hpcrl --help` starts at once."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl import __version__
from hpcrl.errors import HpcrlError
from hpcrl.system.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE

if TYPE_CHECKING:
    from hpcrl.campaign_dir.paths import RunDir
    from hpcrl.config.recipe import Recipe
    from hpcrl.plan.plan import Plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what a user can mend is one message and exit code 2, never a traceback."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(words, argparse.Namespace(words=words))
    try:
        code: int = arguments.run(arguments)
    except HpcrlError as error:
        print(f"hpcrl: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcrl", description="Agentic-RL campaigns as one heterogeneous Slurm job: plan, submit, train, survive."
    )
    parser.add_argument("--version", action="version", version=f"hpcrl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_asking(commands)
    _add_campaign(commands)
    _add_export(commands)
    _add_traj(commands)
    _add_lab(commands)
    return parser


def _add_asking(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser("plan", help="show what would be asked of a site, and what it costs")
    _add_request(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument(
        "--dag", choices=["text", "dot", "mermaid"], nargs="?", const="text", help="print the learning pipeline"
    )
    plan.set_defaults(run=_plan)
    submit = commands.add_parser("submit", help="start a campaign")
    _add_request(submit)
    submit.add_argument("--name", help="the campaign's name (default: the recipe's, numbered)")
    submit.add_argument("--dry-run", action="store_true", help="check everything, ask Slurm, submit nothing")
    submit.add_argument("--watch", action="store_true", help="follow the campaign until it ends")
    submit.set_defaults(run=_submit)


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a shipped one")
    parser.add_argument("--site", required=True, help="a site's name or file, such as local or lab")
    parser.add_argument(
        "-s",
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the recipe (rollout.group_size=16) or of the site (site.account=m1234)",
    )


def _add_campaign(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    ls = commands.add_parser("ls", help="list campaigns, newest first")
    ls.add_argument("--json", action="store_true")
    ls.set_defaults(run=_ls)
    monitor = commands.add_parser("monitor", help="watch a campaign")
    monitor.add_argument("campaign", metavar="CAMPAIGN")
    monitor.add_argument("--once", action="store_true", help="print one frame")
    monitor.add_argument("--json", action="store_true", help="print one snapshot as JSON")
    monitor.set_defaults(run=_monitor)
    logs = commands.add_parser("logs", help="show the logs of the last job")
    logs.add_argument("campaign", metavar="CAMPAIGN")
    logs.add_argument("role", metavar="ROLE", nargs="?", help="env, prefill, decode, reward, train, driver")
    logs.add_argument("-n", "--lines", type=int, default=40, help="lines of each log (default 40)")
    logs.set_defaults(run=_logs)
    stop = commands.add_parser("stop", help="checkpoint and end a campaign")
    stop.add_argument("campaign", metavar="CAMPAIGN")
    stop.add_argument("--now", action="store_true", help="cancel its job at once")
    stop.set_defaults(run=_stop)
    resume = commands.add_parser("resume", help="go on from the last checkpoint in a new job")
    resume.add_argument("campaign", metavar="CAMPAIGN")
    resume.add_argument("--watch", action="store_true", help="follow the campaign until it ends")
    resume.set_defaults(run=_resume)


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = commands.add_parser("export", help="write a checkpoint as a model directory")
    export.add_argument("campaign", metavar="CAMPAIGN")
    export.add_argument(
        "--hf", type=Path, required=True, metavar="DIR", help="made anew; transformers and vLLM load it"
    )
    export.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")
    export.set_defaults(run=_export)


def _add_traj(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from hpcrl.traj.arguments import add_commands

    traj = commands.add_parser("traj", help="read, count, export and verify the trajectories of a campaign")
    add_commands(traj)
    traj.set_defaults(run=_traj)


def _add_lab(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    lab = commands.add_parser("lab", help="a real Slurm on this machine, to try things out")
    lab.add_argument("action", choices=["up", "down", "status", "env"])
    lab.add_argument("--dir", type=Path, help="state directory (default: $HPCRL_LAB, else one of this user's)")
    lab.set_defaults(run=_lab)


def _plan(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import lifecycle as campaign

    asked = campaign.request(arguments.recipe, site=arguments.site, settings=tuple(arguments.settings))
    if arguments.json:
        sys.stdout.write(asked.plan.to_json().decode())
    elif arguments.dag:
        _show_dag(asked.recipe, how=arguments.dag)
    else:
        _show_plan(asked.plan, campaign.script_of(asked, name=f"{asked.recipe.name}-1"))
    return 0


def _show_dag(recipe: "Recipe", *, how: str) -> None:
    from hpcrl.config import pipeline as dag

    _say(dag.PICTURES[how](dag.pipeline_of(recipe.train)))


def _submit(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import lifecycle as campaign

    asked = campaign.request(arguments.recipe, site=arguments.site, settings=tuple(arguments.settings))
    if arguments.dry_run:
        opinion = campaign.dry_run(asked)
        _show_plan(asked.plan, campaign.script_of(asked, name=arguments.name or f"{asked.recipe.name}-1"))
        _say(f"dry run: nothing was submitted. {asked.site.name}: {opinion}")
        return 0
    run = campaign.submit(asked, name=arguments.name)
    job = campaign.submitted(run.job(0))
    _say(f"campaign {run.name}: {asked.recipe.name} on {asked.site.name}, job {job.id}, in {run.root}")
    if arguments.watch:
        return _watch(run.name)
    _say(f"watch it with `hpcrl monitor {run.name}`")
    return 0


def _ls(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import directory as home
    from hpcrl.monitor.view import list_campaigns

    return list_campaigns(home.everyone(), as_json=arguments.json)


def _monitor(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from hpcrl.campaign import directory as home
    from hpcrl.campaign import lifecycle as campaign
    from hpcrl.monitor.collect import Collector, slurm_at
    from hpcrl.monitor.snapshot import to_json
    from hpcrl.monitor.view import show_once, watch

    run = home.find(arguments.campaign)
    collector = Collector(run, ask=slurm_at(campaign.site_of(run)))
    if arguments.json:
        sys.stdout.write(to_json(collector.poll()).decode())
    elif arguments.once:
        show_once(collector.poll(), console=Console(highlight=False))
    else:
        watch(collector, console=Console(highlight=False), until_done=False)
    return 0


def _watch(name: str) -> int:
    """Follow a campaign to its end and say what came of it."""
    from rich.console import Console

    from hpcrl.campaign import directory as home
    from hpcrl.campaign import lifecycle as campaign
    from hpcrl.monitor.collect import Collector, slurm_at
    from hpcrl.monitor.view import watch

    run = home.find(name)
    collector = Collector(run, ask=slurm_at(campaign.site_of(run)))
    snapshot = watch(collector, console=Console(highlight=False), until_done=True)
    for line in campaign.closing_words(run, state=snapshot.state, rewards=snapshot.reward_mean):
        _say(line)
    return 0 if snapshot.state in ("done", "stopped", "queued", "running", "draining") else EXIT_FAILED


def _logs(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import directory as home

    run = home.find(arguments.campaign)
    jobs = [run.job(number) for number in run.job_numbers()]
    job = next((job for job in reversed(jobs) if any(job.logs.glob("*.log"))), jobs[-1])  # the last may only wait
    role = {"driver": "batch"}.get(arguments.role, arguments.role)
    logs = sorted(job.logs.glob(f"{role}*.log" if role else "*.log"))
    if not logs:
        present = ", ".join(sorted({path.stem.split("-")[0] for path in job.logs.glob("*.log")})) or "none yet"
        raise HpcrlError(f"job {job.number} of {run.name} has no log of {arguments.role!r}: it has {present}")
    for path in logs:
        lines = path.read_text(errors="replace").splitlines()[-arguments.lines :]
        _say(f"== {path}" + ("" if lines else " (empty)"))
        for line in lines:
            _say(line)
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import lifecycle as campaign

    stop = campaign.stop_now if arguments.now else campaign.stop_gracefully
    _say(stop(arguments.campaign))
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    from hpcrl.campaign import lifecycle as campaign

    run = campaign.resume(arguments.campaign)
    job = run.job(run.job_numbers()[-1])
    _say(f"campaign {run.name}: job {campaign.submitted(job).id} goes on from the last checkpoint")
    return _watch(run.name) if arguments.watch else 0


def _traj(arguments: argparse.Namespace) -> int:
    """Become an interpreter that can read segments."""
    from hpcrl.campaign import directory as home

    run = home.find(arguments.campaign)
    python = _python_with("h5py", run)
    sys.stdout.flush()
    try:
        os.execv(python, [python, "-m", "hpcrl.traj", str(run.root), *arguments.words[1:]])
    except OSError as error:
        cure = "pip install 'hpcrl[local]' here"
        raise HpcrlError(f"{python!r} cannot be run here ({error.strerror}), and reads trajectories: {cure}") from error


def _python_with(module: str, run: "RunDir") -> str:
    """This interpreter if it has the module, else the one that the campaign's jobs run with."""
    from importlib.util import find_spec

    from hpcrl.campaign import lifecycle as campaign

    return sys.executable if find_spec(module) else campaign.site_of(run).python or sys.executable


def _export(arguments: argparse.Namespace) -> int:
    """Run where there is torch."""
    from hpcrl.campaign import directory as home

    run = home.find(arguments.campaign)
    step = [] if arguments.step is None else [str(arguments.step)]
    words = [
        _python_with("torch", run),
        "-m",
        "hpcrl.trainers.export",
        str(run.root),
        str(arguments.hf.absolute()),
        *step,
    ]
    return subprocess.run(words, check=False).returncode


def _lab(arguments: argparse.Namespace) -> int:
    from hpcrl.config.site import default_lab_dir
    from hpcrl.lab import lab

    state_dir = arguments.dir or default_lab_dir()
    match arguments.action:
        case "up":
            _say(str(lab.up(state_dir)))
        case "down":
            _say(f"the lab in {state_dir} is {'down: nothing of it is left' if lab.down(state_dir) else 'not up'}")
        case "status":
            _say(str(lab.status(state_dir)))
        case "env":
            if not lab.status(state_dir).is_up:
                raise HpcrlError(f"the lab in {state_dir} is not up: `hpcrl lab up` first")
            for name, value in lab.environment(state_dir).items():
                _say(f"export {name}={value}")
    return 0


def _show_plan(plan: "Plan", script: str) -> None:
    """A plan for people: where every role goes, what was compromised, what it costs, the script."""
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
    console.print(f"\n[dim]{escape(script.rstrip())}[/]", soft_wrap=True)  # unwrapped: it can be copied


def _say(text: str) -> None:
    print(text)  # noqa: T201 - the command's answer


if __name__ == "__main__":
    sys.exit(main())
