# The two commands that matter: `make demo` and `make test`. Both install what they need into .venv.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.PHONY: install demo test check bench clean

install: $(VENV)/.local

demo: $(VENV)/.local
	$(BIN)/hpcrl submit recipes/quickstart.toml --site local --watch

test: $(VENV)/.dev
	bash jobs/lab/packages.sh
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck jobs/*.sh jobs/lab/*.sh .ci/run
	$(BIN)/codespell

bench: $(VENV)/.bench
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hpcrl needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -c 'import ensurepip' || bash jobs/lab/packages.sh python3-venv
	$(PYTHON) -m venv $(VENV)

$(VENV)/.local: $(VENV)/bin/python pyproject.toml
	@echo "installing hpcrl with its local engine and trainer into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[local]'
	@touch $@

$(VENV)/.dev: $(VENV)/.local
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[local,dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[local,dev,bench]'
	@touch $@
