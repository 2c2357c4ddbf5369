"""The variables of the shell that jobs get."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from hpcrl.campaign import submission
from hpcrl.campaign.request import CampaignRequest, load_request
from hpcrl.campaign.submission_checks import check_plan, check_request
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import ConfigError
from hpcrl.slurm.submit import USUAL_EXPORTS, make_job_environment, select_exports
from hpcrl.system.files import make_private_dir
from tests.support.plans import make_site

SHELL = {
    "PATH": "/bin",
    "LMOD_DIR": "/l",
    "BASH_FUNC_module%%": "() { :; }",
    "HF_HOME": "/hf",
    "HF_TOKEN": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "VLLM_API_KEY": "secret",
    "MY_A": "1",
    "MY_TOKEN": "secret",
}
USUAL = {name: SHELL[name] for name in ("PATH", "LMOD_DIR", "BASH_FUNC_module%%", "HF_HOME")}
RECIPE = """
name = "keyed"
extends = "quickstart"
[metrics]
wandb = "{wandb}"
[notices]
webhook = "$CHAT_ADDRESS"
[domains.lake]
reward = "hpcrl.envs.judge:judge"
[domains.lake.reward_options]
url = "https://judge.example/v1"
model = "m"
key_variable = "JUDGE_KEY"
rubric = "Is it worth ${{PRICE_OF_IT}}?"
"""
SECRETS = {
    "JUDGE_KEY": "secret-judge",
    "CHAT_ADDRESS": "https://chat.example/secret-chat",
    "PRICE_OF_IT": "secret-price",
    "WANDB_API_KEY": "secret-wandb",
    "FOO_API_KEY": "secret-foo",
}
NAMED = set(SECRETS) - {"FOO_API_KEY"}


def choose(*, named: Iterable[str] = (), allowed: Iterable[str] = ()) -> dict[str, str]:
    return select_exports(SHELL, named=named, allowed=allowed)


def test_jobs_get_what_modules_and_libraries_need_and_no_secret() -> None:
    assert choose() == USUAL


def test_jobs_get_what_the_site_allows_and_everything_only_if_it_allows_that() -> None:
    assert choose(allowed=["MY_A"]) == USUAL | {"MY_A": "1"}
    assert choose(allowed=["MY_*"]) == USUAL | {"MY_A": "1", "MY_TOKEN": "secret"}
    assert choose(allowed=["*"]) == SHELL


def test_a_named_variable_is_passed_and_a_named_pattern_passes_no_secret() -> None:
    assert choose(named=["HF_TOKEN"]) == USUAL | {"HF_TOKEN": "secret"}
    assert choose(named=["MY_*"]) == USUAL | {"MY_A": "1"}


def test_no_usual_variable_is_a_secret_or_a_socket() -> None:
    found = select_exports(dict.fromkeys(USUAL_EXPORTS, "x"), named=(), allowed=())
    assert found.keys() == set(USUAL_EXPORTS)
    secrets = [f"{one.rstrip('*')}_{kind}" for one in USUAL_EXPORTS for kind in ("KEY", "TOKEN", "PASSWORD", "SECRET")]
    assert select_exports(dict.fromkeys(secrets, "x"), named=(), allowed=()) == {}


def test_a_site_exports_nothing_more_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    for site in (make_site("local"), make_site("local", "exports=[]")):
        assert "HF_TOKEN" not in make_job_environment(site, variables=())
    for exports in ('["HF_TOKEN"]', '["*"]'):
        found = make_job_environment(make_site("local", f"exports={exports}"), variables=())
        assert found["HF_TOKEN"] == "secret"


def test_variables_in_settings_and_prologues_of_the_site_are_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prologue.sh").write_text("source ${OF_PROLOGUE:-x}/activate\n")
    for name in ("OF_PROLOGUE", "OF_SETTING", "OF_NOTHING"):
        monkeypatch.setenv(name, "x")
    settings = (f"prologue={tmp_path}/prologue.sh", "temporary_dir=/local/$OF_SETTING/t")
    found = make_job_environment(make_site("local", *settings), variables=())
    assert {name for name in found if name.startswith("OF_")} == {"OF_PROLOGUE", "OF_SETTING"}


@pytest.fixture
def recipe(tmp_path: Path, home: Path) -> Path:
    path = tmp_path / "keyed.toml"
    path.write_text(RECIPE.format(wandb="online"))
    return path


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of Slurm's commands, of which sbatch records its environment and its command line."""
    folder = make_private_dir(tmp_path / "bin")
    bodies = {
        "sbatch": f'env > {folder}/environment.$$; cat "/proc/$PPID/cmdline" >> {folder}/words\n'
        f'echo "$@" >> {folder}/words\ncase "$*" in *--parsable*) echo 71 ;; *) echo "Submitted batch job 71" ;; esac',
        **dict.fromkeys(("srun", "squeue", "scancel"), "true"),
    }
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return folder


def submit(request: CampaignRequest, folder: Path) -> CampaignDir:
    campaign = CampaignDir(make_private_dir(folder / "c"))
    submission.write_description(campaign, request)
    job = submission.claim_job(campaign, 0)
    submission.queue_next_jobs(job, request, submission.start_job(job, request))
    return campaign


def list_passed(programs: Path) -> list[set[str]]:
    """Return the secrets in the environments of each sbatch."""
    shells = [path.read_text() for path in programs.glob("environment.*")]
    return [{name for name, value in SECRETS.items() if value in shell} for shell in shells]


@pytest.mark.parametrize(
    ("settings", "num_jobs"),
    [
        (("site.nodes_may_submit=false", "job.num_jobs=3"), 3),
        (("job.layout=multi-job",), 4),
    ],
)
def test_every_job_gets_the_secrets_that_the_recipe_names_by_the_environment_alone(
    recipe: Path, programs: Path, tmp_path: Path, settings: tuple[str, ...], num_jobs: int
) -> None:
    request = load_request(str(recipe), site="perlmutter", settings=(*settings, "site.account=a"))
    campaign = submit(request, tmp_path)
    passed = list_passed(programs)
    assert len(passed) == num_jobs
    assert all(names == NAMED for names in passed), passed
    files = [path for path in campaign.root.rglob("*") if path.is_file()] + [programs / "words"]
    assert len(files) > 5
    assert [path for path in files for value in SECRETS.values() if value.encode() in path.read_bytes()] == []


def test_the_key_of_wandb_is_passed_only_where_the_recipe_sends_figures_to_it(recipe: Path) -> None:
    online, offline, off = (
        load_request(str(recipe), site="local", settings=(f"metrics.wandb={mode}",)).recipe.variables
        for mode in ("online", "offline", "off")
    )
    assert "WANDB_API_KEY" in online
    assert "WANDB_*" in offline
    assert "WANDB_API_KEY" not in offline
    assert not [name for name in off if "WANDB" in name]


def test_a_key_that_the_recipe_names_and_the_shell_lacks_is_noted(
    recipe: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = load_request(str(recipe), site="local", settings=("metrics.wandb=off",))
    assert not [note for note in check_plan(request) if "is not set here" in note]
    for name in NAMED:
        monkeypatch.delenv(name)
    notes = [note for note in check_plan(request) if "is not set here" in note]
    assert notes == [
        "domains.lake.reward_options.key_variable: the variable JUDGE_KEY is not set here, so jobs will not have it: "
        "export it",
        "notices.webhook: the variable CHAT_ADDRESS is not set here, so jobs will not have it: export it",
    ]


def test_code_that_reads_a_variable_which_jobs_do_not_get_is_refused_at_submission(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "searching.py").write_text(
        "import os\nfrom hpcrl.envs.base import env_reward\n\nKEY = os.environ['SEARCH_KEY']\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    monkeypatch.setenv("SEARCH_KEY", "secret")
    reward = "domains.lake.reward=searching:env_reward"
    with pytest.raises(ConfigError, match=r"SEARCH_KEY.* \(jobs do not get SEARCH_KEY of this shell: add it to site"):
        check_request(load_request("quickstart", site="local", settings=(reward,)))
    check_request(load_request("quickstart", site="local", settings=(reward, 'site.exports=["SEARCH_KEY"]')))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("os.environ['MY_CORPUS']", "MY_CORPUS of this shell: add it to site.exports"),
        ("open(os.getenv('MY_CORPUS'))", ""),
    ],
)
def test_code_that_reads_a_variable_which_only_the_prologue_may_set_is_noted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, named: str
) -> None:
    (tmp_path / "corpus.py").write_text(f"import os\nfrom hpcrl.envs.base import env_reward\n\nTEXTS = {line}\n")
    (tmp_path / "modules.sh").write_text("module load corpora\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    monkeypatch.setenv("MY_CORPUS", "/dev/null")
    settings = ("domains.lake.reward=corpus:env_reward", f"site.prologue={tmp_path}/modules.sh")
    (note,) = (
        note for note in check_request(load_request("quickstart", site="local", settings=settings)) if "lake" in note
    )
    assert named in note
    assert "unless the prologue sets what is missing, name it in site.exports" in note
    settings = (*settings, 'site.exports=["MY_CORPUS"]')
    assert not [
        note for note in check_request(load_request("quickstart", site="local", settings=settings)) if "lake" in note
    ]


def test_code_that_fails_with_all_variables_is_refused_also_where_a_prologue_may_set_more(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus.py").write_text("raise ValueError('no corpus')\n")
    (tmp_path / "modules.sh").write_text("module load corpora\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    settings = ("domains.lake.reward=corpus:env_reward", f"site.prologue={tmp_path}/modules.sh")
    with pytest.raises(ConfigError, match=r"\(ValueError: no corpus\): correct corpus$"):
        check_request(load_request("quickstart", site="local", settings=settings))


def test_code_may_read_what_the_site_sets_also_where_it_has_a_prologue(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus.py").write_text(
        "import os\nfrom hpcrl.envs.base import env_reward\n\nos.environ['MY_CORPUS']\n"
    )
    (tmp_path / "modules.sh").write_text("module load corpora\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    settings = ("domains.lake.reward=corpus:env_reward", f"site.prologue={tmp_path}/modules.sh")
    settings += ("site.environment.MY_CORPUS=/x",)
    assert not [
        note for note in check_request(load_request("quickstart", site="local", settings=settings)) if "lake" in note
    ]
