"""The report of `hpcrl doctor`.

run_doctor      make the checks, print them, and return the exit code
"""

import tempfile
import time
from datetime import date
from pathlib import Path

from hpcrl.campaign.directory import show_campaigns_root
from hpcrl.config.site import Site
from hpcrl.doctor.facts import write_facts
from hpcrl.doctor.login_checks import run_login_checks
from hpcrl.doctor.node_job import run_node_jobs
from hpcrl.doctor.result import CheckResult
from hpcrl.errors import ConfigError
from hpcrl.system.files import make_private_dir, remove_path
from hpcrl.system.terminal import print_json, print_line, print_to_stderr

MARKS = {"ok": "ok      ", "warning": "warning ", "failed": "FAILED  ", "unknown": "unknown "}
EXIT_FOUND_FAULTS = 1


def run_doctor(site: Site, *, has_job: bool, as_json: bool, timeout_s: float) -> int:
    """Check a site; the exit code is 1 if a check failed."""
    campaigns = show_campaigns_root(site)
    results = list(run_login_checks(site, campaigns=campaigns))
    if not as_json:
        print_line(f"{site.name}: {site.description}")
        print_line(f"facts: {', '.join(site.sources) or 'no sources'}, {site.checked_on or 'no date'}")
        _print_results(results)
    if has_job:
        if site.scheduler != "slurm":
            raise ConfigError(f"site {site.name!r} has no Slurm, so that no job can check its nodes: leave out --job")
        folder = Path(tempfile.mkdtemp(prefix="doctor-", dir=make_private_dir(campaigns)))
        found = run_node_jobs(site, folder=folder, timeout_s=timeout_s, show=print_to_stderr)
        if all(result.name != "node-job" for result in found):
            remove_path(folder)
        if not as_json:
            _print_results(found)
        results += found
    has_failed = any(result.state == "failed" for result in results)
    if as_json:
        print_json({"site": site.name, "time": time.time(), "results": results})
    else:
        counts = {state: sum(result.state == state for result in results) for state in MARKS}
        print_line(", ".join(f"{num} {state}" for state, num in counts.items() if num))
    if has_job and not has_failed:
        path = write_facts(site.name, results, today=date.today())
        print_to_stderr(f"{path}: the site is verified now")
    return EXIT_FOUND_FAULTS if has_failed else 0


def _print_results(results: list[CheckResult]) -> None:
    width = max((len(_name(result)) for result in results), default=0)
    for result in results:
        print_line(f"{MARKS[result.state]} {_name(result):<{width}}  {result.found}")
        if result.change:
            print_line(f"{'':9} {'':<{width}}  -> {result.change}")


def _name(result: CheckResult) -> str:
    return f"{result.name} ({result.place})" if result.place else result.name
