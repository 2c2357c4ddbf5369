"""Engines with more GPUs than a node has."""

import io

import pytest

from hpcrl.commands.planning import print_plan
from hpcrl.plan.plan import Plan
from hpcrl.plan.suggestions import suggest_plans
from hpcrl.system.terminal import PipeConsole
from tests.support.plans import make_recipe, make_site, plan_recipe, refuse_plan

SPANNING = (
    "engine.backend=vllm",
    "model.tiny.num_heads=24",
    "model.tiny.hidden_size=96",
    "resources.decode.gpus_per_worker=8",
    "resources.decode.num_workers=2",
    "resources.prefill.num_workers=1",
)
"""On Perlmutter, whose nodes have four GPUs."""


def plan(*settings: str) -> Plan:
    return plan_recipe(*SPANNING, *settings, site="perlmutter")


def test_an_engine_larger_than_a_node_is_a_worker_on_each_of_its_nodes() -> None:
    role = plan().role("decode")
    assert (role.nodes_per_engine, role.num_workers, role.workers_per_node, role.gpus_per_worker) == (2, 4, 1, 4)
    assert plan().components[role.component].nodes == 4
    assert plan().components[role.component].gpus_per_node == 4


def test_what_is_printed_counts_engines_as_the_recipe_does() -> None:
    made, text = plan(), io.StringIO()
    print_plan(made, PipeConsole(file=text, width=200))
    (row,) = (line.split("  ") for line in text.getvalue().splitlines() if line.startswith("decode"))
    assert [cell.strip() for cell in row if cell][3:] == ["4", "2", "2 x 4 a100-80", "2 x 1", "2 x 4"]
    recipe, site = make_recipe(*SPANNING), make_site("perlmutter")
    own, _ = suggest_plans(recipe, site, made)
    assert own.num_engines == 3, "two of decode and one of prefill"


def test_an_engine_that_fits_on_a_node_stays_there() -> None:
    role = plan("resources.decode.gpus_per_worker=4").role("decode")
    assert (role.nodes_per_engine, role.num_workers, role.gpus_per_worker) == (1, 2, 4)


@pytest.mark.parametrize("settings", [("resources.decode.gpus_per_worker=6",), ("engine.backend=embedded",)])
def test_gpus_that_do_not_fill_nodes_and_other_engines_are_refused(settings: tuple[str, ...]) -> None:
    assert "cannot hold resources.decode" in refuse_plan(*SPANNING, *settings, site="perlmutter")


def test_kv_files_cannot_be_handed_over_between_engines_on_several_nodes() -> None:
    files = "site.inference.kv_connector=files"
    refused = refuse_plan(*SPANNING, files, site="perlmutter")
    assert "set resources.prefill.num_workers = 0" in refused
    assert plan(files, "router.remote_prefill=never")
    assert plan(files, "resources.prefill.num_workers=0")
    assert any("handed over only if the package nixl" in warning for warning in plan().warnings)
