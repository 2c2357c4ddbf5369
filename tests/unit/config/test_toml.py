"""Recipes and sites as TOML: found, extended, overridden, refused with a fix."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission_checks import check_request
from hpcrl.config.recipe import fill_warmup_steps, make_recipe
from hpcrl.config.site import load_site
from hpcrl.config.toml import MAX_BYTES, RENAMED_KEYS, find_toml, list_known_names, load_table, name_setting
from hpcrl.errors import ConfigError
from hpcrl.testing.recipes import load_recipe

RECIPE = """
name = "small"
[model.tiny]
[domains.lake]
env = "hpcrl.envs.gymnasium_text:FrozenLake"
[rollout]
group_size = 4
[train]
num_steps = 2
groups_per_step = 2
learning_rate = 0.001
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def refused(path: Path, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path), settings=settings)
    return str(caught.value)


def test_a_recipe_is_read_with_its_defaults(recipe: Path) -> None:
    loaded = load_recipe(str(recipe))
    assert loaded.rollout.group_size == 4
    assert loaded.rollout.max_lag == 1
    assert loaded.resources.decode.affinity == "bandwidth"


def test_a_setting_is_read_as_toml_and_else_as_text(recipe: Path) -> None:
    loaded = load_recipe(str(recipe), settings=("rollout.group_size=16", "description=a long walk", "seed = 7"))
    assert (loaded.rollout.group_size, loaded.description, loaded.seed) == (16, "a long walk", 7)


@pytest.mark.parametrize("table", ["model.tiny", "judge.grader.tiny"])
def test_a_tiny_model_that_cannot_be_made_is_refused(recipe: Path, table: str) -> None:
    assert f"{table}: hidden_size = 64, num_heads = 3" in refused(recipe, f"{table}.num_heads=3")
    assert f"{table}.context_length: expected integer >= 32" in refused(recipe, f"{table}.context_length=4")


def test_a_recipe_extends_another_beside_it(recipe: Path) -> None:
    child = recipe.with_name("child.toml")
    child.write_text('extends = "small.toml"\nname = "child"\n[rollout]\nmax_lag = 3\n')
    loaded = load_recipe(str(child))
    assert (loaded.name, loaded.rollout.group_size, loaded.rollout.max_lag) == ("child", 4, 3)


@pytest.mark.parametrize(
    ("file", "line", "settings", "name"),
    [
        ("my-run", "", (), "my-run"),
        ("my-run", 'name = "own"', (), "own"),
        ("my-run", "", ("name=set",), "set"),
        ("my run", "", (), "small"),  # no recipe can have this name
    ],
)
def test_a_recipe_that_sets_no_name_has_that_of_its_file_and_not_of_its_parent(
    recipe: Path, file: str, line: str, settings: tuple[str, ...], name: str
) -> None:
    child = recipe.with_name(f"{file}.toml")
    child.write_text(f'extends = "small.toml"\n{line}\n')
    assert load_recipe(str(child), settings=settings).name == name


def test_extends_in_a_cycle_is_refused(recipe: Path) -> None:
    other = recipe.with_name("other.toml")
    other.write_text('extends = "small.toml"')
    recipe.write_text('extends = "other.toml"')
    assert "cycle" in refused(recipe)


def test_the_error_for_a_mistyped_key_suggests_the_nearest_name(recipe: Path) -> None:
    message = refused(recipe, "rollout.group_sise=4")
    assert "'rollout.group_sise'" in message
    assert "did you mean 'group_size'?" in message


def test_a_mistyped_key_in_a_domain_is_found(recipe: Path) -> None:
    assert "did you mean 'max_turns'?" in refused(recipe, "domains.lake.max_turn=4")


def test_the_error_for_a_key_that_is_like_no_other_suggests_none(recipe: Path) -> None:
    assert "did you mean" not in refused(recipe, "train.grpo=true")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.advantage=grpoo", "unknown value 'grpoo': did you mean 'grpo'? it takes "),
        ("domains.lake.on_timeout=faults", "did you mean 'fault'? it takes fault, score, or a number"),
        ("domains.lake.on_reward_error=score", "unknown value 'score': it takes fault, or a number"),
    ],
)
def test_the_error_for_a_mistyped_value_has_the_known_ones(recipe: Path, setting: str, message: str) -> None:
    assert f"{setting.partition('=')[0]}: " in refused(recipe, setting)
    assert message in refused(recipe, setting)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("domains", "my lake", 'env = "a:b"'),
        ("judge", "My judge", 'path = "/m"'),
        ("train.pipeline", "my node", 'function = "a:b"'),
    ],
)
def test_the_error_for_a_wrong_name_has_that_name_alone(recipe: Path, table: str, key: str, value: str) -> None:
    message = refused(child_of(recipe, f'[{table}."{key}"]\n{value}'))
    assert message.endswith(f"(seen: {key!r})")
    assert f": {table}: expected a name of at most" in message
    assert " at key" not in message


def test_the_error_for_a_mistyped_table_suggests_the_nearest_name(recipe: Path) -> None:
    assert "did you mean 'rollout'?" in refused(recipe, "rolout.group_size=4")


def test_a_wrong_type_names_key_and_value(recipe: Path) -> None:
    message = refused(recipe, "rollout.group_size=many")
    assert "rollout.group_size: expected integer, got text" in message
    assert "'many'" in message


def test_a_value_out_of_range_names_key_and_value(recipe: Path) -> None:
    message = refused(recipe, "rollout.group_size=1")
    assert "rollout.group_size: expected integer >= 2" in message
    assert "seen: 1" in message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.num_steps=0", "train.num_steps = 0: give the number of steps"),
        ("domains={}", "[domains] is missing"),
        ("model={}", "[model] needs either `path`"),
        ("train={}", "these are missing and have no default"),
        ("train={num_steps=2,groups_per_step=2}", "train.learning_rate: missing"),
    ],
)
def test_what_a_setting_has_set_is_blamed_on_it_and_not_on_the_file(recipe: Path, setting: str, message: str) -> None:
    assert refused(recipe, "rollout.group_size=4", setting).startswith(f"-s {setting}: {message}")


def test_what_no_setting_has_set_is_blamed_on_the_file(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("num_steps = 2", "num_steps = 0"))
    assert refused(recipe, "train.groups_per_step=4").startswith(f"{recipe}: train.num_steps = 0")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("rollout.max_running = 1 cannot hold one group", "rollout.max_running=1"),
        ("recipe 'x': domains.lake: FrozenLake: size = -1: it must be 2 to 20", "domains.lake.options.size=-1"),
        ("recipe 'x': domains.lake: FrozenLake: map = 'X': no S", ""),
        ("train.num_steps = 3 is less than rollout.max_running", "rollout.max_running=1"),
        ("rollout.max_running_total = 1: no", ""),
        ("teacher.path = '/t' is not a model directory", 'teacher={path="/t"}'),
        ("partitions.gpu: it has no nodes", ""),
        ("sites.gpu.account = 'm1'", ""),
        ("partitions.gpu.account = 'm1': it is unknown", "site.partitions.gpu.account=m1"),
        ("/r/small.toml: rollout.max_running: it is missing", ""),
        ("-s seed=x: rollout.max_running", ""),
    ],
)
def test_a_message_about_a_key_names_the_setting_that_has_set_it(message: str, named: str) -> None:
    settings = (
        "rollout.max_running=1",
        "domains.lake.options.size=-1",
        'teacher={path="/t"}',
        "site.partitions.gpu.account=m1",
    )
    assert name_setting(message, settings) == f"-s {named}: {message}".removeprefix("-s : ")


def test_a_setting_is_named_without_what_controls_a_terminal(recipe: Path) -> None:
    message = refused(recipe, "name=\x1b[31mx\ny")
    assert message.startswith("-s name=\\x1b[31mx\\ny: name: expected")
    assert message.isprintable()


def test_a_missing_key_is_named(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("learning_rate = 0.001", ""))
    assert "train.learning_rate: missing" in refused(recipe)


def test_malformed_toml_names_file_and_line(recipe: Path) -> None:
    recipe.write_text(RECIPE + "\nbroken = = 1\n")
    message = refused(recipe)
    assert str(recipe) in message
    assert "line 13" in message


def test_a_binary_file_is_refused(recipe: Path) -> None:
    recipe.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused(recipe)


def test_a_wrong_value_in_one_of_several_domains_is_found(recipe: Path) -> None:
    message = refused(recipe, 'domains.a.env="x:Y"', "domains.b.env=json", 'domains.c.env="x:Y"')
    assert "domains.b.env: expected `package.module:name` (seen: 'json')" in message


def test_a_setting_without_a_value_is_refused(recipe: Path) -> None:
    assert "expected key=value" in refused(recipe, "rollout.group_size")


@pytest.mark.parametrize(
    ("key", "part"),
    [('"A.B"', "A.B"), ("'A=B'", "A=B"), (r'"A\"B"', 'A"B'), ('"A', '"A'), ("A B", "A B")],
)
def test_a_quoted_part_of_the_key_of_a_setting_is_one_part(recipe: Path, key: str, part: str) -> None:
    layered = load_table("recipes", str(recipe), settings=(f"domains.a.options. {key} .x=1=2",))
    assert layered.table["domains"]["a"]["options"] == {part: {"x": "1=2"}}


def test_a_setting_below_a_plain_value_is_refused(recipe: Path) -> None:
    assert "not a table" in refused(recipe, "name.first=x")


def test_a_model_needs_exactly_one_source(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("[model.tiny]", "[model]"))
    assert "either `path`" in refused(recipe)


def test_a_directory_in_place_of_its_recipe_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(ConfigError, match=rf"it is a directory: did you mean '{tmp_path}/recipe.toml'"):
        find_toml("recipes", str(tmp_path))


def test_the_error_for_an_unknown_recipe_suggests_the_nearest_name(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'quickstart'"):
        find_toml("recipes", "quickstrat")


def test_a_path_that_is_not_there_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'nowhere/x\.toml'"):
        find_toml("recipes", "nowhere/x.toml")


def test_a_users_own_site_wins_and_may_extend_the_shipped_one(home: Path) -> None:
    own = home.parent / "config" / "hpcrl" / "sites"
    own.mkdir(parents=True)
    (own / "perlmutter.toml").write_text('extends = "perlmutter"\naccount = "m1234"\n')
    site = load_site("perlmutter")
    assert (site.account, site.name) == ("m1234", "perlmutter")
    assert "perlmutter" in list_known_names("sites")


def test_a_setting_can_create_a_table(recipe: Path) -> None:
    layered = load_table("recipes", str(recipe), settings=("job.walltime_min=5",))
    assert layered.table["job"] == {"walltime_min": 5}


DEEP = {
    "lists": "x = " + "[" * 2000 + "]" * 2000,
    "tables": f"[{'.'.join('a' * 2000)}]",
    "inline": "x = " + "{a = " * 2000,
}
DEEP_KEYS = {
    "bare": ".".join(["a-1"] * 65),
    "quoted": ".".join(['"a b"'] * 65),
    "empty": ".".join(['""', "''"] * 33),
    "mixed": " .\t".join(["a", r'"a\" . b"', "'a \".\\'"] * 22),
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_a_file_that_is_nested_too_deep_is_refused(recipe: Path, text: str) -> None:
    recipe.write_text(text)
    assert "nested" in refused(recipe)


@pytest.mark.parametrize("form", ["{} = 1", "[{}]", "x = {{ {} = 1 }}"])
@pytest.mark.parametrize("key", DEEP_KEYS.values(), ids=DEEP_KEYS)
def test_a_key_that_is_nested_too_deep_is_refused_before_it_is_parsed(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, key: str, form: str
) -> None:
    # tomllib takes minutes for the parts that fit in a file
    monkeypatch.setattr(tomllib, "loads", lambda text: pytest.fail("it was parsed"))
    recipe.write_text(form.format(key))
    assert "nested" in refused(recipe)


LONG_NAME = ".".join("x" * 70)


@pytest.mark.parametrize(
    "text",
    [
        f"# see {LONG_NAME}",
        f'description = "it\\"s {LONG_NAME}"',
        f"description = 'see {LONG_NAME}'",
        f'description = """a "quoted" \\"""\n{LONG_NAME}""""\nseed = 1 # \'{LONG_NAME}\'',
        f"description = '''\nit's {LONG_NAME}'''",
    ],
)
def test_a_comment_or_a_text_with_many_dots_is_no_deep_key(recipe: Path, text: str) -> None:
    recipe.write_text(text + "\n" + RECIPE)
    load_recipe(str(recipe))
    recipe.write_text(f"{text}\n{RECIPE}\n{LONG_NAME} = 1")
    assert "nested" in refused(recipe)


@pytest.mark.parametrize("setting", ["x=" + "[" * 2000, ".".join("a" * 2000) + "=1"], ids=["value", "key"])
def test_a_setting_that_is_nested_too_deep_is_refused(recipe: Path, setting: str) -> None:
    assert "nested" in refused(recipe, setting)


def test_a_setting_must_be_text(recipe: Path) -> None:
    assert "not UTF-8 text" in refused(recipe, "description=" + os.fsdecode(b"\xff"))


def test_a_file_may_start_with_a_byte_order_mark(recipe: Path) -> None:
    recipe.write_bytes(b"\xef\xbb\xbf" + RECIPE.encode())
    assert load_recipe(str(recipe)).rollout.group_size == 4


@pytest.mark.parametrize("parent", ["no-such-recipe", "no-such-recipe.toml"])
def test_a_parent_that_is_not_found_is_named_with_the_file_that_extends_it(recipe: Path, parent: str) -> None:
    recipe.write_text(f'extends = "{parent}"')
    assert refused(recipe).startswith(f"{recipe}: extends: no recipe '{parent}'")


def child_of(recipe: Path, text: str) -> Path:
    child = recipe.with_name("child.toml")
    child.write_text(f'extends = "small.toml"\n{text}')
    return child


LAKE_OPTIONS = '[domains.lake.options]\nmap = "4x4"\nshow = "lake"\n[domains.lake.reward_options]\nscale = 2\n'


def test_options_of_the_parent_are_merged(recipe: Path) -> None:
    recipe.write_text(RECIPE + LAKE_OPTIONS)
    child = child_of(recipe, '[domains.lake.options]\nshow = "position"')
    assert load_recipe(str(child)).domains["lake"].options == {"map": "4x4", "show": "position"}


def test_options_of_the_parent_are_replaced_by_a_table_that_sets_env(recipe: Path) -> None:
    recipe.write_text(RECIPE + LAKE_OPTIONS)
    lake = load_recipe(str(child_of(recipe, '[domains.lake]\nenv = "my.own:Env"\noptions.size = 8'))).domains["lake"]
    assert (lake.env, lake.options, lake.reward_options) == ("my.own:Env", {"size": 8}, {"scale": 2})


@pytest.mark.parametrize("order", [1, -1])
def test_a_setting_of_env_drops_the_options_of_the_file_and_keeps_those_of_settings(recipe: Path, order: int) -> None:
    recipe.write_text(RECIPE + LAKE_OPTIONS)
    settings = ('domains.lake.env="my.own:Env"', "domains.lake.options.size=8")
    lake = load_recipe(str(recipe), settings=settings[::order]).domains["lake"]
    assert (lake.env, lake.options, lake.reward_options) == ("my.own:Env", {"size": 8}, {"scale": 2})


def test_reward_options_of_the_parent_are_replaced_by_a_table_that_sets_reward(recipe: Path) -> None:
    recipe.write_text(RECIPE + LAKE_OPTIONS)
    lake = load_recipe(str(child_of(recipe, '[domains.lake]\nreward = "my.own:reward"'))).domains["lake"]
    assert (lake.options, lake.reward_options) == ({"map": "4x4", "show": "lake"}, {})


def test_pipeline_options_of_the_parent_are_replaced_by_a_node_that_sets_function(recipe: Path) -> None:
    recipe.write_text(RECIPE + '[train.pipeline.shape]\nfunction = "a:b"\noptions.low = 1\n')
    child = child_of(recipe, '[train.pipeline.shape]\nfunction = "a:c"\noptions.high = 2')
    assert load_recipe(str(child)).train.pipeline["shape"].options == {"high": 2}


def test_a_model_path_replaces_the_tiny_model_of_the_parent(recipe: Path) -> None:
    model = load_recipe(str(child_of(recipe, '[model]\npath = "/models/small"'))).model
    assert (model.path, model.tiny) == ("/models/small", None)
    assert load_recipe(str(recipe), settings=("model.path=/models/small",)).model == model


def test_a_tiny_model_replaces_the_model_path_of_the_parent(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("[model.tiny]", '[model]\npath = "/models/small"'))
    model = load_recipe(str(child_of(recipe, "[model.tiny]\nhidden_size = 32"))).model
    assert (model.path, model.tiny and model.tiny.hidden_size) == (None, 32)
    assert load_recipe(str(recipe), settings=("model.tiny.hidden_size=32",)).model == model


MODEL = """[model]
path = "/models/large"
num_params = 32_000_000_000
config.hidden_size = 5120
chat_template_kwargs.enable_thinking = false
"""


SMALL_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}


def test_a_model_path_replaces_what_describes_the_model_of_the_parent(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("[model.tiny]", MODEL))
    fields = [f"config.{name} = {value}" for name, value in SMALL_CONFIG.items()]
    model = load_recipe(str(child_of(recipe, "\n".join(["[model]", 'path = "/models/small"', *fields])))).model
    assert (model.num_params, model.config) == (None, SMALL_CONFIG)
    assert model.chat_template_kwargs == {"enable_thinking": False}, "a copy of the same model keeps them"
    settings = (*(f"model.{field}" for field in fields), "model.path=/models/small")
    assert load_recipe(str(recipe), settings=settings).model == model


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hidden_size": 64, "num_hidden_layers": 2}, "config lacks num_attention_heads: copy the fields"),
        (SMALL_CONFIG | {"num_attention_heads": 0}, "config cannot be used"),
        (SMALL_CONFIG | {"hidden_size": "large"}, "config cannot be used"),
        (SMALL_CONFIG | {"model_type": 3}, "config cannot be used (model_type = 3 is not the name of a family)"),
        (SMALL_CONFIG | {"num_experts": "many"}, "config cannot be used (num_experts = 'many' is not a count)"),
        (
            SMALL_CONFIG | {"num_experts": 4, "num_experts_per_tok": 5},
            "config cannot be used (num_experts_per_tok = 5 is more than the 4 experts of a layer)",
        ),
    ],
)
@pytest.mark.parametrize("table", ["model", "judge.grader"])
def test_a_config_without_what_a_plan_needs_is_refused(
    recipe: Path, fields: dict[str, object], why: str, table: str
) -> None:
    settings = [f"{table}.config.{name}={value}" for name, value in fields.items()]
    assert f"{table}.{why}" in refused(recipe, f"{table}.path=/models/small", *settings)


EVALUATED = "[evaluation]\nevery_versions = 1\noptions.lake.size = 8\n"


@pytest.mark.parametrize("setting", ['domains.lake.env="my.own:Env"', 'domains.lake={env="my.own:Env"}'])
def test_a_domain_that_sets_env_drops_the_options_of_its_evaluation(recipe: Path, setting: str) -> None:
    recipe.write_text(RECIPE + EVALUATED)
    child = child_of(recipe, '[domains.lake]\nenv = "my.own:Env"')
    assert load_recipe(str(child)).evaluation.options == {}
    assert load_recipe(str(recipe), settings=(setting,)).evaluation.options == {}


def test_an_empty_table_of_options_replaces_that_of_the_parent(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("[model.tiny]", MODEL) + EVALUATED + LAKE_OPTIONS)
    loaded = load_recipe(
        str(
            child_of(
                recipe,
                "model = {config = {}, chat_template_kwargs = {}}\nevaluation.options.lake = {}\n"
                "[domains.lake]\noptions = {}\nreward_options = {}\n",
            )
        )
    )
    lake = loaded.domains["lake"]
    assert (loaded.model.config, loaded.model.chat_template_kwargs, loaded.evaluation.options) == ({}, {}, {"lake": {}})
    assert (lake.env, lake.options, lake.reward_options) == ("hpcrl.envs.gymnasium_text:FrozenLake", {}, {})


def test_a_model_path_and_a_tiny_model_in_one_file_are_refused(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("[model.tiny]", '[model]\npath = "/models/small"\n[model.tiny]'))
    assert "not both" in refused(recipe)


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_the_error_for_an_old_key_names_the_new_one(recipe: Path, old: str, new: str) -> None:
    assert f"{old!r} is now called {new!r}" in refused(recipe, f"{old}=1")
    table, name = new.split(".")
    assert name in getattr(load_recipe(str(recipe)), table).__struct_fields__


@pytest.mark.parametrize(
    ("key", "advice"),
    [("containers", "its list is now one word"), ("partitions.host.notes", "remove it")],
)
def test_the_error_for_a_removed_key_of_a_site_has_advice(key: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_site("local", settings=(f'{key}=["apptainer"]',))
    assert f"{key!r} was removed: {advice}" in str(caught.value)


def test_an_old_value_is_refused_with_its_new_name(recipe: Path) -> None:
    refusal = refused(recipe, "resources.decode.num_workers=0")
    assert 'resources.decode.num_workers = 0 is now written "auto": use the new value' in refusal


MANY_DIGITS = "9" * 5000


@pytest.mark.parametrize("number", [MANY_DIGITS, f"0x{MANY_DIGITS}", str(2**63)], ids=["digits", "hex", "64-bit"])
def test_an_integer_that_is_too_large_is_refused_in_a_file_and_in_a_setting(recipe: Path, number: str) -> None:
    assert "too l" in refused(recipe, f"seed={number}")
    recipe.write_text(f"seed = {number}\n{RECIPE}")
    message = refused(recipe)
    assert message.startswith(f"{recipe}: ")
    assert len(message) < 400


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_number_that_json_cannot_hold_is_refused(recipe: Path, number: str) -> None:
    setting = f"train.learning_rate={number}"
    assert refused(recipe, setting) == f"-s {setting}: give a finite number"
    recipe.write_text(f"{RECIPE}[domains.lake.options]\nsizes = [1.0, {number}]\n")
    assert f"domains.lake.options.sizes.1 = {number}: give a finite number" in refused(recipe)


@pytest.mark.parametrize("name", ["~nosuchuser/x.toml", "n" * 300, "n" * 300 + ".toml", "a\0b.toml"])
def test_a_name_that_no_file_can_have_is_unknown(home: Path, recipe: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no recipe"):
        load_recipe(name)
    with pytest.raises(ConfigError, match="no site"):
        load_site(name)
    recipe.write_text(f"extends = {json.dumps(name)}\n")
    assert "no recipe" in refused(recipe)


@pytest.mark.parametrize("name", ["~nosuchuser/m", "n" * 300])
def test_paths_in_a_recipe_may_name_what_no_file_can_have(home: Path, recipe: Path, name: str) -> None:
    settings = (f"model.chat_template={name}", "model.tiny.hidden_size=32", f"domains.lake.tasks={name}")
    with pytest.raises(ConfigError):
        check_request(load_request(str(recipe), site="local", settings=settings))
    with pytest.raises(ConfigError, match="is not a model directory"):
        check_request(load_request(str(recipe), site="local", settings=(f"model.path={name}",)))


@pytest.mark.parametrize(
    "text",
    ["[" + ".".join(["a"] * 50_000) + "]", ".".join(["a"] * 50_000) + " = 1", "x = {" + "'a' . " * 20_000 + "a = 1}"],
    ids=["header", "key", "inline"],
)
def test_a_dotted_key_of_many_parts_is_refused_before_it_is_parsed(recipe: Path, text: str) -> None:
    recipe.write_text(text)
    assert "nested" in refused(recipe)


def test_a_file_that_is_too_large_is_refused(recipe: Path) -> None:
    recipe.write_text(f"{RECIPE}\ndescription = '{'x' * MAX_BYTES}'")
    assert "larger than 256 KiB" in refused(recipe)


def test_a_long_text_with_dots_is_not_a_key(recipe: Path) -> None:
    text = "A sentence ends. " * 200 + "." * 200 + "/".join(["a.b"] * 100)
    recipe.write_text(f"description = '{text}'\n{RECIPE}")
    assert load_recipe(str(recipe)).description == text


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("train.steps=10", "-s train.steps=10: unknown key 'train.steps': did you mean 'num_steps'?"),
        ("train.num_steps=many", "-s train.num_steps=many: train.num_steps: expected integer, got text"),
        ("train.num_steps.x=1", "-s train.num_steps.x=1: 'num_steps' is 2, not a table"),
    ],
)
def test_the_error_for_a_setting_names_the_setting(recipe: Path, setting: str, expected: str) -> None:
    assert refused(recipe, setting).startswith(expected)


def test_all_misspelt_keys_are_named_at_once(recipe: Path) -> None:
    error = refused(recipe, "train.num_stepz=10", "rollout.group_sise=4")
    assert "-s train.num_stepz=10: unknown key 'train.num_stepz': did you mean 'num_steps'?" in error
    assert "-s rollout.group_sise=4: unknown key 'rollout.group_sise': did you mean 'group_size'?" in error


def test_the_error_for_a_site_setting_names_the_setting(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"^-s site\.accountx=x: unknown key 'accountx': did you mean 'account'\?"):
        load_site("local", settings=("accountx=x",))


@pytest.mark.parametrize("line", ["num_stepz = 3", "num_steps = 'many'"])
def test_the_error_for_a_key_of_the_parent_names_the_parent(recipe: Path, line: str) -> None:
    child = child_of(recipe, "seed = 1")
    recipe.write_text(RECIPE.replace("num_steps = 2", line))
    assert refused(child).startswith(f"{child.parent}/small.toml: ")


def test_a_file_that_extends_itself_by_its_name_is_refused(recipe: Path) -> None:
    recipe.with_name("selfx.toml").write_text('extends = "selfx"\n')
    assert "selfx.toml: extends = 'selfx' names this file itself" in refused(recipe.with_name("selfx.toml"))


def test_a_long_chain_of_extends_is_refused(recipe: Path) -> None:
    for number in range(1200):
        recipe.with_name(f"r{number}.toml").write_text(f'extends = "r{number + 1}.toml"\n')
    assert "more than 16 files extend each other" in refused(recipe.with_name("r0.toml"))


def test_a_recipe_without_domains_has_the_steps_of_its_warm_up() -> None:
    recipe = load_recipe("sft", settings=("warmup.epochs=3", "warmup.conversations_per_step=8"))
    assert recipe.warmup is not None
    filled = fill_warmup_steps(recipe, recipe.warmup, num_conversations=28)
    assert filled.warmup is not None
    assert (filled.warmup.steps, filled.train.num_steps) == (11, 11)  # the last step starts a fourth epoch
    given = load_recipe("sft", settings=("warmup.epochs=0", "train.num_steps=7"))
    assert given.warmup is not None
    assert fill_warmup_steps(given, given.warmup, num_conversations=28).warmup.steps == 7  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("warmup.steps=4",), "warmup.steps = 4 and warmup.epochs = 60 are two"),
        (("warmup.epochs=0",), "warmup has neither `steps` nor `epochs`"),
    ],
)
def test_a_warm_up_with_two_lengths_or_none_is_refused(settings: tuple[str, ...], message: str) -> None:
    recipe = load_recipe("sft", settings=settings)
    assert recipe.warmup is not None
    with pytest.raises(ConfigError, match=message):
        fill_warmup_steps(recipe, recipe.warmup, num_conversations=28)


def test_too_many_epochs_are_refused_with_the_steps_that_they_are() -> None:
    recipe = load_recipe("warmup", settings=("warmup.steps=0", "warmup.epochs=1000", "train.num_steps=40"))
    assert recipe.warmup is not None
    with pytest.raises(ConfigError, match=r"warmup\.epochs = 1000 are 125 steps, more than train\.num_steps = 40"):
        fill_warmup_steps(recipe, recipe.warmup, num_conversations=2)


def test_a_recipe_with_neither_domains_nor_a_warm_up_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('name = "r"\n[model.tiny]\n[rollout]\ngroup_size = 2\n[train]\nnum_steps = 1\n')
    with path.open("a") as file:
        file.write("groups_per_step = 1\nlearning_rate = 1e-3\n")
    with pytest.raises(ConfigError, match=r"\[domains\] is missing"):
        load_recipe(str(path))
    with pytest.raises(ConfigError, match=r"train\.num_steps = 0: give the number of steps"):
        load_recipe("quickstart", settings=("train.num_steps=0",))


def test_a_warm_up_from_neither_a_file_of_data_nor_a_campaign_is_refused(home: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"warmup\.path = 'rows\.json' is not a data file \(\.jsonl, .* there are none"
    ):
        load_request("sft", site="local", settings=("warmup.path=rows.json",))


def test_all_missing_keys_are_named_at_once(tmp_path):
    path = tmp_path / "gaps.toml"
    path.write_text('name = "gaps"\n[model.tiny]\n[domains.a]\n[rollout]\nmax_lag = 1\n[train]\nnum_steps = 3\n')
    with pytest.raises(ConfigError) as caught:
        make_recipe(load_table("recipes", str(path)))
    for key in ("domains.a.env (a string)", "rollout.group_size (an integer)", "train.learning_rate (a number)"):
        assert key in str(caught.value)


def test_a_key_that_another_table_has_is_found_there():
    with pytest.raises(ConfigError, match=r"did you mean 'rollout\.group_size'\?"):
        make_recipe(load_table("recipes", "quickstart", settings=["group_size=16"]))


def test_a_whole_number_may_be_written_with_an_exponent():
    recipe = make_recipe(load_table("recipes", "quickstart", settings=["model.num_params=8.2e9"]))
    assert recipe.model.num_params == 8_200_000_000
    with pytest.raises(ConfigError, match="expected integer"):
        make_recipe(load_table("recipes", "quickstart", settings=["rollout.group_size=8.5"]))


def test_a_recipe_beside_the_user_is_offered_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "guess.toml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean '\./guess\.toml'\?"):
        load_table("recipes", "guess")
