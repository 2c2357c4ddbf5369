"""Sites: `hpcrl site ls`, `show` and `new`, and `hpcrl doctor`.

run_site_ls, run_site_show, run_site_new, run_doctor    the commands
"""

import argparse
import contextlib
import sys

from hpcrl.campaign.own_gpus import describe_own_gpus
from hpcrl.config.site import load_site
from hpcrl.config.toml import find_toml, list_known_names, load_table
from hpcrl.errors import HpcrlError
from hpcrl.slurm.site_detection import write_site
from hpcrl.system.terminal import print_line, print_note


def run_site_ls(arguments: argparse.Namespace) -> int:
    del arguments
    names = list_known_names("sites")
    width = max(map(len, names))
    for name in names:
        try:
            description = load_site(name).description
        except HpcrlError as error:
            description = f"cannot be used: {error}"
        print_line(f"{name:<{width}}  {description}")
    return 0


def run_site_show(arguments: argparse.Namespace) -> int:
    path = find_toml("sites", arguments.name)
    load_table("sites", arguments.name)
    print_line(f"# {path}")
    sys.stdout.write(path.read_text())
    try:
        site = load_site(arguments.name)
    except HpcrlError as error:  # a site with a wrong value is shown too
        print_note(f"it cannot be used: {error}")
        return 0
    with contextlib.suppress(HpcrlError):
        for line in describe_own_gpus(site):
            print_line(f"# {line}")
    return 0


def run_site_new(arguments: argparse.Namespace) -> int:
    path, notes = write_site(arguments.name)
    for note in notes:
        print_note(note)
    print_line(f"{path} describes this cluster; next:")
    print_line(f"  hpcrl plan quickstart --site {arguments.name}               # what Slurm would be asked for")
    print_line(f"  hpcrl submit quickstart --site {arguments.name} --dry-run   # whether Slurm would accept it")
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    from hpcrl.doctor.node_job import run_doctor as check_site

    settings = tuple(setting.removeprefix("site.") for setting in arguments.settings)
    site = load_site(arguments.site, settings=settings)
    return check_site(
        site, has_job=arguments.job, as_json=arguments.json, timeout_s=arguments.timeout, is_changed=bool(settings)
    )
