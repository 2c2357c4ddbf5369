"""The check of a warm-up's data before submission: conversations that are longer than the model's context."""

import subprocess
import sys

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import WarmupConfig
from hpcrl.envs.task_set import import_conversations
from hpcrl.errors import ConfigError
from hpcrl.learn.batch import compute_row_lengths
from hpcrl.models.tiny import make_tiny_model
from hpcrl.roles import warmup_check
from hpcrl.roles.warmup import WarmupData
from hpcrl.testing.model_templates import FAMILIES, save_family
from tests.support.campaigns import hpcrl
from tests.support.chats import make_chat
from tests.support.plans import make_recipe

CONTEXT = 32


FITS, LONG = make_chat("a", "b"), make_chat("a", "b" * 40)


def imitate(tmp_path, rows, *settings):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    recipe = make_recipe(f"model.tiny.context_length={CONTEXT}", *settings, name="sft")
    warmup = WarmupConfig(path=str(path), steps=1, conversations_per_step=len(rows), shuffle=False)
    return msgspec.structs.replace(recipe, warmup=warmup)


def run_check(recipe):
    command = [sys.executable, "-m", "hpcrl.roles.warmup_check"]
    done = subprocess.run(command, input=msgspec.json.encode(recipe), capture_output=True, check=False)
    return done.returncode, done.stdout.decode()


def test_what_is_longer_than_the_context_is_counted_in_a_note(tmp_path):
    code, note = run_check(imitate(tmp_path, [FITS, LONG, FITS]))
    expected = "warmup.path: 1 of 3 conversations are longer than the model's context of 32 tokens: what is longer is"
    assert (code, note.partition(" not trained")[0]) == (0, expected)


def test_data_of_which_nothing_fits_is_refused(tmp_path):
    code, refusal = run_check(imitate(tmp_path, [LONG, LONG]))
    assert code == 2
    assert "2 of 2 conversations are longer than the model's context of 32 tokens, and nothing is left" in refusal


def test_data_that_fits_has_no_note(tmp_path):
    assert warmup_check._describe_lengths(imitate(tmp_path, [FITS])) == ""


@pytest.mark.parametrize("num", [26, 27, 28, 29])
def test_lengths_are_those_of_the_trainer(tmp_path, num):
    recipe = imitate(tmp_path, [make_chat("a", "b" * num), make_chat("\u00e4", "b", "c", "d" * (num - 4))])
    campaign = CampaignDir(tmp_path / "campaign")
    campaign.warmup.mkdir(parents=True)
    import_conversations(recipe.warmup, directory=campaign.warmup)
    make_tiny_model(campaign.model, recipe.model.tiny, seed=0)
    lengths = [compute_row_lengths(one) for one in WarmupData(campaign, recipe, recipe.warmup).choose(1)]
    found = warmup_check.count_long_conversations(recipe, recipe.warmup, context=CONTEXT)
    assert found.num_long == sum(max(one) > CONTEXT for one in lengths)


def test_of_much_data_the_first_part_is_read_and_never_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(warmup_check, "MAX_CHECKED_BYTES", 10)
    note = warmup_check._describe_lengths(imitate(tmp_path, [LONG, LONG, FITS]))
    assert "1 of the first 1 conversations are longer" in note


def test_a_row_that_the_template_cannot_render_is_refused_with_its_number(tmp_path):
    folder = save_family(tmp_path / "model", FAMILIES["Qwen3"])
    (folder / "refuses.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('no such text') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    recipe = imitate(tmp_path, [FITS, make_chat("no", "b")])
    model = msgspec.structs.replace(
        recipe.model, tiny=None, path=str(folder), chat_template=str(folder / "refuses.jinja")
    )
    recipe = msgspec.structs.replace(recipe, model=model)
    with pytest.raises(ConfigError, match=r"warmup\.path: row 1 cannot be trained on: .*no such text"):
        warmup_check._describe_lengths(recipe)


@pytest.mark.parametrize("command", ["plan", "submit"])
def test_plan_and_submission_refuse_data_of_which_nothing_fits(home, tmp_path, command):
    (tmp_path / "rows.jsonl").write_bytes(msgspec.json.encode(LONG))
    settings = (f"warmup.path={tmp_path}/rows.jsonl", f"model.tiny.context_length={CONTEXT}")
    words = [word for setting in settings for word in ("-s", setting)]
    done = hpcrl(command, "sft", "--site", "local", *words, check=False)
    assert done.returncode == 2
    assert "recipe 'sft': warmup.path: 1 of 1 conversations are longer than the model's context" in done.stderr


def test_domains_that_are_never_played_are_a_note(home, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(msgspec.json.encode(FITS))
    settings = (f"warmup.path={tmp_path}/rows.jsonl", "warmup.steps=9", "train.num_steps=9")
    words = [word for setting in settings for word in ("-s", setting)]
    note = "train.num_steps = 9 are all of the warm-up: [domains], [rollout] and train.pipeline have no effect"
    assert note in hpcrl("plan", "quickstart", "--site", "local", *words, "--json").stderr


def test_the_check_imports_no_torch():
    code = "import hpcrl.roles.warmup_check, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
