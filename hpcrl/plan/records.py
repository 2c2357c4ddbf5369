"""The records that a campaign was submitted with, read again: by workers, next jobs and the commands of the user.

read_recipe, read_site, read_plan    the recipe, site and plan of its last submission
digest_records, list_edited_records  those that were edited by hand since
read_record                          any other file of the campaign directory that holds one struct
"""

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.config.toml import LayeredTable, drop_unknown, to_struct
from hpcrl.errors import CampaignError, ConfigError
from hpcrl.plan.plan import Plan
from hpcrl.system.file_watch import retry_passing
from hpcrl.system.files import read_json
from hpcrl.system.json_records import decode_record

T = TypeVar("T", bound=msgspec.Struct)


def read_recipe(campaign: CampaignDir, *, skips_unknown: bool = False) -> Recipe:
    """Read the recipe of a campaign with all its settings; `skips_unknown` is as for `read_site`."""
    return read_record(campaign.recipe, Recipe, skips_unknown=skips_unknown)


def read_site(campaign: CampaignDir, *, skips_unknown: bool = False) -> Site:
    """Read the site of a campaign; what only looks at the campaign skips keys of another version."""
    return read_record(campaign.site, Site, skips_unknown=skips_unknown)


def list_edited_records(campaign: CampaignDir) -> list[str]:
    """Return which records are not as the last submission wrote them; none if it recorded no digests."""
    digests = read_json(campaign.manifest).get("digests", {})
    return [name for name, digest in digest_records(campaign).items() if digests.get(name, digest) != digest]


def digest_records(campaign: CampaignDir) -> dict[str, str]:
    """Return the digests of recipe and site, by which an edited one is known."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (campaign.recipe, campaign.site)}


def read_plan(campaign: CampaignDir) -> Plan:
    """Read the plan of a campaign."""
    return read_record(campaign.plan, Plan)


def read_record(path: Path, kind: type[T], *, skips_unknown: bool = False) -> T:
    """Read a file as `kind`; refuse one that is damaged or of another version, with what does not fit.

    With `skips_unknown` keys and values are renamed that were renamed since, and other unknown keys are skipped.
    """
    try:
        data = retry_passing(path.read_bytes)
        try:
            return decode_record(data, kind)
        except msgspec.ValidationError:  # a key that was renamed since gets its new name in the message
            table = decode_record(data)
            if skips_unknown and isinstance(table, dict):
                drop_unknown(table, kind)
            return to_struct(LayeredTable(table=table, layers=((path.name, table),)), kind)
    except (OSError, msgspec.DecodeError, ConfigError) as error:
        raise CampaignError(
            f"{path} cannot be read ({error}): the campaign is damaged or was made by another version of hpcrl"
        ) from error
