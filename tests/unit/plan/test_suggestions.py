"""Other plans for the same recipe and site, with what they cost."""

import pytest

from hpcrl.plan.plan import make_plan
from hpcrl.plan.suggestions import MAX_SUGGESTIONS, PlanSuggestion, suggest_plans
from tests.support.plans import make_recipe, make_site, plan_recipe

LARGE = ("model.num_params=8000000000", "resources.train.num_workers=4", "rollout.max_running=512")


def suggest(*settings: str, site: str) -> list[PlanSuggestion]:
    recipe, place = make_recipe(*settings), make_site(site)
    return suggest_plans(recipe, place, make_plan(recipe, place))


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
