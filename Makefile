# One entry for people and for CI. Every target may be repeated; nothing is done twice.

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help install test check format demo study smollm2 peers

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers

help: ## List the targets
	@sed -nE 's/^([a-z0-9]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP) ## Create .venv and install the project with its development tools

test: $(STAMP) ## Run the default test suite (pass options in ARGS, e.g. ARGS=--slow)
	$(BIN)/python -m pytest -q --numprocesses=2 --dist=loadfile $(ARGS)

check: $(STAMP) ## Check format, lint and types, as the pre-commit hooks and CI do
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(STAMP) ## Format the code and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: $(STAMP) ## Train a small drafter on this machine, then measure what it brings
	$(BIN)/python -m train.main --flagfile=train/flagfiles/demo.flags
	$(BIN)/python -m serve.bench --flagfile=serve/flagfiles/demo.flags

study: $(STAMP) ## Train every method on the demo target at equal budget, measure them, write docs/study (hours)
	$(BIN)/python -m benchmarks.study

smollm2: $(STAMP) ## Fetch a small public target, SmolLM2-135M-Instruct, as a Hugging Face folder
	$(BIN)/python -m benchmarks.fetch --model=smollm2

peers: $(PEERS)/.installed ## Create .venv-peers with PyTorch, which benchmarks compare with and nothing else uses

# PyTorch has wheels for a CPU alone, and small, where a 3.11 is at hand; any other Python takes what pip gives it.
$(PEERS)/.installed: benchmarks/peers/requirements.txt | $(BIN)/python
	$(or $(lastword $(wildcard $(HOME)/.pyenv/versions/3.11*/bin/python)),$(BIN)/python) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0
	@touch $@

# The stamp is younger than pyproject.toml exactly when the installed dependencies are those it names.
$(STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# Oldest supported Python first: whoever develops on it can't write what it lacks, and the pins were proved on it.
# A name on PATH may be a shim that cannot run (pyenv installs such), so each candidate proves itself by running;
# sys.executable then gives the real interpreter behind it.
PROBE := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12)) if len(sys.argv) > 1 else print(sys.executable)

$(BIN)/python:
	@shopt -s nullglob; \
	pyenv_root=$$(pyenv root 2>/dev/null || echo "$${PYENV_ROOT:-$$HOME/.pyenv}"); \
	found=(python3.12 "$$pyenv_root"/versions/3.12*/bin/python python3.13 "$$pyenv_root"/versions/3.13*/bin/python python3 python); \
	for candidate in $(if $(PYTHON),"$(PYTHON)","$${found[@]}"); do \
	  if "$$candidate" -c '$(PROBE)' check >/dev/null 2>&1; then \
	    echo "Creating $(VENV) with $$("$$candidate" -c '$(PROBE)')"; \
	    exec "$$candidate" -m venv $(VENV); \
	  fi; \
	done; \
	echo "$(if $(PYTHON),$(PYTHON) is not,Nothing on PATH or under $$pyenv_root/versions is) a Python 3.12 or newer with venv;" \
	  "install one, or name it: make install PYTHON=/path/to/python3.12" >&2; \
	exit 1
