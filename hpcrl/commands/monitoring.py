"""Watch campaigns: `hpcrl ls`, `hpcrl monitor`, and what follows a campaign to its end.

run_ls, run_monitor    the commands
watch_campaign         follow a campaign until it ends
final_summary          the text at its end
MAX_LISTED, JOB_INTERVAL_S    limits
"""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.campaign import directory
from hpcrl.campaign.continuation_checks import find_final_failure
from hpcrl.campaign_dir.job_end import EndCause
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.commands.interpreters import find_python_with
from hpcrl.errors import HpcrlError
from hpcrl.monitor.advisories import describe_advisory, select_untrained
from hpcrl.monitor.collect import SnapshotCollector, make_slurm_query
from hpcrl.monitor.job_state import read_jobs
from hpcrl.monitor.snapshot import SeriesChange, encode_snapshot, measure_change
from hpcrl.monitor.view import print_campaigns, show_snapshot
from hpcrl.monitor.view import watch_campaign as watch_snapshots
from hpcrl.plan.records import read_recipe, read_site
from hpcrl.system.exit_codes import EXIT_FAILED
from hpcrl.system.files import read_json
from hpcrl.system.terminal import PipeConsole, escape_to_one_line, print_json_text, print_line, print_note, show_wait

MAX_LISTED = 60
"""The trajectories on the page that lists them; a terminal shows those that fit."""
JOB_INTERVAL_S = 1.0
"""The time between two looks at the records of jobs; the monitor looks at events more often."""


def run_ls(arguments: argparse.Namespace) -> int:
    campaigns = directory.list_campaigns(show_note=print_note)
    home = os.environ.get("HPCRL_HOME", "")
    return print_campaigns(campaigns, as_json=arguments.json, home=home, site=arguments.site)


def run_monitor(arguments: argparse.Namespace) -> int:
    campaign_dir = directory.find_campaign(arguments.campaign)
    collector = SnapshotCollector(campaign_dir, query=make_slurm_query(campaign_dir), job_interval_s=JOB_INTERVAL_S)
    with show_wait(f"the events of {campaign_dir.name} are read"):  # a long campaign has many
        snapshot = collector.poll()
    if arguments.json:
        print_json_text(encode_snapshot(snapshot))
    elif arguments.once:
        show_snapshot(snapshot, console=PipeConsole())
    else:
        console, traj_command = PipeConsole(), _make_traj_command(campaign_dir)
        is_read_as_lines = not console.is_terminal  # a screen stays, also after the end
        watch_snapshots(collector, console=console, until_done=is_read_as_lines, traj_command=traj_command)
    return 0


def watch_campaign(name: str) -> int:
    """Follow a campaign to its end and print the result."""
    campaign_dir = directory.find_campaign(name)
    collector = SnapshotCollector(campaign_dir, query=make_slurm_query(campaign_dir), job_interval_s=JOB_INTERVAL_S)
    with show_wait(f"the events of {campaign_dir.name} are read"):
        collector.poll()
    console, traj_command = PipeConsole(), _make_traj_command(campaign_dir)
    snapshot = watch_snapshots(collector, console=console, until_done=True, traj_command=traj_command)
    untrained = [describe_advisory(one) for one in select_untrained(snapshot.advisories)]
    summary = final_summary(
        campaign_dir,
        state=snapshot.state,
        rewards=snapshot.reward_mean,
        losses=snapshot.detail.losses,
        untrained=untrained,
    )
    for line in summary:
        print_line(escape_to_one_line(line))
    has_failed = snapshot.state not in ("done", "stopped", "queued", "running", "draining")
    return EXIT_FAILED if has_failed or snapshot.is_partial else 0


def _make_traj_command(campaign_dir: CampaignDir) -> list[str]:
    """Return a command that lists the newest trajectories of a campaign as JSON; empty if its site is unreadable."""
    try:
        python = find_python_with("h5py", campaign_dir)
    except HpcrlError:
        return []
    words = ["ls", campaign_dir.name, "--json", f"--limit={MAX_LISTED}"]
    return [python, "-m", "hpcrl.traj", str(campaign_dir.root), *words]


def final_summary(
    campaign: CampaignDir,
    *,
    state: str,
    rewards: Sequence[float | None],
    losses: Sequence[float | None] = (),
    untrained: Sequence[str] = (),
) -> list[str]:
    """Return the final lines of a campaign: what was done, where the results are, and what to try next.

    The losses are named where no step has a reward: conversations were imitated. `untrained` is why
    domains train nothing.
    """
    reward = measure_change(rewards)
    what, change = ("mean reward", reward) if reward else ("loss", measure_change(losses))
    learned = f": {what} {_describe_change(change, num_steps=len(rewards))}" if change else ""
    if state in ("queued", "running", "draining"):
        return []  # what watched it has printed how to see it again
    if state != "done":
        report = f"`{_command_name()} report {campaign.name}` shows what it did"
        return [f"campaign {campaign.name} ended as {state}{learned}; {_advise_next(campaign)}; {report}"]
    return [
        f"campaign {campaign.name} made every step, but did not train everything{learned}"
        if untrained
        else f"campaign {campaign.name} is done{learned}",
        *(f"  not trained   {why}" for why in untrained),
        f"  in            {campaign.root}",
        *([f"  weights       {campaign.weights}"] if reward else []),
        f"  checkpoints   {campaign.checkpoints}",
        *([f"  trajectories  {campaign.spool('scored')}"] if reward else []),
        "next:",
        *_suggest_commands(campaign, has_rewards=bool(reward), is_partial=bool(untrained)),
    ]


def _advise_next(campaign: CampaignDir) -> str:
    """Return what to do after a campaign that has not made all its steps: to resume it alone helps for some causes."""
    hpcrl, resume = _command_name(), f"{_command_name()} resume {campaign.name}"
    logs = f"see `{hpcrl} logs {campaign.name}`"
    if find_final_failure(campaign, num_steps=read_recipe(campaign).train.num_steps):
        return logs
    match _find_last_cause(campaign):
        case "budget-used":
            return f"raise the limit that was reached: `{resume} -s limits.KEY=VALUE`"
        case "user-code" | "memory-limits":
            return (
                f"{logs}: another job would fail in the same way, so change your code, or a setting of the recipe "
                f"with `{resume} -s KEY=VALUE`"
            )
    return f"{logs}, then `{resume}`"


def _find_last_cause(campaign: CampaignDir) -> EndCause | None:
    """Return why the last job ended that has an outcome; None if that is not known."""
    ends = [job.outcome for job in read_jobs(campaign) if job.outcome is not None]
    return ends[-1].likely_cause if ends else None


def _suggest_commands(campaign: CampaignDir, *, has_rewards: bool, is_partial: bool) -> list[str]:
    """Return what to try next after a campaign, each command with its purpose."""
    recipe = _read_recipe_name(campaign)
    if read_site(campaign, skips_unknown=True).scheduler == "local":
        elsewhere = (f"plan {recipe} --site lab", "the same as a heterogeneous Slurm job; `lab up` makes a Slurm here")
    else:
        elsewhere = (f"plan {recipe} --site perlmutter -s site.account=m1234", "the same on a large machine")
    commands = [(f"report {campaign.name}", "how it went, as one page")]
    if is_partial:  # the best episode may be one that failed
        commands.append((f"events {campaign.name} --kind fault", "why episodes or rewards failed"))
    elif has_rewards:
        commands.append((f"traj show {campaign.name} --best", "what the model has learned to generate"))
    else:
        commands.append((f"export {campaign.name} --hf DIR", "the model, as a directory for transformers and vLLM"))
    commands.append(elsewhere)
    width = max(len(command) for command, _ in commands)
    hpcrl = _command_name()
    return [f"  {hpcrl} {command:<{width}}   # {why}" for command, why in commands]


def _read_recipe_name(campaign: CampaignDir) -> str:
    """Return the recipe as it was named at submission."""
    try:
        return shlex.quote(str(read_json(campaign.manifest)["source"]["recipe"]))
    except (OSError, ValueError, KeyError, TypeError):
        return "quickstart"


def _describe_change(change: SeriesChange, *, num_steps: int) -> str:
    means = f" (means of the first and last {change.num})" if change.num > 1 else ""
    return f"{change.first:.3f} -> {change.last:.3f} in {num_steps} steps{means}"


def _command_name() -> str:
    """Return the command that runs hpcrl: its name if it is on PATH, else the path that was just called."""
    called = Path(sys.argv[0]).absolute()
    if called.name != "hpcrl" or shutil.which("hpcrl"):
        return "hpcrl"
    return str(called.relative_to(Path.cwd()) if called.is_relative_to(Path.cwd()) else called)
