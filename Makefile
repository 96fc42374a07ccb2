# Baton's commands; `make help` lists them. Paths are relative and quoted, so a checkout may lie
# anywhere: in a path with spaces or of 150 characters, twice side by side.

SHELL := /bin/sh
.SHELLFLAGS := -euc
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
BATON := $(VENV_PYTHON) -m baton.cli.main
PROVE := $(VENV_PYTHON) scripts/prove.py
# Looking at a cluster installs nothing.
NOTHING := "nothing installed, nothing runs; start with make run or make up"
INSTALLED := if [ ! -e .venv/stamp.baton ]; then echo $(NOTHING) >&2; exit 1; fi
# mypy finds only one root of a namespace by itself.
PACKAGES := $(addprefix -p baton.,$(notdir $(patsubst %/__init__.py,%,$(wildcard */baton/*/__init__.py))))

.PHONY: help
help: ## list these commands
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# --- serving ------------------------------------------------------------------------------------
# ARGS are the options of the command: make logs ARGS="-f decode-0"

.PHONY: run
run: install model ## start a cluster, stream an answer, serve until Ctrl-C (ONESHOT=1: stop after it)
	@exec $(BATON) run --end-with-parent $(if $(ONESHOT),--oneshot) $(ARGS)

.PHONY: up
up: install model ## start a cluster in the background, under supervisor (ARGS="--decode 2")
	@exec $(BATON) up $(ARGS)

.PHONY: down
down: ## stop it, and say so if anything is left behind
	@if [ -e .venv/stamp.baton ]; then exec $(BATON) down $(ARGS); else echo $(NOTHING); fi

.PHONY: status
status: ## show processes, leases, blocks and queues (ARGS=--json)
	@$(INSTALLED); exec $(BATON) status $(ARGS)

.PHONY: chat
chat: ## talk to the running cluster in the terminal (ARGS="--temperature 1")
	@$(INSTALLED); exec $(BATON) chat $(ARGS)

.PHONY: logs
logs: ## print the newest lines of all logs, by time (ARGS="-f decode-0")
	@$(INSTALLED); exec $(BATON) logs $(ARGS)

# --- proving ------------------------------------------------------------------------------------

.PHONY: test
test: install-dev model ## prove a commit: unit, simulation, conformance, integration (< 15 minutes)
	@exec $(PROVE) -m "not slow" $(ARGS)

.PHONY: test-all
test-all: install-dev model ## the same and the slow tests
	@exec $(PROVE) $(ARGS)

.PHONY: chaos
chaos: install-dev ## kill, freeze and cut everything at every stage, by the thousand (ARGS="--part fake --faults 100")
	@PYTHONPATH=tests exec $(VENV_PYTHON) -m chaos.run $(ARGS)

.PHONY: lint
lint: install-dev ## style (ruff) and import rules (import-linter)
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@PYTHONPATH=shared:services $(VENV_PYTHON) -c 'from importlinter.cli import lint_imports_command as lint; lint()'

.PHONY: types
types: install-dev ## strict types (mypy)
	@MYPYPATH=shared:services exec $(VENV_PYTHON) -m mypy $(PACKAGES)

.PHONY: bench
bench: install model ## measure hand-over and interference; tables go to benchmarks/
	@exec $(VENV_PYTHON) -m baton.bench $(ARGS)

.PHONY: gpu
gpu: install-dev model ## on a machine with a GPU: its tests, then its figures (benchmarks/device.md)
	@$(VENV_PYTHON) -m pip install -q "cuda-bindings>=12.9" "nvidia-ml-py>=12.560"
	@$(VENV_PYTHON) -m pytest -q -m gpu tests $(ARGS)
	@BATON_ENGINE_DEVICE=cuda exec $(VENV_PYTHON) -m baton.bench device

.PHONY: ci
ci: ## what continuous integration runs
	@exec bash .ci/run

# --- environment --------------------------------------------------------------------------------

.PHONY: install
install: ## make .venv with pinned dependencies (TORCH_SPEC=... chooses another torch)
	@$(PYTHON) scripts/install.py

.PHONY: install-dev
install-dev: ## the same, and what tests, lint and types need
	@$(PYTHON) scripts/install.py dev

.PHONY: model
model: install ## fetch and prepare the model, once
	@exec $(BATON) model prepare

.PHONY: lock
lock: install-dev ## write requirements*.lock anew from pyproject.toml
	@exec $(VENV_PYTHON) scripts/lock.py

.PHONY: format
format: install-dev ## format the code and sort imports
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .

.PHONY: clean
clean: down ## stop the cluster; remove .venv and tool caches (prepared models stay)
	@rm -rf .venv .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build
