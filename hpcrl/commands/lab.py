"""A real Slurm on this machine: `hpcrl lab`.

run_lab    the command
"""

import argparse
import dataclasses
from pathlib import Path

from hpcrl.config.site import default_lab_dir, load_site
from hpcrl.config.toml import find_toml
from hpcrl.errors import HpcrlError
from hpcrl.lab import conf, lab, likeness, outages
from hpcrl.system.terminal import print_line, show_wait


def run_lab(arguments: argparse.Namespace) -> int:
    state_dir = arguments.dir or default_lab_dir()
    if (arguments.part is not None) != (arguments.action in ("break", "restore")):
        raise HpcrlError("name a node or slurmctld after `hpcrl lab break` and `hpcrl lab restore`, and only there")
    match arguments.action:
        case "break":
            outages.break_part(state_dir, arguments.part)
        case "restore":
            outages.restore_part(state_dir, arguments.part)
        case "up":
            _bring_up_lab(state_dir, arguments)
        case "down":
            print_line(
                f"the lab in {state_dir} is {'down: everything is removed' if lab.down(state_dir) else 'not up'}"
            )
        case "status":
            print_line(str(lab.status(state_dir)))
        case "env":
            if not lab.status(state_dir).has_controller:
                raise HpcrlError(f"the lab in {state_dir} is not up: `hpcrl lab up` first")
            for name, value in lab.make_environment(state_dir).items():
                print_line(f"export {name}={value}")
    return 0


def _bring_up_lab(state_dir: Path, arguments: argparse.Namespace) -> None:
    if arguments.like is not None:
        _bring_up_likeness(state_dir, arguments)
        return
    cluster = conf.STRICT_CLUSTER if arguments.strict else conf.DEFAULT_CLUSTER
    print_line(str(_start_lab(state_dir, _apply_settings(cluster, arguments))))


def _start_lab(state_dir: Path, cluster: conf.LabCluster) -> lab.LabStatus:
    with show_wait("Slurm starts: controller, accounting and nodes"):
        return lab.up(state_dir, cluster=cluster)


def _bring_up_likeness(state_dir: Path, arguments: argparse.Namespace) -> None:
    site = load_site(arguments.like)
    cluster = dataclasses.replace(likeness.imitate_site(site), is_strict=arguments.strict)
    now = _start_lab(state_dir, _apply_settings(cluster, arguments))
    print_line(str(now))
    path = likeness.write_lab_site(site, source=find_toml("sites", arguments.like), root=now.state_dir)
    print_line(f"{path} is site {site.name} for use with it; next: hpcrl submit quickstart --site {path} --watch")


def _apply_settings(cluster: conf.LabCluster, arguments: argparse.Namespace) -> conf.LabCluster:
    """Return a cluster with the settings of Slurm that the command line names."""
    return dataclasses.replace(
        cluster,
        kill_wait_s=cluster.kill_wait_s if arguments.kill_wait is None else arguments.kill_wait,
        preempt_grace_s=cluster.preempt_grace_s if arguments.grace is None else arguments.grace,
        over_time_limit_min=arguments.over_time_limit or 0,
        requeues=not arguments.no_requeue,
    )
