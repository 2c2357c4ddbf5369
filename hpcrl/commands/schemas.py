"""The JSON that commands print with --json, as JSON schemas: `hpcrl schema`.

show_schema       prints one, or the list
make_schema       makes one
JSON_OUTPUTS      the outputs by name
"""

import argparse
import importlib
from typing import Any, NamedTuple

import msgspec

from hpcrl.config.toml import suggest_name
from hpcrl.errors import HpcrlError
from hpcrl.system.terminal import print_line


class JsonOutput(NamedTuple):
    """The JSON that a command prints."""

    command: str
    type: str
    """`module:name` of its struct, which is imported only when it is asked for: some need numpy."""
    is_list: bool = False
    dropped: tuple[str, ...] = ()
    """Fields of the struct that are not printed."""


JSON_OUTPUTS = {
    "plan": JsonOutput("hpcrl plan RECIPE --site SITE --json", "hpcrl.plan.plan:Plan"),
    "plan-suggest": JsonOutput(
        "hpcrl plan RECIPE --site SITE --suggest --json", "hpcrl.plan.suggestions:PlanSuggestion", is_list=True
    ),
    "ls": JsonOutput("hpcrl ls --json", "hpcrl.monitor.view:CampaignLine", is_list=True),
    "monitor": JsonOutput(
        "hpcrl monitor CAMPAIGN --json", "hpcrl.monitor.snapshot:CampaignSnapshot", dropped=("detail",)
    ),
    "compare": JsonOutput("hpcrl compare CAMPAIGN CAMPAIGN --json", "hpcrl.commands.comparison:CampaignComparison"),
    "calibrate": JsonOutput("hpcrl calibrate SOURCE --json", "hpcrl.commands.calibration:CalibrationReport"),
    "simulate": JsonOutput("hpcrl simulate RECIPE --site SITE --json", "hpcrl.simulation.result:SimulationResult"),
    "try": JsonOutput("hpcrl try RECIPE --json", "hpcrl.trial.report:TrialEpisode", is_list=True),
    "traj-ls": JsonOutput("hpcrl traj ls CAMPAIGN --json", "hpcrl.spool.list_line:ListLine", is_list=True),
    "traj-show": JsonOutput("hpcrl traj show CAMPAIGN --json", "hpcrl.traj.show:ShownTrajectory"),
    "traj-verify": JsonOutput("hpcrl traj verify CAMPAIGN --json", "hpcrl.traj.verify:VerifyReport"),
    "traj-stats": JsonOutput("hpcrl traj stats CAMPAIGN --json", "hpcrl.traj.stats:CampaignStats"),
    "report": JsonOutput("hpcrl report CAMPAIGN ... --json", "hpcrl.report.figures:ReportDocument"),
    "doctor": JsonOutput("hpcrl doctor --site SITE --json", "hpcrl.doctor.result:DoctorReport"),
    "events": JsonOutput("hpcrl events CAMPAIGN --json (each line)", "hpcrl.campaign_dir.events:CampaignEvent"),
}


def run_schema(arguments: argparse.Namespace) -> int:
    show_schema(arguments.name)
    return 0


def show_schema(name: str | None) -> None:
    """Print the schema of an output; None: the names of all."""
    if name is None:
        width = max(map(len, JSON_OUTPUTS))
        for known, output in JSON_OUTPUTS.items():
            print_line(f"{known:<{width}}  {output.command}")
        return
    if name not in JSON_OUTPUTS:
        names = list(JSON_OUTPUTS)
        raise HpcrlError(f"no schema {name!r}: {suggest_name(name, names)}there are {', '.join(names)}")
    print_line(msgspec.json.format(msgspec.json.encode(make_schema(name)), indent=2).decode())


def make_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of an output."""
    output = JSON_OUTPUTS[name]
    module, _, attribute = output.type.partition(":")
    try:
        struct = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise HpcrlError(f"the schema {name!r} needs {error.name}: pip install 'hpcrl[local]'") from error
    if name == "events":
        struct = _unite(struct.__subclasses__())
    kind: Any = struct if not output.is_list else list.__class_getitem__(struct)
    schema = msgspec.json.schema(kind)
    for table in schema.get("$defs", {}).values() if output.dropped else ():
        _drop_fields(table, output)
    if name == "events":
        schema["anyOf"].append(_describe_other_kinds(schema["$defs"]))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": output.command, **_allow_null(schema)}


def _allow_null(part: Any) -> Any:
    """Return a part of a schema in which every number may be null, which stands for NaN and infinity."""
    if isinstance(part, list):
        return [_allow_null(one) for one in part]
    if not isinstance(part, dict):
        return part
    types = {"type": ["number", "null"]} if part.get("type") == "number" else {}
    return {name: _allow_null(one) for name, one in part.items()} | types


def _unite(kinds: list[Any]) -> Any:
    union = kinds[0]
    for kind in kinds[1:]:
        union |= kind
    return union


def _describe_other_kinds(known: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of events of the kinds that other versions write: any object with such a kind."""
    kinds = [kind for table in known.values() for kind in table["properties"].get("event", {}).get("enum", ())]
    properties = {"event": {"type": "string", "not": {"enum": kinds}}}
    return {"title": "an event of another version", "type": "object", "required": ["event"], "properties": properties}


def _drop_fields(table: dict[str, Any], output: JsonOutput) -> None:
    if table.get("title") != output.type.partition(":")[2]:
        return
    for field in output.dropped:
        table["properties"].pop(field, None)
        table["required"] = [one for one in table.get("required", []) if one != field]
