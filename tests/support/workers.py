"""Workers of campaigns as their roles see them.

make_worker_context   the context of the first worker of a role in the first job, on one machine
"""

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.config.site import load_site
from hpcrl.plan.plan import make_plan
from hpcrl.roles.context import WorkerContext


def make_worker_context(campaign: CampaignDir, role: RoleName, recipe: Recipe) -> WorkerContext:
    """Make the context of a worker; the directory of events must exist before anything is emitted."""
    site, worker = load_site("local"), f"000-{role}-0"
    return WorkerContext(
        campaign=campaign,
        job=campaign.job(0),
        role=role,
        index=0,
        recipe=recipe,
        site=site,
        plan=make_plan(recipe, site),
        events=EventLog(campaign.events / f"{worker}.jsonl", job=0, role=role, worker=worker, node="n"),
    )
