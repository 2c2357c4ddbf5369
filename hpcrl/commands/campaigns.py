"""End and continue campaigns: `hpcrl stop`, `hpcrl resume`, `hpcrl extend`.

run_stop, run_resume, run_extend    the commands
"""

import argparse

from hpcrl.campaign import continuation, directory
from hpcrl.campaign.running_jobs import describe_next_start, read_submission, stop_gracefully, stop_now
from hpcrl.commands.monitoring import watch_campaign
from hpcrl.errors import HpcrlError
from hpcrl.system.terminal import print_line, print_note


def run_stop(arguments: argparse.Namespace) -> int:
    stop = stop_now if arguments.now else stop_gracefully
    print_line(stop(arguments.campaign))
    return 0


def run_resume(arguments: argparse.Namespace) -> int:
    campaign_dir = continuation.resume(
        arguments.campaign, settings=tuple(arguments.settings), accept=arguments.accept, show_note=print_note
    )
    job = directory.list_jobs(campaign_dir)[-1]
    start = describe_next_start(campaign_dir, f"job {read_submission(job).id}", job=job)
    print_line(f"campaign {campaign_dir.name}: {start}")
    return watch_campaign(campaign_dir.name) if arguments.watch else 0


def run_extend(arguments: argparse.Namespace) -> int:
    if arguments.steps is None and arguments.jobs < 1:
        raise HpcrlError("extend what? --steps N is the new number of steps, --jobs N lets N more jobs follow")
    print_line(
        continuation.extend(arguments.campaign, steps=arguments.steps, jobs=arguments.jobs, show_note=print_note)
    )
    return 0
