"""The printed commands that ask a Slurm, as printed: each session in one shell, in a fresh home, on its own lab."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa  # noqa: TID251
import pyarrow.parquet as pq  # noqa: TID251
import pytest
from safetensors.numpy import save_file

from hpcrl.testing.model_templates import FAMILIES, save_family
from tests.support.campaigns import end_campaigns
from tests.support.doc_blocks import TUTORIAL, find_files
from tests.support.hub_server import HubProcess
from tests.support.lab_tools import short_dir
from tests.support.printed_commands import LAB_SESSIONS, ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

PLACES = {"/tmp/hpcrl-lab-0": "$LABS/first", "/tmp/second": "$LABS/second"}
"""What stands for a directory of a line that may be in use here."""
SMALL = {"num_hidden_layers": 1, "vocab_size": 1000}
"""A model whose checkpoints fit on the disk of this machine."""
RECIPE = 'name = "mine"\nextends = "quickstart"\n'


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    """A hub with what the lines name."""
    hub = HubProcess(tmp_path / "hub")
    for recipe in (
        (ROOT / "recipes" / "qwen3-8b-math.toml").read_text(),
        find_files(TUTORIAL / "gpu-node.md")["my-first.toml"],
    ):
        model = tomllib.loads(recipe)["model"]
        folder = save_family(hub.find_model(model["path"]), FAMILIES["Qwen3"])
        config = json.loads((folder / "config.json").read_text())
        config |= model["config"] | SMALL
        (folder / "config.json").write_text(json.dumps(config))
        table = np.zeros((config["vocab_size"], config["hidden_size"]), np.float16)
        names = ("model.embed_tokens", "lm_head", "model.layers.0.input_layernorm")  # by which submit compares models
        save_file({f"{name}.weight": table for name in names}, folder / "model.safetensors")
    rows = hub.root / "datasets" / "openai" / "gsm8k" / "main"
    rows.mkdir(parents=True)
    for part in ("train", "test"):
        columns = {"question": [f"{n} + {n}?" for n in range(300)], "answer": [f"#### {2 * n}" for n in range(300)]}
        pq.write_table(pa.table(columns), rows / f"{part}-00000-of-00001.parquet")
    hub.start()
    yield hub
    hub.end()


@pytest.fixture
def work(tmp_path: Path, home: Path) -> Path:
    """Make the files that lines name; return the directory where they are run."""
    work = tmp_path / "work"
    (work / ".venv" / "bin").mkdir(parents=True)
    (work / ".venv" / "bin" / "hpcrl").symlink_to(Path(sys.executable).parent / "hpcrl")
    (work / "recipes").symlink_to(ROOT / "recipes")
    (work / "my").mkdir()
    (work / "my" / "recipe.toml").write_text(RECIPE)
    (work / "my-first.toml").write_text(find_files(TUTORIAL / "gpu-node.md")["my-first.toml"])
    own = tmp_path / "config" / "hpcrl"
    for folder in ("recipes", "sites"):
        (own / folder).mkdir(parents=True)
    (own / "recipes" / "RECIPE.toml").write_text(RECIPE)
    (own / "sites" / "my-perlmutter.toml").write_text(find_files(TUTORIAL / "supercomputer.md")["my-perlmutter.toml"])
    return work


@pytest.mark.parametrize("session", LAB_SESSIONS)
def test_a_session_runs_as_printed(session: str, needs_slurm: None, hub: HubProcess, work: Path, home: Path) -> None:
    script = "\n".join(("set -eux -o pipefail", *LAB_SESSIONS[session]))
    for place, stand_in in PLACES.items():
        script = script.replace(place, stand_in)
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "HF_HUB_OFFLINE", "HF_TOKEN", "SLURM_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in proxies}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment |= {"HF_ENDPOINT": hub.address, "NO_PROXY": "", "SCRATCH": str(work.parent / "scratch")}
    (work.parent / "scratch").mkdir()
    with short_dir() as labs:
        environment |= {"LABS": str(labs), "HPCRL_LAB": str(labs / "first")}
        try:
            command = ["bash", "-c", script]
            done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            assert "Traceback" not in done.stderr
        finally:
            for lab in ("first", "second"):
                subprocess.run(["hpcrl", "lab", "down"], env=environment | {"HPCRL_LAB": str(labs / lab)}, check=True)
            end_campaigns(home)
