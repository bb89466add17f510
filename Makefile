# Everything runs in .venv, made from constraints.txt with Python 3.11; nothing else is needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python
READY := .venv/.ready

# One thread per process: the tests and the tiny job start several on few cores.
export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED = 1

.DEFAULT_GOAL := help
.PHONY: help quickstart test slow vllm lint checks faults bench clean

help:  ## these targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

quickstart: $(READY)  ## install, train the tiny model on CPU, see it think in German; KEEP=1 leaves the service up
	@.venv/bin/polythink quickstart $(if $(KEEP),--keep)

test: $(READY)  ## all tests but those marked slow
	$(PY) -m pytest

slow: $(READY)  ## the tests marked slow: elastic runs with nodes that come and go
	$(PY) -m pytest -m slow --ignore tests/integration/faults

vllm: $(READY)  ## the engines' contract on vLLM's CPU build, in .venv-vllm (3.5 GB)
	@bash .ci/vllm

lint: $(READY)  ## ruff check, ruff format, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

checks: lint test vllm  ## what CI runs

faults: $(READY)  ## every fault the service must survive (45 min); the table goes to tests/integration/faults/TABLE.md
	POLYTHINK_FAULTS_TABLE=tests/integration/faults/TABLE.md $(PY) -m pytest tests/integration/faults -m "slow or not slow"

bench: $(READY)  ## the benchmarks that run on CPU
	$(PY) -m tests.benchmarks.merge
	$(PY) -m tests.benchmarks.submit
	$(PY) -m tests.benchmarks.serving

clean:  ## remove the environment and all caches; jobs and models in POLYTHINK_HOME stay
	rm -rf .venv .venv-vllm build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made anew only when the pins or the package's needs change.
$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo "Python 3.11 is needed, $(PYTHON) is not; say where it is: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@echo "Installing the pinned packages into .venv (a few minutes, once)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
