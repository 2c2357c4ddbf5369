"""Remove campaigns that have ended, with everything in their directories: `hpcrl rm`.

remove_campaigns      removes them, after the user has agreed
"""

import os
import sys
from collections.abc import Sequence

from hpcrl.campaign import directory
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import CampaignError, HpcrlError
from hpcrl.monitor.view import survey_campaigns
from hpcrl.system.terminal import format_bytes, print_line

REMOVABLE_STATES = frozenset({"done", "failed", "stopped", "planned"})


def remove_campaigns(names: Sequence[str], *, is_agreed: bool) -> None:
    """Remove these campaigns; one that may still run is refused, and then none is removed."""
    campaigns = [directory.find_campaign(name) for name in dict.fromkeys(names)]
    for campaign in campaigns:
        _refuse_living(campaign)
    for campaign in campaigns:
        if is_agreed or _ask_user(campaign):
            directory.release_campaign(campaign)
            print_line(f"campaign {campaign.name} is removed")
        else:
            print_line(f"campaign {campaign.name} is kept")


def _refuse_living(campaign: CampaignDir) -> None:
    problems: list[str] = []
    (line,) = survey_campaigns([campaign], problems=problems)
    if line.state in REMOVABLE_STATES:
        return
    why = f" ({'; '.join(problems)})" if problems else ""
    raise CampaignError(
        f"campaign {campaign.name} is {line.state}{why}: `hpcrl stop {campaign.name}` first; nothing is removed"
    )


def _ask_user(campaign: CampaignDir) -> bool:
    if not sys.stdin.isatty():
        raise HpcrlError(f"rm {campaign.name}: it cannot ask without a terminal: add --yes")
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
