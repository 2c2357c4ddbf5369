"""The judges of a campaign, the models of [judge.NAME], for user code: by the variables of its process.

    JudgeAccess       the address, key and name of a judge, as every client of OpenAI's API takes them
    find_judges       the judges of the campaign, by name
    find_judge        one of them
    write_variables   the variables that they are read from
    keep_judges       variables of which a program that is not trusted sees no judge but those that it may call
    LOGPROBS_PATH     what a judge has besides OpenAI's API

The variables of a judge are JUDGE_VARIABLE_PREFIX, its name in capitals, and _URL or _API_KEY. A judge that is gone
for a while keeps its address: requests wait there until it is back.
"""

import os
from collections.abc import Collection, Mapping
from typing import NamedTuple

from hpcrl.errors import ConfigError
from hpcrl.system.variables import JUDGE_OUTAGES_VARIABLE, JUDGE_VARIABLE_PREFIX

URL_SUFFIX, KEY_SUFFIX = "_URL", "_API_KEY"
"""verifiers passes no variable with API_KEY in its name on to the programs of its harnesses."""
LOGPROBS_PATH = "/hpcrl/logprobs"
"""Below the address of a judge: the log-probs of tokens that are sent, which a teacher gives."""


class JudgeAccess(NamedTuple):
    """The address, key and name of a judge."""

    url: str
    """The base of OpenAI's API, up to and including /v1."""
    api_key: str
    model: str
    """The name of the model: that of the judge."""


def find_judges(variables: Mapping[str, str] = os.environ) -> dict[str, JudgeAccess]:
    """Return the judges of the campaign by name; empty if its recipe has none."""
    found = {}
    for variable, url in variables.items():
        if variable.startswith(JUDGE_VARIABLE_PREFIX) and variable.endswith(URL_SUFFIX):
            stem = variable.removesuffix(URL_SUFFIX)
            name = stem.removeprefix(JUDGE_VARIABLE_PREFIX).lower()
            found[name] = JudgeAccess(url, variables.get(stem + KEY_SUFFIX, ""), name)
    return dict(sorted(found.items()))


def find_judge(name: str) -> JudgeAccess:
    """Return a judge of the campaign by its name in the recipe."""
    judges = find_judges()
    if name not in judges:
        known = ", ".join(judges) or "none"
        raise ConfigError(
            f"judge = {name!r}: the judges of this campaign are {known}: add [judge.{name}] to the recipe"
        )
    return judges[name]


def write_variables(judges: Mapping[str, JudgeAccess]) -> dict[str, str]:
    """Return the variables of the judges with these names."""
    variables: dict[str, str] = {}
    for name, access in judges.items():
        stem = JUDGE_VARIABLE_PREFIX + name.upper()
        variables |= {stem + URL_SUFFIX: access.url, stem + KEY_SUFFIX: access.api_key}
    return variables


def keep_judges(variables: Mapping[str, str], judges: Collection[str]) -> dict[str, str]:
    """Return the variables of a process, with those of these judges alone."""
    kept = {name: access for name, access in find_judges(variables).items() if name in judges}
    others = {
        name: value
        for name, value in variables.items()
        if not name.startswith(JUDGE_VARIABLE_PREFIX) and name != JUDGE_OUTAGES_VARIABLE
    }
    return others | write_variables(kept)
