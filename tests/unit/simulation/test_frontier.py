"""Other plans with the time and cost of the whole campaign, against a simulation of all of its steps."""

import contextlib
import json
import os
import pty
import subprocess
import sys

import pytest

from hpcrl.campaign.request import CampaignRequest
from hpcrl.plan.plan import make_plan
from hpcrl.plan.suggestions import PlanSuggestion, list_plans
from hpcrl.simulation.campaign import SimulationSettings, simulate_campaign
from hpcrl.simulation.frontier import _time_plan, time_plans
from hpcrl.simulation.sizes import find_sizes
from hpcrl.simulation.workload import DrawnEpisodes, LatencySettings
from tests.support.plans import make_recipe, make_site

LATENCIES = LatencySettings(env_s=1.0, env_sigma=1.0, reset_s=1.0)


def plan_request(*settings: str, site: str = "perlmutter") -> CampaignRequest:
    recipe, place = make_recipe(*settings), make_site(site)
    return CampaignRequest(recipe=recipe, site=place, plan=make_plan(recipe, place))


def time_made(request: CampaignRequest, settings: SimulationSettings) -> PlanSuggestion:
    """Time the plan that was made, and no other."""
    made = list_plans(request.recipe, request.site, request.plan)[0]
    return _time_plan(made, request, LATENCIES, settings).suggestion


@pytest.mark.parametrize(
    ("walltime_min", "num_steps", "train_s"), [(20, 60, None), (4, 60, None), (5, 30, 100.0), (6, 30, 100.0)]
)
def test_the_time_of_a_campaign_is_near_that_of_all_its_steps(
    walltime_min: int, num_steps: int, train_s: float | None
) -> None:
    """Also where a job has time for one or two steps."""
    job = (f"job.walltime_min={walltime_min}", "job.num_jobs=99", "job.drain_s=20")
    request = plan_request(f"train.num_steps={num_steps}", *job)
    settings = SimulationSettings(train_s=train_s)
    made = time_made(request, settings)
    source = DrawnEpisodes(request.recipe, LATENCIES, seed=0)
    whole = simulate_campaign(request, find_sizes(request), source, settings)
    assert made.campaign_hours is not None
    assert made.campaign_hours * 3600 == pytest.approx(whole.seconds + settings.start_s, rel=0.1)
    assert made.campaign_jobs == pytest.approx(whole.num_jobs, rel=0.1)
    assert made.campaign_node_hours == pytest.approx(made.nodes * made.campaign_hours, rel=1e-3)


def test_more_engines_make_a_campaign_faster_that_waits_for_them() -> None:
    large = ("model.num_params=8000000000", "resources.train.num_workers=4", "rollout.max_running=512")
    large += ("train.groups_per_step=64", "domains.lake.usual_reply_tokens=200", "resources.decode.num_workers=2")
    large += ("rollout.mode=sync",)
    made, *others = time_plans(plan_request(*large), LATENCIES, SimulationSettings(num_steps=3))
    assert made.settings == []
    (more,) = (one for one in others if one.settings == ["resources.decode.num_workers=4"])
    assert more.campaign_hours is not None
    assert made.campaign_hours is not None
    assert more.campaign_hours < made.campaign_hours


def test_plans_of_which_several_sizes_are_smaller_are_found_by_settings_that_lead_to_them() -> None:
    settings = ("model.num_params=8000000000", "resources.train.num_workers=8", "resources.decode.num_workers=8")
    request = plan_request(*settings, "resources.prefill.num_workers=0")
    made, *others = time_plans(request, LATENCIES, SimulationSettings(num_steps=3))
    cheapest = min(others, key=lambda one: one.campaign_node_hours or 0.0)
    keys = {setting.partition("=")[0] for setting in cheapest.settings}
    assert {"resources.train.num_workers", "resources.decode.num_workers"} <= keys
    assert cheapest.nodes < made.nodes
    again = plan_request(*settings, "resources.prefill.num_workers=0", *cheapest.settings).plan
    assert (again.layout, again.num_nodes, again.num_gpus) == (cheapest.layout, cheapest.nodes, cheapest.gpus)
    assert len({one.size for one in (made, *others)}) == 1 + len(others)


def test_the_error_of_a_time_is_that_of_its_steps() -> None:
    """Those of two seeds are within three errors."""
    request = plan_request("train.num_steps=60")
    one, other = (time_made(request, SimulationSettings(seed=seed)) for seed in (1, 2))
    assert one.campaign_hours is not None
    assert other.campaign_hours is not None
    assert 0 < one.find_error(other) < 0.4
    assert abs(one.campaign_hours / other.campaign_hours - 1) < 3 * one.find_error(other)


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hpcrl.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_plan_suggest_prints_the_time_and_cost_of_the_campaign() -> None:
    done = run("plan", "quickstart", "--site", "lab", "--suggest")
    assert done.returncode == 0, done.stderr
    assert "a job; the last step after " in done.stdout.splitlines()[0]
    listed = json.loads(run("plan", "quickstart", "--site", "lab", "--suggest", "--json").stdout)
    assert all(one["campaign_hours"] > 0 for one in listed)
    assert [one["settings"] == [] for one in listed] == [True, *[False] * (len(listed) - 1)]
    assert run("simulate", "quickstart", "--site", "lab", "--suggest").stdout == done.stdout
    assert done.stdout.count("assumed   environments start in ") == 1


def test_the_number_of_simulated_plans_is_shown_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hpcrl.cli", "plan", "quickstart", "--site", "lab", "--suggest"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal has no other end any more
            while piece := os.read(ours, 4096):
                shown += piece
        printed = process.communicate()[0]
    os.close(ours)
    assert b"plans are simulated" in shown
    assert b"100%" in shown
    assert printed.startswith("planned   hetjob")


def test_both_commands_list_what_fits_of_a_recipe_that_does_not() -> None:
    words = ("qwen3-8b-math", "--site", "perlmutter", "-s", "resources.train.num_workers=1", "--suggest")
    plan, simulation = run("plan", *words, "-s", "site.account=m1"), run("simulate", *words, "-s", "site.account=m1")
    assert plan.returncode == simulation.returncode == 0
    assert plan.stdout == simulation.stdout
    assert plan.stdout.startswith("fits      -s resources.train.num_workers=2")


def test_a_recipe_without_episodes_has_suggestions_by_size() -> None:
    done = run("plan", "sft", "--site", "lab", "--suggest")
    assert done.returncode == 0, done.stderr
    assert "the last step after" not in done.stdout
    assert done.stdout.startswith("planned   ")


def test_jobs_that_are_missing_are_named() -> None:
    request = plan_request("train.num_steps=30", "job.walltime_min=5", "job.num_jobs=2", "job.drain_s=20")
    made = time_made(request, SimulationSettings(train_s=100.0))
    assert made.campaign_jobs is not None
    assert f" in {made.campaign_jobs} jobs ({made.campaign_jobs - 2} more than job.num_jobs), " in made.describe()


def test_the_error_of_few_steps_counts_as_large() -> None:
    made = time_made(plan_request("train.num_steps=2"), SimulationSettings())
    assert made.campaign_error == 0.5


@pytest.mark.parametrize("option", ["--gpus=4", "--traces=calls.csv", "--timeline=a.svg", "--steps=7"])
def test_options_that_other_plans_cannot_have_are_refused(option: str) -> None:
    done = run("simulate", "quickstart", "--site", "lab", "--suggest", option)
    assert done.returncode == 2
    name, _, value = option.partition("=")
    shown = f"{name} {value}" if name == "--steps" else name
    assert done.stderr.startswith(f"hpcrl: {shown} and --suggest: ")
