"""Bring what a recipe names to the file system of a site: `hpcrl stage RECIPE --site SITE`, on a login node.

stage_recipe     fetch models, data files and images, check what is there, and print a line for each
list_hub_names   the models and data files of the hub that a recipe names, by its settings
list_images      the images of registries that its tasks, and the site's steps, run in

A second run fetches nothing; it compares the digest of every file, and fetches a damaged one again.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hpcrl.campaign.directory import find_campaigns_root
from hpcrl.campaign.request import resolve_recipe
from hpcrl.campaign.staged_files import (
    MANIFEST,
    PULLED_IMAGES,
    HubName,
    StagedFile,
    StagedRepository,
    StagingDir,
    find_staging_dir,
    parse_data_name,
    parse_model_name,
    read_manifest,
)
from hpcrl.config.program import AGENT_PROGRAM, is_registry_image
from hpcrl.config.recipe import DomainConfig, Recipe, make_recipe
from hpcrl.config.site import ContainerTool, Site, load_site
from hpcrl.config.toml import LayeredTable, load_table
from hpcrl.envs.isolation.images import pull_image
from hpcrl.envs.program_files import fill_template
from hpcrl.envs.task_set import check_task_set
from hpcrl.errors import EnvFault, HpcrlError, StageError
from hpcrl.plan.plan import make_plan
from hpcrl.plan.programs import warn_foreign_images
from hpcrl.slurm.submit import expand_path
from hpcrl.staging.hub_files import RepositoryListing, StageTransfer, choose_files, is_whole, list_repository, sum_sizes
from hpcrl.system.files import is_directory, make_private_dir, publish_file, staged_path, sync_directory
from hpcrl.system.free_space import find_free_space
from hpcrl.system.terminal import PipeConsole, format_bytes, print_line, print_note, print_to_stderr, show_wait

FREE_SHARE = 1.02
"""File systems need some room besides the files."""
PULL_WORDS: dict[ContainerTool, Callable[[str, str], list[str]]] = {
    "enroot": lambda path, image: ["enroot", "import", "--output", path, image],
    "pyxis": lambda path, image: ["enroot", "import", "--output", path, image],
    "podman-hpc": lambda _, image: ["podman-hpc", "pull", image.removeprefix("docker://")],
    "shifter": lambda _, image: ["shifterimg", "pull", image.removeprefix("docker://")],
}
"""The words that pull an image of the steps, for the programs other than apptainer; shifter and podman-hpc have a
store for it."""
RepositoryKey = tuple[str, str, str]


def stage_recipe(recipe: str, *, site: str, settings: tuple[str, ...] = ()) -> int:
    """Bring what a recipe names to a site's file system; raises StageError for the first thing that cannot be."""
    of_site = tuple(setting.removeprefix("site.") for setting in settings if setting.startswith("site."))
    of_recipe = tuple(setting for setting in settings if not setting.startswith("site."))
    layered, loaded_site = load_table("recipes", recipe, settings=of_recipe), load_site(site, settings=of_site)
    if loaded_site.staging_dir is None:
        find_campaigns_root(loaded_site)  # which explains a variable that is not set
    else:
        expand_path(loaded_site.staging_dir)
    staging = find_staging_dir(loaded_site)
    named = {
        setting: name
        for setting, name in list_hub_names(make_recipe(layered)).items()
        if name.kind != "model" or not is_directory(layered.find_folder(*setting.split(".")) / name.repository)
    }
    for warning in _warn_foreign_images(layered, loaded_site, staging):
        print_note(warning)
    _stage_repositories(list(named.values()), staging)
    images = list_images(layered, loaded_site, staging)
    for image, tool in images.items():
        _stage_image(image, tool, staging)
    if not named and not images:
        print_line(f"recipe {recipe} names no model or data file of the hub, and no image of a registry")
    return 0


def _warn_foreign_images(layered: LayeredTable, site: Site, staging: StagingDir) -> list[str]:
    """Warn of images that may not run where a plan has env workers; on any partition, if none can be made yet."""
    recipe = resolve_recipe(layered, staging=staging)
    labels = list(site.partitions)
    with contextlib.suppress(HpcrlError):
        plan = make_plan(recipe, msgspec.structs.replace(site, account_required=False))
        labels = [plan.components[plan.role("env").component].partition] if plan.has_role("env") else []
    return warn_foreign_images(recipe, site, labels) if labels else []


def list_hub_names(recipe: Recipe) -> dict[str, HubName]:
    """Return the models and data files of the hub that a recipe names, by its settings."""
    models: dict[str, str | None] = {"model.path": recipe.model.path}
    models |= {f"judge.{name}.path": judge.path for name, judge in recipe.judge.items()}
    models |= recipe.further_models
    found = {setting: parse_model_name(path) for setting, path in models.items() if path is not None}
    data: dict[str, str | list[str] | None] = {"warmup.path": recipe.warmup.path if recipe.warmup else None}
    for name, domain in recipe.domains.items():
        if (tasks := domain.task_set) is not None:
            data |= {f"domains.{name}.tasks": tasks.path, f"domains.{name}.tasks.held_out_path": tasks.held_out_path}
    for setting, paths in data.items():
        for number, path in enumerate([paths] if isinstance(paths, str) else paths or []):
            found[f"{setting}[{number}]"] = parse_data_name(path)
    return {setting: name for setting, name in found.items() if name is not None}


def _stage_repositories(names: list[HubName], staging: StagingDir) -> None:
    """Bring the files of all repositories, after the space for all of them was looked at."""
    wanted: dict[RepositoryKey, list[HubName]] = defaultdict(list)
    for name in names:
        wanted[name.kind, name.repository, name.revision].append(name)
    transfers = [_prepare_transfer(group, staging) for group in wanted.values()]
    _check_free_space(transfers, staging)
    for transfer in transfers:
        _run_transfer(transfer, staging)


def _prepare_transfer(group: list[HubName], staging: StagingDir) -> StageTransfer:
    """Ask the hub for a repository's files; without an answer, take those that were staged before."""
    name = group[0]
    staged = read_manifest(staging.find_folder(name))
    try:
        with show_wait(f"the hub is asked for the files of {name}"):
            listing = list_repository(name)
    except StageError as error:
        if staged is None or not {one.file for one in group if one.file} <= staged.files.keys():
            raise
        print_to_stderr(f"hpcrl: note: {name} is compared with what was staged before: {error}")
        listing = RepositoryListing(staged.commit, staged.files)
    files = listing.files if staged is not None and listing.files is staged.files else choose_files(listing.files)
    if name.kind == "dataset":
        for one in group:
            if one.file not in listing.files:
                raise StageError(f"{one}: the data set has no such file; it has {_shorten_list(listing.files)}")
        files = {one.file: listing.files[one.file] for one in group}
    elif "config.json" not in files:
        raise StageError(f"{name} is not a model that transformers loads: it has no config.json")
    folder = staging.find_repository(name) / listing.commit
    return StageTransfer(name=name, commit=listing.commit, folder=folder, files=files)


def _shorten_list(names: dict[str, StagedFile]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _check_free_space(transfers: list[StageTransfer], staging: StagingDir) -> None:
    """Raise StageError, before anything is fetched, if the file system or a quota has no room for all of it."""
    existing = next(path for path in (staging.root, *staging.root.parents) if path.exists())
    free = find_free_space(existing)
    need = sum(transfer.count_missing_bytes() for transfer in transfers) * FREE_SHARE
    num_files = sum(len(transfer.files) for transfer in transfers)
    if need > free.num_bytes or num_files > free.num_files:
        raise StageError(
            f"{existing} has {format_bytes(free.num_bytes)} and {free.num_files:.0f} files free (by {free.source}); "
            f"{format_bytes(need)} in up to {num_files} files are missing: free space, or set staging_dir of the "
            "site to another file system"
        )


def _run_transfer(transfer: StageTransfer, staging: StagingDir) -> None:
    """Bring the files of a repository with a bar on the terminal, record them, and print what was done."""
    make_private_dir(transfer.folder)
    total = sum_sizes(transfer.files.values())
    with _show_progress(str(transfer.name), total) as advance:
        moving = StageTransfer(
            name=transfer.name,
            commit=transfer.commit,
            folder=transfer.folder,
            files=transfer.files,
            advance=advance,
        )
        moving.bring_files()
    _record(moving, staging)
    kept = len(moving.files) - len(moving.fetched)
    damaged = f", of them damaged before: {', '.join(sorted(moving.damaged))}" if moving.damaged else ""
    print_line(
        f"{transfer.name}: {len(moving.files)} files, {format_bytes(total)}: {kept} were there, {len(moving.fetched)} "
        f"fetched{damaged}"
    )
    print_line(f"  in {transfer.folder}")


def _record(transfer: StageTransfer, staging: StagingDir) -> None:
    """Record that files are there, besides those of other recipes, and let the revision name their commit."""
    before = read_manifest(transfer.folder)
    files = {**(before.files if before is not None else {}), **transfer.files}
    name = transfer.name
    record = StagedRepository(kind=name.kind, repository=name.repository, commit=transfer.commit, files=files)
    if record != before:
        text = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
        publish_file(transfer.folder / MANIFEST, text)
    link = staging.find_repository(name) / name.revision
    if name.revision != transfer.commit and staging.find_folder(name).name != transfer.commit:
        temporary = link.with_name(f".{link.name}.{secrets.token_hex(6)}.tmp")
        temporary.symlink_to(transfer.commit)
        os.rename(temporary, link)  # noqa: PTH104 - replaces the link itself
        sync_directory(link.parent)


@contextlib.contextmanager
def _show_progress(name: str, total: int) -> Iterator[Callable[[int], object]]:
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    console = PipeConsole(stderr=True, markup=False)
    with Progress(TextColumn("{task.description}", markup=False), *columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def list_images(layered: LayeredTable, site: Site, staging: StagingDir) -> dict[str, ContainerTool]:
    """Return the images of registries that tasks and steps run in, with the program that pulls each."""
    found: dict[str, ContainerTool] = {}
    if site.container is not None:
        for label in site.partitions:
            image = site.choose_image(label)
            if image is not None and (is_registry_image(image) or site.container in ("podman-hpc", "shifter")):
                found[image] = site.container
    recipe = resolve_recipe(layered, staging=staging)
    for name, domain in recipe.domains.items():
        changed = domain.options | recipe.evaluation.options.get(name, {})
        for options in (domain.options, changed):
            for image in _list_task_images(name, domain, options):
                found.setdefault(image, "apptainer")
    return found


def _list_task_images(name: str, domain: DomainConfig, options: dict[str, Any]) -> Iterator[str]:
    """Yield the images that the tasks of a domain of agent programs name."""
    template = options.get("image")
    if domain.env != AGENT_PROGRAM or not isinstance(template, str) or not is_registry_image(template):
        return
    found: dict[str, None] = {}

    def add_image(row: dict[str, Any]) -> None:
        found[fill_template(template, {**options.get("task", {}), **row}, what="image")] = None

    try:
        if domain.task_set is None or "{" not in template:
            add_image({})
        else:
            check_task_set(domain.task_set, domain=name, only_held_out=domain.held_out, check=add_image)
    except EnvFault as error:
        raise StageError(f"domains.{name}.options: {error}") from error
    yield from found


def _stage_image(image: str, tool: ContainerTool, staging: StagingDir) -> None:
    """Pull an image unless the file that was pulled is there as it was."""
    suffix = PULLED_IMAGES.get(tool)
    if suffix is None:
        with show_wait(f"{image} is pulled"):
            _pull(PULL_WORDS[tool]("", image), image)
        print_line(f"{image}: pulled into the store of {tool}")
        return
    path = staging.find_image(image, suffix=suffix)
    record = path.with_suffix(".json")
    make_private_dir(path.parent)
    with show_wait(f"{image} is looked for, and compared with its digest"):
        is_there = _is_recorded(path, record)
    if is_there:
        print_line(f"{image}: was there\n  in {path}")
        return
    with show_wait(f"{image} is pulled"), staged_path(path) as temporary:
        if tool in PULL_WORDS:
            _pull(PULL_WORDS[tool](str(temporary), image), image)
        else:
            try:
                asyncio.run(pull_image(image, temporary))
            except EnvFault as error:
                raise StageError(str(error)) from error
        digest = _digest_file(temporary)
        facts = StagedFile(size=temporary.stat().st_size, sha256=digest)
    publish_file(record, msgspec.json.encode({"image": image, "file": facts}))
    print_line(f"{image}: pulled, {format_bytes(facts.size)}\n  in {path}")


def _is_recorded(path: Path, record: Path) -> bool:
    try:
        facts = msgspec.convert(msgspec.json.decode(record.read_bytes())["file"], StagedFile)
    except (OSError, msgspec.MsgspecError, KeyError, TypeError):
        return False
    return is_whole(path, facts)


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pull(words: list[str], image: str) -> None:
    if shutil.which(words[0]) is None:
        raise StageError(f"{image} cannot be pulled: {words[0]} is not on PATH here; run this where the site has it")
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2][-300:]
        raise StageError(f"{image} cannot be pulled: {last or f'{words[0]} ended with {done.returncode}'}")
