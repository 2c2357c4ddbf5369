"""Submit a campaign: its directory, the records that its jobs read, and its jobs.

submit, dry_run      create a campaign with its first job, or only try whether that would succeed
preview_scripts      the batch scripts, for `hpcrl plan`
write_description    the campaign's directory with its records
write_records        these records again, after a change
claim_job, start_job, queue_next_jobs   a further job
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from hpcrl import __version__
from hpcrl.campaign import directory
from hpcrl.campaign.fixed_settings import list_fixed_settings
from hpcrl.campaign.provenance import describe_software
from hpcrl.campaign.request import CampaignRequest, make_imitation_model
from hpcrl.campaign.submission_checks import check_request
from hpcrl.campaign_dir.campaign_format import CAMPAIGN_FORMAT
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir, JobDir
from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.envs.task_set import import_conversations, import_task_set
from hpcrl.errors import CampaignError, SlurmError
from hpcrl.plan.records import digest_records
from hpcrl.slurm import next_job
from hpcrl.slurm import submit as slurm
from hpcrl.slurm.component_jobs import cancel_component_jobs, queue_component_jobs
from hpcrl.slurm.script import (
    find_driver_environment,
    list_separate_components,
    make_batch_script,
    make_component_script,
    make_job_script,
)
from hpcrl.slurm.step_script import write_step_setups
from hpcrl.system.files import make_private_dir, publish_file, publish_json, remove_path
from hpcrl.system.processes import do_nothing
from hpcrl.system.tls import make_certificate


def submit(
    request: CampaignRequest, *, name: str | None = None, show_note: Callable[[str], object] = do_nothing
) -> CampaignDir:
    """Check the user's code, create the campaign's directory, submit its first job; on failure leave no files.

    `show_note` is called with each problem that is found here and that nodes may not have.
    """
    for note in check_request(request):
        show_note(note)
    campaign = directory.reserve_campaign(name, stem=request.recipe.name, site=request.site)
    try:
        write_description(campaign, request)
        job = claim_job(campaign, 0)
        submitted = start_job(job, request)
    except BaseException:
        directory.release_campaign(campaign)
        raise
    queue_next_jobs(job, request, submitted, show_note=show_note)
    return campaign


def dry_run(
    request: CampaignRequest, *, name: str | None = None, show_note: Callable[[str], object] = do_nothing
) -> str:
    """Check everything that submission checks, and let Slurm test the script; leave no files. Return Slurm's answer."""
    for note in check_request(request):
        show_note(note)
    campaign = directory.reserve_campaign(name, stem=request.recipe.name, site=request.site)
    try:
        write_description(campaign, request)
        if request.site.scheduler == "local":
            return "no test by a scheduler: the site has none"
        job = claim_job(campaign, 0)
        answers = []
        for script in preview_scripts(request, name=campaign.name):
            publish_file(job.script, script, mode=0o700)
            answers.append(slurm.check_script(job.script, site=request.site))
        return "\n".join(answers)
    finally:
        directory.release_campaign(campaign)


def preview_scripts(request: CampaignRequest, *, name: str) -> list[str]:
    """Return the batch scripts for `hpcrl plan`, the driver's first; submission only fills in the campaign's path."""
    job = CampaignDir(directory.show_campaigns_root(request.site) / name).job(0)
    plan, site, exports = request.plan, request.site, _shell_exports().items()
    first = make_batch_script(
        plan,
        job=job,
        python=site.choose_python(plan.components[0].partition),
        exports=exports,
        environment=find_driver_environment(plan, site),
    )
    others = [
        make_component_script(plan, component, job=job, site=site, exports=exports)
        for component in list_separate_components(plan)
    ]
    return [first, *others]


def start_job(job: JobDir, request: CampaignRequest) -> slurm.SubmittedJob:
    """Submit a job whose directory was made."""
    plan, site = request.plan, request.site
    script, env = make_job_script(plan, job=job, site=site), make_environment(request)
    queue_component_jobs(job, plan=plan, site=site, env=env)
    try:
        return slurm.submit_job(script, job=job, site=site, env=env)
    except BaseException:  # also if it may be queued: its directory is removed
        with contextlib.suppress(SlurmError):
            cancel_component_jobs(job, env=env)
        raise


def make_environment(request: CampaignRequest) -> dict[str, str]:
    """Return the environment of the jobs that are submitted from here."""
    return slurm.make_job_environment(request.site, variables=request.recipe.variables)


def queue_next_jobs(
    job: JobDir,
    request: CampaignRequest,
    submitted: slurm.SubmittedJob,
    *,
    show_note: Callable[[str], object] = do_nothing,
) -> None:
    """Queue the jobs that may follow a job which was submitted, where its nodes may not submit them."""
    if submitted.scheduler == "slurm" and not request.site.nodes_may_submit:
        try:
            env = make_environment(request)
            next_job.queue_all_next_jobs(job, plan=request.plan, site=request.site, slurm_id=submitted.id, env=env)
        except (SlurmError, OSError) as error:
            num = len(next_job.list_next_jobs(job))
            show_note(f"{num} of {request.plan.num_jobs - 1} jobs that may follow are queued: {error}")


def claim_job(campaign: CampaignDir, number: int) -> JobDir:
    """Make the directory of a job; raise CampaignError if another process is submitting it."""
    job = campaign.job(number)
    make_private_dir(campaign.jobs)
    if not next_job.claim_job_dir(job):
        raise CampaignError(
            f"campaign {campaign.name!r}: another process is submitting job {number}; if it was killed, try again "
            f"{next_job.SUBMISSION_TIMEOUT_S / 60:.0f} minutes after it"
        )
    if job.script.exists():  # of a job that was to follow by itself
        remove_path(job.root)
    make_private_dir(job.logs)
    return job


def write_description(campaign: CampaignDir, request: CampaignRequest) -> None:
    """Write the recipe, the site and the plan; campaign.json is written last and marks a complete campaign."""
    for folder in _campaign_folders(campaign):
        make_private_dir(folder)
    write_records(campaign, request)
    _import_task_sets(campaign, request.recipe, request.site)
    source = request.source
    manifest = {
        "name": campaign.name,
        "format": CAMPAIGN_FORMAT,
        "hpcrl": __version__,
        "recipe": request.recipe.name,
        "site": request.site.name,
        "created": time.time(),
        "exports": _shell_exports(),
        "source": msgspec.to_builtins(source),
        "digests": digest_records(campaign),
        "fixed": list_fixed_settings(request.recipe),
        "software": describe_software(
            python=request.site.choose_python(), recipe=None if source is None else source.recipe
        ),
    }
    publish_json(campaign.manifest, manifest)


def write_records(campaign: CampaignDir, request: CampaignRequest) -> None:
    """Write the recipe, the site and the plan, which jobs read."""
    for path, value in ((campaign.recipe, request.recipe), (campaign.site, request.site)):
        publish_file(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    publish_file(campaign.plan, request.plan.to_json())
    if request.site.network.tls and not campaign.certificate.exists():
        make_certificate(campaign.certificate)
    paths = (request.recipe.served_models | request.recipe.further_models).values()
    write_step_setups(campaign, request.plan, request.site, paths=paths)


def _import_task_sets(campaign: CampaignDir, recipe: Recipe, site: Site) -> None:
    """Copy the rows of the domains' task sets, and the conversations of the warm-up, into the campaign."""
    if recipe.warmup is not None:
        make_private_dir(campaign.warmup)
        model = make_imitation_model(recipe, site)
        import_conversations(recipe.warmup, directory=campaign.warmup, model=model)
    for name, domain in recipe.domains.items():
        if domain.task_set is not None:
            make_private_dir(campaign.tasks)
            import_task_set(domain.task_set, domain=name, directory=campaign.tasks, only_held_out=domain.held_out)


def _campaign_folders(campaign: CampaignDir) -> list[Path]:
    spools = [campaign.spool(name) for name in SPOOLS]
    return [campaign.events, campaign.endpoints, campaign.weights, campaign.checkpoints, campaign.env_workers, *spools]


def _shell_exports() -> dict[str, str]:
    """Return the variables of this shell that jobs, also resumed ones, need to find the user's code."""
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in path.split(os.pathsep))} if path else {}
