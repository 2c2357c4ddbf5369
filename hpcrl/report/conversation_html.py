"""The trajectories of a campaign's page: a table of those that are shown, conversations, and groups side by side.

write_trajectory_table    the table, with filters
write_conversation        one trajectory
write_groups              the attempts at some tasks
"""

import math
from collections.abc import Sequence

from hpcrl.report.figures import SampledGroup, SampledToken, SampledTrajectory, SampledTurn
from hpcrl.report.markup import count_tokens, esc, format_number, format_time
from hpcrl.system.terminal import format_duration

MAX_GROUP_TURNS = 6
_RARE_LOGPROB, _SOME_LOGPROB = math.log(0.05), math.log(0.3)


def write_trajectory_table(sampled: Sequence[SampledTrajectory], key: str) -> str:
    heads = ("id", "chosen as", "domain", "outcome", "reward", "tokens", "turns", "versions", "ended (UTC)")
    numeric = (4, 5, 6)
    head = "".join(
        f'<th scope="col"{" class=num" if index in numeric else ""}><button type="button">{name}</button></th>'
        for index, name in enumerate(heads)
    )
    rows = []
    for number, one in enumerate(sampled):
        versions = "-".join(map(str, dict.fromkeys((one.start_version, one.end_version))))
        chosen = " ".join(one.chosen)
        reward = "" if one.reward is None else f"{one.reward:.6g}"
        rows.append(
            f'<tr data-domain="{esc(one.domain)}" data-outcome="{esc(one.outcome)}" data-chosen="{chosen}">'
            f'<td class="nowrap"><a href="#{key}-t{number}">{esc(one.id)}</a></td><td>{", ".join(one.chosen)}</td>'
            f"<td>{esc(one.domain)}</td><td>{esc(one.outcome)}</td>"
            f'<td class="num" data-value="{reward}">{format_number(one.reward)}</td>'
            f'<td class="num" data-value="{one.num_tokens}">{one.num_tokens:,}</td>'
            f'<td class="num" data-value="{one.num_turns}">{one.num_turns:,}</td>'
            f'<td class="nowrap">{versions}</td><td class="nowrap">{format_time(one.created)}</td></tr>'
        )
    selects = "".join(
        _write_select(name, label, sorted(values))
        for name, label, values in (
            ("domain", "Domain", {one.domain for one in sampled}),
            ("outcome", "Outcome", {one.outcome for one in sampled}),
            ("chosen", "Chosen as", {reason for one in sampled for reason in one.chosen}),
        )
    )
    return (
        f'<form class="filters" data-table="{key}-table" hidden>{selects}<label>Contains'
        '<input name="text" type="search"></label><span role="status" class="soft small"></span></form>'
        '<div class="scroll tall" tabindex="0" role="region" aria-label="Trajectories">'
        f'<table class="full" id="{key}-table">'
        f"<caption>Trajectories that are shown; a heading sorts</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _write_select(name: str, label: str, values: Sequence[str]) -> str:
    options = "".join(f'<option value="{esc(value)}">{esc(value)}</option>' for value in values)
    return f'<label>{label}<select name="{name}"><option value="">all</option>{options}</select></label>'


def write_conversation(one: SampledTrajectory, key: str) -> str:
    reward = f"reward {format_number(one.reward)}" if one.reward is not None else "no reward"
    chosen = f" ({', '.join(one.chosen)})" if one.chosen else ""
    turns = "1 turn" if one.num_turns == 1 else f"{one.num_turns:,} turns"
    summary = f"<b>{esc(one.id)}</b> {reward}, {esc(one.outcome)}, {turns}{chosen}"
    note = f'<p class="soft small">{esc(one.note)}</p>' if one.note else ""
    messages = "".join(map(_write_turn, one.conversation))
    return f'<details class="conversation" id="{key}"><summary>{summary}</summary>{note}{messages}</details>'


def _write_turn(turn: SampledTurn) -> str:
    facts = [f"<b>{esc(turn.role)}</b>"]
    if turn.num_tokens:
        facts.append(f"{count_tokens(turn.num_tokens)} in {format_duration(turn.generate_s)}")
        facts.append(f"step {format_duration(turn.step_s)}")
    if turn.versions:
        facts.append(f"version {esc(turn.versions)}")
    if turn.fate:
        facts.append(esc(turn.fate))
    if turn.reward:
        facts.append(f"reward {format_number(turn.reward)}")
    if turn.num_left_out:
        facts.append(f"{turn.num_left_out:,} characters are left out")
    role = turn.role if turn.role in ("assistant", "tool") else "user"
    tokens = ""
    if turn.tokens or turn.least_likely:
        tokens = (
            f"<details><summary>Log-probabilities of {_describe_tokens(turn)}</summary>{_write_tokens(turn)}</details>"
        )
    return (
        f'<div class="turn {role}"><div class="meta">{" &middot; ".join(facts)}</div>'
        f"<pre>{esc(turn.text)}</pre>{tokens}</div>"
    )


def _describe_tokens(turn: SampledTurn) -> str:
    """Return which tokens of a turn are shown."""
    whole = count_tokens(turn.num_tokens)
    if len(turn.tokens) == turn.num_tokens:
        return whole
    first = [f"the first {len(turn.tokens):,}"] if turn.tokens else []
    least = [f"the {len(turn.least_likely):,} least likely"] if turn.least_likely else []
    return f"{' and '.join([*first, *least])} of {whole}"


def _write_tokens(turn: SampledTurn) -> str:
    first = "".join(_write_token(token, f"{token.logprob:.2f}") for token in turn.tokens)
    least = "".join(_write_token(token, f"no. {token.number:,}: {token.logprob:.2f}") for token in turn.least_likely)
    return "".join(f'<p class="tokens">{items}</p>' for items in (first, least) if items)


def _write_token(token: SampledToken, label: str) -> str:
    name = "rare" if token.logprob < _RARE_LOGPROB else "some" if token.logprob < _SOME_LOGPROB else ""
    kind = f' class="{name}"' if name else ""
    return f"<span{kind}><code>{esc(token.text)}</code><small>{label}</small></span>"


def write_groups(groups: Sequence[SampledGroup]) -> str:
    parts = []
    for group in groups:
        columns = []
        for one in group.attempts:
            answers = [turn for turn in one.conversation if turn.role == "assistant"]
            shown = "".join(f"<pre>{esc(turn.text)}</pre>" for turn in answers[:MAX_GROUP_TURNS])
            more = len(answers) - MAX_GROUP_TURNS
            left_out = f'<p class="soft small">{more} more turns</p>' if more > 0 else ""
            head = f"<b>{format_number(one.reward)}</b> {esc(one.outcome)}, {count_tokens(one.num_tokens)}"
            columns.append(f'<div><p class="small">{head}</p><div class="turn assistant">{shown}{left_out}</div></div>')
        label = f"attempts of {group.id}"
        summary = (
            f"<b>{esc(group.id)}</b> {len(group.attempts)} attempts, reward {format_number(group.reward_mean)} "
            f"&plusmn; {format_number(group.reward_std)} ({esc(group.chosen)})"
        )
        attempts = (
            f'<div class="attempts" tabindex="0" role="region" aria-label="{esc(label)}">{"".join(columns)}</div>'
        )
        parts.append(f'<details class="conversation"><summary>{summary}</summary>{attempts}</details>')
    return "".join(parts)
