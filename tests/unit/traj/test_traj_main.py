"""`hpcrl traj ls|show|stats` print each trajectory once, and no text in it controls the terminal."""

import io
import json
import math
import os
import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import EpisodesCounted
from hpcrl.campaign_dir.paths import SPOOLS
from hpcrl.spool.record import ConversationRow, EpisodeTurn
from hpcrl.system.files import make_private_dir, publish_json
from hpcrl.system.terminal import (
    draw_time_bar,
    escape_controls,
    escape_to_one_line,
    format_age,
    format_duration,
    make_console,
)
from hpcrl.traj import show
from hpcrl.traj.__main__ import main
from hpcrl.traj.conversation import (
    TokenDecoder,
    build_conversation,
    chat_messages,
    load_token_decoder,
    restore_rows,
)
from hpcrl.traj.history import SeenIds, TrajectoryHistory, TrajectorySelection
from hpcrl.traj.stats import DomainTally, count_by_domain, count_fates
from tests.support.campaign_spools import Spools, unscored
from tests.support.printed_json import load_checked
from tests.support.trajectories import make_lake_trajectory, make_taught_trajectory


@pytest.fixture
def spools(tmp_path):
    return Spools(tmp_path / 'a campaign\'s "own" place')


@pytest.fixture
def filled(spools, tiny_model_dir):
    """Make groups 0 to 3 of two episodes in two segments; group 4 is not scored yet."""
    spools.campaign.model.symlink_to(tiny_model_dir)
    spools.scored(*(make_lake_trajectory(group, index) for group in (0, 1) for index in (0, 1)))
    spools.scored(*(make_lake_trajectory(group, index) for group in (2, 3) for index in (0, 1)))
    spools.add(
        "rollouts",
        unscored(make_lake_trajectory(4)),
        unscored(make_lake_trajectory(4, 1, domain="taxi", status="truncated")),
    )
    return spools


def traj(spools, *words, capsys):
    """Return exit code, stdout and stderr of `hpcrl traj`."""
    code = main([str(spools.campaign.root), words[0], "name", *words[1:]])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed.out, printed.err


def ids(spools, *words, capsys):
    code, out, _ = traj(spools, "ls", "--json", *words, capsys=capsys)
    assert code == 0
    return [row["id"] for row in json.loads(out)]


def test_ls_lists_each_trajectory_once_and_the_newest_first(filled, capsys):
    listed = ids(filled, capsys=capsys)
    assert listed == ["taxi/4/1", "lake/4/0", *(f"lake/{group}/{index}" for group in (3, 2, 1, 0) for index in (1, 0))]


def test_ls_shows_the_figures_of_an_episode(filled, capsys):
    _, out, _ = traj(filled, "ls", "-n", "3", capsys=capsys)
    assert "lake/3/1" in out
    assert "3-4" in out
    assert "0.30" in out
    assert "the newest 3 of 10" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--domain", "taxi"), ["taxi/4/1"]),
        (("--status", "truncated"), ["taxi/4/1"]),
        (("--group", "lake/2"), ["lake/2/1", "lake/2/0"]),
        (("--min-version", "1", "--max-version", "1"), ["lake/1/1", "lake/1/0"]),
        (("--domain", "taxi", "--domain", "lake", "-n", "2"), ["taxi/4/1", "lake/4/0"]),
        (("--spool", "archive"), []),
        (("--spool", "rollouts", "--group", "lake/0"), ["lake/0/1", "lake/0/0"]),
    ],
)
def test_filters_let_through_what_they_name(filled, capsys, words, expected):
    assert ids(filled, *words, capsys=capsys) == expected


@pytest.mark.parametrize("columns", [20, 40, 80])
@pytest.mark.parametrize("words", [("ls",), ("stats",), ("verify",), ("show", "--tokens")], ids=" ".join)
def test_figures_that_do_not_fit_are_left_out_and_never_cut(filled, capsys, monkeypatch, words, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = traj(filled, *words, capsys=capsys)
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    titles = "\u2500"
    assert [line for line in out.splitlines() if "\u2026" in line and titles not in line] == []
    if words == ("ls",):
        assert ("versions" in out) == (columns == 80)


@pytest.mark.parametrize("words", [("ls",), ("stats",), ("verify",), ("show",), ("show", "--tokens")], ids=" ".join)
def test_no_line_in_a_pipe_ends_with_blanks(filled, capsys, words):
    _, out, _ = traj(filled, *words, capsys=capsys)
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_an_id_that_is_wider_than_the_screen_is_wrapped(spools, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    spools.scored(make_lake_trajectory(1, domain="a-long-name-of-a-domain"))
    _, out, _ = traj(spools, "ls", capsys=capsys)
    assert "a-long-name-of-a-domain/1/0" in "".join(line.rstrip() for line in out.splitlines())


def test_ls_reads_no_more_segments_than_the_newest_need(spools, monkeypatch):
    from hpcrl.traj import history, listing

    read = []
    monkeypatch.setattr(history, "read_segment", lambda path, *, verify: read.append(path) or _read(path))
    _read = sys.modules["hpcrl.spool.segment"].read_segment
    for group in range(50):
        path = spools.scored(make_lake_trajectory(group, created=1_800_000_000.0 + 1000 * group))
        os.utime(path, (1_800_000_001 + 1000 * group,) * 2)
    found = listing.find_newest(TrajectoryHistory(spools.campaign), TrajectorySelection(), limit=3)
    assert [one.id for _, one in found] == ["lake/49/0", "lake/48/0", "lake/47/0"]
    assert len(read) == 3


def test_a_trajectory_that_is_retired_meanwhile_is_found_in_the_archive(spools):
    first, second = spools.scored(make_lake_trajectory(0)), spools.scored(make_lake_trajectory(1))
    trajectories = TrajectoryHistory(spools.campaign).trajectories(TrajectorySelection())
    found = [next(trajectories)[1].id]
    for path in (first, second):  # retired between two reads: archived, then removed
        (spools.campaign.spool("rollouts") / path.name).unlink()
        path.unlink()
    spools.add("archive", make_lake_trajectory(0), make_lake_trajectory(1))
    found += [one.id for _, one in trajectories]
    assert found == ["lake/0/0", "lake/1/0"]


def test_an_episode_that_failed_and_was_run_again_has_two_records(spools, capsys):
    spools.add("scored", unscored(make_lake_trajectory(0, status="env-fault")))
    spools.add("scored", make_lake_trajectory(0), make_lake_trajectory(0))
    assert ids(spools, capsys=capsys) == ["lake/0/0", "lake/0/0"]
    _, out, _ = traj(spools, "show", "lake/0/0", "--json", capsys=capsys)
    assert json.loads(out)["status"] == "done"


@given(st.lists(st.one_of(st.text(max_size=8), st.from_regex(r"[ab]/\d{1,2}/\d{1,5}", fullmatch=True))))
def test_ids_are_new_once(names):
    seen = SeenIds()
    assert [seen.add(name) for name in names] == [name not in names[:index] for index, name in enumerate(names)]


def test_a_conversation_is_input_and_output_without_marks(filled):
    exchanges = build_conversation(make_lake_trajectory(), load_token_decoder(filled.campaign))
    assert [(one.input_text, one.output_text) for one in exchanges] == [("hi", "ab"), ("?", "c")]
    assert [message["role"] for message in chat_messages(exchanges)] == ["user", "assistant"] * 2


def test_a_turn_that_was_started_and_not_completed_is_shown_too(filled):
    unfinished = make_lake_trajectory(turns=make_lake_trajectory().turns[:1], status="policy-fault")
    last = build_conversation(unfinished, load_token_decoder(filled.campaign))[-1]
    assert (last.input_text, last.output_text, last.turn) == ("?", "c", None)


def test_without_a_tokenizer_the_ids_stand_for_the_text(spools, capsys):
    spools.scored(make_lake_trajectory())
    code, out, _ = traj(spools, "show", capsys=capsys)
    assert code == 0
    assert "70 71 1" in out
    assert "tokenizer.json does not exist" in " ".join(out.split())


def test_ids_that_the_tokenizer_does_not_have_are_shown_as_ids(filled):
    decoder = load_token_decoder(filled.campaign)
    assert decoder.decode_text([-1, 5]) == "-1 5"
    assert decoder.decode_token(-1) == "?"


def test_show_prints_rewards_times_and_versions(filled, capsys):
    _, out, _ = traj(filled, "show", "lake/3/1", capsys=capsys)
    for text in (
        "hi",
        "ab",
        "reward +0.25",
        "3 tokens in 400 ms",
        "step 50 ms",
        "version 3",
        "remote prefill",
        "reset 12%",
    ):
        assert text in out


def test_show_tokens_prints_each_id_and_log_probability(filled, capsys):
    _, out, _ = traj(filled, "show", "lake/3/1", "--tokens", capsys=capsys)
    assert "<user>" in out
    assert out.count("-0.5000") == 4


def test_a_text_of_many_lines_is_printed_whole_with_its_empty_lines(monkeypatch, capsys):
    text = "".join(f"line {number}\n" + "\n" * (number % 3) for number in range(400)) + "\x1b[2J" + "word " * 40
    printed = []
    for num_lines in (show._NUM_PRINTED_LINES, 10_000):
        monkeypatch.setattr(show, "_NUM_PRINTED_LINES", num_lines)
        show._print_passage(make_console(pipe_width=60), show.Text("input"), text, style="")
        printed.append([line.rstrip() for line in capsys.readouterr().out.splitlines()])
    assert printed[0] == printed[1]
    lines = [line.removeprefix("input").strip() for line in printed[0]]
    assert lines[:6] == ["line 0", "line 1", "", "line 2", "", ""]
    assert lines.count("") == 399
    assert "\x1b" not in "".join(lines)


def test_tokens_of_a_long_turn_are_in_several_tables_each_once(filled, capsys, monkeypatch):
    _, whole, _ = traj(filled, "show", "lake/3/1", "--tokens", capsys=capsys)
    monkeypatch.setattr(show, "_MAX_TABLE_ROWS", 2)
    _, out, _ = traj(filled, "show", "lake/3/1", "--tokens", capsys=capsys)
    assert out.count("log-prob") > whole.count("log-prob")
    places = [line.split()[1] for line in out.splitlines() if line.startswith(("input  ", "output  "))]
    rows = [place for place in places if place.isdigit()]
    assert rows == list(map(str, range(len(rows))))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("ls", "--json"), "traj-ls"),
        (("show", "--json"), "traj-show"),
        (("show", "--json", "--tokens"), "traj-show"),
        (("verify", "--json"), "traj-verify"),
        (("stats", "--json"), "traj-stats"),
    ],
)
def test_every_output_has_its_schema(filled, capsys, words, name):
    filled.scored(make_taught_trajectory())
    filled.add("rollouts", unscored(make_lake_trajectory(9, status="env-fault", reset_s=math.nan)))
    code, out, _ = traj(filled, *words, capsys=capsys)
    assert code == 0
    load_checked(out, name)


def test_show_prints_the_log_probs_of_a_teacher(spools, capsys):
    spools.scored(make_taught_trajectory())
    _, out, _ = traj(spools, "show", "--tokens", capsys=capsys)
    assert out.count("-0.7500") == 4
    _, out, _ = traj(spools, "show", "--tokens", "--json", capsys=capsys)
    assert json.loads(out)["teacher_logprobs"] == [None] * 4 + [-0.75] * 3 + [None] * 3 + [-0.75]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "taxi/4/1"),
        (("--domain", "lake"), "lake/4/0"),
        (("--best",), "lake/3/1"),
        (("--worst",), "lake/0/1"),
        (("lake/2/1",), "lake/2/1"),
        (("taxi",), "taxi/4/1"),
    ],
)
def test_show_finds_the_requested_trajectory(filled, capsys, words, expected):
    _, out, _ = traj(filled, "show", "--json", *words, capsys=capsys)
    assert json.loads(out)["id"] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "lake/2"), "matches several ids: 'lake/2/0', 'lake/2/1'"),
        (("show", "lkae/3/1"), "there are 'lake/3/1'"),
        (("show", "lake/0/0", "--best"), "give only one of them"),
        (("show", "--best", "--domain", "taxi"), "no such trajectory with a reward"),
        (("ls", "--domain", "laek"), "did you mean 'lake'?"),
        (("stats", "--min-version", "4", "--max-version", "3"), "no version is in between"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(filled, capsys, words, message):
    code, out, err = traj(filled, *words, capsys=capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_an_empty_campaign_is_reported(spools, capsys):
    assert traj(spools, "ls", capsys=capsys)[1] == "no trajectories yet\n"
    assert traj(spools, "stats", capsys=capsys)[1] == "no trajectories yet\n"
    assert traj(spools, "show", capsys=capsys)[0] == 2


def test_spools_that_are_gone_are_named(filled, capsys):
    folder = filled.campaign.spool("scored").parent
    shutil.rmtree(folder)
    for words in (["ls"], ["stats"], ["ls", "--domain", "lake"]):
        assert traj(filled, *words, capsys=capsys)[1] == f"the spools are gone: restore {folder}\n"
    for words in (["ls", "--json"], ["stats", "--json"]):
        assert traj(filled, *words, capsys=capsys)[2] == f"hpcrl: note: the spools are gone: restore {folder}\n"


def test_an_empty_list_names_the_episodes_that_failed_and_what_shows_them(spools, capsys):
    make_private_dir(spools.campaign.events)
    log = EventLog.open(spools.campaign, "env", 0, job=0, role="env")
    log.emit(EpisodesCounted(outcomes={"dying": {"env-fault": 40}, "taxi": {"policy-fault": 1}}))
    log.close()
    publish_json(spools.campaign.recipe, {"domains": {"dying": {}, "taxi": {}}})
    lost = "lost to a fault, which leaves no trajectory"
    command = f"{lost} (`hpcrl events {spools.campaign.name} --kind fault`)\n"
    for action in ("ls", "stats"):
        assert traj(spools, action, capsys=capsys)[1] == f"no trajectories yet: 41 episodes were {command}"
    listed = traj(spools, "ls", "--domain", "dying", capsys=capsys)[1]
    assert listed == f"no trajectory matches: 40 episodes were {command}"
    listed = traj(spools, "ls", "--domain", "taxi", capsys=capsys)[1]
    assert listed == f"no trajectory matches: 1 episode was {command}"


def test_damaged_foreign_and_empty_files_are_named_and_the_rest_is_read(filled, capsys):
    scored = sorted(filled.campaign.spool("scored").glob("*.h5"))
    data = bytearray(scored[0].read_bytes())
    scored[0].write_bytes(data[: len(data) // 2])
    (filled.campaign.spool("scored") / "empty.h5").touch()
    (filled.campaign.spool("scored") / "for\neign\x1b[31m.h5").write_bytes(b"text")
    code, out, err = traj(filled, "ls", capsys=capsys)
    assert code == 0
    assert "lake/3/1" in out
    assert "lake/1/1" not in out
    assert "\x1b" not in err
    assert len(err.splitlines()) == 4
    assert scored[0].name in err
    assert "hpcrl traj verify" in err


UNTRUSTED = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202egnp.exe \r overwritten \x7f\x00 fine"


@given(st.text())
def test_escaped_text_has_no_terminal_controls(text):
    escaped = escape_controls(text + UNTRUSTED)
    assert not {*escaped} & {*map(chr, (*range(9), *range(11, 32), *range(127, 160))), "\u202e", "\u2066", "\u2028"}
    assert "\n" not in escape_to_one_line(text)
    escaped.encode()


def test_text_without_controls_stays_as_it_is():
    assert escape_controls("na\u00efve \u4f60\u597d \U0001f600\n\tx") == "na\u00efve \u4f60\u597d \U0001f600\n\tx"


def test_untrusted_text_is_printed_escaped(spools, monkeypatch, capsys):
    class Chat:
        before_first = before_next = after_observation = closing = ()

        def decode(self, token_ids):
            return UNTRUSTED

        template = type("T", (), {"decode_token": lambda self, token_id: UNTRUSTED})()

    hostile = make_lake_trajectory(producer="\x1b[1m", extra={"fault\x1b": UNTRUSTED, "list": [UNTRUSTED]})
    spools.add("scored", msgspec.structs.replace(hostile, id="\x1b[0mlake\n/0/0"))
    monkeypatch.setattr("hpcrl.traj.show.load_token_decoder", lambda campaign: TokenDecoder(Chat()))
    for words in (("ls",), ("show", "--tokens"), ("show", "--json"), ("stats",), ("verify",)):
        _, out, err = traj(spools, *words, capsys=capsys)
        assert not set("\x1b\x07\x9b\u202e\r\x7f\x00") & set(out + err), words


def test_a_terminal_that_knows_only_ascii_gets_only_ascii(filled, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    for words in (("show",), ("stats",), ("ls",)):
        assert main([str(filled.campaign.root), words[0], "name"]) == 0
    assert b"generate" in out.buffer.getvalue()


def test_the_time_bar_has_its_width_and_names_its_parts():
    bar = draw_time_bar([("generate", 3.0), ("step", 1.0), ("reset", 0.0)], width=8, ascii_only=True)
    assert bar.plain == "######==  # generate 75%  = step 25%  - reset 0%"
    assert draw_time_bar([("generate", 0.0)], width=8, ascii_only=True).plain == "not measured"


def test_durations_and_ages_have_a_unit_that_reads_well():
    assert [format_duration(seconds) for seconds in (0.0012, 0.25, 12.34, 1200.0, 9000.0)] == [
        "1.2 ms",
        "250 ms",
        "12.3 s",
        "20 min",
        "2.5 h",
    ]
    assert [format_age(0.0, now=now) for now in (59.0, 600.0, 7200.0, 864000.0, -5.0)] == [
        "59 s",
        "10 min",
        "2 h",
        "10 d",
        "0 s",
    ]


def test_an_impossible_time_does_not_raise(spools, capsys):
    spools.scored(
        make_lake_trajectory(0, created=float("inf")),
        make_lake_trajectory(1, created=1e300),
        make_lake_trajectory(2, created=float("nan")),
    )
    for words in (("ls",), ("show", "lake/1/0"), ("show", "lake/0/0"), ("stats",)):
        assert traj(spools, *words, capsys=capsys)[0] == 0


def test_figures_are_those_of_the_trajectories():
    tally = DomainTally()
    for group in range(11):
        tally.add(make_lake_trajectory(group))
    tally.add(unscored(make_lake_trajectory(11, status="env-fault")))
    figures = tally.figures("lake")
    assert figures.by_status == {"done": 11, "env-fault": 1}
    assert (figures.reward.num, figures.reward.min, figures.reward.max) == (11, 0.0, 1.0)
    assert figures.reward.p50 == pytest.approx(0.5)
    assert figures.reward.std == pytest.approx(np.std(np.arange(11) / 10))
    assert (figures.num_tokens, figures.num_generated_tokens, figures.by_updates) == (132, 48, {1: 12})
    assert [(one.version, one.reward_mean) for one in figures.by_version][:2] == [(0, 0.0), (1, 0.1)]


def test_stats_json_has_every_domain(filled, capsys):
    _, out, _ = traj(filled, "stats", "--json", capsys=capsys)
    assert [(one["domain"], one["num_trajectories"]) for one in json.loads(out)["domains"]] == [
        ("lake", 9),
        ("taxi", 1),
    ]


def test_stats_shows_the_trend_by_version(filled, capsys):
    _, out, _ = traj(filled, "stats", "--domain", "lake", capsys=capsys)
    assert "mean reward 0.00 with version 0, 0.30 with version 3" in out


def test_stats_show_how_far_the_model_is_from_its_teacher(spools, capsys):
    spools.scored(make_taught_trajectory(), make_lake_trajectory(1))
    _, out, _ = traj(spools, "stats", "--json", capsys=capsys)
    assert json.loads(out)["domains"][0]["teacher_gap"] == 0.25
    _, out, _ = traj(spools, "stats", capsys=capsys)
    assert "+0.2500 a trained token" in out


def test_stats_show_what_became_of_the_generated_tokens(spools, capsys):
    first, second = make_lake_trajectory().turns
    masked = [first, msgspec.structs.replace(second, masked="choice")]
    mask = make_lake_trajectory().loss_mask.copy()
    mask[10] = False
    spools.scored(forked(0), make_lake_trajectory(1, turns=masked, loss_mask=mask))
    spools.add("scored", unscored(make_lake_trajectory(2, status="aborted-redundant")))
    _, out, _ = traj(spools, "stats", "--json", capsys=capsys)
    (figures,) = json.loads(out)["domains"]
    assert figures["token_fates"] == {"trained": 9, "aborted-redundant": 4, "choice": 2}
    assert (figures["trained_share"], figures["num_conversations"]) == (9 / 11, 5)
    _, out, _ = traj(spools, "stats", capsys=capsys)
    text = " ".join(out.split())
    assert "81.8% of the tokens of kept episodes, before the trainer drops any; 18.2% in a conversation that" in text
    assert "5 conversations, 1.7 an episode" in out
    cost = figures["num_row_tokens"] / figures["num_tokens"]
    assert cost > 0
    assert f"the trainer computes {cost:.1f} tokens for each that is stored" in " ".join(out.split())


def test_an_untrained_turn_of_an_old_record_counts_as_sampled_otherwise():
    mask = make_lake_trajectory().loss_mask.copy()
    mask[4:7] = False
    assert count_fates(make_lake_trajectory(loss_mask=mask)) == {"trained": 1, "sampling": 3}


# ---- episodes with several conversations


def forked(number=0, **changed):
    """Make an episode of three conversations: the second continues from the first turn of the first, one is masked."""
    base = make_lake_trajectory(number)
    own = np.array([2, 80, 3, 81, 1, 2, 82, 3, 83], np.int32)
    mask = np.concatenate([base.loss_mask, np.isin(np.arange(9), (3, 4))])
    fields = {
        "rows": [
            ConversationRow(end=11),
            ConversationRow(end=16, parent=0, shares=7),
            ConversationRow(end=20),
        ],
        "turns": [
            *base.turns,
            EpisodeTurn(start=14, end=16, row=1, generate_s=1.0),
            EpisodeTurn(start=19, end=20, row=2, masked="choice"),
        ],
        "token_ids": np.concatenate([base.token_ids, own]),
        "loss_mask": mask,
        "logprobs": np.where(mask, -0.5, 0.0).astype(np.float32),
        "versions": np.where(mask, number, 0).astype(np.int32),
    }
    return make_lake_trajectory(number, **{**fields, **changed})


def test_show_draws_the_tree_of_conversations_and_the_one_with_most_generated(filled, capsys):
    filled.scored(forked(9))
    _, out, _ = traj(filled, "show", "lake/9/0", capsys=capsys)
    tree = [line.split("──", 1)[1].strip() for line in out.splitlines() if "── " in line]
    assert [" ".join(line.split()) for line in tree] == [
        "conversation 1 11 tokens, 2 turns, 4 generated, all trained",
        "turn 1 3 tokens stop trained reward +0.25",
        "conversation 2 12 tokens, 1 turn, 2 generated, all trained, the first 7 shared with 1",
        "turn 3 2 tokens stop trained",
        "turn 2 1 token trained reward +0.50",
        "conversation 3 4 tokens, 1 turn, 1 generated, none trained",
        "turn 4 1 token not trained: the environment trains another conversation (`trains`)",
    ]
    shown = out.split("\nturn 1")[1]
    assert "k" in shown.split("turn 3")[1]
    assert "20: 7 generated, 13 read; 1 of the generated ones are not trained" in out


def test_show_prints_another_conversation_when_asked(filled, capsys):
    filled.scored(forked(9))
    _, out, _ = traj(filled, "show", "lake/9/0", "--conversation", "3", "--tokens", capsys=capsys)
    assert "turn 4" in out.split("shown below")[1]
    assert "0.0000" in out
    code, _, err = traj(filled, "show", "lake/9/0", "--conversation", "4", capsys=capsys)
    assert (code, "has 3 conversations" in err) == (2, True)


def test_conversations_of_an_old_record_are_shown_and_counted(filled, capsys):
    branch = {
        "shares": 7,
        "token_ids": [2, 80, 3, 81, 1],
        "logprobs": [0.0, 0.0, 0.0, -1.0, -1.0],
        "versions": [0, 0, 0, 9, 9],
        "loss_mask": [False, False, False, True, True],
        "turns": [{"start": 10, "end": 12}],
    }
    filled.scored(make_lake_trajectory(9, extra={"branches": [branch], "note": "kept"}))
    _, out, _ = traj(filled, "show", "lake/9/0", "--json", "--conversation", "2", capsys=capsys)
    shown = json.loads(out)
    assert shown["rows"] == [{"end": 11}, {"end": 16, "parent": 0, "shares": 7}]
    assert [(one["output_text"], one["turn"].get("masked")) for one in shown["turns"]] == [
        ("ab", None),
        ("l", "choice"),
    ]
    assert shown["extra"] == {"note": "kept"}
    (tally,) = count_by_domain(TrajectoryHistory(filled.campaign), TrajectorySelection(group="lake/9"))
    assert tally.token_fates == {"trained": 4, "choice": 2}


@pytest.mark.parametrize("branches", ["many", [{"shares": 99}], [{"shares": 99, "token_ids": [], "logprobs": [],
    "versions": [], "loss_mask": [], "turns": []}]])  # fmt: skip
def test_a_fact_that_only_looks_like_conversations_stays_a_fact(branches):
    odd = make_lake_trajectory(extra={"branches": branches})
    assert restore_rows(odd) is odd


def test_a_thousand_conversations_are_drawn_on_a_page(filled, capsys):
    base, num = make_lake_trajectory(9), 1000
    own = np.tile(np.array([2, 80, 3, 81, 1], np.int32), num)
    mask = np.concatenate([base.loss_mask, np.tile([False, False, False, True, True], num)])
    filled.scored(
        make_lake_trajectory(
            9,
            rows=[
                ConversationRow(end=11),
                *(ConversationRow(end=16 + 5 * n, parent=n, shares=11 + 5 * n) for n in range(30)),
                *(ConversationRow(end=16 + 5 * n, parent=0, shares=7) for n in range(30, num)),
            ],
            turns=[*base.turns, *(EpisodeTurn(start=14 + 5 * n, end=16 + 5 * n, row=n + 1) for n in range(num))],
            token_ids=np.concatenate([base.token_ids, own]),
            loss_mask=mask,
            logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
            versions=np.zeros(len(mask), np.int32),
        )
    )
    _, out, _ = traj(filled, "show", "lake/9/0", capsys=capsys)
    tree = out.split("1,001 conversations")[1].split("turn 1 (")[0]
    assert "976 more conversations: 976 turns, 1,952 generated, all trained" in " ".join(tree.split())
    assert len(tree.splitlines()) < 120


def test_a_spool_that_cannot_be_listed_is_named(spools, capsys):
    spools.campaign.spool("scored").rmdir()
    spools.campaign.spool("scored").touch()
    spools.add("rollouts", unscored(make_lake_trajectory()))
    code, out, err = traj(spools, "ls", capsys=capsys)
    assert code == 0
    assert "lake/0/0" in out
    assert "Not a directory" in err


def test_reading_leaves_the_campaign_as_it_is(filled, capsys):
    before = {path: path.stat().st_mtime_ns for path in Path(filled.campaign.root).rglob("*")}
    for words in (("ls",), ("show",), ("stats",), ("verify",)):
        traj(filled, *words, capsys=capsys)
    assert {path: path.stat().st_mtime_ns for path in Path(filled.campaign.root).rglob("*")} == before


def test_the_spools_are_listed_in_the_order_in_which_trajectories_move():
    assert SPOOLS == ("rollouts", "scored", "archive")
