"""The user's request, loaded: recipe, site, and the plan that maps one to the other.

CampaignRequest, RequestSource  a request, and the words that load it again
load_request          loads it
load_files            loads its recipe and its site
resolve_recipe        the recipe of a table, with absolute paths
make_imitation_model  the model whose conversations the warm-up imitates
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcrl.campaign import directory
from hpcrl.campaign.own_gpus import add_own_gpus
from hpcrl.campaign.staged_files import StagingDir, advise_staging, find_staging_dir
from hpcrl.config.program import AGENT_PROGRAM, is_registry_image, resolve_options
from hpcrl.config.recipe import (
    MIN_PARAMS,
    DomainConfig,
    ModelConfig,
    Recipe,
    WarmupConfig,
    fill_warmup_steps,
    make_recipe,
)
from hpcrl.config.site import Site, load_site
from hpcrl.config.toml import LayeredTable, load_table
from hpcrl.envs.task_set import DATA_SUFFIXES, ImitationModel, check_conversations
from hpcrl.errors import CampaignError, ConfigError, PlanError
from hpcrl.hardware.architecture import read_architecture, select_fields
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS
from hpcrl.models.model_config import read_model_config
from hpcrl.plan.plan import Plan, make_plan
from hpcrl.plan.suggestions import advise_repair
from hpcrl.system.files import expand_path, is_directory, is_file

M = TypeVar("M", bound=ModelConfig)


class RequestSource(msgspec.Struct, frozen=True, kw_only=True):
    """The words of a request, to load it again: names or absolute paths, and settings."""

    recipe: str
    site: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CampaignRequest:
    """The user's request: recipe and site, and the plan that maps one to the other."""

    recipe: Recipe
    site: Site
    plan: Plan
    source: RequestSource | None = None
    """None for one that was read from a campaign."""

    @property
    def shown_recipe(self) -> str:
        """The recipe in messages: the word of the user, as a file may give its recipe another name."""
        return self.recipe.name if self.source is None else self.source.recipe


def load_request(recipe: str, *, site: str, settings: tuple[str, ...] = ()) -> CampaignRequest:
    """Load recipe and site, and make the plan; settings are `key=value` of the recipe, `site.key=value` of the site."""
    loaded_recipe, loaded_site = load_files(recipe, site=site, settings=settings)
    source = RequestSource(recipe=_fix_name(recipe), site=_fix_name(site), settings=settings)
    try:
        plan = make_plan(loaded_recipe, loaded_site)
    except PlanError as error:
        raise PlanError(f"{error}{advise_repair(loaded_recipe, loaded_site, refusal=str(error))}") from None
    return CampaignRequest(recipe=loaded_recipe, site=loaded_site, plan=plan, source=source)


def load_files(recipe: str, *, site: str, settings: tuple[str, ...] = ()) -> tuple[Recipe, Site]:
    """Load recipe and site, with what is staged and the GPUs of this machine; nothing is planned yet."""
    site_settings = tuple(s.removeprefix("site.") for s in settings if s.startswith("site."))
    recipe_settings = tuple(s for s in settings if not s.startswith("site."))
    loaded_site = add_own_gpus(load_site(site, settings=site_settings))
    staging = find_staging_dir(loaded_site)
    loaded_site = staging.use_images(loaded_site)
    loaded_recipe = resolve_recipe(load_table("recipes", recipe, settings=recipe_settings), staging=staging)
    if (warmup := loaded_recipe.warmup) is not None:
        for path in warmup.paths:
            if problem := staging.describe_problem(path):
                raise ConfigError(f"warmup.path: {problem}: {advise_staging(recipe, site, settings)}")
        loaded_recipe = fill_warmup_steps(
            loaded_recipe, warmup, num_conversations=_count_conversations(loaded_recipe, warmup, site=loaded_site)
        )
    return loaded_recipe, loaded_site


def _fix_name(name: str) -> str:
    """Return a name that means the same file in every directory."""
    return str(expand_path(name).absolute()) if name.endswith(".toml") or "/" in name else name


def resolve_recipe(layered: LayeredTable, *, staging: StagingDir) -> Recipe:
    """Make the recipe of a table, with absolute paths; names of the hub become those of what is staged."""
    return _resolve_paths(make_recipe(layered), layered, staging)


def _count_conversations(recipe: Recipe, warmup: WarmupConfig, *, site: Site) -> int:
    return check_conversations(warmup, model=make_imitation_model(recipe, site))


def make_imitation_model(recipe: Recipe, site: Site) -> ImitationModel:
    """Return the model that a warm-up trains, as the check of its conversations needs it."""
    return ImitationModel(python=site.choose_python(), path=recipe.model.path)


def _resolve_paths(recipe: Recipe, layered: LayeredTable, staging: StagingDir) -> Recipe:
    """Make paths absolute, as a relative one would mean another directory on the workers' nodes.

    A file is looked for beside the TOML file that sets it, then in the current directory.
    """
    evaluated = {
        name: _resolve_options(recipe.domains[name], options, layered, "evaluation", "options", name)
        if name in recipe.domains
        else options
        for name, options in recipe.evaluation.options.items()
    }
    warmup = recipe.warmup and msgspec.structs.replace(
        recipe.warmup, path=_resolve_warmup_path(recipe.warmup.path, layered, staging)
    )
    teacher = recipe.teacher
    if teacher is not None and teacher.path is not None:
        path = _resolve_model_path(teacher.path, layered, staging, "teacher", "path")
        teacher = msgspec.structs.replace(teacher, path=path, num_params=_find_size(path, teacher.num_params))
    nodes = dict(recipe.train.pipeline)
    for name, node in nodes.items():
        if node.model is not None:
            path = _resolve_model_path(node.model, layered, staging, "train", "pipeline", name, "model")
            nodes[name] = msgspec.structs.replace(node, model=path, num_params=_find_size(path, node.num_params))
    return msgspec.structs.replace(
        recipe,
        model=_resolve_model(recipe.model, layered, staging, "model"),
        domains={name: _resolve_domain(name, domain, layered, staging) for name, domain in recipe.domains.items()},
        evaluation=msgspec.structs.replace(recipe.evaluation, options=evaluated),
        train=msgspec.structs.replace(recipe.train, pipeline=nodes),
        warmup=warmup,
        teacher=teacher,
        judge={name: _resolve_model(judge, layered, staging, "judge", name) for name, judge in recipe.judge.items()},
    )


def _resolve_model_path(path: str, layered: LayeredTable, staging: StagingDir, *trail: str) -> str:
    """Make the path of a model absolute: a directory beside the TOML file, one of the hub, or in the current one."""
    near = layered.find_folder(*trail) / expand_path(path)
    if is_directory(near):
        return str(near.absolute())
    return staging.find_model(path) or str(expand_path(path).absolute())


def _resolve_file(path: str, layered: LayeredTable, *trail: str) -> str:
    """Make the path of a file absolute; `trail` is the key of the recipe that names it."""
    near, here = layered.find_folder(*trail) / expand_path(path), expand_path(path)
    return str((near if is_file(near) or not is_file(here) else here).absolute())


def _resolve_files(paths: str | list[str], layered: LayeredTable, staging: StagingDir, *trail: str) -> str | list[str]:
    """Make the paths of data files absolute, also of those named by their id on the hub."""
    if isinstance(paths, list):
        return [str(_resolve_files(path, layered, staging, *trail)) for path in paths]
    return staging.find_data(paths) or _resolve_file(paths, layered, *trail)


def _resolve_warmup_path(paths: str | list[str], layered: LayeredTable, staging: StagingDir) -> str | list[str]:
    """Make the paths of files absolute, and find the directories of campaigns."""
    if isinstance(paths, list):
        return [str(_resolve_warmup_path(path, layered, staging)) for path in paths]
    if (staged := staging.find_data(paths)) is not None:
        return staged
    if paths.endswith(DATA_SUFFIXES):
        return _resolve_file(paths, layered, "warmup", "path")
    try:
        return str(directory.find_campaign(paths).root)
    except CampaignError as error:
        suffixes = ", ".join(DATA_SUFFIXES)
        raise ConfigError(f"warmup.path = {paths!r} is not a data file ({suffixes}), and {error}") from error


def _resolve_domain(name: str, domain: DomainConfig, layered: LayeredTable, staging: StagingDir) -> DomainConfig:
    options = _resolve_options(domain, domain.options, layered, "domains", name, "options")
    if domain.env == AGENT_PROGRAM and is_registry_image(options.get("image")) and staging.images.is_dir():
        options = {"staged_images": str(staging.images), **options}
    python, tasks = domain.python, domain.tasks
    if python is not None and "/" in python:
        python = str(expand_path(python).absolute())
    trail = ("domains", name, "tasks")
    if isinstance(tasks, str):
        tasks = staging.find_data(tasks) or _resolve_file(tasks, layered, *trail)
    elif tasks is not None:
        held_out = tasks.held_out_path and _resolve_files(
            tasks.held_out_path, layered, staging, *trail, "held_out_path"
        )
        path = _resolve_files(tasks.path, layered, staging, *trail, "path")
        tasks = msgspec.structs.replace(tasks, path=path, held_out_path=held_out)
    return msgspec.structs.replace(domain, options=options, python=python, tasks=tasks)


def _resolve_options(
    domain: DomainConfig, options: dict[str, Any], layered: LayeredTable, *trail: str
) -> dict[str, Any]:
    return resolve_options(domain.env, options, find_folder=partial(layered.find_folder, *trail))


def _resolve_model(model: M, layered: LayeredTable, staging: StagingDir, *trail: str) -> M:
    path = model.path and _resolve_model_path(model.path, layered, staging, *trail, "path")
    config = (_find_config(path) if path else {}) or model.config or MODEL_CONFIGS.get(model.path or "", {})
    template = model.chat_template and _resolve_file(model.chat_template, layered, *trail, "chat_template")
    return msgspec.structs.replace(model, path=path, config=config, chat_template=template)


def _find_size(model: str, num_params: int | None) -> int | None:
    """Return the number of weights of a model, by default by its config.json; None if that is not here."""
    if num_params is not None:
        return num_params
    config = _find_config(model)
    return read_architecture(config).num_params if config else None


def _find_config(model: str) -> dict[str, Any]:
    """Return what a plan needs of a model's config.json; empty if that is not here, or is of a model for tests."""
    try:
        config = select_fields(read_model_config(Path(model) / "config.json").fields)
        return config if read_architecture(config).num_params >= MIN_PARAMS else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
