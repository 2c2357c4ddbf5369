"""Where campaigns lie: found by name, reserved before one is submitted, released when that fails.

By name under ~/.hpcrl/campaigns ($HPCRL_HOME moves it). Where a site keeps them on another file system, that name is a
symbolic link; making the directory or the link is what reserves the name.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hpcrl.campaign_dir.paths import RunDir
from hpcrl.config.site import Site
from hpcrl.errors import CampaignError, HpcrlError, SlurmError
from hpcrl.slurm.submit import expand
from hpcrl.system.files import discard, private_dir, read_json, sync_directory

FORBIDDEN_IN_PATHS = "\n\r"


def find(name: str) -> RunDir:
    """The campaign of a name or of a path."""
    candidates = [_home() / name, Path(name)] if "/" not in name else [Path(name)]
    for path in candidates:
        if (path / "campaign.json").is_file():
            return RunDir(path.resolve())
    known = ", ".join(run.name for run in everyone()[:8])
    raise CampaignError(f"no campaign {name!r}: {'there are ' + known if known else 'there is none yet'} (`hpcrl ls`)")


def everyone() -> list[RunDir]:
    """All campaigns of this user, newest first."""
    campaigns = _home()
    if not campaigns.is_dir():
        return []
    found = [RunDir(path.resolve()) for path in campaigns.iterdir() if (path / "campaign.json").is_file()]
    return sorted(found, key=lambda run: -float(read_json(run.campaign)["created"]))


def reserve(name: str | None, *, stem: str, site: Site) -> RunDir:
    """A fresh directory for a campaign; without a name, the stem with the next free number."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise CampaignError(f"--name {name!r}: letters, digits, '.', '_' and '-' only, at most 64 of them")
    campaigns = private_dir(_home())
    for candidate in [name] if name else _numbered(stem, campaigns):
        path = root_of(site) / candidate
        with contextlib.suppress(FileExistsError):
            if path.parent != campaigns:
                (campaigns / candidate).symlink_to(path)
                private_dir(path.parent)
            path.mkdir(mode=0o700)
            sync_directory(path.parent)
            return RunDir(path)
    raise CampaignError(f"there is a campaign {name!r} already: choose another --name, or `hpcrl resume {name}`")


def _numbered(stem: str, campaigns: Path) -> Iterator[str]:
    taken = {path.name for path in campaigns.iterdir()}
    number = 1
    while True:
        if f"{stem}-{number}" not in taken:
            yield f"{stem}-{number}"
        number += 1


def release(run: RunDir) -> None:
    """Give a reserved directory and its name back."""
    discard(run.root)
    link = _home() / run.name
    if link.is_symlink():
        link.unlink()


def _home() -> Path:
    return Path(os.environ.get("HPCRL_HOME") or Path.home() / ".hpcrl") / "campaigns"


def root_of(site: Site) -> Path:
    """The directory that holds this user's campaigns on a site."""
    root = Path(expand(site.campaigns_dir)) if site.campaigns_dir else _home()
    absolute = root.absolute()
    if any(character in str(absolute) for character in FORBIDDEN_IN_PATHS):
        raise HpcrlError(f"campaigns cannot lie in {str(absolute)!r}: a batch script cannot name it; set $HPCRL_HOME")
    return absolute


def shown_root(site: Site) -> Path:
    """The same, for people to look at anywhere: what is only set on the site stays as it is written."""
    try:
        return root_of(site)
    except SlurmError:
        return Path(site.campaigns_dir or "")
