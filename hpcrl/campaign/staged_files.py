"""The files of the hub that recipes name, on a site's file system: the path of each name, and whether all is there.

HubName                              a repository of the hub, a revision of it, and perhaps a file in it
parse_model_name, parse_data_name    read the name of a model or of a data file; None for a path
StagingDir, find_staging_dir         the directory of a site in which they are
StagedFile, StagedRepository         the record of a repository, written when all its files are there
advise_staging                       the command that stages what is missing
PULLED_IMAGES                        the programs whose images are staged as files, and the ends of their names

A revision is a symbolic link to the directory of its commit, which never changes: a campaign keeps the files that it
was submitted with, also if the revision moves on.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.campaign.directory import show_campaigns_root
from hpcrl.config.program import is_registry_image
from hpcrl.config.site import ContainerTool, Site
from hpcrl.errors import HpcrlError
from hpcrl.slurm.submit import expand_path
from hpcrl.system.files import is_directory, is_file

HubKind = Literal["model", "dataset"]
MANIFEST = ".hpcrl-staged.json"
FOLDERS: dict[HubKind, str] = {"model": "models", "dataset": "datasets"}
PULLED_IMAGES: dict[ContainerTool, str] = {
    "apptainer": ".sif",
    "singularity": ".sif",
    "enroot": ".sqsh",
    "pyxis": ".sqsh",
}
_REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w.-]*))?"
_MODEL_NAME = re.compile(rf"(?P<scheme>hf://)?{_REPOSITORY}")
_DATA_NAME = re.compile(rf"hf://datasets/{_REPOSITORY}/(?P<file>.+)")


class HubName(msgspec.Struct, frozen=True, kw_only=True):
    """A repository of the hub, at a revision; of a data set also a file in it."""

    kind: HubKind
    repository: str
    """Owner and name."""
    revision: str = "main"
    file: str = ""

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        if self.kind == "model":
            return f"{self.repository}{at}"
        return f"hf://datasets/{self.repository}{at}/{self.file}"


class StagedFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The size and the digest of a file."""

    size: int
    sha256: str = ""
    git_sha1: str = ""
    """The digest that Git has of a small file, for which the hub lists no other."""


class StagedRepository(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a repository that are staged."""

    kind: HubKind
    repository: str
    commit: str
    files: dict[str, StagedFile]


def parse_model_name(path: str) -> HubName | None:
    """Read the name of a model, OWNER/NAME or OWNER/NAME@REVISION; None for a path, also of what is here."""
    found = _MODEL_NAME.fullmatch(path)
    is_here = is_directory(Path(path)) or is_file(Path(path))
    if found is None or (is_here and found["scheme"] is None):
        return None
    return HubName(kind="model", repository=found["repository"], revision=found["revision"] or "main")


def parse_data_name(path: str) -> HubName | None:
    """Read the name of a data file, hf://datasets/OWNER/NAME@REVISION/FILE; None for a path."""
    found = _DATA_NAME.fullmatch(path)
    if found is None or ".." in Path(found["file"]).parts:
        return None
    name, revision = found["repository"], found["revision"] or "main"
    return HubName(kind="dataset", repository=name, revision=revision, file=found["file"])


@dataclass(frozen=True)
class StagingDir:
    """The directory of a site in which files of the hub, and images, are staged."""

    root: Path

    @property
    def images(self) -> Path:
        return self.root / "images"

    def find_model(self, path: str) -> str | None:
        """Return the local directory of a model named by its id on the hub; None for a path."""
        name = parse_model_name(path)
        return None if name is None else str(self.find_folder(name))

    def find_data(self, path: str) -> str | None:
        """Return the local path of a data file named by its id on the hub; None for a path."""
        name = parse_data_name(path)
        return None if name is None else str(self.find_folder(name) / name.file)

    def find_folder(self, name: HubName) -> Path:
        """Return the directory of the commit that was staged for a revision; that of the revision if none was."""
        link = self.find_repository(name) / name.revision
        try:
            return link.parent / Path(os.readlink(link)).name  # noqa: PTH115 - no other links of the path are followed
        except OSError:
            return link

    def find_repository(self, name: HubName) -> Path:
        """Return the directory of a repository, with one for each commit."""
        return self.root / FOLDERS[name.kind] / name.repository.replace("/", "--")

    def find_image(self, image: str, *, suffix: str = ".sif") -> Path:
        """Return the path of an image of a registry, which has the name that the cache of a node gives it."""
        return self.images / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}{suffix}"

    def describe_problem(self, path: str) -> str:
        """Return what a staged model or file lacks; empty if nothing, or if the path is elsewhere.

        Sizes are compared; `hpcrl stage` compares digests.
        """
        if not Path(path).is_relative_to(self.root):
            return ""
        folder, repository, revision, *rest = Path(path).relative_to(self.root).parts
        name = f"{repository.replace('--', '/', 1)}" + (f"@{revision}" if revision != "main" else "")
        place = self.root / folder / repository / revision
        staged = read_manifest(place)
        shown = name if folder == "models" else f"hf://datasets/{name}/{'/'.join(rest)}"
        wanted = dict.fromkeys(["/".join(rest)] if rest else list(staged.files) if staged else [])
        if staged is None or not wanted.keys() <= staged.files.keys():
            return f"{shown} is not staged"
        for file in wanted:
            if not _has_size(place / file, staged.files[file].size):
                return f"{place / file} is missing, or was not copied to its end"
        return ""

    def use_images(self, site: Site) -> Site:
        """Return a site whose images of registries are the staged ones, where these are there."""
        suffix = PULLED_IMAGES.get(site.container) if site.container is not None else None
        if suffix is None:
            return site

        def choose(image: str | None) -> str | None:
            if image is None or not is_registry_image(image):
                return image
            path = self.find_image(image, suffix=suffix)
            return str(path) if path.exists() else image

        partitions = {
            label: msgspec.structs.replace(part, image=choose(part.image)) for label, part in site.partitions.items()
        }
        return msgspec.structs.replace(site, image=choose(site.image), partitions=partitions)


def find_staging_dir(site: Site) -> StagingDir:
    """Return the directory of a site: `staging_dir`, by default a hidden one among the campaigns."""
    if site.staging_dir is None:
        return StagingDir(show_campaigns_root(site) / ".staged")
    try:
        return StagingDir(Path(expand_path(site.staging_dir)).absolute())
    except HpcrlError:  # a variable that is set only at the site
        return StagingDir(Path(site.staging_dir))


def read_manifest(folder: Path) -> StagedRepository | None:
    """Read the record of a commit's directory; None if its files are not all there, or the record is damaged."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=StagedRepository)
    except (OSError, msgspec.MsgspecError):
        return None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def advise_staging(recipe: str, site: str, settings: Sequence[str]) -> str:
    """Return the end of a message about what is not staged."""
    words = [recipe, "--site", site, *(word for setting in settings for word in ("-s", setting))]
    return (
        f"`hpcrl stage {shlex.join(words)}` on a login node fetches it (what is not the name of a directory here is "
        "one of the hub)"
    )
