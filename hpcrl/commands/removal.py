"""Remove campaigns that have ended, `hpcrl rm`, and files that campaigns no longer need, `hpcrl gc`.

run_rm, run_gc        the commands
remove_campaigns      removes them, after the user has agreed
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from hpcrl.campaign import directory, surplus
from hpcrl.campaign.running_jobs import find_orphaned_job
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import CampaignError, HpcrlError
from hpcrl.monitor.view import survey_campaigns
from hpcrl.system.terminal import format_bytes, is_terminal, print_line, print_note, show_wait, track_progress

REMOVABLE_STATES = frozenset({"done", "failed", "stopped", "planned"})


def run_rm(arguments: argparse.Namespace) -> int:
    remove_campaigns(arguments.campaigns, is_agreed=arguments.yes)
    return 0


def run_gc(arguments: argparse.Namespace) -> int:
    campaigns = [directory.find_continuable(name) for name in arguments.campaigns] or directory.list_campaigns(
        show_note=print_note
    )
    parts: list[surplus.SurplusPart] = []
    for campaign in track_progress(campaigns, "campaigns are looked through"):
        try:
            parts += surplus.find_surplus(campaign, with_archive=arguments.archive)
        except (HpcrlError, OSError, ValueError) as error:
            if arguments.campaigns:
                raise
            print_note(f"campaign {campaign.name} is left alone: {error}")
    for part in parts:
        print_line(f"{part.campaign.name}: {part.kind}: {len(part.paths)}, {format_bytes(part.num_bytes)}")
    total = format_bytes(sum(part.num_bytes for part in parts))
    if not arguments.yes:
        options = ["--archive"] * arguments.archive + ["--yes"]
        command = shlex.join(["hpcrl", "gc", *arguments.campaigns, *options])
        print_line(f"{total} in all; `{command}` removes it" if parts else "nothing can be removed")
        return 0
    with show_wait(f"{total} are removed"):
        failed = surplus.remove_surplus(parts)
    for line in failed:
        print_note(f"not removed: {line}")
    print_line(f"{total} in all, {'removed' if not failed else 'removed but for what is named above'}")
    return 1 if failed else 0


def remove_campaigns(names: Sequence[str], *, is_agreed: bool) -> None:
    """Remove these campaigns; one that may still run, or be protected, is refused, and then none is removed."""
    campaigns = [directory.find_campaign(name) for name in dict.fromkeys(names)]
    for campaign in campaigns:
        _refuse_living(campaign)
        directory.refuse_foreign(campaign)
        directory.refuse_protected(campaign)
    for campaign in campaigns:
        if is_agreed or _ask_user(campaign):
            with show_wait(f"the files of {campaign.name} are removed"):
                directory.release_campaign(campaign)
            print_line(f"campaign {campaign.name} is removed")
        else:
            print_line(f"campaign {campaign.name} is kept")


def _refuse_living(campaign: CampaignDir) -> None:
    problems: list[str] = []
    (line,) = survey_campaigns([campaign], problems=problems)
    if line.state in REMOVABLE_STATES:
        with show_wait(f"whether processes of {campaign.name} still run is looked at"):
            living = find_orphaned_job(campaign)
        if living is None:
            return
        raise CampaignError(
            f"campaign {campaign.name}: processes of job {living.number} still run: `hpcrl stop --now {campaign.name}` "
            "ends them; nothing is removed"
        )
    why = f" ({'; '.join(problems)})" if problems else ""
    raise CampaignError(
        f"campaign {campaign.name} is {line.state}{why}: `hpcrl stop {campaign.name}` first; nothing is removed"
    )


def _ask_user(campaign: CampaignDir) -> bool:
    if not is_terminal(sys.stdin):
        raise HpcrlError(f"rm {campaign.name}: it cannot ask without a terminal: add --yes")
    with show_wait("its size is measured"):
        size = format_bytes(_measure_size(campaign))
    answer = input(f"remove {campaign.root} ({size}, with its checkpoints and trajectories)? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def _measure_size(campaign: CampaignDir) -> int:
    total = 0
    for folder, _, files in os.walk(campaign.root):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - thousands of files
            except OSError:
                continue
    return total
