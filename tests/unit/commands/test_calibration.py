"""`hpcrl calibrate`: coefficients from a CSV file or a campaign, and clear refusals."""

import os

import msgspec
import pytest

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import EngineCounted, EpisodesCounted, StepFinished
from hpcrl.cli import main
from hpcrl.commands.calibration import fit_servers, read_campaign_points, read_serving_csv
from hpcrl.config.site import load_site
from hpcrl.errors import CampaignError, ConfigError
from hpcrl.hardware.cost_model import estimate_speed, estimate_step_s, read_model_shape
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS
from hpcrl.plan.records import read_plan
from hpcrl.system.files import publish_json
from tests.support.printed_json import load_checked

HEADER = "gpu,model,precision,tp,batch,prompt_tokens,reply_tokens,token_ms"
SHAPE = read_model_shape(MODEL_CONFIGS["Qwen/Qwen3-8B"])


def make_rows(gpu: str, factor: float = 1.0) -> list[str]:
    speed = estimate_speed(GPU_CATALOGUE[gpu], shape=SHAPE)
    return [
        f"{gpu},Qwen/Qwen3-8B,bf16,1,{batch},{prompt},200,{speed.decode_s(batch, num_kv=batch * prompt) * 1e3 * factor}"
        for batch in (1, 4, 16)
        for prompt in (100, 1000, 2000)
    ]


@pytest.fixture
def csv_file(tmp_path):
    path = tmp_path / "servers.csv"
    path.write_text("\n".join([HEADER, *make_rows("h100"), *make_rows("h200")]))
    return path


def test_the_command_prints_a_table_for_a_site_file_and_the_error(csv_file, capsys, tmp_path):
    assert main(["calibrate", str(csv_file), "--hold-out", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "[speed]" in printed
    assert "# h200 (held out, 9): median error" in printed
    site = tmp_path / "mine.toml"
    site.write_text(f'extends = "local"\nname = "mine"\n{printed}')
    loaded = load_site(str(site))
    assert loaded.find_gpu("h100").fit == loaded.speed != GPU_CATALOGUE["h100"].fit


def test_slower_servers_give_slower_coefficients(tmp_path):
    path = tmp_path / "slow.csv"
    path.write_text("\n".join([HEADER, *make_rows("h100", factor=2.0)]))
    fit = fit_servers(read_serving_csv(path)).fit
    slow = estimate_speed(GPU_CATALOGUE["h100"], shape=SHAPE, fit=fit)
    usual = estimate_speed(GPU_CATALOGUE["h100"], shape=SHAPE)
    assert slow.decode_s(8, num_kv=8000) == pytest.approx(2 * usual.decode_s(8, num_kv=8000), rel=0.15)


def test_json_has_the_coefficients_and_errors(csv_file, capsys):
    assert main(["calibrate", str(csv_file), "--json"]) == 0
    printed = load_checked(capsys.readouterr().out, "calibrate")
    assert printed["num_points"] == 18
    assert [one["gpu"] for one in printed["errors"]] == ["h100", "h200"]
    assert set(printed["fit"]) >= {"layer_s", "read", "train"}


def test_published_names_of_columns_gpus_and_models_are_understood(tmp_path):
    path = tmp_path / "published.csv"
    path.write_text(
        "system,model_path,isl,osl,batch_size,tp_size,silicon_tpot_ms\n"
        "h100_sxm,nvidia/Qwen3-32B-NVFP4,1024,1024,4,4,9.5\n"
    )
    (point,) = read_serving_csv(path).points
    assert (point.gpu.name, point.tp, point.batch, point.token_s) == ("h100", 4, 4, 0.0095)


def test_a_model_may_be_given_by_its_config(tmp_path):
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(MODEL_CONFIGS["Qwen/Qwen3-8B"]))
    path = tmp_path / "servers.csv"
    path.write_text(f"{HEADER}\nh100,config.json,bf16,1,4,100,100,8\n")
    assert read_serving_csv(path).points[0].shape == SHAPE


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "has no column 'gpu', 'model', 'batch'"),
        ('{"gpu": "h100"}\n', "seems to be JSON: give CSV"),
        ("gpu\tmodel\tbatch\n", "has its columns not separated by commas"),
        ("gpu,model,batch\nh100,m,1\n", "has no column 'prompt_tokens', 'reply_tokens', 'token_ms'"),
        (f"{HEADER}\n", "has no rows below its header"),
        (f"{HEADER}\n,Qwen/Qwen3-8B,bf16,1,4,100,100,8\n", "line 2: column 'gpu' is empty"),
        (f"{HEADER}\nh100,Qwen/Qwen3-8B,bf16,1,4,100,100,-8\n", "line 2: token_ms = '-8': give a number above 0"),
        (f"{HEADER}\nh100,Qwen/Qwen3-8B,bf16,1,four,100,100,8\n", "batch = 'four': give a number above 0"),
        (f"{HEADER}\nh100,Qwen/Qwen3-8B,bf16,1,4,100,nan,8\n", "reply_tokens = 'nan': give a number above 0"),
        (f"{HEADER}\nh100,Qwen/Qwen3-8B,fp3,1,4,100,100,8\n", "precision = 'fp3': it is one of bf16"),
        (f"{HEADER}\nh100,Qwen/Qwen3-8B,bf16,0.5,4,100,100,8\n", "tp = '0.5': give a whole number"),
        (f"{HEADER}\nh100,Qwen/Qwen3-8B,bf16,64,4,100,100,8\n", "tp = 64 and pp = 1: the model has 32 heads"),
        (f"{HEADER}\nh100,Qwen/Qwen3-8B,bf16,1,4,100,100,1e-9\n", "token_ms = '1e-9': no engine is so fast"),
        (f"{HEADER}\nh100,Qwen/Qwen3-8B,bf16,1,4,100,100,0.4\n", "line 2: token_ms = '0.4': no engine is so fast"),
        (f"{HEADER}\nh100,Qwen/Qwen3-8B,bf16\n", "batch = '': give a number above 0"),
    ],
)  # fmt: skip
def test_a_file_without_what_is_needed_is_refused_with_the_place(tmp_path, capsys, text, refusal):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert main(["calibrate", str(path)]) == 2
    assert refusal in capsys.readouterr().err


def test_gpus_and_models_that_are_not_known_are_counted_and_too_few_rows_refused(tmp_path):
    path = tmp_path / "odd.csv"
    path.write_text(
        f"{HEADER}\ntpu9,Qwen/Qwen3-8B,bf16,1,4,100,100,8\nh100,who/knows,bf16,1,4,100,100,8\n"
        "h100,Qwen/Qwen3-8B,bf16,1,4000,9000,100,8\n"
    )
    servers = read_serving_csv(path)
    assert servers.points == []
    with pytest.raises(ConfigError, match=r"0 measurements .* 8 are needed .*'tpu9' is in no catalogue"):
        fit_servers(servers)


def test_fp8_on_a_gpu_without_it_is_computed_in_bfloat16(tmp_path):
    path = tmp_path / "fp8.csv"
    path.write_text(f"{HEADER}\n" + "".join(f"{gpu},Qwen/Qwen3-8B,fp8,1,4,100,100,8\n" for gpu in ("a100-80", "h100")))
    without, with_fp8 = (point.shape for point in read_serving_csv(path).points)
    assert (without.weight_bytes, without.factor_bytes) == (1.0, 2.0)
    assert (with_fp8.weight_bytes, with_fp8.factor_bytes) == (1.0, None)


def test_coefficients_below_the_peaks_are_named(tmp_path, capsys):
    """Times a third of the usual ones: the GPU is faster than the one that is named."""
    usual = [
        (batch, estimate_speed(GPU_CATALOGUE["h100"], shape=SHAPE).decode_s(batch, num_kv=batch * 4000) * 300)
        for batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    ]
    path = tmp_path / "fast.csv"
    rows = [f"h100,Qwen/Qwen3-8B,bf16,1,{batch},3950,100,{ms:.4f}\n" for batch, ms in usual]
    path.write_text(f"{HEADER}\n" + "".join(rows))
    assert main(["calibrate", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "# read = 0." in printed
    assert "less than the peaks of the GPUs allow (0.7 at least)" in printed
    assert main(["calibrate", str(path), "--json"]) == 0
    assert "read" in load_checked(capsys.readouterr().out, "calibrate")["doubtful"]


def test_a_held_out_type_that_is_not_in_the_file_is_refused(csv_file):
    with pytest.raises(ConfigError, match=r"--hold-out b200: .*has measurements of h100, h200"):
        fit_servers(read_serving_csv(csv_file), held_out=["b200"])


@pytest.mark.parametrize("name", ["servers.csv", "servers"])
def test_a_pipe_is_refused(tmp_path, capsys, name):
    os.mkfifo(tmp_path / name)
    assert main(["calibrate", str(tmp_path / name)]) == 2
    assert f"{name} cannot be read (it is not a regular file)" in capsys.readouterr().err


def test_a_file_that_is_missing_is_refused(capsys):
    assert main(["calibrate", "nowhere.csv"]) == 2
    assert (
        "nowhere.csv cannot be read (No such file or directory): give the name of a campaign, or a CSV file"
        in capsys.readouterr().err
    )


@pytest.fixture
def campaign(make_campaign):
    """A campaign of simulated engines, with the events of an env worker."""
    made = make_campaign("measured", "engine.backend=sim", "engine.sim.gpu=h20", "resources.decode.gpus_per_worker=0")
    made.model.mkdir()
    (made.model / "config.json").write_bytes(msgspec.json.encode(MODEL_CONFIGS["Qwen/Qwen3-8B"]))
    emit_to(made, "env").emit(EpisodesCounted(done=100, turns=400, num_tokens=40_000))
    emit_to(made, "train").emit(StepFinished(step=1, length_mean=2400.0, num_tokens=100_000, step_s=3.0))
    return made


def emit_to(campaign, role: str) -> EventLog:
    campaign.events.mkdir(exist_ok=True)
    name = f"000-{role}-0"
    return EventLog(campaign.events / f"{name}.jsonl", job=0, role=role, worker=name, node="n")


def test_a_campaign_calibrates_by_its_engines(campaign):
    speed = estimate_speed(GPU_CATALOGUE["h20"], shape=SHAPE)
    log = emit_to(campaign, "decode")
    for running in (4.0, 8.0, 16.0) * 3:
        token_s = speed.decode_s(running, num_kv=running * 1500) * 1.5
        log.emit(EngineCounted(window_s=10.0, busy_share=1.0, running=running, num_tokens=int(running * 10 / token_s)))
    report = fit_servers(read_campaign_points(campaign))
    assert report.num_points == 9
    assert report.errors[0].gpu == "h20"
    assert report.errors[0].median_error < 0.1
    assert estimate_speed(GPU_CATALOGUE["h20"], shape=SHAPE, fit=report.fit).decode_s(
        8, num_kv=12_000
    ) > speed.decode_s(8, num_kv=12_000)


def read_one_point(make_campaign, *settings: str, num_nodes: int = 1):
    """Return the point of a campaign with vLLM on nodes of 4 GPUs."""
    host = ("gpu=h100", "gpus_per_node=4", "cores_per_node=32", "mem_gib_per_node=100")
    engines = ("engine.backend=vllm", "resources.decode.gpus_per_worker=4", "resources.train.gpus_per_worker=0")
    made = make_campaign("staged", *(f"site.partitions.host.{one}" for one in host), *engines, *settings)
    plan = read_plan(made)
    roles = [msgspec.structs.replace(one, nodes_per_engine=num_nodes) for one in plan.roles]
    publish_json(made.plan, msgspec.to_builtins(msgspec.structs.replace(plan, roles=roles)))
    made.model.mkdir()
    (made.model / "config.json").write_bytes(msgspec.json.encode(MODEL_CONFIGS["Qwen/Qwen3-8B"]))
    emit_to(made, "env").emit(EpisodesCounted(done=100, turns=400, num_tokens=40_000))
    emit_to(made, "decode").emit(EngineCounted(window_s=10.0, busy_share=1.0, running=8.0, num_tokens=2_000))
    (point,) = read_campaign_points(made).points
    return point


def test_an_engine_of_a_campaign_has_its_stages_and_the_gpus_of_all_its_nodes(make_campaign):
    point = read_one_point(make_campaign, "engine.pipeline_parallel=2", num_nodes=2)
    assert (point.tp, point.pp) == (4, 2)


def test_a_copy_of_the_model_in_an_engine_has_its_share_of_the_requests(make_campaign):
    point = read_one_point(make_campaign, "engine.data_parallel=2")
    assert (point.tp, point.num_copies, point.batch) == (2, 2, 4.0)


def test_an_engine_of_a_campaign_has_weights_of_the_bytes_that_the_recipe_asks_for(make_campaign):
    assert (
        read_one_point(make_campaign, "engine.quantization=fp8", "engine.pipeline_parallel=2").shape.weight_bytes == 1
    )


def test_an_engine_that_is_faster_than_its_gpus_can_be_is_left_out(campaign):
    log = emit_to(campaign, "decode")
    for num_tokens in (2_000, 2_000_000):
        log.emit(EngineCounted(window_s=10.0, busy_share=1.0, running=8.0, num_tokens=num_tokens))
    servers = read_campaign_points(campaign)
    assert len(servers.points) == 1
    assert servers.left_out == {"an engine that is faster than its GPUs can be": 1}


def read_steps(make_campaign, *seconds: float, num_ranks: int = 1):
    """Return what is read of a campaign whose training steps, on ranks of one node, took these times."""
    host = ("gpu=h100", f"gpus_per_node={num_ranks + 1}", "cores_per_node=16", "mem_gib_per_node=100")
    gpus = ("resources.train.gpus_per_worker=1", "resources.decode.gpus_per_worker=1")
    ranks = f"resources.train.num_workers={num_ranks}"
    made = make_campaign("trained", *(f"site.partitions.host.{one}" for one in host), *gpus, ranks)
    made.model.mkdir()
    (made.model / "config.json").write_bytes(msgspec.json.encode(MODEL_CONFIGS["Qwen/Qwen3-8B"]))
    log = emit_to(made, "train")
    for step_s in seconds:
        log.emit(StepFinished(step=1, length_mean=2400.0, num_tokens=100_000, step_s=step_s))
    return read_campaign_points(made)


def test_training_steps_that_no_gpu_takes_are_left_out(make_campaign):
    servers = read_steps(make_campaign, 30.0, 0.03, 30_000.0)
    assert [one.step_s for one in servers.steps] == [30.0]
    assert servers.left_out == {
        "a training step that is faster than its GPUs can be": 1,
        "a training step of a model that is too small, or on CPUs": 1,
    }


def test_what_ranks_send_is_counted_beside_the_efficiency_of_training(make_campaign):
    """Gradients of 8B in float32 take 0.073 s over NVLink, and the last of two micro-batches hides a part."""
    servers = read_steps(make_campaign, 30.0, num_ranks=2)
    (step,) = servers.steps
    ((sum_s, num_passes),) = step.work.traffic.beside
    assert (sum_s, num_passes) == (pytest.approx(8.19e9 * 4 * 2 / 2 / 450e9, rel=0.01), 0.5)
    fit = fit_servers(servers).fit
    gpu = msgspec.structs.replace(step.gpu, fit=fit)
    assert estimate_step_s(gpu, shape=step.shape, work=step.work) == pytest.approx(30.0)


def test_a_training_step_whose_links_alone_take_as_long_is_left_out(make_campaign, monkeypatch):
    slow = msgspec.structs.replace(GPU_CATALOGUE["h100"], link_gb_per_s=2.0)
    monkeypatch.setitem(GPU_CATALOGUE, "h100", slow)
    servers = read_steps(make_campaign, 40.0, 20.0, num_ranks=2)
    assert [one.step_s for one in servers.steps] == [40.0]
    assert servers.left_out == {"a training step whose links alone take as long (network.gbit_per_gpu)": 1}


def test_idle_engines_are_left_out(campaign):
    emit_to(campaign, "decode").emit(EngineCounted(window_s=10.0, running=0.1, num_tokens=3))
    with pytest.raises(CampaignError, match="no events of busy engines"):
        read_campaign_points(campaign)


def test_a_campaign_without_a_model_is_refused(make_campaign):
    with pytest.raises(CampaignError, match="cannot be read"):
        read_campaign_points(make_campaign("cpu"))
