"""Other plans for the same recipe and site, with what they cost."""

import json
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign.request import load_request
from hpcrl.cli import main
from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.errors import PlanError
from hpcrl.plan import suggestions
from hpcrl.plan.plan import make_plan
from hpcrl.plan.suggestions import (
    MAX_SUGGESTIONS,
    PlanSuggestion,
    choose_frontier,
    show_suggestions,
    suggest_fitting,
    suggest_plans,
)
from tests.support.described_sites import find_described
from tests.support.plans import make_recipe, make_site, plan_recipe

OF_EIGHT_GPUS = ("gpu=h100", "gpus_per_node=8", "cores_per_node=64", "mem_gib_per_node=1000")
LARGE = ("model.num_params=8000000000", "resources.train.num_workers=4", "rollout.max_running=512")


def suggest(*settings: str, site: str) -> list[PlanSuggestion]:
    recipe, place = make_recipe(*settings), make_site(site)
    return suggest_plans(recipe, place, make_plan(recipe, place))[1]


@pytest.mark.parametrize("site", ["leonardo", "perlmutter", "lab", "lab-hetstep"])
@pytest.mark.parametrize("settings", [(), LARGE])
def test_the_settings_of_a_suggestion_lead_to_its_size_and_cost(site: str, settings: tuple[str, ...]) -> None:
    if site.startswith("lab") and settings:
        settings = ()  # its nodes are too small for a large model
    found = suggest(*settings, site=site)
    assert 1 <= len(found) <= MAX_SUGGESTIONS
    for suggestion in found:
        made = plan_recipe(*settings, *suggestion.settings, site=site)
        assert (made.layout, made.cost.node_hours) == (suggestion.layout, suggestion.node_hours)
        assert sum(component.nodes for component in made.components) == suggestion.nodes


def test_suggestions_differ_in_size_from_the_plan_and_from_each_other() -> None:
    sizes = [suggestion.size for suggestion in suggest(site="perlmutter")]
    assert len(set(sizes)) == len(sizes)


def test_a_small_job_apart_is_offered_one_node() -> None:
    found = suggest(site="perlmutter")
    assert found[0].settings == ["job.layout=colocated"]
    assert found[0].nodes == 1
    assert "1 node, " in found[0].describe()


def test_a_larger_plan_is_among_the_suggestions() -> None:
    made = plan_recipe(site="leonardo")
    assert any(suggestion.node_hours > made.cost.node_hours for suggestion in suggest(site="leonardo"))


def timed(name: str, hours: float, node_hours: float) -> PlanSuggestion:
    """Return a suggestion whose campaign takes so long and so much."""
    return PlanSuggestion(
        settings=[name],
        layout="hetjob",
        nodes=4,
        gpus=16,
        node_hours=8.0,
        gpu_hours=32.0,
        num_engines=3,
        num_ranks=4,
        campaign_hours=hours,
        campaign_node_hours=node_hours,
        campaign_gpu_hours=4 * node_hours,
    )


def test_the_frontier_has_no_plan_beside_which_another_is_as_fast_and_as_cheap() -> None:
    made = timed("made", 10.0, 100.0)
    others = [
        timed("slower, more costly", 11.0, 101.0),
        timed("as fast, more costly", 10.0, 120.0),
        timed("the same", 10.0, 100.0),
        timed("faster", 5.0, 150.0),
        timed("faster, more costly still", 5.0, 160.0),
        timed("cheaper", 20.0, 80.0),
    ]
    assert [one.settings[0] for one in choose_frontier(made, others)] == ["faster", "cheaper"]


def test_times_that_differ_by_less_than_their_error_are_the_same() -> None:
    made, better = (
        msgspec.structs.replace(timed(name, hours, cost), campaign_error=0.1)
        for name, hours, cost in (("made", 10.0, 100.0), ("a=1", 9.0, 90.0))
    )
    assert choose_frontier(made, [better]) == []
    cheaper = msgspec.structs.replace(better, campaign_node_hours=80.0)
    assert choose_frontier(made, [cheaper]) == [cheaper]
    planned, line = show_suggestions([cheaper], made, site="x")
    assert "the last step after 10 h ± 10%, " in planned
    assert line.endswith(": saves 20% of the node-hours of the plan above")


def test_a_long_frontier_keeps_its_ends() -> None:
    made = timed("made", 10.0, 100.0)
    others = [timed(str(number), number, 50.0 - number) for number in range(1, 8)]
    found = [one.settings[0] for one in choose_frontier(made, others)]
    assert len(found) == MAX_SUGGESTIONS
    assert (found[0], found[-1]) == ("1", "7")


def test_a_long_frontier_keeps_a_plan_that_is_faster_and_cheaper() -> None:
    made = timed("made", 10.0, 100.0)
    others = [timed(str(hours), hours, 150.0 - 9 * hours) for hours in (1.0, 2.0, 3.0, 4.0, 9.0, 11.0, 12.0)]
    assert [one.settings[0] for one in choose_frontier(made, others)] == ["1.0", "9.0", "12.0"]


def test_of_plans_with_the_same_time_and_nodes_the_one_with_fewer_gpus_is_offered() -> None:
    more, fewer = timed("more", 9.0, 90.0), timed("fewer", 9.0, 90.0)
    fewer = msgspec.structs.replace(fewer, campaign_gpu_hours=80.0)
    assert choose_frontier(timed("made", 10.0, 100.0), [more, fewer]) == [fewer]


def test_the_time_and_cost_of_a_campaign_are_shown_where_they_are_known() -> None:
    made = timed("made", 0.5, 2.0)
    (line,) = show_suggestions([timed("a=1", 3.0, 1.5)], made, site="x")[1:]
    assert line == (
        "or        -s a=1: hetjob, 4 nodes, 16 GPUs, 3 engine workers, 4 ranks, 8 node-hours and 32 GPU-hours a job; "
        "the last step after 3 h, 1.5 node-hours and 6 GPU-hours in all"
    )
    assert show_suggestions([], made, site="x") == [
        "planned   hetjob, 8 node-hours and 32 GPU-hours a job; the last step after 30 min, 2 node-hours and 8 "
        "GPU-hours in all",
        "no other size that was tried, and that the site can hold, is faster or cheaper",
    ]


@pytest.mark.parametrize(
    ("hours", "node_hours", "savings"),
    [
        (9.9, 85.0, ": saves 1% of the time and 15% of the node-hours of the plan above"),
        (10.0, 85.0, ": saves 15% of the node-hours of the plan above"),
        (5.0, 101.0, ""),
        (11.0, 50.0, ""),
    ],
)
def test_the_savings_of_a_suggestion_that_is_better_than_the_plan_are_shown(
    hours: float, node_hours: float, savings: str
) -> None:
    suggestion = timed("a=1", hours, node_hours)
    line = show_suggestions([suggestion], timed("made", 10.0, 100.0), site="x")[1]
    assert line == f"or        {suggestion.describe()}{savings}"


@pytest.mark.parametrize("site", ["workstation", find_described("one-node")])
def test_a_refusal_names_the_largest_number_of_ranks_that_fits(home: Path, site: str) -> None:
    settings = tuple(f"site.partitions.host.{one}" for one in OF_EIGHT_GPUS if site == "workstation")
    with pytest.raises(PlanError) as caught:
        load_request("qwen3-8b-math", site=site, settings=settings)
    assert str(caught.value).endswith(". It fits with -s resources.train.num_workers=8")
    assert load_request("qwen3-8b-math", site=site, settings=(*settings, "resources.train.num_workers=8"))


def test_a_refusal_that_fewer_ranks_do_not_help_names_no_number(home: Path) -> None:
    with pytest.raises(PlanError) as caught:
        load_request("qwen3-8b-math", site="workstation")
    assert "resources.train.num_workers" not in str(caught.value)


@pytest.mark.parametrize(
    ("site", "settings", "first"),
    [
        ("workstation", OF_EIGHT_GPUS, ["resources.train.num_workers=8"]),
        ("expanse", (), ["resources.train.num_workers=12"]),
    ],
)
def test_a_refused_recipe_has_suggestions_that_fit(site: str, settings: tuple[str, ...], first: list[str]) -> None:
    of_site = tuple(f"partitions.host.{one}" for one in settings)
    found = suggest_fitting(make_recipe(name="qwen3-8b-math"), make_site(site, *of_site), refusal="")
    assert found[0].settings == first
    assert len({one.size for one in found}) == len(found) == MAX_SUGGESTIONS
    for one in found:
        made = make_plan(make_recipe(*one.settings, name="qwen3-8b-math"), make_site(site, *of_site))
        assert (made.layout, made.cost.node_hours) == (one.layout, one.node_hours)


@pytest.mark.parametrize("asked", ["job.layout=hetstep", "resources.decode.num_workers=64"])
def test_a_setting_that_makes_a_recipe_too_large_is_suggested_otherwise(asked: str) -> None:
    recipe, site = make_recipe(asked, name="quickstart"), make_site("lab")
    with pytest.raises(PlanError) as caught:
        make_plan(recipe, site)
    found = suggest_fitting(recipe, site, refusal=str(caught.value))
    key = asked.partition("=")[0]
    assert found[0].settings == [f"{key}=auto"]


def test_too_few_ranks_of_the_trainer_are_suggested_as_more() -> None:
    recipe = make_recipe("resources.train.num_workers=1", name="qwen3-8b-math")
    found = suggest_fitting(recipe, make_site("perlmutter"), refusal="")
    assert found[0].settings == ["resources.train.num_workers=2"]


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        ("workstation", "resources.train.num_workers = 8 at least, and host has 4 GPUs: choose another site"),
        ("generic-slurm", "resources.train.num_workers = 16 at least, and gpu has 12 GPUs beside other roles: choose"),
    ],
)
def test_a_trainer_with_too_little_memory_on_all_nodes_of_a_site_is_refused(site: str, reason: str) -> None:
    recipe, place = make_recipe(f"{suggestions.NUM_RANKS}=16", name="qwen3-8b-math"), make_site(site)
    with pytest.raises(PlanError) as refused:
        make_plan(recipe, place)
    what = f"recipe 'qwen3-8b-math' does not fit on site '{site}': for its memory the trainer needs {reason}"
    with pytest.raises(PlanError, match=f"^{what}") as caught:
        suggest_fitting(recipe, place, refusal=str(refused.value))
    assert "Lower" not in str(caught.value)


@pytest.mark.parametrize(
    ("site", "num_ranks", "shortage"),
    [
        ("workstation", 4, "it needs resources.train.num_workers = 8 at least, and host has 4 GPUs"),
        ("generic-slurm", 8, "it needs resources.train.num_workers = 16 at least, and gpu has 12 GPUs beside other ro"),
    ],
)
def test_adapters_are_the_last_resort_where_a_site_has_too_few_gpus_for_the_whole_model(
    home: Path, site: str, num_ranks: int, shortage: str
) -> None:
    asked = f"{suggestions.NUM_RANKS}={num_ranks}"
    with pytest.raises(PlanError, match=shortage) as caught:
        load_request("qwen3-8b-math", site=site, settings=(asked,))
    assert str(caught.value).endswith(". It fits with -s train.lora_rank=16")
    assert "set resources" not in str(caught.value)
    found = suggest_fitting(make_recipe(asked, name="qwen3-8b-math"), make_site(site), refusal="")
    assert found[0].settings == ["train.lora_rank=16"]
    assert load_request("qwen3-8b-math", site=site, settings=(asked, *found[0].settings))


def test_a_refusal_that_names_a_setting_does_not_advise_adapters(home: Path) -> None:
    with pytest.raises(PlanError) as caught:
        load_request("qwen3-8b-math", site="perlmutter", settings=("site.account=x", f"{suggestions.NUM_RANKS}=1"))
    assert ": set resources.train.num_workers = " in str(caught.value)
    assert "lora_rank" not in str(caught.value)


def test_a_recipe_for_which_nothing_fits_is_refused_with_what_a_smaller_trainer_lacks() -> None:
    asked = ("train.context_parallel=1", "train.tokens_per_micro_batch=200000", "train.compile=true")
    recipe, place = make_recipe(*asked, name="qwen3-32b"), make_site("workstation")
    reason = r"with -s resources.train.num_workers=4, a train worker needs \d+ GiB .* has 22 GiB"
    with pytest.raises(PlanError, match=rf"^as it stands\. Nothing else that was tried fits: {reason}"):
        suggest_fitting(recipe, place, refusal="as it stands")


def test_a_reason_that_is_the_refusal_is_not_repeated() -> None:
    recipe, place = make_recipe(name="qwen3-8b-math"), make_site("local")
    with pytest.raises(PlanError) as caught:
        make_plan(recipe, place)
    refusal = str(caught.value)
    with pytest.raises(PlanError) as caught:
        suggest_fitting(recipe, place, refusal=refusal)
    assert str(caught.value) == f"{refusal}. Nothing else that was tried fits"


@pytest.mark.parametrize("num_ranks", [16, 128, 4096])
def test_a_refusal_costs_few_tries(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(recipe: Recipe, site: Site) -> None:
        tried.append(recipe.resources.train.num_workers)
        raise PlanError("too large")

    monkeypatch.setattr(suggestions, "make_plan", refuse)
    recipe, site = make_recipe(f"resources.train.num_workers={num_ranks}", name="qwen3-8b-math"), make_site("snellius")
    assert suggestions.advise_repair(recipe, site, refusal="") == ""
    assert len(set(tried)) == len(tried) <= 6
    tried.clear()
    with pytest.raises(PlanError):
        suggest_fitting(recipe, site, refusal="too large")
    assert len(tried) <= 10


def test_plan_suggest_shows_what_fits_below_the_refusal(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "qwen3-8b-math", "--site", "expanse", "-s", "site.account=a1", "--suggest"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "note: site 'expanse' cannot hold resources.train" in shown.err
    assert shown.out.startswith("fits      -s resources.train.num_workers=12: hetjob, 5 nodes, ")
    assert main([*words, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["settings"] == ["resources.train.num_workers=12"]


def test_plan_suggest_refuses_a_recipe_for_which_nothing_fits(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3-8b-math", "--site", "generic-slurm", "--suggest"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert (
        "for its memory the trainer needs resources.train.num_workers = 16 at least, and gpu has 12 GPUs" in shown.err
    )
