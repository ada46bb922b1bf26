# Two commands: `make quickstart` and `make test`. Everything happens in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ADAPTERS ?= .venv-adapters

.PHONY: quickstart test test-adapters soak servers lint types layers unit install install-dev clean

quickstart: install
	$(BIN)/asyncflow train recipes/quickstart.yaml run.overwrite=true

test: install-dev servers lint types layers unit

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "AsyncFlow needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# DeepSpeed and Megatron-Core want an environment of their own. The first is built here from source (some seconds, no compiler).
$(ADAPTERS)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(ADAPTERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[deepspeed,megatron]'
	touch $@

test-adapters: $(ADAPTERS)/installed
	$(ADAPTERS)/bin/python -m pytest tests/contract/test_train_engine.py tests/contract/test_train_engine_ranks.py

soak: install-dev
	$(BIN)/python -m tests.sim.run --seeds 0:20000 --processes 2

# The queue is tested over a real Redis server.
servers:
	@command -v redis-server >/dev/null || ([ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -q && apt-get install -y -q --no-install-recommends redis-server) \
	  || echo "NOTE: there is no redis-server here, and it cannot be installed: the tests over Redis will be skipped"

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: install-dev
	$(BIN)/mypy

layers: install-dev
	$(BIN)/lint-imports

unit: install-dev
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) $(ADAPTERS) runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
