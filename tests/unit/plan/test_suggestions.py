"""Other plans for the same recipe and site, with what they cost."""

from pathlib import Path

import pytest

from hpcrl.campaign.request import load_request
from hpcrl.errors import PlanError
from hpcrl.plan.plan import make_plan
from hpcrl.plan.suggestions import MAX_SUGGESTIONS, PlanSuggestion, choose_frontier, show_suggestions, suggest_plans
from tests.support.described_sites import find_described
from tests.support.plans import make_recipe, make_site, plan_recipe

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


def test_a_long_frontier_keeps_its_ends() -> None:
    made = timed("made", 10.0, 100.0)
    others = [timed(str(number), number, 50.0 - number) for number in range(1, 8)]
    found = [one.settings[0] for one in choose_frontier(made, others)]
    assert len(found) == MAX_SUGGESTIONS
    assert (found[0], found[-1]) == ("1", "7")


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


@pytest.mark.parametrize("site", ["workstation", find_described("one-node")])
def test_a_refusal_names_the_largest_number_of_ranks_that_fits(home: Path, site: str) -> None:
    of_site = ("gpu=h100", "gpus_per_node=8", "cores_per_node=64", "mem_gib_per_node=1000")
    settings = tuple(f"site.partitions.host.{one}" for one in of_site if site == "workstation")
    with pytest.raises(PlanError) as caught:
        load_request("qwen3-8b-math", site=site, settings=settings)
    assert str(caught.value).endswith(". It fits with -s resources.train.num_workers=8")
    assert load_request("qwen3-8b-math", site=site, settings=(*settings, "resources.train.num_workers=8"))


def test_a_refusal_that_fewer_ranks_do_not_help_names_no_number(home: Path) -> None:
    with pytest.raises(PlanError) as caught:
        load_request("qwen3-8b-math", site="workstation")
    assert "resources.train.num_workers" not in str(caught.value)
