"""Fit the cost model to what servers and trainers took, and print the coefficients for a site file: `hpcrl calibrate`.

run_calibrate, calibrate_speed    fits, and prints the coefficients and the error
read_serving_csv      the measured servers of a CSV file
read_campaign_points  those of a campaign, by its own events
CalibrationReport     the result
MeasuredServers       the points of a source, and what was left out
fit_servers, measure_group, GpuError    the fit, and its error on the servers of a GPU type
CSV_COLUMNS           the columns of a CSV file, with the names that they may have

Servers whose KV does not fit are left out, since requests queue there and the time per token has no meaning.
"""

import argparse
import csv
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from hpcrl.campaign import directory
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import EngineCounted, EpisodesCounted, StepFinished
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.engine_speed import divide_engine_gpus, round_weights
from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site, load_site
from hpcrl.config.toml import suggest_name
from hpcrl.errors import CampaignError, ConfigError
from hpcrl.hardware.architecture import ModelArchitecture, read_architecture
from hpcrl.hardware.cost_model import ModelShape, estimate_speed, make_model_shape, read_model_shape
from hpcrl.hardware.gpus import DEFAULT_SIMULATED_GPU, GPU_CATALOGUE, GpuModel, RooflineFit
from hpcrl.hardware.model_catalogue import find_model_config
from hpcrl.hardware.rank_traffic import RankLinks
from hpcrl.hardware.speed_fit import (
    MIN_POINTS,
    ServingPoint,
    StepPoint,
    correlate_ranks,
    estimate_token_s,
    find_peak_step_s,
    find_peak_token_s,
    find_train_factor,
    fit_speed,
    measure_errors,
)
from hpcrl.monitor.count_lines import drop_superseded
from hpcrl.plan.plan import Plan
from hpcrl.plan.records import read_plan, read_recipe, read_site
from hpcrl.plan.training_work import find_rank_links, plan_training_work
from hpcrl.system.csv_tables import guess_table_fault, refuse_bad_table
from hpcrl.system.files import find_input, is_table_path
from hpcrl.system.json_records import decode_record
from hpcrl.system.terminal import print_json, print_line, show_wait


class _CsvColumn(NamedTuple):
    """A column of a CSV file."""

    names: tuple[str, ...]
    """Its names, the usual one first."""
    default: str | None = None
    """None: the column is required."""


CSV_COLUMNS = {
    "gpu": _CsvColumn(("gpu", "system")),
    "model": _CsvColumn(("model", "model_path")),
    "batch": _CsvColumn(("batch", "batch_size")),
    "prompt_tokens": _CsvColumn(("prompt_tokens", "isl")),
    "reply_tokens": _CsvColumn(("reply_tokens", "osl")),
    "token_ms": _CsvColumn(("token_ms", "tpot_ms", "silicon_tpot_ms")),
    "tp": _CsvColumn(("tp", "tp_size"), "1"),
    "pp": _CsvColumn(("pp", "pp_size"), "1"),
    "precision": _CsvColumn(("precision",), ""),
    "attention_dp": _CsvColumn(("attention_dp", "attention_dp_size"), "1"),
}
WEIGHT_BYTES = {"": 2.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.56, "int4": 0.56}
"""Bytes per weight; those of 4 bits include the scale of every block of 16 or 32."""
MAX_PEAK_FACTOR = 10.0
"""A time this many times shorter than the peaks of the GPUs allow is wrong. In published ones it is 4 at most, since
prompts are computed between the steps in less than the model thinks."""
MAX_IDLE_FACTOR = 1000.0
"""A training step that takes longer than at the peaks of its GPUs by this factor does not measure them."""
PEAK_COEFFICIENTS = ("read", "kv", "compute", "prefill", "train")
"""The coefficients that are relative to a peak of the GPUs."""
PEAK_FIT_SHARE = 0.7
"""A coefficient below this is wrong; those of published figures are at least 0.9."""
MIN_RUNNING = 0.5
"""The mean number of requests below which an engine's times are mostly those of waiting."""


@dataclass
class MeasuredServers:
    """The points of a source, and what was left out."""

    source: str
    points: list[ServingPoint] = field(default_factory=list)
    steps: list[StepPoint] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Numbers of rows by reason."""


class GpuError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of the fitted model on the servers of one GPU type."""

    gpu: str
    num_points: int
    is_fitted: bool
    """False if none of them was used for the fit."""
    median_error: float
    """The median size of relative errors."""
    bias: float
    """The median relative error; below 0 if the model is too fast."""
    rank_correlation: float


class CalibrationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a calibration."""

    source: str
    fit: RooflineFit
    num_points: int
    num_steps: int
    errors: list[GpuError]
    left_out: dict[str, int]
    doubtful: list[str]
    """The coefficients that are less than the peaks of the GPUs allow."""


def run_calibrate(arguments: argparse.Namespace) -> int:
    site = None if arguments.site is None else load_site(arguments.site)
    return calibrate_speed(arguments.source, site=site, held_out=arguments.hold_out, as_json=arguments.json)


def calibrate_speed(source: str, *, site: Site | None, held_out: Sequence[str], as_json: bool) -> int:
    """Fit to a campaign or a CSV file, but not to the GPU types in `held_out`, and print the result."""
    with show_wait("the measurements are read, and the cost model is fitted to them"):
        path = Path(source)
        if is_table_path(path):
            servers = read_serving_csv(path, find_gpu=GPU_CATALOGUE.get if site is None else site.find_gpu)
        else:
            servers = read_campaign_points(directory.find_campaign(source))
        report = fit_servers(servers, held_out=held_out)
    if as_json:
        print_json(report)
        return 0
    for line in _describe_report(report):
        print_line(line)
    return 0


def fit_servers(servers: MeasuredServers, *, held_out: Sequence[str] = ()) -> CalibrationReport:
    """Fit to the servers of all GPU types but those in `held_out`; report the error on each type."""
    types = Counter(point.gpu.name for point in servers.points)
    for name in held_out:
        if name not in types:
            raise ConfigError(
                f"--hold-out {name}: {suggest_name(name, list(types))}{servers.source} has measurements of "
                f"{', '.join(types) or 'no GPU'}"
            )
    seen = [point for point in servers.points if point.gpu.name not in held_out]
    if len(seen) < MIN_POINTS and not servers.steps:
        reasons = "; ".join(f"{num} left out: {why}" for why, num in servers.left_out.items())
        raise ConfigError(
            f"{servers.source} has {len(seen)} measurements that can be fitted to, and {MIN_POINTS} are needed"
            f"{f' ({reasons})' if reasons else ''}: give more rows{', or fewer --hold-out' if held_out else ''}"
        )
    fit = fit_speed(seen, steps=servers.steps)
    return CalibrationReport(
        source=servers.source,
        fit=fit,
        num_points=len(seen),
        num_steps=len(servers.steps),
        errors=[
            measure_group([point for point in servers.points if point.gpu.name == name], fit, held_out=held_out)
            for name in sorted(types)
        ],
        left_out=dict(servers.left_out),
        doubtful=[name for name in PEAK_COEFFICIENTS if getattr(fit, name) < PEAK_FIT_SHARE],
    )


def measure_group(points: Sequence[ServingPoint], fit: RooflineFit, *, held_out: Sequence[str] = ()) -> GpuError:
    """Measure the error on points of one GPU type."""
    errors = measure_errors(points, fit)
    return GpuError(
        gpu=points[0].gpu.name,
        num_points=len(points),
        is_fitted=points[0].gpu.name not in held_out,
        median_error=round(median(map(abs, errors)), 4),
        bias=round(median(errors), 4),
        rank_correlation=round(
            correlate_ranks([estimate_token_s(point, fit) for point in points], [point.token_s for point in points]), 4
        ),
    )


# ---- a CSV file


def read_serving_csv(path: Path, *, find_gpu: Callable[[str], GpuModel | None] = GPU_CATALOGUE.get) -> MeasuredServers:
    """Read measured servers; refuse a file that lacks columns or rows, or has values that cannot be."""
    try:
        with find_input(path).open(newline="", encoding="utf-8-sig") as file, refuse_bad_table(path):
            reader = csv.DictReader(file)
            names = _match_columns(path, reader.fieldnames or ())
            found = MeasuredServers(source=str(path))
            for number, row in enumerate(reader, 2):
                values = {key: (row.get(name) or "").strip() if name else "" for key, name in names.items()}
                _add_row(found, values, place=f"{path}, line {number}", folder=path.parent, find_gpu=find_gpu)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): give the name of a campaign, or a CSV file of measured servers"
        ) from error
    if not found.points and not found.left_out:
        raise ConfigError(f"{path} has no rows below its header: give a row for each measurement")
    return found


def _match_columns(path: Path, given: Sequence[str]) -> dict[str, str | None]:
    known = set(given)
    names = {key: next((name for name in column.names if name in known), None) for key, column in CSV_COLUMNS.items()}
    missing = [key for key, column in CSV_COLUMNS.items() if names[key] is None and column.default is None]
    if missing:
        if fault := guess_table_fault(given):
            raise ConfigError(f"{path} {fault}")
        raise ConfigError(
            f"{path} has no column {', '.join(map(repr, missing))}: it has {', '.join(sorted(known)) or 'none'}, and "
            f"needs {', '.join(key for key, column in CSV_COLUMNS.items() if column.default is None)}"
        )
    return names


def _add_row(
    found: MeasuredServers,
    values: dict[str, str],
    *,
    place: str,
    folder: Path,
    find_gpu: Callable[[str], GpuModel | None],
) -> None:
    """Add the point of a row, or count why there is none."""
    numbers = _read_numbers(values, place=place)
    if values["precision"] not in WEIGHT_BYTES:
        raise ConfigError(
            f"{place}: precision = {values['precision']!r}: it is one of {', '.join(filter(None, WEIGHT_BYTES))}"
        )
    if not values["gpu"]:
        raise ConfigError(f"{place}: column 'gpu' is empty: name the GPU type, such as h100")
    gpu = find_gpu(values["gpu"].lower().removesuffix("_sxm").removesuffix("_pcie").replace("_", "-"))
    config = _find_config(values["model"], folder=folder)
    if gpu is None or not gpu.has_speed:
        found.left_out[f"GPU {values['gpu']!r} is in no catalogue (describe it in [gpus.NAME] of a site)"] += 1
    elif config is None:
        found.left_out[f"model {values['model']!r} is not known (give the path of its config.json)"] += 1
    elif numbers["attention_dp"] > 1:
        found.left_out["attention is data-parallel"] += 1
    else:
        shape = _round_shape(read_model_shape(config), values["precision"], gpu=gpu)
        if numbers["tp"] > shape.num_heads or numbers["pp"] > shape.num_layers:
            raise ConfigError(
                f"{place}: tp = {numbers['tp']:g} and pp = {numbers['pp']:g}: the model has {shape.num_heads} heads "
                f"and {shape.num_layers} layers"
            )
        point = _make_point(gpu, shape, numbers)
        room = estimate_speed(gpu, shape=shape, tp=point.tp, pp=point.pp).kv_tokens
        if point.batch * (numbers["prompt_tokens"] + numbers["reply_tokens"]) > room:
            found.left_out["its KV does not fit"] += 1
        elif point.token_s * MAX_PEAK_FACTOR < (peak_s := find_peak_token_s(point)):
            raise ConfigError(
                f"{place}: token_ms = {values['token_ms']!r}: no engine is so fast; at the peaks of its GPUs it is "
                f"{peak_s * 1e3:.3g}: give milliseconds, and check tp, batch and precision"
            )
        else:
            found.points.append(point)


def _round_shape(shape: ModelShape, precision: str, *, gpu: GpuModel) -> ModelShape:
    """Return the shape with the bytes of a precision; a GPU without FP8 computes in bfloat16 even then."""
    factor_bytes = None if gpu.has_fp8 or precision != "fp8" else WEIGHT_BYTES["bf16"]
    return msgspec.structs.replace(shape, weight_bytes=WEIGHT_BYTES[precision], factor_bytes=factor_bytes)


def _read_numbers(values: dict[str, str], *, place: str) -> dict[str, float]:
    numbers = {
        name: _read_number(values[name] or CSV_COLUMNS[name].default or "", name, place=place)
        for name in ("batch", "prompt_tokens", "reply_tokens", "token_ms", "tp", "pp", "attention_dp")
    }
    for name in ("tp", "pp", "attention_dp"):
        if not numbers[name].is_integer():
            raise ConfigError(f"{place}: {name} = {values[name]!r}: give a whole number")
    return numbers


def _make_point(gpu: GpuModel, shape: ModelShape, numbers: dict[str, float]) -> ServingPoint:
    num_prompt, num_new = numbers["prompt_tokens"], numbers["reply_tokens"]
    return ServingPoint(
        gpu=gpu,
        shape=shape,
        tp=int(numbers["tp"]),
        pp=int(numbers["pp"]),
        batch=numbers["batch"],
        num_context=num_prompt + num_new / 2,
        num_prefilled=num_prompt,
        num_new=num_new,
        token_s=numbers["token_ms"] / 1e3,
    )


def _read_number(text: str, name: str, *, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e12:
        raise ConfigError(f"{place}: {name} = {text!r}: give a number above 0")
    return value


def _find_config(model: str, *, folder: Path) -> dict[str, Any] | None:
    """Return the sizes of a model by its name, or by the path of its directory or config.json."""
    if (known := find_model_config(model)) is not None:
        return known
    for path in (folder / model, folder / model / "config.json"):
        if model and path.is_file():
            try:
                config = decode_record(path.read_bytes(), dict[str, Any])
                read_model_shape(config)
            except (OSError, msgspec.DecodeError, KeyError) as error:
                raise ConfigError(f"{path} is not the config.json of a language model ({error!r})") from error
            return config
    return None


# ---- a campaign


def read_campaign_points(campaign: CampaignDir) -> MeasuredServers:
    """Read what engines and trainer took from the events of a campaign, a point for each engine and step."""
    recipe, site = read_recipe(campaign, skips_unknown=True), read_site(campaign, skips_unknown=True)
    architecture = _read_campaign_architecture(campaign, recipe)
    shape = make_model_shape(architecture)
    reader = EventReader(campaign.events, choose_lines=drop_superseded)  # the last counts of episodes are enough
    used = EngineCounted | EpisodesCounted | StepFinished
    events = [event for event in reader.poll_merged() if isinstance(event, used)]
    found = MeasuredServers(source=f"campaign {campaign.name}")
    gpus = _find_role_gpus(campaign, recipe, site)
    if gpus["decode"] is None:
        raise CampaignError(
            f"campaign {campaign.name} ran on no GPU whose figures are known: calibrate with one on GPUs, or with "
            'engine.backend = "sim"'
        )
    plan, lengths = read_plan(campaign), _measure_lengths(events)
    if lengths is not None:
        num_gpus = plan.role("decode").gpus_per_engine
        _add_engine_points(found, events, shape, gpu=gpus["decode"], recipe=recipe, num_gpus=num_gpus, lengths=lengths)
    if (gpu := gpus["train"]) is not None:
        links = find_rank_links(plan, site, gpu=gpu)
        _add_step_points(found, events, architecture, gpu=gpu, recipe=recipe, plan=plan, links=links)
    if not found.points and not found.steps:
        raise CampaignError(
            f"campaign {campaign.name} has no events of busy engines or of steps on a known GPU: one on CPUs, or with "
            "simulated engines, has nothing to fit to, and a young one should run longer"
        )
    return found


def _read_campaign_architecture(campaign: CampaignDir, recipe: Recipe) -> ModelArchitecture:
    path = Path(recipe.engine.sim.config or campaign.model / "config.json")
    try:
        return read_architecture(decode_record(path.read_bytes(), dict[str, Any]))
    except (OSError, msgspec.DecodeError, KeyError) as error:
        raise CampaignError(f"the sizes of the model of {campaign.name} cannot be read: {path}: {error!r}") from error


def _find_role_gpus(campaign: CampaignDir, recipe: Recipe, site: Site) -> dict[str, GpuModel | None]:
    plan, gpus = read_plan(campaign), dict[str, GpuModel | None]()
    for role in ("decode", "train"):
        planned = plan.role(role) if plan.has_role(role) else None
        name = plan.components[planned.component].gpu if planned and planned.gpus_per_worker else None
        if role == "decode" and recipe.engine.backend == "sim":
            name = (recipe.engine.sim.gpus or [name or DEFAULT_SIMULATED_GPU])[0]
        gpu = site.find_gpu(name)
        gpus[role] = gpu if gpu is not None and gpu.has_speed else None
    return gpus


class _TurnLengths(NamedTuple):
    """The average turn of a campaign."""

    num_new: float
    num_fresh: float
    """Tokens that an observation adds."""
    num_context: float


def _measure_lengths(events: Iterable[Any]) -> _TurnLengths | None:
    """Return the average turn by the last counts of each env worker, and the steps; None before any episode ended."""
    last: dict[str, EpisodesCounted] = {}
    totals = []
    for event in events:
        match event:
            case EpisodesCounted():
                last[event.worker] = event
            case StepFinished(length_mean=float(mean)):
                totals.append(mean)
    turns = sum(one.turns for one in last.values())
    tokens = sum(one.num_tokens for one in last.values())
    episodes = sum(one.done + one.truncated for one in last.values())
    if not turns or not tokens or not episodes:
        return None
    num_new, per_episode = tokens / turns, max(1.0, turns / episodes)
    total = max(fmean(totals), num_new) if totals else num_new * per_episode
    fresh = max(1.0, total / per_episode - num_new)
    return _TurnLengths(num_new=num_new, num_fresh=fresh, num_context=(total + fresh + num_new / 2) / 2)


def _add_engine_points(
    found: MeasuredServers,
    events: Iterable[Any],
    shape: ModelShape,
    *,
    gpu: GpuModel,
    recipe: Recipe,
    num_gpus: int,
    lengths: _TurnLengths,
) -> None:
    shape = round_weights(shape, recipe.engine, gpu=gpu)
    tp, pp = divide_engine_gpus(recipe.engine, num_gpus=num_gpus)
    scale = recipe.engine.sim.speed if recipe.engine.backend == "sim" else 1.0
    for event in events:
        if not isinstance(event, EngineCounted) or event.role == "prefill" or event.role.startswith("judge"):
            continue
        if event.running < MIN_RUNNING or not event.num_tokens:
            found.left_out["an engine with next to no requests"] += 1
            continue
        point = ServingPoint(
            gpu=gpu,
            shape=shape,
            tp=tp,
            pp=pp,
            num_copies=recipe.engine.data_parallel,
            batch=event.running / max(event.busy_share, 0.01) / recipe.engine.data_parallel,
            num_context=lengths.num_context,
            num_prefilled=lengths.num_fresh,
            num_known=max(0.0, lengths.num_context - lengths.num_fresh),
            num_new=lengths.num_new,
            token_s=event.running * event.window_s * scale / event.num_tokens,
        )
        if point.token_s * MAX_PEAK_FACTOR < find_peak_token_s(point):
            found.left_out["an engine that is faster than its GPUs can be"] += 1
        else:
            found.points.append(point)


def _add_step_points(
    found: MeasuredServers,
    events: Iterable[Any],
    architecture: ModelArchitecture,
    *,
    gpu: GpuModel,
    recipe: Recipe,
    plan: Plan,
    links: RankLinks | None,
) -> None:
    shape = make_model_shape(architecture)
    for event in events:
        match event:
            case StepFinished(step_s=float(step_s), num_tokens=int(num_tokens)) if num_tokens and step_s:
                work = plan_training_work(
                    recipe,
                    plan,
                    architecture=architecture,
                    gpu=gpu,
                    links=links,
                    num_tokens=num_tokens,
                    mean_length=event.length_mean or 0.0,
                )
                step = StepPoint(gpu=gpu, shape=shape, work=work, step_s=step_s)
                peak_s = find_peak_step_s(step)
                if step.step_s * MAX_PEAK_FACTOR < peak_s:
                    found.left_out["a training step that is faster than its GPUs can be"] += 1
                elif step.step_s > peak_s * MAX_IDLE_FACTOR:
                    found.left_out["a training step of a model that is too small, or on CPUs"] += 1
                elif not find_train_factor(step):
                    found.left_out["a training step whose links alone take as long (network.gbit_per_gpu)"] += 1
                else:
                    found.steps.append(step)


def _describe_report(report: CalibrationReport) -> list[str]:
    lines = [f"# fitted to {report.num_points} measurements of servers and {report.num_steps} training steps of"]
    lines.append(f"# {report.source}; for a site file:")
    lines.append("[speed]")
    for name, value in msgspec.structs.asdict(report.fit).items():
        lines.append(f"{'# ' * (name in report.doubtful)}{name} = {value:.4g}")
    if report.doubtful:
        lines.append(
            f"# {', '.join(report.doubtful)}: less than the peaks of the GPUs allow ({PEAK_FIT_SHARE:g} at least): the "
            "measurements do not determine this, or a GPU is another one than they name"
        )
    for one in report.errors:
        seen = "fitted" if one.is_fitted else "held out"
        lines.append(
            f"# {one.gpu} ({seen}, {one.num_points}): median error {one.median_error:.1%}, bias {one.bias:+.1%}, "
            f"rank correlation {one.rank_correlation:.3f}"
        )
    lines += [f"# {num} left out: {why}" for why, num in sorted(report.left_out.items())]
    return lines
