"""Verified facts, in the user's own site file.

write_facts   record that a site was checked, and what its nodes showed
"""

import re
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from hpcrl.config.toml import format_toml, user_folder
from hpcrl.doctor.result import CheckResult
from hpcrl.system.files import make_private_dir, publish_file


def write_facts(name: str, results: Sequence[CheckResult], *, today: date) -> Path:
    """Set `verified`, `checked_on` and `nodes_may_submit` in the user's file of a site, and leave the rest of it."""
    facts: dict[str, Any] = {"verified": True, "checked_on": today.isoformat()}
    submissions = [result for result in results if result.name == "submission"]
    if submissions:
        facts["nodes_may_submit"] = all("accepted" in result.found for result in submissions)
    path = user_folder("sites") / f"{name}.toml"
    make_private_dir(path.parent)
    text = path.read_text() if path.exists() else f'extends = "{name}"\n'
    publish_file(path, _set_keys(text, facts))
    return path


def _set_keys(text: str, facts: dict[str, Any]) -> str:
    """Replace keys of the top level, which ends at the first table, or add them at the end of it."""
    found = re.search(r"^\s*\[", text, re.MULTILINE)
    top, tables = (text[: found.start()], text[found.start() :]) if found else (text, "")
    for key in facts:
        top = re.sub(rf"^{key}\s*=.*\n", "", top, flags=re.MULTILINE)
    written = format_toml("Written by `hpcrl doctor --job`.", facts, {})
    top = top.replace("# Written by `hpcrl doctor --job`.\n", "")
    merged = f"{top.rstrip()}\n{written}\n{tables}".lstrip() if tables else f"{top.rstrip()}\n{written}".lstrip()
    tomllib.loads(merged)
    return merged
