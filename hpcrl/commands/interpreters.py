"""Commands that need packages which this interpreter may lack, run by the one of the campaign's jobs.

run_traj, run_report, run_export, run_simulate    `hpcrl traj`, `report`, `export` and `simulate`
run_suggestions     `hpcrl plan --suggest`
find_python_with    the interpreter that has a module
"""

import argparse
import contextlib
import os
import sys
import tempfile
from importlib.util import find_spec

from hpcrl.campaign import directory
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.site import load_site
from hpcrl.config.toml import list_known_names
from hpcrl.errors import HpcrlError
from hpcrl.plan.records import read_site
from hpcrl.system.interrupts import replace_process, run_process
from hpcrl.system.terminal import show_wait


def run_traj(arguments: argparse.Namespace) -> int:
    """Replace this process by an interpreter that can read segments."""
    campaign = directory.find_campaign(arguments.campaign)
    python = find_python_with("h5py", campaign)
    try:
        replace_process([python, "-m", "hpcrl.traj", str(campaign.root), *arguments.words[1:]])
    except OSError as error:
        hint = "pip install 'hpcrl[local]' here"
        raise HpcrlError(
            f"{python!r}, which would read the trajectories, cannot be run here ({error.strerror}): {hint}"
        ) from error


def run_report(arguments: argparse.Namespace) -> int:
    """Replace this process by an interpreter that can read segments."""
    if arguments.output is not None and arguments.output.name in ("", "-"):
        raise HpcrlError(f"report -o {arguments.output}: give the name of a file; --json without -o prints the figures")
    campaigns = [directory.find_campaign(name) for name in arguments.campaigns]
    for number, campaign in enumerate(campaigns):
        if campaign.root in [other.root for other in campaigns[:number]]:
            raise HpcrlError(f"report: {campaign.name} is named twice: a page has each campaign once")
    options = [f"--format={arguments.format}", *(f"--{name}" for name in ("json", "png") if getattr(arguments, name))]
    if arguments.output is not None:
        options.append(f"--output={arguments.output}")
    python = _find_report_python(campaigns[0])
    replace_process([python, "-m", "hpcrl.report", *options, "--", *(str(campaign.root) for campaign in campaigns)])


def run_export(arguments: argparse.Namespace) -> int:
    """Run the export with an interpreter that has what it needs."""
    campaign = directory.find_campaign(arguments.campaign)
    if arguments.tracker:
        if arguments.step is not None:
            raise HpcrlError("export --step chooses a checkpoint: it goes with --hf only")
        python = find_python_with(arguments.tracker, campaign)
        words = [python, "-m", "hpcrl.job.metrics_export", str(campaign.root), arguments.tracker]
        return run_process(words)
    step = [] if arguments.step is None else [str(arguments.step)]
    python = find_python_with("torch", campaign)
    words = [python, "-m", "hpcrl.trainers.export", str(campaign.root), str(arguments.hf.absolute()), *step]
    return _print_process(words, what="the checkpoint is written as a model")


def run_simulate(arguments: argparse.Namespace) -> int:
    """Run the simulation with an interpreter that has numpy, which the policies need."""
    if arguments.site is None:
        raise HpcrlError(f"--site is missing: give one of {', '.join(list_known_names('sites'))}, or a file")
    settings = tuple(one.removeprefix("site.") for one in arguments.settings if one.startswith("site."))
    python = sys.executable if find_spec("numpy") else load_site(arguments.site, settings=settings).choose_python()
    return run_process([python, "-m", "hpcrl.simulation", *arguments.words[1:]])


def run_suggestions(arguments: argparse.Namespace) -> int:
    """Simulate other plans with this interpreter, which has numpy, and print them."""
    settings = [word for setting in arguments.settings for word in ("-s", setting)]
    words = [arguments.recipe, "--site", arguments.site, *settings, "--suggest", *(["--json"] * arguments.json)]
    return _print_process([sys.executable, "-m", "hpcrl.simulation", *words])


def _print_process(words: list[str], *, what: str | None = None) -> int:
    """Run a program, then print what it has printed; return its exit code.

    `what` is shown meanwhile, unless the program shows its progress itself.
    """
    with tempfile.TemporaryFile("w+") as printed:  # it would be on the line of the spinner
        with show_wait(what) if what is not None else contextlib.nullcontext():
            code = run_process(words, stdout=printed)
        printed.seek(0)
        sys.stdout.write(printed.read())
    return code


def _find_report_python(campaign_dir: CampaignDir) -> str:
    """Return an interpreter that reads trajectories if there is one; without it the report has none of them."""
    try:
        python = find_python_with("h5py", campaign_dir)
    except HpcrlError:  # the campaign's records are damaged
        return sys.executable
    return python if os.access(python, os.X_OK) else sys.executable


def find_python_with(module: str, campaign_dir: CampaignDir) -> str:
    """Return this interpreter if it has the module, else the interpreter of the campaign's jobs."""

    if find_spec(module):
        return sys.executable
    return read_site(campaign_dir, skips_unknown=True).python or sys.executable
