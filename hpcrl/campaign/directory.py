"""The directories of campaigns.

    find_campaign, list_campaigns              by name or path
    find_continuable, refuse_newer_format      one that is to be changed
    refuse_protected                           one that is to be removed
    list_jobs                                  the jobs of a campaign
    reserve_campaign, release_campaign         a directory is reserved before submission, released if that fails
    find_campaigns_root, show_campaigns_root   the directory that holds them on a site
    FORBIDDEN_IN_PATHS                         characters that a batch script cannot contain
    ACCOUNT_FIELD                              stands for the account in that directory
    REMOVAL_TIMEOUT_S                          the time for which a removal is tried again

Campaigns are found by name under ~/.hpcrl/campaigns ($HPCRL_HOME moves it). Where a site stores them on another file
system, that name is a symbolic link. Creating the directory or the link reserves the name.
"""

import contextlib
import errno
import math
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcrl.campaign_dir.campaign_format import describe_newer_format
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.config.site import Site
from hpcrl.config.toml import suggest_name
from hpcrl.errors import CampaignError, HpcrlError, SlurmError
from hpcrl.monitor.job_state import describe_lost_jobs
from hpcrl.slurm.submit import expand_path
from hpcrl.system.file_systems import may_hold_files
from hpcrl.system.file_watch import is_outage, retry_passing
from hpcrl.system.files import is_directory, make_private_dir, publish_file, read_json, remove_path, sync_directory
from hpcrl.system.processes import do_nothing
from hpcrl.system.terminal import print_note

FORBIDDEN_IN_PATHS = "\n\r"
ACCOUNT_FIELD = "{account}"
"""Stands for the account in site.campaigns_dir."""
REMOVAL_TIMEOUT_S = 10.0
"""The time for which a campaign is removed again while workers still write into its directory."""


def find_campaign(name: str) -> CampaignDir:
    """Find a campaign by name or path; one of a newer format is noted, as some of it may not be understood."""
    campaign = _locate_campaign(name)
    if problem := describe_newer_format(campaign):
        print_note(f"{problem}: what is new in it is not shown")
    return campaign


def find_continuable(name: str) -> CampaignDir:
    """Find a campaign that is to be continued; one of a newer format is refused."""
    campaign = _locate_campaign(name)
    refuse_newer_format(campaign)
    return campaign


def refuse_newer_format(campaign: CampaignDir) -> None:
    """Raise CampaignError if writing into a campaign might damage it."""
    if problem := describe_newer_format(campaign):
        raise CampaignError(f"{problem}, and does not change it: use that version")


def _locate_campaign(name: str) -> CampaignDir:
    candidates = [Path(name)] if name else []
    if "/" not in name and name not in ("", ".", ".."):
        candidates.insert(0, _find_campaigns_home() / name)
    denied: list[str] = []
    for path in candidates:
        if _has_manifest(path, show_note=denied.append):
            return CampaignDir(path.resolve())
    if denied:
        raise CampaignError(denied[0])
    folder = next((path for path in candidates if is_directory(path)), None)
    known = [campaign.name for campaign in list_campaigns()]
    others = f"there are {', '.join(known[:8])}" if known else "there are none yet"
    if folder:
        advice = ": restore it, or remove the directory by hand" if folder.parent == _find_campaigns_home() else ""
        raise CampaignError(f"{folder} has no {CampaignDir(folder).manifest.name}{advice}; {others} (`hpcrl ls`)")
    raise CampaignError(f"no campaign {name!r}: {suggest_name(name, known)}{others} (`hpcrl ls`)")


def _has_manifest(path: Path, *, show_note: Callable[[str], object]) -> bool:
    """Return whether a path is the directory of a campaign; `show_note` is called with one that may not be entered."""
    try:
        return stat.S_ISREG(CampaignDir(path).manifest.stat().st_mode)
    except PermissionError:
        show_note(f"{path} cannot be read: permission denied")
    except (OSError, ValueError):  # such as a name that is too long, or has a null byte
        pass
    return False


def list_campaigns(*, show_note: Callable[[str], object] = do_nothing) -> list[CampaignDir]:
    """Return all campaigns of this user, newest first; `show_note` is called with each that may not be entered."""
    campaigns = _find_campaigns_home()
    try:
        paths = list(campaigns.iterdir())
    except FileNotFoundError:
        if not campaigns.is_symlink() and not campaigns.parent.is_symlink():
            if may_hold_files(str(campaigns)):
                return []
            raise CampaignError(f"{campaigns} cannot be made: set $HPCRL_HOME to another directory") from None
        raise CampaignError(f"{campaigns} leads to nothing: set $HPCRL_HOME to another directory") from None
    except (OSError, ValueError) as error:  # one with a null byte is a ValueError
        why = error.strerror if isinstance(error, OSError) else error
        raise CampaignError(f"{campaigns} cannot be read ({why}): set $HPCRL_HOME to another directory") from error
    found = [CampaignDir(path.resolve()) for path in paths if _has_manifest(path, show_note=show_note)]
    return sorted(found, key=_read_creation_time, reverse=True)


def _read_creation_time(campaign: CampaignDir) -> float:
    """Return when a campaign was created; one whose campaign.json is damaged counts as the oldest."""
    try:
        created = float(read_json(campaign.manifest)["created"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return -math.inf
    return created if math.isfinite(created) else -math.inf


def list_jobs(campaign: CampaignDir) -> list[JobDir]:
    """Return the jobs of a campaign, oldest first; at least one."""
    jobs = [campaign.job(number) for number in campaign.job_numbers()]
    if not jobs:
        if campaign.has_results():
            raise CampaignError(describe_lost_jobs(campaign))
        raise CampaignError(
            f"campaign {campaign.name!r} has no job: it was not submitted to the end; remove it "
            f"(`hpcrl rm {shlex.quote(campaign.name)}`) and submit it again"
        )
    return jobs


def reserve_campaign(name: str | None, *, stem: str, site: Site) -> CampaignDir:
    """Create the directory of a new campaign; without a name, it gets the stem and the next free number."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise CampaignError(f"--name {name!r}: letters, digits, '.', '_' and '-' only, at most 64 of them")
    try:
        return _reserve_name(name, stem=stem, site=site)
    except OSError as error:
        raise CampaignError(
            f"campaigns cannot be stored in {_find_campaigns_home()} or in site.campaigns_dir: {error.strerror} "
            f"({error.filename}): set $HPCRL_HOME, or the site's campaigns_dir, to a directory that can be written"
        ) from error


def _reserve_name(name: str | None, *, stem: str, site: Site) -> CampaignDir:
    campaigns = make_private_dir(_find_campaigns_home())
    for candidate in [name] if name else _generate_names(stem, campaigns):
        path = find_campaigns_root(site) / candidate
        with contextlib.suppress(FileExistsError):
            if path.parent != campaigns:
                (campaigns / candidate).symlink_to(path)
                make_private_dir(path.parent)
            path.mkdir(mode=0o700)
            sync_directory(path.parent)
            return CampaignDir(path)
    raise CampaignError(f"campaign {name!r} exists already: choose another --name, or `hpcrl resume {name}`")


def _generate_names(stem: str, campaigns: Path) -> Iterator[str]:
    existing = {path.name for path in campaigns.iterdir()}
    number = 1
    while True:
        if f"{stem}-{number}" not in existing:
            yield f"{stem}-{number}"
        number += 1


def refuse_protected(campaign: CampaignDir) -> None:
    """Raise CampaignError if a campaign may not be removed, as far as the modes of its directories show it."""
    try:
        _check_may_change(campaign.root.parent)
        for folder, folders, files in os.walk(campaign.root, onerror=_raise_denied):
            if folders or files:
                _check_may_change(Path(folder))
    except PermissionError as error:
        why = f"{error.strerror} ({error.filename})"
        raise CampaignError(f"campaign {campaign.name} cannot be removed: {why}; nothing is removed") from error


def _check_may_change(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _raise_denied(error: OSError) -> None:
    if isinstance(error, PermissionError):
        raise error


def refuse_foreign(campaign: CampaignDir) -> None:
    """Raise CampaignError for a directory somewhere else, which may hold more than a campaign."""
    home = _find_campaigns_home()
    if (home / campaign.name).resolve() != campaign.root.resolve():
        raise CampaignError(
            f"{campaign.root} is not in {home}, where campaigns are removed: remove the directory yourself"
        )


def release_campaign(campaign: CampaignDir) -> None:
    """Remove a campaign's directory and free its name; what is not removed to the end can be removed again."""
    try:
        retry_passing(lambda: _remove_files(campaign), timeout_s=REMOVAL_TIMEOUT_S, passes=_is_disturbed)
    except OSError as error:
        if is_outage(error):
            raise
        why = f"{error.strerror} ({error.filename})"
        if _is_disturbed(error):
            why = f"its workers may still run: {why}; repeat the command after their end"
        raise CampaignError(f"campaign {campaign.name} is not removed to the end: {why}") from error
    link = _find_campaigns_home() / campaign.name
    if link.is_symlink():
        link.unlink()


def _remove_files(campaign: CampaignDir) -> None:
    """Remove a campaign's directory: campaign.json last, as the campaign is not found without it."""
    if not campaign.root.exists():
        return
    for path in campaign.root.iterdir():
        if path != campaign.manifest:
            remove_path(path)
    manifest = campaign.manifest.read_bytes() if campaign.manifest.exists() else None
    remove_path(campaign.manifest)
    try:
        campaign.root.rmdir()
    except OSError:
        if manifest is not None:
            publish_file(campaign.manifest, manifest)
        raise


def _is_disturbed(error: OSError) -> bool:
    """Return whether a removal failed since another process wrote into the directory, or removed some of it."""
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)


def _find_campaigns_home() -> Path:
    return Path(os.environ.get("HPCRL_HOME") or Path.home() / ".hpcrl") / "campaigns"


def find_campaigns_root(site: Site) -> Path:
    """Return the directory that holds this user's campaigns on a site."""
    wanted = _fill_account(site)
    if ACCOUNT_FIELD in wanted:
        raise SlurmError(
            f"{wanted!r} contains the account, and site {site.name!r} has no account: set account in your own file of "
            "the site, or -s site.account=NAME"
        )
    root = Path(expand_path(wanted)) if wanted else _find_campaigns_home()
    absolute = root.absolute()
    if any(character in str(absolute) for character in FORBIDDEN_IN_PATHS):
        raise HpcrlError(
            f"campaigns cannot be stored in {str(absolute)!r}: a batch script cannot name it; set $HPCRL_HOME"
        )
    return absolute


def show_campaigns_root(site: Site) -> Path:
    """Return the same directory for display: variables that are set only on the site stay unexpanded."""
    try:
        return find_campaigns_root(site)
    except SlurmError:
        return Path(_fill_account(site))


def _fill_account(site: Site) -> str:
    return (site.campaigns_dir or "").replace(ACCOUNT_FIELD, (site.account or "").strip() or ACCOUNT_FIELD)
