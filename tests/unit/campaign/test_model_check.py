"""What would refuse a model in the job is refused on the login node, in one line and without torch."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.campaign import submission_checks
from hpcrl.campaign.model_check import check_model
from hpcrl.campaign.request import CampaignRequest, load_request
from hpcrl.campaign.submission import submit
from hpcrl.campaign.submission_checks import check_plan, check_request, run_model_check
from hpcrl.errors import ConfigError, HpcrlError, PlanError
from hpcrl.models.weight_headers import INDEX_FILE, check_weight_names
from hpcrl.testing.model_templates import FAMILIES, save_family
from tests.support.families import make_family_model

NEVER_ENDS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

OPENS_LATER_ANSWERS_DIFFERENTLY = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ 'Again: ' if messages|length > 2 else '' }}{% endif %}"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_family(tmp_path / "model", FAMILIES["Qwen3"])


def request_of(model: Path, *settings: str) -> CampaignRequest:
    return load_request("quickstart", site="local", settings=(f'model.path="{model}"', *settings))


def test_a_variable_that_the_template_reads_may_be_set(model: Path, home: Path) -> None:
    check_model(request_of(model, "model.chat_template_kwargs.enable_thinking=false").recipe)


def test_compressed_kv_needs_vllm_also_in_a_model_too_small_for_a_plan(model: Path, home: Path) -> None:
    change_config(model, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32)
    with pytest.raises(PlanError, match=r'have 96 and 32 numbers a head: set engine\.backend = "vllm"'):
        check_model(request_of(model).recipe)
    check_model(request_of(model, "engine.backend=vllm").recipe)


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", FAMILIES)
def test_current_families_are_accepted(tmp_path: Path, home: Path, name: str) -> None:
    check_model(request_of(save_family(tmp_path / "m", FAMILIES[name])).recipe)


@pytest.mark.parametrize(
    ("changes", "settings", "problem"),
    [
        ({"architectures": ["BertForMaskedLM"]}, (), "BertForMaskedLM, which generates no text"),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"},
            (),
            "'llava'.* language model alone",
        ),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, (), "model_type = 'foo', which transformers"),
        ({"quantization_config": {"quant_method": "fp8"}}, (), r"quantised weights .*: fp8\)"),
        ({"max_position_embeddings": None}, (), r"set engine\.max_model_len"),
        ({"model_type": "gemma"}, ('train.trainer="megatron"',), "gemma"),
        ({}, ('train.trainer="megatron"',), "lacks the field"),
        ({}, ('model.chat_template="none.jinja"',), r"none\.jinja"),
        ({}, ("model.chat_template_kwargs.enable_thinkin=false",), "never reads it: did you mean 'enable_thinking'"),
        ({}, ("model.chat_template_kwargs.add_generation_prompt=false",), "each conversation has its own"),
        ({"max_position_embeddings": 4096}, ("engine.max_model_len=8192",), r"max_model_len = 8192: .* 4096 tokens"),
        ({"max_position_embeddings": 4096}, ("rollout.max_new_tokens=5000",), r"max_new_tokens = 5000: .* 4096 tokens"),
        (
            {},
            ("engine.max_model_len=256", "rollout.max_new_tokens=300"),
            r"max_new_tokens = 300: .* 256 tokens",
        ),
    ],
)
def test_a_model_that_a_job_would_refuse_is_refused(
    model: Path, home: Path, changes: Any, settings: tuple[str, ...], problem: str
) -> None:
    change_config(model, **changes)
    with pytest.raises(HpcrlError, match=problem) as refused:
        check_model(request_of(model, *settings).recipe)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("[]", "config.json is not a model's configuration: it has a JSON list, no object"),
        ("{", "config.json is not a model's configuration: "),
        ("[" * 3000, "config.json is not a model's configuration: config.json is nested too deep"),
        (None, "is not a model directory: it has no config.json"),
    ],
)
@pytest.mark.parametrize("setting", ["model.path", "teacher.path", "judge.a.path"])
def test_a_directory_without_a_model_is_refused_in_one_line(
    tmp_path: Path, home: Path, setting: str, config: str | None, problem: str
) -> None:
    folder = save_family(tmp_path / "bad", FAMILIES["Qwen3"])
    if config is None:
        (folder / "config.json").unlink()
        (folder / "config.json").mkdir()
    else:
        (folder / "config.json").write_text(config)
    settings = (f'{setting}="{folder}"', 'train.kl="k1"', 'train.kl_in="reward"')  # a teacher needs these
    request = load_request("quickstart", site="local", settings=settings)
    with pytest.raises(ConfigError, match=rf"^{setting}.*{problem}"):
        check_model(request.recipe)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": None},
        {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    ],
    ids=["unknown", "stretched"],
)
def test_a_context_may_be_set_where_the_model_leaves_it_open(model: Path, home: Path, changes: Any) -> None:
    change_config(model, **changes)
    check_model(request_of(model, "engine.max_model_len=8192").recipe)


def test_parallelism_that_does_not_divide_the_model_is_refused(model: Path, home: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    change_config(model, **sizes, num_key_value_heads=2)
    check_model(request_of(model, 'train.trainer="megatron"').recipe)
    parallel = ("train.pipeline_parallel=4", "resources.train.num_workers=4")
    with pytest.raises(HpcrlError, match=r"train\.pipeline_parallel = 4"):
        check_model(request_of(model, 'train.trainer="megatron"', *parallel).recipe)
    experts = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    change_config(model, **experts)
    parallel = ("train.expert_parallel=2", "resources.train.num_workers=2")
    with pytest.raises(HpcrlError, match=r"train\.expert_parallel = 2 does not divide the model's 5 experts"):
        check_model(request_of(model, 'train.trainer="megatron"', *parallel).recipe)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: file.unlink(), "model-1.safetensors cannot be read: No such file"),
        (lambda file: file.write_bytes(file.read_bytes()[:-5]), r"has \d+ bytes, and \d+ by its header"),
        (lambda file: file.write_bytes(b"version https://git-lfs"), "has 23 bytes and no header"),
        (lambda file: (file.parent / INDEX_FILE).write_text("{"), f"{INDEX_FILE} cannot be read"),
    ],
)
def test_weights_that_are_absent_or_cut_are_refused_before_the_queue(
    model: Path, home: Path, change: Callable[[Path], object], problem: str
) -> None:
    file = model / "model-1.safetensors"
    write_tensor(file)
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file.name}}))
    check_model(request_of(model).recipe)
    change(file)
    with pytest.raises(ConfigError, match=problem) as refused:
        check_model(request_of(model).recipe)
    assert "download" in str(refused.value)


def test_pickled_weights_are_refused(model: Path, home: Path) -> None:
    (model / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model-00001-of-00002\.bin alone.*save_pretrained"):
        check_model(request_of(model).recipe)


@pytest.mark.parametrize(
    ("architecture", "settings", "problem"),
    [
        ("Qwen3ForSequenceClassification", (), 'set judge.grader.engine.backend = "vllm", which serves reward models'),
        ("Qwen3ForCausalLM", ("judge.grader.chat_template_kwargs.a=1",), "judge.grader.chat_template_kwargs.a"),
        (None, (), "judge.grader.path = .* is not a model directory"),
    ],
)
def test_a_judge_that_a_job_could_not_serve_is_refused(
    tmp_path: Path, home: Path, architecture: str | None, settings: tuple[str, ...], problem: str
) -> None:
    judge = save_family(tmp_path / "judge", FAMILIES["Qwen3"])
    if architecture is None:
        (judge / "config.json").unlink()
    else:
        change_config(judge, architectures=[architecture])
    request = load_request("quickstart", site="local", settings=(f'judge.grader.path="{judge}"', *settings))
    with pytest.raises(ConfigError, match=problem):
        check_request(request)


def write_tensor(file: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


TEACHES = ('train.kl="k1"', 'train.kl_in="reward"')
SERVED_BY_VLLM = 'judge.grader.engine.backend="vllm"'
DUMMY = 'judge.grader.engine.vllm_args=["--load-format=dummy"]'


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        ("model.path", ()),
        ("model.path", ('engine.backend="sim"',)),
        ("judge.grader.path", ()),
        ("judge.grader.path", (SERVED_BY_VLLM,)),
        ("teacher.path", TEACHES),
    ],
)
def test_a_directory_without_weights_is_planned_and_not_submitted(
    model: Path, tiny_model_dir: Path, tmp_path: Path, home: Path, setting: str, more: tuple[str, ...]
) -> None:
    folder = model
    if setting == "teacher.path":  # it has the tokens of the policy
        folder = tmp_path / "teacher"
        shutil.copytree(tiny_model_dir, folder)
        (folder / "model.safetensors").unlink()
    request = load_request("quickstart", site="local", settings=(f'{setting}="{folder}"', *more))
    check_plan(request)
    with pytest.raises(ConfigError, match=rf"^{setting} = .* has no weights .*`hpcrl stage quickstart --site local"):
        check_request(request)
    write_tensor(folder / "model.safetensors")
    check_request(request)


@pytest.mark.parametrize("more", ['judge.grader.engine.backend="sim"', f"{SERVED_BY_VLLM} {DUMMY}"])
def test_a_judge_whose_engine_reads_no_weights_needs_none(model: Path, home: Path, more: str) -> None:
    settings = (f'judge.grader.path="{model}"', *more.split())
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    check_request(load_request("quickstart", site="local", settings=settings))


@pytest.mark.parametrize("backend", ["embedded", "vllm"])
def test_weights_of_a_judge_that_are_cut_are_refused(model: Path, home: Path, backend: str) -> None:
    settings = (f'judge.grader.path="{model}"', f'judge.grader.engine.backend="{backend}"')
    recipe, file = load_request("quickstart", site="local", settings=settings).recipe, model / "model.safetensors"
    write_tensor(file)
    check_model(recipe)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"^judge\.grader\.path = .*has \d+ bytes, and \d+ by its header: download"):
        check_model(recipe)


def test_vllm_reads_pickled_weights_of_a_judge(model: Path, home: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"pickled")
    settings = [f'judge.grader.path="{model}"']
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin alone"):
        check_model(load_request("quickstart", site="local", settings=tuple(settings)).recipe)
    check_request(load_request("quickstart", site="local", settings=(*settings, SERVED_BY_VLLM)))


def test_a_judge_on_another_machine_is_planned_with_a_note(tmp_path: Path, home: Path) -> None:
    settings = (f'judge.grader.path="{tmp_path / "elsewhere"}"',)
    note = run_model_check(load_request("quickstart", site="local", settings=settings))
    assert "judge.grader.path = " in note
    assert "is not on this machine" in note


def test_a_reward_model_may_be_a_judge_of_vllm(tmp_path: Path, home: Path) -> None:
    judge = save_family(tmp_path / "judge", FAMILIES["Qwen3"])
    change_config(judge, architectures=["Qwen3ForSequenceClassification"])
    settings = (f'judge.grader.path="{judge}"', 'judge.grader.engine.backend="vllm"')
    assert run_model_check(load_request("quickstart", site="local", settings=settings)) == ""


def test_submission_refuses_a_bad_template_and_leaves_no_campaign(model: Path, home: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception('not today') }}")
    with pytest.raises(ConfigError, match=r"recipe 'quickstart': .*not today"):
        submit(request_of(model))
    assert not list(home.glob("campaigns/*"))


def test_a_template_that_never_ends_is_refused(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission_checks, "MODEL_CHECK_TIMEOUT_S", 1)
    (model / "chat_template.jinja").write_text(NEVER_ENDS)
    with pytest.raises(ConfigError, match=r"set model\.chat_template to one that ends"):
        run_model_check(request_of(model))


def test_a_template_that_takes_all_memory_is_refused(model: Path, home: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ '{:>100000000000}'.format(1)|length }}")
    with pytest.raises(ConfigError, match="refuses this conversation"):
        run_model_check(request_of(model))


def test_a_model_on_another_machine_is_planned_with_a_note(tmp_path: Path, home: Path) -> None:
    assert "is not on this machine" in run_model_check(request_of(tmp_path / "elsewhere"))


def test_a_template_file_beside_the_recipe_is_found(model: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(FAMILIES["Qwen3"].template)
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'extends = "quickstart"\nname = "mine"\n[model]\npath = "{model}"\nchat_template = "chat.jinja"\n'
    )
    loaded = load_request(str(recipe), site="local").recipe
    assert loaded.model.chat_template == str(tmp_path / "chat.jinja")
    check_model(loaded)


def test_the_check_imports_no_torch(model: Path, home: Path) -> None:
    modules = "hpcrl.models.chat_layout, hpcrl.models.model_config, hpcrl.trainers.megatron.weight_names"
    heavy = (
        f"import sys, {modules}; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_template_without_a_layout_of_turns_is_refused_only_if_an_environment_needs_one(
    tmp_path: Path, home: Path
) -> None:
    model = save_family(tmp_path / "model", FAMILIES["Qwen2.5"])
    (model / "chat_template.jinja").write_text(OPENS_LATER_ANSWERS_DIFFERENTLY)
    with pytest.raises(ConfigError, match="opens the first answer by"):
        check_model(request_of(model).recipe)
    check_model(load_request("agent", site="local", settings=(f'model.path="{model}"',)).recipe)
    native = 'domains.sums={env = "hpcrl.envs.arithmetic:Arithmetic"}'
    both = load_request("agent", site="local", settings=(f'model.path="{model}"', native)).recipe
    with pytest.raises(ConfigError, match="opens the first answer by"):
        check_model(both)


def test_the_size_of_a_teacher_is_that_of_its_config(tmp_path: Path) -> None:
    config = {"hidden_size": 5120, "num_hidden_layers": 128, "num_attention_heads": 64, "num_key_value_heads": 8}
    config |= {"head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936}  # twice the layers of Qwen3-32B
    (tmp_path / "config.json").write_text(json.dumps(config))
    teacher = ("train.kl=k1", "train.kl_in=reward", "train.kl_coef=1.0", f'teacher.path="{tmp_path}"')
    with pytest.raises(
        PlanError, match=r"a train worker needs 119 GiB \(119 for 64\.0 billion weights of the model of teacher\.path"
    ):
        load_request("quickstart", site="lab", settings=teacher)


def test_a_plan_reads_the_size_of_the_model_from_its_config_json(tmp_path: Path) -> None:
    config = {
        **{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=r"gradients and optimizer of 8\.2 billion weights"):
        load_request("quickstart", site="lab-hetstep", settings=(f'model.path="{tmp_path}"',))


SIZES = {
    **{"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"vocab_size": 10, "model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1},
}
EXPERTS = [f"model.layers.{layer}.mlp.experts.{index}.up_proj.weight" for layer in (0, 1) for index in (0, 1)]


def write_weights(model: Path, *, head: bytes | None) -> None:
    """Write the tensors that matter to the check of names, and none of the others."""
    contents = {name: bytes(4) for name in EXPERTS} | {"model.embed_tokens.weight": bytes(160)}
    contents |= {} if head is None else {"lm_head.weight": head}
    header, end = {}, 0
    for name, data in contents.items():
        shape = [len(data) // 16, 4] if len(data) > 4 else [1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(contents.values()))


@pytest.mark.parametrize(
    ("changes", "head", "problem"),
    [
        ({"num_hidden_layers": 3}, bytes(160), "num_hidden_layers = 3, and its files have 2 layers"),
        ({"num_hidden_layers": 1}, bytes(160), "num_hidden_layers = 1, and its files have 2 layers"),
        ({"vocab_size": 11}, bytes(160), "vocab_size = 11, and its files have 10 words"),
        ({"num_experts": 3}, bytes(160), "3 experts in a layer, and its files have 2"),
        ({"num_experts_per_tok": 3}, bytes(160), "num_experts_per_tok = 3 is more than the 2 experts"),
        ({}, None, "tie_word_embeddings = false, and its files have no lm_head.weight"),
        ({"tie_word_embeddings": True}, bytes(159) + b"1", "has? .*a lm_head.weight that differs from"),
    ],
)
def test_files_of_another_model_than_its_config_are_refused(
    model: Path, home: Path, changes: dict[str, Any], head: bytes | None, problem: str
) -> None:
    change_config(model, **SIZES)
    write_weights(model, head=bytes(160))
    check_model(request_of(model).recipe)
    change_config(model, **SIZES, tie_word_embeddings=True)
    check_model(request_of(model).recipe)
    change_config(model, tie_word_embeddings=False)
    change_config(model, **changes)
    write_weights(model, head=head)
    with pytest.raises(ConfigError, match=problem):
        check_model(request_of(model).recipe)


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("qwen3", {"hidden_size": 96}, r"hidden_size = 96, and model\.embed_tokens\.weight in its files has 64"),
        ("qwen3", {"head_dim": 16}, r"num_attention_heads x head_dim = 64, and .*q_proj\.weight in its files has 128"),
        ("llama", {"num_key_value_heads": 4}, r"num_key_value_heads x head_dim = 128, and .*k_proj.* has 64"),
        ("qwen2", {"intermediate_size": 48}, r"intermediate_size = 48, and .*mlp\.down_proj\.weight in .* has 64"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 16},
            r"moe_intermediate_size = 16, and .*experts\.0\.down_proj.* has 32",
        ),
        ("mixtral", {"intermediate_size": 16}, r"with intermediate_size = 16, and .*experts\.0\.w2\.weight .* has 64"),
        ("glm4_moe", {"intermediate_size": 48}, r"with intermediate_size = 48, and .*\.0\.mlp\.down_proj.* has 64"),
        (
            "deepseek_v3",
            {"qk_nope_head_dim": 16},
            r"\(qk_nope_head_dim \+ .*\) = 320, and .*q_b_proj\.weight .* has 384",
        ),
    ],
)
def test_files_with_other_sizes_than_their_config_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], problem: str
) -> None:
    make_family_model(tmp_path, family)
    check_weight_names("model.path", tmp_path, json.loads((tmp_path / "config.json").read_text()))
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        check_weight_names("model.path", tmp_path, json.loads((tmp_path / "config.json").read_text()))


def test_shards_without_their_index_are_refused(model: Path, home: Path) -> None:
    (model / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"and no {INDEX_FILE}"):
        check_model(request_of(model).recipe)
