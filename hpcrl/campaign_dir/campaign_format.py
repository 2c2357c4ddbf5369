"""The format of a campaign directory: a number in campaign.json, which is raised when an older hpcrl would damage it.

CAMPAIGN_FORMAT        the newest format that this version reads and writes
describe_newer_format  how a campaign's format is too new, if it is
"""

from hpcrl import __version__
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import read_json

CAMPAIGN_FORMAT = 1
"""Campaigns without a number are older, and are read like those of format 1."""


def describe_newer_format(campaign: CampaignDir) -> str:
    """Describe a format that is newer than this version of hpcrl; empty if it is not, or cannot be read."""
    try:
        manifest = read_json(campaign.manifest)
    except (OSError, ValueError):
        return ""
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(found, int) or found <= CAMPAIGN_FORMAT:
        return ""
    return (
        f"campaign {campaign.name} has format {found}, of hpcrl {manifest.get('hpcrl', '?')}; hpcrl {__version__} "
        f"reads formats up to {CAMPAIGN_FORMAT}"
    )
