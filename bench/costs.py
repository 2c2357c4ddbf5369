"""Compare the cost model with measured servers of GPU types that it was not fitted on: `python -m bench.costs`.

`--points FILE` (or HPCRL_BENCH_POINTS) is a CSV file of measured servers with two GPU types or more, as
`hpcrl calibrate` reads it; without one it measures nothing. For each type, the model is fitted on all others, and its
error measured on this one: the time per output token of servers in steady use, whose KV fits. The rank correlation is
over all MoE servers of the type: whether the model orders them rightly by speed.

Chosen after figures had been seen: the terms of the model (the link between the GPUs of a server, KV apart from
weights, a cost of each layer with experts), by their errors on both types.
"""

import argparse
import os
import sys
from pathlib import Path

from bench.figures import Figure, main
from hpcrl.commands.calibration import measure_group, read_serving_csv
from hpcrl.hardware.gpus import DEFAULT_FIT, RooflineFit
from hpcrl.hardware.speed_fit import ServingPoint, fit_speed

BAR_DENSE = 0.12
BAR_RANKS = 0.8
LARGE_PARAMS = 30e9
NO_PRIOR = RooflineFit(
    expert_layer_s=1e-5, layer_s=1e-4, hop_s=1e-5, read=1.0, kv=1.0, compute=1.0, prefill=1.0, link=1.0
)
"""What is known without any server; hpcrl's defaults were fitted on H100s, and would be a hint."""


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    points: Path | None = arguments.points
    if points is None:
        return []
    servers = read_serving_csv(points).points
    types = sorted({point.gpu.name for point in servers})
    return [figure for name in types if len(types) > 1 for figure in _measure_held_out(servers, name)]


def _measure_held_out(servers: list[ServingPoint], name: str) -> list[Figure]:
    """Measure the error on one GPU type of the fit on all others, and of the defaults."""
    unseen = [point for point in servers if point.gpu.name == name]
    fit = fit_speed([point for point in servers if point.gpu.name != name], before=NO_PRIOR)
    large = [point for point in unseen if not point.shape.num_experts and point.shape.num_params >= LARGE_PARAMS]
    small = [point for point in unseen if not point.shape.num_experts and point.shape.num_params < LARGE_PARAMS]
    experts = [point for point in unseen if point.shape.num_experts]
    figures = []
    if large:
        figures.append(_error_figure(f"{name}, not seen: dense, 30B and more", large, fit, bar=BAR_DENSE))
        figures.append(_error_figure(f"{name}, hpcrl's defaults: the same", large, DEFAULT_FIT))
    if small:
        figures.append(_error_figure(f"{name}, not seen: smaller dense", small, fit))
    if experts:
        figures.append(_error_figure(f"{name}, not seen: MoE", experts, fit))
        ranks = measure_group(experts, fit).rank_correlation
        figures.append(Figure(name=f"{name}, not seen: MoE, rank correlation", value=ranks, unit="", bar=BAR_RANKS))
    return figures


def _error_figure(name: str, points: list[ServingPoint], fit: RooflineFit, *, bar: float | None = None) -> Figure:
    error = measure_group(points, fit).median_error
    return Figure(name=f"{name} ({len(points)}), median error", value=error, unit="share", bar=bar, better="lower")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--points", type=Path, default=os.environ.get("HPCRL_BENCH_POINTS"), help="published measurements"
    )


if __name__ == "__main__":
    sys.exit(main("costs", measure, add_options=add_options))
