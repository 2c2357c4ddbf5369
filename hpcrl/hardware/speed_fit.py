"""Fit the coefficients of the cost model to measured servers, and measure its error. Pure.

    ServingPoint          a server under a steady load, with the time that a token took
    StepPoint             a training step, with the time that it took
    estimate_token_s      the time of a token by the model
    find_peak_token_s, find_peak_step_s    the times at the peaks of the GPUs
    find_train_factor     the coefficient of a training step
    fit_speed             the coefficients that predict all points best
    measure_errors        relative errors of the time of a token
    correlate_ranks       Spearman's rank correlation
    SERVING_TERMS, MIN_POINTS    the fitted coefficients of servers, and the fewest measurements

Each coefficient also has a small vote for its value before, so that one that no measurement depends on stays as it is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import msgspec

from hpcrl.hardware.cost_model import ModelShape, TrainingWork, estimate_speed, estimate_step_s
from hpcrl.hardware.gpus import DEFAULT_FIT, GpuModel, RooflineFit

PEAK_FIT = RooflineFit(
    layer_s=0.0, expert_layer_s=0.0, hop_s=0.0, link=0.0, read=1.0, kv=1.0, compute=1.0, prefill=1.0, train=1.0
)
"""The coefficients of servers and trainers that reach the peaks of their GPUs."""
SERVING_TERMS = ("layer_s", "expert_layer_s", "hop_s", "read", "kv", "compute", "prefill", "link")
MIN_POINTS = 8
_NUM_ROUNDS = 25
_NUM_HALVINGS = 50
_PRIOR_VOTES = 0.02
"""The votes of the value that a coefficient had before, beside one of each measurement."""
_SOFT_ERROR = 0.02
"""Relative errors far above this count in proportion only, so that a few odd servers do not decide."""


@dataclass(frozen=True, kw_only=True)
class ServingPoint:
    """A server under a steady load."""

    gpu: GpuModel
    shape: ModelShape
    tp: int = 1
    pp: int = 1
    num_copies: int = 1
    """Copies of the model, which divide its experts."""
    batch: float
    """Sequences that are decoded together, by each copy."""
    num_context: float
    """Tokens of KV of each."""
    num_prefilled: float
    """Tokens of a turn whose KV is computed between the steps of others."""
    num_known: float = 0.0
    """Tokens that were known before these."""
    num_new: float
    """Tokens that a turn generates."""
    token_s: float
    """The measured time of a token of one sequence."""


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """A training step."""

    gpu: GpuModel
    shape: ModelShape
    work: TrainingWork
    step_s: float
    """The measured time."""


def estimate_token_s(point: ServingPoint, fit: RooflineFit | None = None) -> float:
    """Return the time of a decode step, with the prefills of other sequences in between."""
    num = point.num_copies
    speed = estimate_speed(point.gpu, shape=point.shape, tp=point.tp, pp=point.pp, num_copies=num, fit=fit)
    others = max(0.0, point.batch - 1) / point.num_new
    prefill_s = num * speed.prefill_s(point.num_prefilled, num_known=point.num_known)  # one in each copy
    return speed.decode_s(num * point.batch, num_kv=num * point.batch * point.num_context) + others * prefill_s


def find_peak_token_s(point: ServingPoint) -> float:
    """Return the time of a token at the peaks of the GPUs."""
    return estimate_token_s(point, PEAK_FIT)


def find_peak_step_s(point: StepPoint) -> float:
    """Return the time of a training step at the peaks of the GPUs."""
    gpu = msgspec.structs.replace(point.gpu, fit=PEAK_FIT)
    return estimate_step_s(gpu, shape=point.shape, work=point.work)


def find_train_factor(point: StepPoint) -> float:
    """Return the coefficient `train` with which a step takes as long as measured, in addition to its traffic.

    0: the traffic alone takes as long, and nothing is known of the arithmetic.
    """

    def estimate_s(factor: float) -> float:
        fit = msgspec.structs.replace(PEAK_FIT, train=factor)
        return estimate_step_s(msgspec.structs.replace(point.gpu, fit=fit), shape=point.shape, work=point.work)

    low, high = 0.0, 1.0
    if estimate_s(low) >= point.step_s:
        return 0.0
    while estimate_s(high) < point.step_s:
        low, high = high, 2 * high
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if estimate_s(middle) < point.step_s else (low, middle)
    return high


def fit_speed(
    points: Sequence[ServingPoint], *, steps: Sequence[StepPoint] = (), before: RooflineFit = DEFAULT_FIT
) -> RooflineFit:
    """Fit for the least relative errors, by reweighted least squares; `before` is what is known without the points."""
    found = msgspec.structs.asdict(before)
    if points:
        rows = [_list_terms(point, before) for point in points]
        scales = _fit_scales(rows, shares=_share_votes(points))
        found |= {name: found[name] * scale for name, scale in zip(SERVING_TERMS, scales, strict=True)}
    if steps:
        found["train"] = median(find_train_factor(step) for step in steps)
    return RooflineFit(**found)


def measure_errors(points: Sequence[ServingPoint], fit: RooflineFit) -> list[float]:
    """Return the relative error of each point; negative where the model is too fast."""
    return [estimate_token_s(point, fit) / point.token_s - 1 for point in points]


def correlate_ranks(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation of two sequences of the same length; 0 if all values of one are equal."""
    ranks = [_rank_values(values) for values in (first, second)]
    means = [fmean(values) for values in ranks]
    one, other = ([value - mean for value in values] for values, mean in zip(ranks, means, strict=True))
    size = (sum(value**2 for value in one) * sum(value**2 for value in other)) ** 0.5
    return sum(a * b for a, b in zip(one, other, strict=True)) / size if size else 0.0


def _rank_values(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal ones share the mean of theirs."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [fmean(places[value]) for value in values]


def _list_terms(point: ServingPoint, before: RooflineFit) -> list[float]:
    """Return the part of the measured time that each coefficient of `before` explains."""
    nothing = {name: 0.0 for name in msgspec.structs.asdict(before)}
    alone = (RooflineFit(**nothing | {name: getattr(before, name)}) for name in SERVING_TERMS)
    return [estimate_token_s(point, fit) / point.token_s for fit in alone]


def _share_votes(points: Sequence[ServingPoint]) -> list[float]:
    """Return the votes of each point, on average 1: the points of each model have the same number together."""
    nums = Counter(point.shape for point in points)
    return [len(points) / len(nums) / nums[point.shape] for point in points]


def _fit_scales(rows: Sequence[Sequence[float]], *, shares: Sequence[float]) -> list[float]:
    """Return the factor of each term with which the terms of each row sum to 1 as nearly as possible; none below 0."""
    weights = shares
    scales = [1.0] * len(SERVING_TERMS)
    for _ in range(_NUM_ROUNDS):
        scales = _solve_positive(rows, weights)
        errors = (abs(sum(a * b for a, b in zip(row, scales, strict=True)) - 1) for row in rows)
        weights = [share / (error + _SOFT_ERROR) for share, error in zip(shares, errors, strict=True)]
    return scales


def _solve_positive(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Solve the weighted least squares; terms that would be negative are left out, one after the other."""
    num = len(SERVING_TERMS)
    matrix = [
        [
            sum(w * row[i] * row[j] for w, row in zip(weights, rows, strict=True)) + _PRIOR_VOTES * (i == j)
            for j in range(num)
        ]
        for i in range(num)
    ]
    wanted = [sum(w * row[i] for w, row in zip(weights, rows, strict=True)) + _PRIOR_VOTES for i in range(num)]
    kept = list(range(num))
    while True:
        found = _solve_linear([[matrix[i][j] for j in kept] for i in kept], [wanted[i] for i in kept])
        lowest = min(range(len(kept)), key=found.__getitem__)
        if found[lowest] >= 0:
            by_term = dict(zip(kept, found, strict=True))
            return [by_term.get(term, 0.0) for term in range(num)]
        del kept[lowest]


def _solve_linear(matrix: list[list[float]], wanted: list[float]) -> list[float]:
    """Solve a small positive definite system by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, wanted, strict=True)]
    num = len(rows)
    for i in range(num):
        for k in range(i + 1, num):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * num
    for i in reversed(range(num)):
        found[i] = (rows[i][num] - sum(rows[i][j] * found[j] for j in range(i + 1, num))) / rows[i][i]
    return found
