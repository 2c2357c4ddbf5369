"""The command lines of all commands. It imports nothing heavy: `hpcrl --help` reads it.

add_commands      adds the commands to `hpcrl`; `run` of each names its function, `module:function` in this package
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.commands.completion import SHELLS
from hpcrl.report.arguments import add_arguments
from hpcrl.traj.arguments import add_commands as add_actions

if TYPE_CHECKING:
    CommandParsers = argparse._SubParsersAction[Any]

NUM_EVENTS, NUM_LINES, NUM_EPISODES = 40, 40, 3


def add_commands(commands: "CommandParsers") -> None:
    """Add the commands; a function that only `run` names is imported when its command runs."""
    _add_planning(commands)
    _add_monitoring(commands)
    _add_logs(commands)
    _add_campaigns(commands)
    _add_export(commands)
    _add_gc(commands)
    _add_traj(commands)
    _add_report(commands)
    _add_site(commands)
    _add_recipe(commands)
    _add_doctor(commands)
    _add_lab(commands)
    _add_try(commands)
    _add_init(commands)
    _add_events(commands)
    _add_compare(commands)
    _add_calibrate(commands)
    _add_simulate(commands)
    _add_rm(commands)
    _add_help(commands)


def _add_planning(commands: "CommandParsers") -> None:
    plan = commands.add_parser("plan", help="show the resources that a recipe needs on a site, and their cost")
    _add_request(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--suggest", action="store_true", help="print other plans for the recipe, with their cost")
    plan.add_argument(
        "--dag", choices=["text", "dot", "mermaid"], nargs="?", const="text", help="print the learning pipeline"
    )
    plan.set_defaults(run="planning:run_plan")
    submit = commands.add_parser("submit", help="start a campaign")
    _add_request(submit)
    submit.add_argument("--name", help="the campaign's name (default: the recipe's, numbered)")
    after = submit.add_mutually_exclusive_group()
    after.add_argument("--dry-run", action="store_true", help="check everything, ask Slurm, submit nothing")
    after.add_argument("--watch", action="store_true", help="follow the campaign until it ends")
    submit.set_defaults(run="planning:run_submit")
    stage = commands.add_parser("stage", help="fetch what a recipe names to a site's file system, on a login node")
    _add_request(stage)
    stage.set_defaults(run="planning:run_stage")
    image = commands.add_parser("image", help="write the definition of an image with hpcrl, and build it")
    image.add_argument("--site", help="a site's name or file (required)")
    _add_settings(image, help="override a key of the site (container=apptainer)")
    image.add_argument("--gpu", choices=["nvidia", "amd", "cpu"], help="default: that of the site's partitions")
    image.add_argument("--base", metavar="IMAGE", help="the image to start from (default: one of vLLM, or of Python)")
    image.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel of hpcrl (default: from the package index)")
    image.add_argument("-o", "--output", type=Path, default=Path("image"), metavar="DIR", help="default: image")
    image.add_argument("--build", action="store_true", help="build it with the site's program")
    image.set_defaults(run="planning:run_image")


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a shipped one")
    parser.add_argument("--site", help="a site's name or file, such as local or lab (required)")
    _add_settings(
        parser, help="override a key of the recipe (rollout.group_size=16) or of the site (site.account=m1234)"
    )


def _add_settings(parser: argparse.ArgumentParser, *, help: str) -> None:
    parser.add_argument("-s", "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help=help)


def _add_monitoring(commands: "CommandParsers") -> None:
    ls = commands.add_parser("ls", help="list campaigns, newest first")
    ls.add_argument("--site", metavar="SITE", help="only those of a site")
    ls.add_argument("--json", action="store_true")
    ls.set_defaults(run="monitoring:run_ls")
    monitor = commands.add_parser("monitor", help="watch a campaign")
    monitor.add_argument("campaign", metavar="CAMPAIGN")
    monitor.add_argument("--once", action="store_true", help="print one frame")
    monitor.add_argument("--json", action="store_true", help="print one snapshot as JSON")
    monitor.set_defaults(run="monitoring:run_monitor")


def _add_logs(commands: "CommandParsers") -> None:
    logs = commands.add_parser("logs", help="show the logs of the last job")
    logs.add_argument("campaign", metavar="CAMPAIGN")
    logs.add_argument("role", metavar="ROLE", nargs="?", help="env, prefill, decode, reward, train, judge-NAME, driver")
    logs.add_argument("-n", "--lines", type=int, default=NUM_LINES, help=f"lines of each log (default {NUM_LINES})")
    logs.add_argument("-f", "--follow", action="store_true", help="continue with what is added, until the job ends")
    logs.set_defaults(run="campaign_logs:run_logs")


def _add_campaigns(commands: "CommandParsers") -> None:
    stop = commands.add_parser("stop", help="checkpoint and end a campaign")
    stop.add_argument("campaign", metavar="CAMPAIGN")
    stop.add_argument("--now", action="store_true", help="cancel its job at once")
    stop.set_defaults(run="campaigns:run_stop")
    resume = commands.add_parser("resume", help="continue from the last checkpoint in a new job")
    resume.add_argument("campaign", metavar="CAMPAIGN")
    _add_settings(resume, help="change a setting of the recipe (job.walltime_min=120) or of the site (site.account=m1)")
    resume.add_argument(
        "--accept", action="store_true", help="take over changed files, edited records and another version of hpcrl"
    )
    resume.add_argument("--watch", action="store_true", help="follow the campaign until it ends")
    resume.set_defaults(run="campaigns:run_resume")
    extend = commands.add_parser("extend", help="give a campaign more steps or jobs, also while it runs")
    extend.add_argument("campaign", metavar="CAMPAIGN")
    extend.add_argument("--steps", type=int, metavar="N", help="the new number of training steps")
    extend.add_argument("--jobs", type=int, default=0, metavar="N", help="N more jobs may follow the last one")
    extend.set_defaults(run="campaigns:run_extend")


def _add_export(commands: "CommandParsers") -> None:
    export = commands.add_parser("export", help="write a checkpoint as a model directory, or send figures to a tracker")
    export.add_argument("campaign", metavar="CAMPAIGN")
    target = export.add_mutually_exclusive_group(required=True)
    target.add_argument("--hf", type=Path, metavar="DIR", help="a new directory, for transformers and vLLM")
    target.add_argument(
        "--wandb",
        dest="tracker",
        action="store_const",
        const="wandb",
        help="recorded figures as a run of Weights & Biases, offline unless WANDB_MODE=online; again: what is new",
    )
    target.add_argument(
        "--mlflow",
        dest="tracker",
        action="store_const",
        const="mlflow",
        help="the same to MLflow: where MLFLOW_TRACKING_URI names, or a database in the campaign's directory",
    )
    export.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")
    export.set_defaults(run="interpreters:run_export")


def _add_gc(commands: "CommandParsers") -> None:
    gc = commands.add_parser("gc", help="list what campaigns no longer need on disk, and remove it with --yes")
    gc.add_argument("campaigns", metavar="CAMPAIGN", nargs="*", help="default: all campaigns")
    gc.add_argument("--archive", action="store_true", help="also the trajectories that training is done with")
    gc.add_argument("--yes", action="store_true", help="remove it")
    gc.set_defaults(run="removal:run_gc")


def _add_traj(commands: "CommandParsers") -> None:
    traj = commands.add_parser("traj", help="read, count, export and verify the trajectories of a campaign")
    add_actions(traj)
    traj.set_defaults(run="interpreters:run_traj")


def _add_report(commands: "CommandParsers") -> None:
    report = commands.add_parser("report", help="write a page about campaigns: verdict, curves, time, trajectories")
    add_arguments(report)
    report.set_defaults(run="interpreters:run_report")


def _add_site(commands: "CommandParsers") -> None:
    site = commands.add_parser("site", help="list, show and describe clusters")
    actions = site.add_subparsers(metavar="ACTION", required=True)
    actions.add_parser("ls", help="list the sites that are known by name").set_defaults(run="sites:run_site_ls")
    show = actions.add_parser("show", help="print the file of a site, and where it is")
    show.add_argument("name", metavar="NAME")
    show.set_defaults(run="sites:run_site_show")
    new = actions.add_parser("new", help="describe the cluster of this login node in a file of your own")
    new.add_argument("name", metavar="NAME")
    new.add_argument(
        "--detect", action="store_true", required=True, help="ask Slurm (sinfo, scontrol); nothing is queued"
    )
    new.set_defaults(run="sites:run_site_new")


def _add_recipe(commands: "CommandParsers") -> None:
    recipe = commands.add_parser("recipe", help="list, show and write recipes")
    actions = recipe.add_subparsers(metavar="ACTION", required=True)
    actions.add_parser("ls", help="list the recipes that are known by name").set_defaults(run="recipes:run_recipe_ls")
    show = actions.add_parser("show", help="print the file of a recipe, and those that it extends")
    show.add_argument("recipe", metavar="NAME")
    show.set_defaults(run="recipes:run_recipe_show")
    new = actions.add_parser("new", help="write a recipe of your own that extends another")
    new.add_argument("name", metavar="NEW")
    new.add_argument("--from", dest="parent", default="quickstart", metavar="RECIPE", help="default: quickstart")
    new.set_defaults(run="recipes:run_recipe_new")


def _add_doctor(commands: "CommandParsers") -> None:
    doctor = commands.add_parser("doctor", help="check a site file against the machine it describes")
    doctor.add_argument("--site", required=True, help="a site's name or file")
    _add_settings(doctor, help="override a key of the site (account=m1234)")
    doctor.add_argument("--job", action="store_true", help="also check nodes of each partition, by short jobs")
    doctor.add_argument("--timeout", type=float, default=900.0, metavar="S", help="the time to wait for them (900 s)")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run="sites:run_doctor")


def _add_lab(commands: "CommandParsers") -> None:
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
    lab.set_defaults(run="lab:run_lab")


def _add_try(commands: "CommandParsers") -> None:
    trial = commands.add_parser("try", help="play a few episodes of each domain here, without a campaign")
    trial.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a shipped one")
    trial.add_argument("--site", default="local", help="the site whose Python is used (default: local)")
    trial.add_argument("--domain", action="append", default=[], metavar="NAME", help="only this one (can be repeated)")
    trial.add_argument(
        "-n", "--episodes", type=int, default=NUM_EPISODES, metavar="N", help=f"of each (default {NUM_EPISODES})"
    )
    trial.add_argument("--json", action="store_true", help="print the results as JSON")
    _add_settings(trial, help="override a key of the recipe (rollout.temperature=0.5)")
    trial.set_defaults(run="trial:run_try")


def _add_init(commands: "CommandParsers") -> None:
    init = commands.add_parser("init", help="write a recipe and an environment to start from")
    init.add_argument(
        "directory", metavar="DIRECTORY", type=_parse_directory, help="a new directory; its name is the recipe's"
    )
    init.set_defaults(run="skeleton:run_init")


def _parse_directory(text: str) -> Path:
    if not text:  # its path would be the current directory
        raise argparse.ArgumentTypeError("the name is empty: give a new directory, such as my-game")
    return Path(text)


def _add_events(commands: "CommandParsers") -> None:
    events = commands.add_parser("events", help="print what happened in a campaign, event by event")
    events.add_argument("campaign", metavar="CAMPAIGN")
    events.add_argument("--kind", action="append", default=[], metavar="KIND", help="of this kind (can be repeated)")
    events.add_argument("--role", action="append", default=[], metavar="ROLE", help="of this role (can be repeated)")
    events.add_argument(
        "-n", "--limit", type=int, default=NUM_EVENTS, metavar="N", help=f"the newest N (default {NUM_EVENTS}; 0: all)"
    )
    events.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
    events.add_argument("--json", action="store_true", help="print a line of JSON for each")
    events.set_defaults(run="campaign_logs:run_events")


def _add_compare(commands: "CommandParsers") -> None:
    compare = commands.add_parser("compare", help="show two campaigns side by side, and how their recipes differ")
    compare.add_argument("campaigns", metavar="CAMPAIGN", nargs=2)
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON")
    compare.set_defaults(run="comparison:run_compare")


def _add_calibrate(commands: "CommandParsers") -> None:
    calibrate = commands.add_parser("calibrate", help="fit the cost model to measured servers, for a site file")
    calibrate.add_argument("source", metavar="SOURCE", help="a campaign, or a CSV file of measured servers")
    calibrate.add_argument("--site", help="the site whose GPU figures are used for a CSV file (default: the catalogue)")
    calibrate.add_argument(
        "--hold-out", action="append", default=[], metavar="GPU", help="only measure the error on this type"
    )
    calibrate.add_argument("--json", action="store_true", help="print the coefficients and errors as JSON")
    calibrate.set_defaults(run="calibration:run_calibrate")


def _add_simulate(commands: "CommandParsers") -> None:
    simulate = commands.add_parser("simulate", help="estimate step time, waste and cost of a recipe at any size")
    add_simulation(simulate)
    simulate.set_defaults(run="interpreters:run_simulate")


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Add what `hpcrl simulate` takes."""
    _add_request(parser)
    parser.add_argument("--gpus", type=int, metavar="N", help="divide N GPUs among the roles as the plan does")
    parser.add_argument("--traces", metavar="SOURCE", help="play recorded episodes: a CSV file, or a campaign")
    parser.add_argument("--skip-invalid", action="store_true", help="leave out calls of a CSV file that are refused")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default: the recipe's)")
    parser.add_argument("--env-s", type=float, metavar="S", help="mean time of an environment's step (1)")
    parser.add_argument("--env-sigma", type=float, metavar="X", help="sigma of its logarithm (1)")
    parser.add_argument("--reset-s", type=float, metavar="S", help="mean time of a reset (1)")
    parser.add_argument("--reward-s", type=float, default=0.0, metavar="S", help="time of a reward (0)")
    parser.add_argument("--train-s", type=float, metavar="S", help="time of a training step (default: an estimate)")
    parser.add_argument("--env-faults", type=float, default=0.0, metavar="SHARE", help="share of resets that fail (0)")
    parser.add_argument("--engine-hours", type=float, metavar="H", help="mean time to the failure of an engine (none)")
    parser.add_argument("--suggest", action="store_true", help="print other plans, with the campaign's time and cost")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw the timeline (.svg or .html)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _add_rm(commands: "CommandParsers") -> None:
    rm = commands.add_parser("rm", help="remove campaigns that have ended, with all their files")
    rm.add_argument("campaigns", metavar="CAMPAIGN", nargs="+")
    rm.add_argument("-y", "--yes", action="store_true", help="do not ask")
    rm.set_defaults(run="removal:run_rm")


def _add_help(commands: "CommandParsers") -> None:
    topics = commands.add_parser("help", help="explain a command or a topic")
    topics.add_argument("topic", metavar="TOPIC", nargs="*", help="a command or a topic (default: list the topics)")
    topics.set_defaults(run="topics:run_help")
    schema = commands.add_parser("schema", help="print the JSON schema of what a command prints with --json")
    schema.add_argument("name", metavar="NAME", nargs="?", help="such as monitor (default: list the names)")
    schema.set_defaults(run="schemas:run_schema")
    completion = commands.add_parser("completion", help="print the completion of a shell")
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run="completion:run_completion")
    man = commands.add_parser("man", help="print the manual page, in the format of man")
    man.set_defaults(run="topics:run_man")
