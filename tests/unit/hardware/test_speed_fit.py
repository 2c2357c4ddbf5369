"""The fit of the cost model: it finds the coefficients that made the measurements, on other GPU types too."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.hardware.cost_model import TrainingWork, estimate_speed, estimate_step_s, read_model_shape
from hpcrl.hardware.gpus import DEFAULT_FIT, GPU_CATALOGUE, RooflineFit
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS
from hpcrl.hardware.rank_traffic import StepTraffic
from hpcrl.hardware.speed_fit import (
    ServingPoint,
    StepPoint,
    correlate_ranks,
    estimate_token_s,
    find_train_factor,
    fit_speed,
    measure_errors,
)

TRUE_FIT = RooflineFit(
    layer_s=5e-5, expert_layer_s=4e-5, hop_s=5e-6, read=1.3, kv=0.8, compute=2.0, prefill=1.5, link=5.0
)
SHAPES = [
    read_model_shape(MODEL_CONFIGS[name])
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B")
]


def make_points(gpu: str) -> list[ServingPoint]:
    wanted = [
        ServingPoint(
            gpu=GPU_CATALOGUE[gpu], shape=shape, tp=tp, batch=batch, num_context=num_prompt + num_new / 2,
            num_prefilled=num_prompt, num_new=num_new, token_s=1.0,
        )
        for shape in SHAPES for tp in (1, 2, 8) for batch in (1, 16, 128)
        for num_prompt, num_new in ((100, 1000), (8000, 500))
    ]  # fmt: skip
    return [
        ServingPoint(
            **{name: getattr(one, name) for name in one.__dataclass_fields__}
            | {"token_s": estimate_token_s(one, TRUE_FIT)}
        )
        for one in wanted
    ]


def test_the_fit_finds_the_coefficients_that_made_the_measurements():
    found = msgspec.structs.asdict(fit_speed(make_points("h100")))
    wanted = msgspec.structs.asdict(TRUE_FIT)
    assert {name: found[name] for name in wanted if name != "train"} == pytest.approx(
        {name: wanted[name] for name in wanted if name != "train"}, rel=0.2
    )


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_server_of_two_copies_takes_the_time_of_their_batches_together(shape):
    """Copies of a dense model are as two servers; those of one with experts read half of them."""
    point, alone = (
        ServingPoint(
            gpu=GPU_CATALOGUE["h100"], shape=shape, num_copies=num_copies, batch=16, num_context=1000,
            num_prefilled=500, num_new=100, token_s=1.0,
        )
        for num_copies in (2, 1)
    )  # fmt: skip
    pair = estimate_speed(point.gpu, shape=shape, num_copies=2)
    prefill_s = 15 / 100 * 2 * pair.prefill_s(500)
    assert estimate_token_s(point) == pytest.approx(pair.decode_s(32, num_kv=32_000) + prefill_s)
    assert (estimate_token_s(point) == pytest.approx(estimate_token_s(alone))) == (not shape.num_experts)


def test_a_fit_on_one_gpu_type_predicts_another():
    fit = fit_speed(make_points("h100"))
    assert max(map(abs, measure_errors(make_points("b200"), fit))) < 0.02


def test_a_coefficient_that_no_measurement_shows_keeps_its_value():
    single = [point for point in make_points("h100") if point.tp == 1 and not point.shape.num_experts]
    found = fit_speed(single)
    assert (found.link, found.hop_s, found.expert_layer_s) == pytest.approx(
        (DEFAULT_FIT.link, DEFAULT_FIT.hop_s, DEFAULT_FIT.expert_layer_s)
    )


def test_a_few_odd_servers_do_not_decide():
    points = make_points("h100")
    odd = [
        ServingPoint(**{name: getattr(one, name) for name in one.__dataclass_fields__} | {"token_s": one.token_s * 30})
        for one in points[::15]
    ]
    errors = measure_errors(points, fit_speed([*points, *odd]))
    assert sorted(map(abs, errors))[len(errors) // 2] < 0.05


def test_no_coefficient_is_negative():
    slow_when_small = [
        ServingPoint(**{name: getattr(one, name) for name in one.__dataclass_fields__} | {"token_s": 1 / one.batch})
        for one in make_points("h100")
    ]
    assert min(msgspec.structs.asdict(fit_speed(slow_when_small)).values()) >= 0


def test_steps_decide_the_efficiency_of_training_alone():
    gpu, work = GPU_CATALOGUE["h100"], TrainingWork(num_tokens=1e6, mean_length=4000, num_gpus=8)
    step_s = estimate_step_s(gpu, shape=SHAPES[0], work=work)
    found = fit_speed([], steps=[StepPoint(gpu=gpu, shape=SHAPES[0], work=work, step_s=step_s * 1.5)])
    assert found == msgspec.structs.replace(DEFAULT_FIT, train=DEFAULT_FIT.train * 1.5)


TRAFFIC = {
    "after": StepTraffic(after_s=5.0),
    "hidden": StepTraffic(beside=((0.1, 1),)),
    "exposed": StepTraffic(within_s=1.0, beside=((1.0, 1), (1.0, 1), (90.0, 2))),
}


@pytest.mark.parametrize("traffic", TRAFFIC.values(), ids=TRAFFIC)
def test_what_ranks_send_is_left_out_of_the_efficiency_of_training(traffic):
    gpu, work = GPU_CATALOGUE["h100"], TrainingWork(num_tokens=1e6, mean_length=4000, num_gpus=8, traffic=traffic)
    slow = msgspec.structs.replace(gpu, fit=msgspec.structs.replace(DEFAULT_FIT, train=7.0))
    step_s = estimate_step_s(slow, shape=SHAPES[0], work=work)
    found = fit_speed([], steps=[StepPoint(gpu=gpu, shape=SHAPES[0], work=work, step_s=step_s)])
    assert found.train == pytest.approx(7.0)


@pytest.mark.parametrize("traffic", [StepTraffic(after_s=95.0), StepTraffic(beside=((25.0, 1), (25.0, 1), (45.0, 2)))])
def test_a_step_in_which_traffic_is_the_limit_has_no_efficiency(traffic):
    work = TrainingWork(num_tokens=1e6, mean_length=4000, num_gpus=8, traffic=traffic)
    assert find_train_factor(StepPoint(gpu=GPU_CATALOGUE["h100"], shape=SHAPES[0], work=work, step_s=95.0)) == 0


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=20, unique=True))
def test_ranks_that_are_equal_correlate_fully_and_reversed_ones_inversely(values):
    assert correlate_ranks(values, [value**3 for value in values]) == pytest.approx(1)
    assert correlate_ranks(values, [-value for value in values]) == pytest.approx(-1)


def test_equal_values_have_no_ranks():
    assert correlate_ranks([1.0, 1.0], [1.0, 2.0]) == 0
