"""Write trajectories as logs of inspect-ai, for `inspect view --log-dir DIRECTORY`. Needs no package of it.

write_inspect_logs    fills a directory: a log per domain
build_inspect_sample  the log's sample of one episode
read_labels, CampaignLabels    the names of a campaign that its logs show
load_answer_parser    the parsers of thoughts and tool calls, as the campaign's agent programs had them
build_summary         the line of a sample in the viewer's list

A log is a zip of JSON files (inspect's `.eval` form): header, a summary of all samples, and a file per sample, so that
the viewer opens a log of any size at once. A group is a sample, its episodes are the epochs. Every turn is a model
event; the input of an event points into one list of messages, which conversations share. An episode with several
conversations has a span for each. Samples are written one by one, in the order of the spools.
"""

import json
import math
import os
import re
import tempfile
import uuid
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import REASONING_PARSER_NAMES, TOOL_PARSER_NAMES, EngineConfig
from hpcrl.rollout.agents.answer_parser import AnswerParser, choose_parsers
from hpcrl.rollout.agents.tool_parsers import TextReader, parse_answer
from hpcrl.spool.ids import parse_episode_id
from hpcrl.spool.record import MASK_REASONS, TRAINABLE, Trajectory, sum_phase_times
from hpcrl.spool.rows import RowSpan, count_by_fate, list_placed_turns, list_spans
from hpcrl.system.files import publish_json, read_json, sync_directory
from hpcrl.traj.conversation import ChatExchange, TokenDecoder, build_conversation, find_main_row
from hpcrl.traj.history import SeenIds

LOG_VERSION = 2
"""The version of the form, `LOG_SCHEMA_VERSION` of inspect-ai."""
MAX_SUMMARY_CHARS = 1024
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "hpcrl")

JsonFields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CampaignLabels:
    """The names of a campaign that its logs show."""

    name: str
    model: str
    recipe: str
    created: float


def read_labels(campaign: CampaignDir) -> CampaignLabels:
    """Read the names of a campaign; what cannot be read is replaced by the directory's name."""
    manifest, recipe = _read_fields(campaign.manifest), _read_fields(campaign.recipe)
    created = manifest.get("created")
    model = recipe.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    return CampaignLabels(
        name=str(manifest.get("name") or campaign.name),
        model=f"hpcrl/{Path(path).name if path else campaign.name}",
        recipe=str(recipe.get("name") or ""),
        created=float(created) if isinstance(created, int | float) else 0.0,
    )


def load_answer_parser(campaign: CampaignDir, decoder: TokenDecoder) -> AnswerParser:
    """Return the parsers of the campaign's model; in place of vLLM's, which are slow to load, those of its family."""
    if decoder.chat is None:
        return AnswerParser()
    engine = _read_fields(campaign.recipe).get("engine")
    named = engine if isinstance(engine, dict) else {}
    known = {"tool_parser": TOOL_PARSER_NAMES, "reasoning_parser": REASONING_PARSER_NAMES}
    settings = {kind: named[kind] for kind, names in known.items() if named.get(kind) in names}
    template = decoder.chat.template
    return AnswerParser.from_choice(choose_parsers(template.text, EngineConfig(**settings)), template, campaign.model)


def _read_fields(path: Path) -> JsonFields:
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError):
        return {}


# ---- one episode


def build_inspect_sample(
    trajectory: Trajectory, decoder: TokenDecoder, labels: CampaignLabels, *, sample_id: str
) -> JsonFields:
    """Return the sample of one episode."""
    parsed = parse_episode_id(trajectory.id)
    started_at = trajectory.created - _episode_s(trajectory)
    story = _SampleStory(trajectory, decoder, labels, sample_id=sample_id, started_at=started_at)
    usage = story.total_usage
    score_fields = _build_scores(trajectory)
    turn_by_row = list_placed_turns(trajectory)
    main = story.messages_by_row[find_main_row(turn_by_row)]
    messages = [story.pool[index] for index in main]
    sample: JsonFields = {
        "id": sample_id,
        "epoch": parsed[1] + 1 if parsed else 1,
        "input": _first_input(messages),
        "target": "",
        "messages": messages,
        "output": story.last_output,
        "scores": score_fields,
        "metadata": _build_metadata(trajectory),
        "events": [*story.events, *_build_closing_events(trajectory, score_fields)],
        "events_data": {"messages": story.pool, "calls": []},
        "model_usage": {labels.model: usage},
        "role_usage": {},
        "started_at": _format_time(started_at),
        "completed_at": _format_time(trajectory.created),
        "total_time": _finite(_episode_s(trajectory)),
        "working_time": _finite(sum_phase_times(trajectory)["generate"]),
        "uuid": _make_id(labels.name, trajectory.id, trajectory.status),
        "turn_count": len(trajectory.turns),
        "attachments": {},
        "store": {},
    }
    if trajectory.status not in TRAINABLE:
        sample["error"] = _build_error(trajectory)
    elif trajectory.status == "truncated":
        sample["limit"] = {"type": "custom", "limit": 0.0, "reason": "the episode was truncated at a limit"}
    return sample


def build_summary(sample: Mapping[str, Any]) -> JsonFields:
    """Return what the viewer lists of a sample before it is opened."""
    copied = ("id", "epoch", "target", "scores", "model_usage", "role_usage", "started_at", "completed_at")
    summary = {name: sample[name] for name in (*copied, "total_time", "working_time", "uuid", "turn_count")}
    metadata = {name: value for name, value in sample["metadata"].items() if isinstance(value, str | int | float)}
    return {
        **summary,
        "input": _shorten_input(sample["input"]),
        "metadata": {
            name: value[:MAX_SUMMARY_CHARS] if isinstance(value, str) else value for name, value in metadata.items()
        },
        "error": sample["error"]["message"][:MAX_SUMMARY_CHARS] if "error" in sample else None,
        "limit": sample["limit"]["type"] if "limit" in sample else None,
        "completed": True,
        "message_count": len(sample["messages"]),
    }


class _SampleStory:
    """The messages and the model events of one episode, row by row."""

    def __init__(
        self,
        trajectory: Trajectory,
        decoder: TokenDecoder,
        labels: CampaignLabels,
        *,
        sample_id: str,
        started_at: float,
    ) -> None:
        self.pool: list[JsonFields] = []
        """Every message once."""
        self.events: list[JsonFields] = []
        self.messages_by_row: list[list[int]] = []
        """Indices into the pool."""
        self.last_output: JsonFields = {"model": labels.model, "choices": [], "completion": ""}
        self.total_usage = _make_usage(0, 0)
        self._labels = labels
        self._parser = decoder.parser or AnswerParser()
        self._prefix = _make_id(labels.name, trajectory.id, trajectory.status)[:8]
        self._clock = started_at + trajectory.reset_s
        self._started_at = started_at
        self._known_messages: dict[tuple[int, str, str], int] = {}
        self._pooled_turns: dict[int, list[int]] = {}
        spans = list_spans(trajectory)
        self._add_event({"event": "sample_init", "sample": {"input": "", "target": "", "id": sample_id}, "state": {}})
        for row, turns in enumerate(list_placed_turns(trajectory)):
            exchanges = build_conversation(trajectory, decoder, row=row, turns=turns)
            self._add_row(row, spans[row], exchanges, has_span=len(spans) > 1)
        first = self.messages_by_row[0]
        self.events[0]["sample"]["input"] = _first_input([self.pool[index] for index in first])

    def _add_row(self, row: int, span: RowSpan, exchanges: Sequence[ChatExchange], *, has_span: bool) -> None:
        span_id = f"{self._prefix}-row-{row}"
        path: list[int] = []
        if has_span:
            parent = f"branch of conversation {span.parent + 1}" if span.shares else "conversation"
            name = f"conversation {row + 1}" + (f" ({parent})" if span.shares else "")
            self._add_event({"event": "span_begin", "id": span_id, "type": "agent", "name": name})
        for exchange in exchanges:
            known = self._pooled_turns.get(exchange.number) if exchange.number is not None else None
            if known is not None:  # a turn of an earlier row
                path = list(known)
                continue
            for message in exchange.messages:
                path = [*path, self._pool_message(message["role"], message["content"], position=len(path))]
            if exchange.end > exchange.output_start or exchange.turn is not None:
                path = self._add_turn(exchange, path, span_id=span_id if has_span else None)
        self.messages_by_row.append(path)
        if has_span:
            self._add_event({"event": "span_end", "id": span_id})

    def _add_turn(self, exchange: ChatExchange, path: list[int], *, span_id: str | None) -> list[int]:
        """Add the event of a turn; return the messages up to its answer."""
        index = self._pool_message(
            "assistant", exchange.marked_text, position=len(path), prompt_end=exchange.prompt_end
        )
        end_path, answer = [*path, index], self.pool[index]
        answer |= {"source": "generate", "model": self._labels.model}
        turn = exchange.turn
        num_generated = exchange.end - exchange.output_start
        generate_s, overlap_s = (turn.generate_s, turn.overlap_s) if turn is not None else (0.0, 0.0)
        usage = _make_usage(exchange.output_start, num_generated)
        self.total_usage = {name: self.total_usage[name] + usage[name] for name in usage}
        output = {
            "model": self._labels.model,
            "choices": [{"message": answer, "stop_reason": self._stop_reason(exchange, answer)}],
            "completion": exchange.output_text,
            "usage": usage,
            "time": _finite(generate_s),
        }
        event: JsonFields = {
            "event": "model",
            "model": self._labels.model,
            "input": [],
            "input_refs": _make_ranges(path),
            "tools": [],
            "tool_choice": "auto",
            "config": {},
            "output": output,
            "completed": _format_time(self._clock + generate_s - overlap_s),
            "working_time": _finite(generate_s),
            "metadata": self._turn_metadata(exchange),
        }
        if span_id:
            event["span_id"] = span_id
        if turn is None:
            event["error"] = "the episode ended before this turn did"
        self._add_event(event)
        self._clock += generate_s - overlap_s + (turn.step_s if turn is not None else 0.0)
        self.last_output = output
        if exchange.number is not None:
            self._pooled_turns[exchange.number] = end_path
        return end_path

    @staticmethod
    def _stop_reason(exchange: ChatExchange, answer: JsonFields) -> str:
        if answer.get("tool_calls"):
            return "tool_calls"
        return "stop" if exchange.is_closed else "unknown"

    def _turn_metadata(self, exchange: ChatExchange) -> JsonFields:
        turn = exchange.turn
        metadata: JsonFields = {"num_generated_tokens": exchange.end - exchange.output_start}
        if exchange.versions:
            metadata["versions"] = list(exchange.versions)
        if turn is not None:
            metadata |= {
                "reward": _json_number(turn.reward),
                "step_s": _finite(turn.step_s),
                "trained": not turn.masked,
            }
            if turn.masked:
                metadata["not_trained_because"] = MASK_REASONS.get(turn.masked, turn.masked)
            if turn.remote_prefill:
                metadata["remote_prefill"] = True
        return metadata

    def _pool_message(self, role: str, content: str, *, position: int, prompt_end: str = "") -> int:
        """Return the index of a message; conversations that have the same one at the same position share it."""
        index = self._known_messages.setdefault((position, role, content), len(self.pool))
        if index == len(self.pool):
            message_id = f"{self._prefix}-{index}"
            fields = {"content": content}
            if role == "assistant":
                reader = self._parser.make_record_reader(prompt_end)
                fields = _parse_answer(reader, content, message_id=message_id)
            self.pool.append({"id": message_id, "role": role, **fields})
        return index

    def _add_event(self, event: JsonFields) -> None:
        self.events.append(
            {
                "uuid": f"{self._prefix}-e{len(self.events)}",
                "timestamp": _format_time(self._clock),
                "working_start": _finite(max(0.0, self._clock - self._started_at)),
                **event,
            }
        )


def _parse_answer(reader: TextReader, text: str, *, message_id: str) -> JsonFields:
    """Return the fields of an answer: thoughts, text and tool calls apart."""
    text, thought, calls = parse_answer(reader, text)
    fields: JsonFields = {"content": text}
    if thought:
        fields["content"] = [{"type": "reasoning", "reasoning": thought}, {"type": "text", "text": text}]
    if calls:
        fields["tool_calls"] = [
            {"id": f"{message_id}-{number}", "function": call.name, "arguments": call.arguments, "type": "function"}
            for number, call in enumerate(calls)
        ]
    return fields


def _build_scores(trajectory: Trajectory) -> JsonFields:
    if trajectory.reward is None:
        return {}
    parts = {f"reward_{name}": value for name, value in trajectory.reward_parts.items()}
    if len(parts) == 1:
        parts = {}  # the reward itself
    return {name: {"value": _json_number(value)} for name, value in {"reward": trajectory.reward, **parts}.items()}


def _build_metadata(trajectory: Trajectory) -> JsonFields:
    fates = count_by_fate(trajectory)
    return {
        "episode": trajectory.id,
        "status": trajectory.status,
        "seed": trajectory.seed,
        "start_version": trajectory.start_version,
        "end_version": trajectory.end_version,
        "producer": trajectory.producer,
        "num_conversations": len(list_spans(trajectory)),
        "num_tokens": len(trajectory),
        "num_generated_tokens": sum(fates.values()),
        "num_trained_tokens": int(trajectory.loss_mask.sum()),
        "extra": trajectory.extra,
    }


def _build_error(trajectory: Trajectory) -> JsonFields:
    fault = trajectory.extra.get("fault")
    message = f"{trajectory.status}: {fault}" if fault else trajectory.status
    return {"message": message, "traceback": message, "traceback_ansi": message}


def _build_closing_events(trajectory: Trajectory, scores: Mapping[str, Any]) -> list[JsonFields]:
    """Return the events after the last turn: rewards, and the fault of a failed episode."""
    at = {
        "timestamp": _format_time(trajectory.created),
        "working_start": _finite(max(0.0, _episode_s(trajectory))),
    }
    name = _make_id(trajectory.id, trajectory.status)[:8]
    events: list[JsonFields] = [
        {"uuid": f"{name}-s{number}", **at, "event": "score", "score": score, "scorer": scorer}
        for number, (scorer, score) in enumerate(scores.items())
    ]
    if trajectory.status not in TRAINABLE:
        events.append({"uuid": f"{name}-f", **at, "event": "error", "error": _build_error(trajectory)})
    return events


def _episode_s(trajectory: Trajectory) -> float:
    total = sum(sum_phase_times(trajectory).values())
    return total if math.isfinite(total) else 0.0


def _make_usage(num_input: int, num_output: int) -> dict[str, int]:
    return {"input_tokens": num_input, "output_tokens": num_output, "total_tokens": num_input + num_output}


def _make_ranges(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return indices as ranges, each with its end excluded."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges


def _first_input(messages: Sequence[JsonFields]) -> list[JsonFields]:
    """Return the messages up to the first answer."""
    first = next((n for n, message in enumerate(messages) if message.get("source") == "generate"), len(messages))
    return list(messages[:first])


def _shorten_input(messages: Sequence[JsonFields]) -> list[JsonFields]:
    return [
        {**message, "content": message["content"][:MAX_SUMMARY_CHARS]}
        for message in messages[-3:]
        if isinstance(message["content"], str)
    ]


def _make_id(*names: str) -> str:
    return uuid.uuid5(_NAMESPACE, "\0".join(names)).hex


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _json_number(value: float) -> float | str:
    """Return a number; one that JSON lacks as text."""
    return value if math.isfinite(value) else str(value)


def _format_time(timestamp: float) -> str:
    try:
        return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0.0, UTC).isoformat(timespec="milliseconds")


# ---- the logs


@dataclass
class _ScoreTally:
    """The running sums of one score."""

    num: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.num, self.total, self.squares = self.num + 1, self.total + value, self.squares + value * value

    def metrics(self) -> JsonFields:
        mean = self.total / self.num
        variance = max(0.0, self.squares / self.num - mean * mean) * self.num / max(1, self.num - 1)
        stderr = math.sqrt(variance / self.num)
        return {name: {"name": name, "value": value} for name, value in (("mean", mean), ("stderr", stderr))}


class _DomainLog:
    """The log of one domain while it is written: samples go into the zip, summaries wait in a temporary file."""

    def __init__(self, directory: Path, domain: str, labels: CampaignLabels) -> None:
        self._domain, self._labels = domain, labels
        self._id = _make_id(labels.name, domain)
        time_text = _format_time(labels.created).replace(":", "-")
        name = f"{time_text}_{re.sub(r'[^A-Za-z0-9-]+', '-', domain)}_{self._id[:22]}"
        fd = os.open(directory / f"{name}.eval", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(fd, "wb")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED)
        self._summaries = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed with the log
        self._seen = SeenIds()
        self._num_by_status: Counter[str] = Counter()
        self._groups: set[str] = set()
        self._max_epoch = 1
        self._usage: Counter[str] = Counter()
        self._scores: dict[str, _ScoreTally] = {}
        self._times: list[str] = []

    def add(self, trajectory: Trajectory, decoder: TokenDecoder) -> None:
        # An episode that failed and was run again has two records, with one id.
        sample_id = trajectory.group if self._seen.add(trajectory.id) else f"{trajectory.group} ({trajectory.status})"
        sample = build_inspect_sample(trajectory, decoder, self._labels, sample_id=sample_id)
        self._write(f"samples/{sample_id}_epoch_{sample['epoch']}.json", sample)
        self._summaries.write((b"," if self._num_by_status else b"") + msgspec.json.encode(build_summary(sample)))
        self._num_by_status[trajectory.status] += 1
        self._groups.add(sample_id)
        self._max_epoch = max(self._max_epoch, sample["epoch"])
        self._usage.update(sample["model_usage"][self._labels.model])
        for name, score in sample["scores"].items():
            if not isinstance(score["value"], str):
                self._scores.setdefault(name, _ScoreTally()).add(score["value"])
        times = [*self._times, sample["started_at"], sample["completed_at"]]
        self._times = [min(times), max(times)]

    def finish(self) -> None:
        """Write what is known only at the end, and make the log durable."""
        head = self._head_fields()
        self._write("_journal/start.json", {name: head[name] for name in ("version", "eval", "plan")})
        with self._zip.open("summaries.json", "w", force_zip64=True) as out:
            self._summaries.seek(0)
            out.write(b"[")
            while block := self._summaries.read(1 << 20):
                out.write(block)
            out.write(b"]")
        self._write("header.json", head)
        self._zip.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        self._file.close()
        self._summaries.close()

    def _write(self, name: str, content: JsonFields) -> None:
        self._zip.writestr(name, _encode_json(content))

    def _head_fields(self) -> JsonFields:
        labels = self._labels
        num = sum(self._num_by_status.values())
        num_completed = sum(self._num_by_status[status] for status in TRAINABLE)
        return {
            "version": LOG_VERSION,
            "status": "success",
            "eval": {
                "eval_id": self._id[:22],
                "run_id": _make_id(labels.name)[:22],
                "created": _format_time(labels.created),
                "task": self._domain,
                "task_id": self._id[:22],
                "task_version": 0,
                "dataset": {"name": f"{labels.name}/{self._domain}", "samples": len(self._groups)},
                "model": labels.model,
                "config": {"epochs": self._max_epoch},
                "metadata": {"campaign": labels.name, "recipe": labels.recipe, "statuses": dict(self._num_by_status)},
            },
            "plan": {"name": "plan", "steps": []},
            "results": {
                "total_samples": num,
                "completed_samples": num_completed,
                "scores": [
                    {"name": name, "scorer": name, "scored_samples": tally.num, "metrics": tally.metrics()}
                    for name, tally in self._scores.items()
                ],
            },
            "stats": {
                "started_at": self._times[0],
                "completed_at": self._times[1],
                "model_usage": {labels.model: dict(self._usage)},
            },
        }


@dataclass
class _LogFolder:
    """The logs that are open, by domain."""

    directory: Path
    labels: CampaignLabels
    logs: dict[str, _DomainLog] = field(default_factory=dict)

    def log_of(self, domain: str) -> _DomainLog:
        if domain not in self.logs:
            self.logs[domain] = _DomainLog(self.directory, domain, self.labels)
        return self.logs[domain]


def write_inspect_logs(
    directory: Path,
    trajectories: Iterable[Trajectory],
    decoder: TokenDecoder,
    *,
    campaign: CampaignDir,
    marker_name: str,
) -> None:
    """Fill a directory with a log per domain."""
    folder = _LogFolder(directory, read_labels(campaign))
    num = 0
    try:
        for trajectory in trajectories:
            folder.log_of(trajectory.domain).add(trajectory, decoder)
            num += 1
        for log in folder.logs.values():
            log.finish()
    finally:
        for log in folder.logs.values():
            log.close()
    publish_json(directory / marker_name, {"num_trajectories": num, "num_files": len(folder.logs)})
    sync_directory(directory)


def _encode_json(content: JsonFields) -> bytes:
    """Encode a part of a log; facts of other schemas may have numbers that JSON lacks, which become null."""
    try:
        return msgspec.json.encode(content)
    except (TypeError, ValueError):
        return json.dumps(content, default=str).encode()
