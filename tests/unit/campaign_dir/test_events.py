"""Events: the line of each kind, the lines that readers skip, and a check that only structs are emitted."""

import ast
import json
import re
from pathlib import Path

import msgspec
import pytest

import hpcrl
from hpcrl.campaign_dir import event_log
from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import (
    CampaignEvent,
    CheckpointSaved,
    CurriculumUpdated,
    DrainStarted,
    EngineCounted,
    EpisodesCounted,
    EvaluationFinished,
    EventsLost,
    FaultReported,
    FlatGroupsDropped,
    GpuShiftChanged,
    JobEnded,
    JobStarted,
    LayoutChosen,
    MemoryRanOut,
    NextJobQueued,
    ParsersChosen,
    RewardJobsScaled,
    RowsSkipped,
    SegmentScored,
    SegmentsRetired,
    StaleDropped,
    StepFinished,
    TaskFailed,
    TasksRestarted,
    TrainingResumed,
    TransportChanged,
    TurnRouted,
    VersionDelivered,
    VersionLoaded,
    VersionPublished,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarted,
    WorkerStarted,
    describe_event,
    make_segment_scored,
    parse_event,
)
from hpcrl.learn.evaluations import EvaluationResult
from hpcrl.trainers.base import StepMetrics

ORIGIN = {"job": 0, "role": "train", "worker": "w", "node": "n"}
LINES = [
    (JobStarted(slurm_id=None, end_time=9.5), "job-started", '"slurm_id": null, "end_time": 9.5'),
    (
        JobEnded(outcome="done", reason="every training step was made"),
        "job-ended",
        '"outcome": "done", "reason": "every training step was made"',
    ),
    (NextJobQueued(slurm_id="123", number=1), "follower", '"slurm_id": "123", "number": 1'),
    (
        DrainStarted(reason="its walltime is nearly over", grace_s=60.0),
        "draining",
        '"reason": "its walltime is nearly over", "grace_s": 60.0',
    ),
    (WorkerStarted(pid=7, gpus=["0"]), "worker-started", '"pid": 7, "gpus": ["0"]'),
    (WorkerRestarted(of="decode-0"), "worker-restarted", '"of": "decode-0"'),
    (WorkerEnded(reason="the job is ending"), "worker-ended", '"reason": "the job is ending"'),
    (WorkerFailed(of="decode-0", reason="exit code 1"), "worker-failed", '"of": "decode-0", "reason": "exit code 1"'),
    (RewardJobsScaled(num=0, waiting=0), "reward-jobs", '"num": 0, "waiting": 0'),
    (
        EpisodesCounted(
            running=1,
            done=2,
            truncated=0,
            aborted_stale=0,
            aborted_redundant=0,
            env_fault=0,
            policy_fault=0,
            num_tokens=30,
            turns=4,
            remote_prefills=3,
            outcomes={"lake": {"exit": 2}},
            token_fates={"lake": {"trained": 30}},
            lengths={"done": {"4": 2, "tokens": 30}},
            loop_share=0.25,
            loop_delay_s=0.5,
        ),
        "episodes",
        '"running": 1, "done": 2, "truncated": 0, "aborted_stale": 0, "aborted_redundant": 0, "env_fault": 0, '
        '"policy_fault": 0, "num_tokens": 30, "turns": 4, "remote_prefills": 3, '
        '"outcomes": {"lake": {"exit": 2}}, "token_fates": {"lake": {"trained": 30}}, '
        '"lengths": {"done": {"4": 2, "tokens": 30}}, "loop_share": 0.25, "loop_delay_s": 0.5',
    ),
    (
        EngineCounted(
            window_s=10.0,
            version=3,
            busy_share=0.5,
            running=2.5,
            waiting=0.0,
            num_places=8,
            kv_share=0.25,
            num_tokens=9,
            num_prefix_queries=40,
            num_prefix_hits=30,
        ),
        "engine",
        '"window_s": 10.0, "version": 3, "busy_share": 0.5, "running": 2.5, "waiting": 0.0, "num_places": 8, '
        '"kv_share": 0.25, "num_tokens": 9, "num_prefix_queries": 40, "num_prefix_hits": 30, "num_preemptions": null',
    ),
    (TasksRestarted(num=2), "tasks-restarted", '"num": 2'),
    (
        TaskFailed(id="lake/3", domain="lake", seed=5, place=None, reason="its last episode: env-fault"),
        "task-failed",
        '"id": "lake/3", "domain": "lake", "seed": 5, "place": null, "reason": "its last episode: env-fault"',
    ),
    (
        ParsersChosen(tool_parser="hermes", reasoning_parser="think", reason="tool calls by the recipe"),
        "parsers",
        '"tool_parser": "hermes", "reasoning_parser": "think", "reason": "tool calls by the recipe"',
    ),
    (CurriculumUpdated(weights={"lake": 0.5}), "curriculum", '"weights": {"lake": 0.5}'),
    (
        TurnRouted(
            id="lake/0/0", domain="lake", prefill=None, decode="d", reason="home", wait_s=0.0, serve_s=1.0, is_home=True
        ),
        "route",
        '"id": "lake/0/0", "domain": "lake", "prefill": null, "decode": "d", "reason": "home", "wait_s": 0.0, '
        '"serve_s": 1.0, "is_home": true, "num_cached": 0',
    ),
    (
        SegmentScored(
            segment="s.h5",
            num=0,
            reward_mean=None,
            rewards={},
            reward_errors={"lake": 1},
            replaced_outcomes={"lake": {"finished": 1}},
            reward_faults={"lake": {"finished": 2}},
        ),
        "scored",
        '"segment": "s.h5", "num": 0, "reward_mean": null, "rewards": {}, "reward_errors": {"lake": 1}, '
        '"replaced_outcomes": {"lake": {"finished": 1}}, "reward_faults": {"lake": {"finished": 2}}',
    ),
    (
        VersionPublished(version=1, step=1, wall_s=0.2, stall_s=0.1),
        "published",
        '"version": 1, "step": 1, "wall_s": 0.2, "stall_s": 0.1',
    ),
    (
        VersionDelivered(
            version=1, bytes=8, sent_bytes=4, wall_s=0.2, codec="delta", reason="it is smaller", to=["b"], sources=["a"]
        ),
        "courier",
        '"version": 1, "bytes": 8, "sent_bytes": 4, "wall_s": 0.2, "codec": "delta", "reason": "it is smaller", '
        '"to": ["b"], "sources": ["a"]',
    ),
    (VersionLoaded(version=1, wall_s=0.2, stall_s=0.1), "loaded", '"version": 1, "wall_s": 0.2, "stall_s": 0.1'),
    (GpuShiftChanged(is_awake=True, wait_s=0.5), "shift", '"is_awake": true, "wait_s": 0.5'),
    (
        TransportChanged(transport="files", reason="no window"),
        "transport",
        '"transport": "files", "reason": "no window"',
    ),
    (
        StepFinished(
            step=3,
            version=2,
            skipped=None,
            num_trajectories=8,
            num_groups=2,
            num_flat_groups=0,
            num_too_long=0,
            num_tokens=90,
            num_padded_tokens=96,
            reward_mean=0.5,
            reward_std=0.1,
            lag_mean=0.5,
            lag_max=1,
            loss=float("nan"),
            grad_norm=1.0,
            clip_fraction=0.0,
            is_ratio_mean=1.0,
            is_truncated_fraction=0.0,
            kl=0.01,
            entropy=1.5,
            step_s=2.0,
            kl_fresh=None,
            kl_reference=None,
            is_ratio_p05=0.9,
            is_ratio_p50=1.0,
            is_ratio_p95=1.1,
            value_loss=None,
            learning_rate=1e-05,
            length_mean=11.0,
            length_max=12,
            lags={"0": 6, "1": 2},
            imbalance=1.0,
            tokens_per_s=45.0,
            times={"learn": 1.5, "publish": 0.1},
            num_rows=9,
            too_long_tokens={"lake": 5},
            replayed_fraction=0.75,
            mfu=None,
            wait_s=0.4,
            lengths={"7": 8, "tokens": 900},
        ),
        "step",
        '"step": 3, "version": 2, "skipped": null, "num_trajectories": 8, "num_groups": 2, "num_flat_groups": 0, '
        '"num_too_long": 0, "num_tokens": 90, "num_padded_tokens": 96, "reward_mean": 0.5, "reward_std": 0.1, '
        '"lag_mean": 0.5, "lag_max": 1, "loss": NaN, "grad_norm": 1.0, "clip_fraction": 0.0, '
        '"is_ratio_mean": 1.0, "is_truncated_fraction": 0.0, "kl": 0.01, "entropy": 1.5, "step_s": 2.0, '
        '"kl_fresh": null, "kl_reference": null, "is_ratio_p05": 0.9, "is_ratio_p50": 1.0, "is_ratio_p95": 1.1, '
        '"value_loss": null, "learning_rate": 1e-05, "length_mean": 11.0, "length_max": 12, "lags": {"0": 6, '
        '"1": 2}, "imbalance": 1.0, "tokens_per_s": 45.0, "times": {"learn": 1.5, "publish": 0.1}, "num_rows": 9, '
        '"too_long_tokens": {"lake": 5}, "replayed_fraction": 0.75, "mfu": null, "wait_s": 0.4, '
        '"lengths": {"7": 8, "tokens": 900}',
    ),
    (
        MemoryRanOut(step=3, rank=1, num_rows=4, num_tokens=900, tokens_per_micro_batch=450, reason="it is small"),
        "out-of-memory",
        '"step": 3, "rank": 1, "num_rows": 4, "num_tokens": 900, "tokens_per_micro_batch": 450, '
        '"max_row_tokens": null, "reason": "it is small"',
    ),
    (
        RowsSkipped(step=3, num=2, num_tokens=80, token_counts={"lake": 80}, share=0.1, limit=450, reason="memory"),
        "rows-skipped",
        '"step": 3, "version": 0, "num": 2, "num_tokens": 80, "token_counts": {"lake": 80}, "share": 0.1, '
        '"limit": 450, "reason": "memory"',
    ),
    (
        StaleDropped(num=2, version=5, token_counts={"lake": 8}, groups=["lake/3"]),
        "stale",
        '"num": 2, "version": 5, "token_counts": {"lake": 8}, "groups": ["lake/3"]',
    ),
    (
        FlatGroupsDropped(num=3, version=5, domains={"lake": 3}, groups=["lake/7"], shares={"lake": 0.75}),
        "flat",
        '"num": 3, "version": 5, "domains": {"lake": 3}, "groups": ["lake/7"], "shares": {"lake": 0.75}',
    ),
    (
        EvaluationFinished(
            number=0,
            version=0,
            reward_mean=None,
            domains={},
            num_episodes=0,
            num_faults=4,
            length_mean=0.0,
            oldest=None,
            newest=None,
        ),
        "evaluation",
        '"number": 0, "version": 0, "reward_mean": null, "domains": {}, "num_episodes": 0, "num_faults": 4, '
        '"length_mean": 0.0, "oldest": null, "newest": null, "outcomes": {}',
    ),
    (
        EventsLost(num=3, reason="No space left on device"),
        "events-lost",
        '"num": 3, "reason": "No space left on device"',
    ),
    (SegmentsRetired(num=8, archive=None), "retired", '"num": 8, "archive": null'),
    (
        TrainingResumed(step=4, version=6, checkpoint="000001-step-000004"),
        "resumed",
        '"step": 4, "version": 6, "checkpoint": "000001-step-000004"',
    ),
    (
        CheckpointSaved(step=4, version=4, wall_s=0.2, stall_s=0.1),
        "checkpoint",
        '"step": 4, "version": 4, "wall_s": 0.2, "stall_s": 0.1',
    ),
    (
        LayoutChosen(layout="local", reason="one machine", nodes=[["n"]]),
        "layout",
        '"layout": "local", "reason": "one machine", "nodes": [["n"]]',
    ),
    (
        FaultReported(what="chain", detail="no job follows this one: é"),
        "fault",
        '"what": "chain", "detail": "no job follows this one: \\u00e9"',
    ),
    (
        FaultReported(what="reward", detail="it broke", id="lake/0/0"),
        "fault",
        '"what": "reward", "detail": "it broke", "id": "lake/0/0"',
    ),
    (
        FaultReported(what="courier", detail="it is gone", version=3),
        "fault",
        '"what": "courier", "detail": "it is gone", "version": 3',
    ),
    (
        FaultReported(what="env-paused", detail="too many faults", domain="lake"),
        "fault",
        '"what": "env-paused", "detail": "too many faults", "domain": "lake"',
    ),
    (
        FaultReported(what="courier", detail="rank 2 is silent", rank=2, at="n2", bucket=1, bytes=9),
        "fault",
        '"what": "courier", "detail": "rank 2 is silent", "rank": 2, "at": "n2", "bucket": 1, "bytes": 9',
    ),
]
"""An event of each kind, its name on disk, and the keys and values of its line behind the origin."""


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log.time, "time", lambda: 1.5)
    return EventLog(tmp_path / "w.jsonl", **ORIGIN)


@pytest.mark.parametrize(("event", "name", "fields"), LINES)
def test_an_event_is_written_with_its_name_and_its_keys_in_order(log, event, name, fields):
    log.emit(event)
    origin = json.dumps({"time": 1.5, "event": name, **ORIGIN})
    assert log.path.read_text() == f"{origin[:-1]}, {fields}}}\n"


@pytest.mark.parametrize(("event", "name", "fields"), LINES)
def test_an_event_is_read_as_it_was_emitted(log, event, name, fields):
    log.emit(event)
    (read,) = EventReader(log.path.parent).poll()
    assert repr(read) == repr(msgspec.structs.replace(event, time=1.5, **ORIGIN))


def test_every_kind_of_event_has_a_line_here():
    assert {type(event) for event, _, _ in LINES} == set(CampaignEvent.__subclasses__())


def test_an_unknown_event_and_an_unknown_field_are_skipped():
    assert parse_event({"event": "started-dreaming", "time": 1.0, "job": 0}) is None
    line = {"event": "transport", "time": 1.0, "job": 0, "transport": "files", "reason": "why", "speed": [1]}
    assert parse_event(line) == TransportChanged(time=1.0, transport="files", reason="why")


def test_a_fault_of_a_newer_version_is_read_and_described():
    line = {"event": "fault", "time": 1.0, "job": 0, "what": "disk", "detail": "it is full"}
    event = parse_event(line)
    assert event == FaultReported(time=1.0, what="disk", detail="it is full")
    assert describe_event(event) == "disk: it is full"


def test_a_line_without_a_time_is_skipped():
    assert parse_event({"event": "job-started", "job": 0}) is None


def test_a_step_event_has_all_figures_of_a_step_in_their_order():
    own = [name for name in StepFinished.__struct_fields__ if name not in CampaignEvent.__struct_fields__]
    assert own == [*StepMetrics.__struct_fields__, "mfu", "wait_s", "lengths"]


def test_an_evaluation_event_has_all_figures_of_a_result():
    assert set(EvaluationResult.__struct_fields__) <= set(EvaluationFinished.__struct_fields__)


KINDS_FOR_PEOPLE = {CurriculumUpdated, GpuShiftChanged, ParsersChosen, TurnRouted, VersionDelivered}
"""The kinds that only `hpcrl events` prints."""


def test_every_kind_of_event_is_read_by_a_module_or_meant_for_people():
    read = {name for path in Path(hpcrl.__file__).parent.rglob("*.py") for name in _list_types_read(_parse(path))}
    assert {kind for kind in CampaignEvent.__subclasses__() if kind.__name__ not in read} == KINDS_FOR_PEOPLE


def test_the_table_of_events_in_the_documents_has_every_kind_with_its_class():
    text = (Path(hpcrl.__file__).parents[1] / "docs" / "monitoring.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| `([A-Z]\w+)` \| \S", text, re.MULTILINE)
    assert rows == [(str(kind.__struct_config__.tag), kind.__name__) for kind in CampaignEvent.__subclasses__()]


def _parse(path):
    return ast.parse(path.read_text())


def _list_types_read(tree):
    """Return what is matched by a case, or given to isinstance."""
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchClass):
            yield _name_of(node.cls)
        elif isinstance(node, ast.Call) and _name_of(node.func) == "isinstance":
            yield from (_name_of(part) for part in ast.walk(node.args[1]) if isinstance(part, ast.Name))


def test_no_emitter_passes_a_string():
    """`emit("fault", ...)` would not be an event; `emit(FaultReported(...))` is."""
    found = []
    for path in Path(hpcrl.__file__).parent.rglob("*.py"):
        for node in ast.walk(_parse(path)):
            if not isinstance(node, ast.Call) or _name_of(node.func).lstrip("_") != "emit":
                continue
            if len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Constant | ast.JoinedStr):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_rewards_of_a_segment_are_counted_over_its_domains() -> None:
    event = make_segment_scored("a.h5", {"lake": [1.0, 0.0], "taxi": [0.5]})
    assert (event.segment, event.num, event.reward_mean) == ("a.h5", 3, 0.5)
    assert make_segment_scored("b.h5", {}).reward_mean is None


def _name_of(function: ast.expr) -> str:
    match function:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""
