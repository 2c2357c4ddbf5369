"""Print the events of a campaign, oldest first: `hpcrl events`.

list_events      print the newest, and with `follow` those that are added
format_event     an event as a line for a person
FOLLOW_INTERVAL_S    the time between two looks
"""

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CampaignEvent, describe_event, parse_event
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.toml import suggest_name
from hpcrl.errors import ConfigError
from hpcrl.system.terminal import escape_to_one_line, format_timestamp, print_line, print_to_stderr

FOLLOW_INTERVAL_S = 0.5
_COMMON = frozenset({"event", *CampaignEvent.__struct_fields__})


def list_events(
    campaign: CampaignDir,
    *,
    kinds: Collection[str] = (),
    roles: Collection[str] = (),
    limit: int = 40,
    as_json: bool = False,
    follow: bool = False,
) -> None:
    """Print the newest `limit` events of these kinds and roles (0: all); with `follow`, continue until interrupted."""
    _check_kinds(kinds)
    reader = EventReader(campaign.events)
    newest = deque(_read_sorted(reader, kinds=kinds, roles=roles), maxlen=limit or None)
    while True:
        for line in newest:
            print_line(_encode_line(line) if as_json else format_event(line))
        for name, why in reader.unreadable.items():
            print_to_stderr(f"{name} cannot be read: {why}")
        if not follow:
            return
        time.sleep(FOLLOW_INTERVAL_S)
        newest = deque(_read_sorted(reader, kinds=kinds, roles=roles))


def format_event(line: Mapping[str, Any]) -> str:
    """Format an event as one line: time, worker, kind, and what it means or its fields."""
    event = parse_event(line)
    text = describe_event(event) if event is not None else None
    if not text:
        fields = {
            name: value for name, value in line.items() if name not in _COMMON and value not in (None, "", {}, [])
        }
        text = "  ".join(f"{name}={_format_value(value)}" for name, value in fields.items())
    when = format_timestamp(_read_time(line))
    return escape_to_one_line(f"{when}  {line.get('worker') or '?':<16} {line.get('event')!s:<16} {text}")


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read_time(line: Mapping[str, Any]) -> float:
    value = line.get("time")
    return float(value) if isinstance(value, int | float) else 0.0


def _read_sorted(reader: EventReader, *, kinds: Collection[str], roles: Collection[str]) -> Iterator[dict[str, Any]]:
    lines = [
        line
        for line in reader.poll_lines()
        if (not kinds or line.get("event") in kinds) and (not roles or line.get("role") in roles)
    ]
    yield from sorted(lines, key=_read_time)


def _encode_line(line: Mapping[str, Any]) -> str:
    return escape_to_one_line(msgspec.json.encode(line).decode())


def _check_kinds(kinds: Collection[str]) -> None:
    known = sorted(str(kind.__struct_config__.tag) for kind in CampaignEvent.__subclasses__())
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"no kind of event {kind!r}: {suggest_name(kind, known)}there are {', '.join(known)}")
