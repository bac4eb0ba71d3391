# SPDX-License-Identifier: Apache-2.0
# make demo   the bug and its end on real NIXL, no GPU needed
# make test   all tests that need no GPU
# make test-free-threaded PYTHON=python3.13t VENV=.venv-3.13t   the same on a Python without a GIL, for which NIXL has no wheels
# make test-sglang   SGLang's own classes on the rig: 2.6 GB in .rig/, on Python 3.11 to 3.13
# make test-hosts   real Ray and vLLM, and engines with native threads, on the rig: 4 GB in .rig/
# make test-neighbours   CPython's own tests and other libraries, with ctxfix as without: 1 GB in .rig/
# make test-gpu   the tests that need two GPUs: integration/gpu/test_gpu.py says what else
# make lint   ruff, strict types
# make docs   the documentation as a site, in build/site/: warnings are errors, nothing is fetched by its pages
# Everything is set up in $(VENV) and .rig/ on first use. Another interpreter: make test PYTHON=python3.12 VENV=.venv-3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-free-threaded test-sglang test-hosts test-neighbours test-gpu lint docs bench clean

$(VENV)/ready: pyproject.toml integration/prerequisites.sh $(wildcard hatch_build.py ctxfix/native/*.c)
	@sh integration/prerequisites.sh $(PYTHON)
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=24'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(VENV)/ready
	@$(BIN)/python integration/rig/demo.py

test: $(VENV)/ready
	$(BIN)/python -m pytest

# Not all of [dev] is to be had there. Of what is, the newest wheel, not a newer source.
test-free-threaded:
	@sh integration/prerequisites.sh $(PYTHON)
	@$(PYTHON) -c "import sysconfig, sys; sys.exit(not sysconfig.get_config_var('Py_GIL_DISABLED'))" || { echo "$(PYTHON) has a GIL: give PYTHON=python3.13t or newer"; exit 2; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=24'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --prefer-binary --editable . \
		cyclonedx-python-lib editables hatchling hypothesis numpy pyelftools pytest pytest-timeout pytest-xdist ruff uv
	$(BIN)/python -m pytest

test-hosts: $(VENV)/ready
	$(BIN)/python -m pytest integration/engines
	$(BIN)/python -m pytest integration/ray
	$(BIN)/python -m pytest integration/vllm

test-neighbours: $(VENV)/ready
	$(BIN)/python -m pytest integration/neighbours

test-sglang: $(VENV)/ready
	$(BIN)/python -m pytest integration/sglang

test-gpu: $(VENV)/ready
	$(BIN)/python -m pytest integration/gpu

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/docs-ready: $(VENV)/ready
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

docs: $(VENV)/docs-ready
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -n -c docs -d build/doctrees . build/site

bench: $(VENV)/ready
	$(BIN)/python benchmarks/post.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/threads.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/memory.py

clean:
	rm -rf .venv* .rig build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
