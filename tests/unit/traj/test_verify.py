"""`hpcrl traj verify` names whatever is damaged or missing with the reason, and nothing else."""

import json
import os
import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from hpcrl.campaign.directory import list_jobs
from hpcrl.campaign_dir.checkpoints import MANIFEST_FILE, CheckpointFile, decode_manifest, encode_manifest
from hpcrl.errors import CampaignError
from hpcrl.learn.consumed import ConsumedGroups, sort_group_numbers
from hpcrl.spool import record
from hpcrl.spool.listing import quarantine_segment
from hpcrl.spool.record import ConversationRow, EpisodeTurn
from hpcrl.system.files import publish_file, publish_json
from hpcrl.system.processes import read_start_ticks
from hpcrl.traj.__main__ import main
from hpcrl.traj.verify import SpoolVerifier
from tests.support.campaign_spools import Spools, unscored
from tests.support.campaigns import hpcrl
from tests.support.trajectories import make_lake_trajectory


@pytest.fixture
def spools(tmp_path):
    spools = Spools(tmp_path / "campaign 'x'")
    spools.scored(*(make_lake_trajectory(group) for group in range(3)))
    spools.scored(make_lake_trajectory(3))
    return spools


def damage(spools):
    return [(one.path, one.reason) for one in _findings(spools) if one.severity == "damage"]


def notes(spools):
    return [(one.path, one.reason) for one in _findings(spools) if one.severity == "note"]


def _findings(spools):
    return SpoolVerifier(spools.campaign).verify_all().findings


def only_damage(spools):
    (found,) = damage(spools)
    return found


def first(spools, spool="scored"):
    return sorted(spools.campaign.spool(spool).glob("*.h5"))[0]


def test_a_description_that_is_cut_is_damage_and_a_spool_that_is_missing_is_named(spools):
    spools.campaign.manifest.write_text('{"name": "o')
    shutil.rmtree(spools.campaign.spool("scored"))
    path, reason = only_damage(spools)
    assert (path, reason.partition(":")[0]) == ("campaign.json", "cannot be read")
    assert ("spools/scored", "is missing") in notes(spools)


def test_spools_that_are_gone_are_damage(spools):
    folder = first(spools).parents[1]
    shutil.rmtree(folder)
    assert only_damage(spools) == ("spools", f"the spools are gone: restore {folder}")


@pytest.mark.parametrize("record", ["recipe", "site", "plan"])
def test_a_record_that_is_missing_is_damage(spools, record):
    """No other job can continue the campaign."""
    getattr(spools.campaign, record).unlink()
    path, reason = only_damage(spools)
    assert (path, reason.partition(":")[0]) == (f"{record}.json", "cannot be read")


def test_damaged_events_and_records_of_jobs_that_are_gone_are_damage(spools):
    campaign = spools.campaign
    (campaign.events / "000-env-0.jsonl").write_bytes(b"\xff\x00 rubbish\n")
    assert damage(spools) == [("events", "1 line of events/000-env-0.jsonl is damaged")]
    shutil.rmtree(campaign.events)
    shutil.rmtree(campaign.jobs)
    reason = "is missing or empty, though a job has left results"
    assert damage(spools) == [("events", reason), ("jobs", reason)]
    with pytest.raises(CampaignError, match="the records of its jobs are gone: restore"):
        list_jobs(campaign)


def submit_job(spools):
    process = {"pid": os.getpid(), "start_ticks": read_start_ticks(os.getpid())}
    publish_json(spools.campaign.job(0).submission, {"id": "local-1", "scheduler": "local", "time": 1.0} | process)


def make_step_line(step):
    return json.dumps({"time": 1.0, "event": "step", "job": 0, "worker": "000-train-0", "step": step})


def test_events_that_end_before_a_checkpoint_are_damage_once_the_campaign_has_ended(spools):
    spools.consumed("lake/0", step=40)
    submit_job(spools)
    path = spools.campaign.events / "000-train-0.jsonl"
    first, last = (make_step_line(step) for step in (1, 40))
    path.write_text(f"{first}\n{last[:30]}")
    assert damage(spools) == []  # it runs: its last events may come later
    publish_json(spools.campaign.job(0).outcome, {"outcome": "done", "reason": "", "time": 2.0})
    reason = "events/ lacks steps: it ends at step 1, and a checkpoint is of step 40"
    assert damage(spools) == [("events", reason)]
    path.write_text(f"{first}\n{last}\n{last[:30]}")
    assert damage(spools) == []  # a process that was killed leaves an unfinished line


def test_a_whole_campaign_is_clean_and_exit_code_0(spools, capsys):
    spools.consumed(*(f"lake/{group}" for group in range(3)))
    assert main([str(spools.campaign.root), "verify", "name"]) == 0
    out = capsys.readouterr().out
    assert "clean" in out
    assert "3 groups, by checkpoint 000001-step-000001; all present" in out


def test_damage_is_exit_code_1_and_named_in_json(spools, capsys):
    first(spools).write_bytes(b"")
    assert main([str(spools.campaign.root), "verify", "name", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["clean"] is False
    assert report["spools"]["scored"]["num_damaged"] == 1
    (finding,) = report["findings"]
    assert finding["path"] == f"spools/scored/{first(spools).name}"
    assert "remove this one and it is scored again" in finding["reason"]


@pytest.mark.parametrize("seed", range(20))
def test_any_changed_byte_or_cut_is_found(spools, seed):
    dice = random.Random(seed)
    path = first(spools)
    data = bytearray(path.read_bytes())
    used = [place for place, byte in enumerate(data) if byte]  # gaps are not checksummed
    if seed % 4:
        data[dice.choice(used)] ^= 1 << dice.randrange(8)
    else:
        del data[dice.randrange(len(data)) :]
    path.write_bytes(data)
    where, _ = only_damage(spools)
    assert path.name in where


def test_a_segment_of_a_newer_schema_is_reported_with_a_hint(spools, monkeypatch):
    monkeypatch.setattr("hpcrl.spool.segment.SCHEMA_MAJOR", record.SCHEMA_MAJOR + 1)
    path = spools.add("rollouts", unscored(make_lake_trajectory(9)))
    monkeypatch.undo()
    where, reason = only_damage(spools)
    assert path.name in where
    assert "use the version of hpcrl that wrote it" in reason


def test_a_name_that_does_not_fit_is_damage(spools):
    spools.add("archive", make_lake_trajectory(5), name="000-env-0-00000009-7-0123abcd.h5")
    spools.add("archive", make_lake_trajectory(6), name="renamed.h5")
    reasons = [reason for _, reason in damage(spools)]
    assert any("has 1 trajectories, but 7 by its name" in reason for reason in reasons)
    assert any("restore its name" in reason for reason in reasons)


def test_a_directory_with_the_name_of_a_segment_is_damage(spools):
    (spools.campaign.spool("scored") / "000-env-0-00000009-7-0123abcd.h5").mkdir()
    assert "Is a directory" in only_damage(spools)[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group": "lake/77"}, "does not start with its group"),
        ({"turns": [EpisodeTurn(start=4, end=99)]}, "tokens 4 to 99 of 11"),
        ({"turns": [EpisodeTurn(start=3, end=7)]}, "does not fit the loss mask"),
        ({"turns": [EpisodeTurn(start=4, end=7, masked="choice")]}, "does not fit the loss mask"),
        ({"turns": [EpisodeTurn(start=4, end=7, row=1)]}, "in conversation 2 of 1"),
        ({"turns": [EpisodeTurn(start=4, end=7), EpisodeTurn(start=5, end=7)]}, "which are not its alone"),
        ({"logprobs": np.full(11, np.nan, np.float32)}, "not finite numbers"),
        ({"teacher_logprobs": np.full(11, np.nan, np.float32)}, "without a log-probability of the teacher"),
        ({"reward": None}, "has no reward"),
    ],
)
def test_an_impossible_trajectory_is_named(spools, changed, message):
    path = spools.add("scored", make_lake_trajectory(8, **changed))
    where, reason = only_damage(spools)
    assert path.name in where
    assert "lake/8/0" in reason
    assert message in reason


def test_an_episode_of_several_conversations_is_clean_whatever_the_order_of_its_turns(spools):
    rows = [ConversationRow(end=7), ConversationRow(end=11, parent=0, shares=4)]
    turns = [EpisodeTurn(start=10, end=11, row=1), EpisodeTurn(start=4, end=7)]
    spools.scored(make_lake_trajectory(8, rows=rows, turns=turns))
    assert damage(spools) == []


def test_a_twin_of_another_segment_is_damage(spools):
    spools.add("scored", *(make_lake_trajectory(group + 10) for group in range(3)), name=first(spools).name)
    assert "differs from its twin in rollouts: 'lake/0/0' and 'lake/10/0'" in only_damage(spools)[1]


def test_a_segment_without_rewards_yet_is_not_damage(spools):
    spools.add("rollouts", unscored(make_lake_trajectory(9)))
    assert _findings(spools) == []


def test_an_episode_that_is_stored_twice_is_a_note(spools):
    spools.scored(make_lake_trajectory(0))
    assert damage(spools) == []
    assert [path for path, _ in notes(spools)] == ["spools/rollouts", "spools/scored"]


def test_foreign_files_and_old_leftovers_are_notes(spools):
    scored = spools.campaign.spool("scored")
    (scored / "notes.txt").touch()
    (scored / ".new.h5.0123.tmp").touch()
    (scored / ".hidden").touch()
    old = scored / ".old.h5.0123.tmp"
    old.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    assert [path for path, _ in notes(spools)] == ["spools/scored/.old.h5.0123.tmp", "spools/scored/notes.txt"]
    assert damage(spools) == []


def test_a_quarantined_segment_is_damage_until_it_is_made_again(spools):
    path = first(spools)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    quarantine_segment(path, "it was cut")
    where, reason = only_damage(spools)
    assert where == f"spools/scored/quarantine/{path.name}"
    assert "damaged or foreign" in reason
    path.write_bytes(whole)
    assert damage(spools) == []
    assert "made again" in notes(spools)[0][1]


def test_a_quarantined_segment_that_can_be_read_may_be_moved_back(spools):
    quarantine_segment(first(spools), "the disk was away")
    _, reason = only_damage(spools)
    assert "the disk was away; it can be read now: move it back" in reason


def test_a_consumed_group_that_is_nowhere_is_damage_if_the_recipe_keeps_all(spools):
    spools.consumed("lake/0", "lake/1", "lake/4", "taxi/3")
    assert [reason for _, reason in damage(spools)] == [
        "trained on, but in no spool: 1 of the groups of lake, such as 'lake/4'",
        "trained on, but in no spool: 1 of the groups of taxi, such as 'taxi/3'",
    ]
    spools.keep("none")
    assert damage(spools) == []


def test_a_consumed_group_may_be_in_the_archive(spools):
    spools.add("archive", make_lake_trajectory(4))
    spools.consumed("lake/4")
    assert damage(spools) == []


def test_a_damaged_list_of_consumed_groups_is_reported_and_the_previous_one_is_used(spools):
    spools.consumed("lake/0", step=1)
    damaged = spools.consumed("lake/99", step=2)
    damaged.write_text(damaged.read_text().replace("99", "98"))
    where, reason = only_damage(spools)
    assert where == "checkpoints/000002-step-000002/consumed.json"
    assert "checksum" in reason


def test_a_manifest_that_is_not_a_table_is_named_beside_the_list_of_groups(spools):
    checkpoint = spools.consumed("lake/0").parent
    (checkpoint / MANIFEST_FILE).write_text("[]")
    reasons = dict(damage(spools))
    assert "cannot be read: Expected `object`" in reasons[f"checkpoints/{checkpoint.name}/consumed.json"]


def test_a_file_of_a_checkpoint_that_was_cut_is_damage(spools):
    checkpoint = spools.consumed("lake/0").parent
    state = checkpoint / "state-00000.safetensors"
    state.write_bytes(b"x" * 999)
    manifest = decode_manifest((checkpoint / MANIFEST_FILE).read_bytes())
    manifest.files[state.name] = CheckpointFile(num_bytes=1000, xxh3="")
    publish_file(checkpoint / MANIFEST_FILE, encode_manifest(manifest))
    where, reason = only_damage(spools)
    assert where == f"checkpoints/{checkpoint.name}"
    assert reason == "state-00000.safetensors: has 999 bytes, had 1,000 when saved"
    state.write_bytes(b"x" * 1000)
    assert damage(spools) == []


def test_missing_groups_are_counted_without_walking_through_all():
    consumed = ConsumedGroups("c", {"lake": [(0, 10), (20, 1 << 60)]})
    present = sort_group_numbers(["lake/0", "lake/1", "lake/20", "lake/21", "lake/x", "odd"])
    assert list(consumed.missing_groups(present)) == [("lake", 8 + (1 << 60) - 22, 2)]


def test_a_segment_that_is_compacted_meanwhile_is_found_under_its_new_name(spools, monkeypatch):
    old = [spools.add("archive", make_lake_trajectory(group)) for group in (10, 11)]
    spools.consumed("lake/10", "lake/11")
    verifier = SpoolVerifier(spools.campaign)
    verify_segment = verifier._verify_segment

    def compacting(spool, name, **rest):
        if spool == "archive" and old:
            spools.add("archive", make_lake_trajectory(10), make_lake_trajectory(11))
            while old:
                old.pop().unlink()
        return verify_segment(spool, name, **rest)

    monkeypatch.setattr(verifier, "_verify_segment", compacting)
    assert verifier.verify_all().clean


def test_a_campaign_that_runs_meanwhile_is_clean(spools):
    """Verify while another process seals, scores, archives and removes segments."""
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(spools.campaign.root)], stdout=subprocess.PIPE)
    assert writer.stdout.readline()
    rounds = 0
    while writer.poll() is None or rounds < 2:
        assert damage(spools) == []
        rounds += 1
    assert writer.wait() == 0


_WRITER = """
import sys
from pathlib import Path
from tests.support.campaign_spools import Spools, unscored
from tests.support.trajectories import make_lake_trajectory

spools = Spools(Path(sys.argv[1]))
print("ready", flush=True)
live = []
for number in range(100, 140):
    name = f"001-env-0-{number:08d}-1-0123abcd.h5"
    spools.add("rollouts", unscored(make_lake_trajectory(number)), name=name)
    spools.add("scored", make_lake_trajectory(number), name=name)
    live.append((number, name))
    if len(live) == 4:
        archived = f"archive-{number:08d}-4-0123abcd.h5"
        spools.add("archive", *(make_lake_trajectory(one) for one, _ in live), name=archived)
        for spool in ("rollouts", "scored"):
            for _, name in live:
                (spools.campaign.spool(spool) / name).unlink()
        live = []
"""


def test_the_command_line_finds_the_campaign_and_passes_the_exit_code_on(spools, home):
    campaigns = home / "campaigns"
    campaigns.mkdir(parents=True)
    (campaigns / "mine").symlink_to(spools.campaign.root)
    hpcrl("traj", "verify", "mine")
    first(spools).write_bytes(b"")
    done = hpcrl("traj", "verify", "mine", check=False)
    assert done.returncode == 1
    assert first(spools).name in done.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "absent"), "no campaign 'absent'"),
        (("ls", "absent", "--limit", "-1"), "-1 is negative"),
        (("ls", "absent", "--status", "finished"), "invalid choice: 'finished'"),
        ((), "required: ACTION"),
    ],
)
def test_a_mistake_is_reported_before_anything_heavy_is_started(home, words, message):
    done = hpcrl("traj", *words, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_traj_without_h5py_prints_a_hint(spools, home):
    (home / "campaigns").mkdir(parents=True)
    (home / "campaigns" / "mine").symlink_to(spools.campaign.root)
    code = "import sys; sys.modules['h5py'] = None; sys.modules['numpy'] = None; "
    code += "from hpcrl.traj.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(spools.campaign.root), "ls", "mine"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'hpcrl[local]'" in done.stderr
