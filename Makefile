# Set-up and checks. `make demo` and `make test` do all that a fresh machine needs; what they need from
# it is python3 (3.11 or later, with venv), make and a network for the first run.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON3 ?= python3
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
CLIENTS := .venv/clients/.installed
MODEL := smollm2-135m-instruct

# The repository root must not come first on sys.path: its kernels/ would hide packages of that name.
export PYTHONSAFEPATH := 1
# Threads of torch that spin while they wait starve whatever else the machine runs.
export OMP_WAIT_POLICY ?= passive

# A CUDA build of torch brings its own triton; elsewhere constraints-cpu.txt picks one.
HAS_NVIDIA := $(firstword $(wildcard /dev/nvidiactl /dev/nvidia0))
CONSTRAINTS := -c constraints.txt $(if $(HAS_NVIDIA),,-c constraints-cpu.txt)
EDITABLE := --no-build-isolation --config-settings editable_mode=strict -e
PYTEST := $(BIN)/pytest -q
# Many tests wait for processes: two run at a time, those of a file one after the other.
TOGETHER := -n 2 --dist loadfile

.PHONY: help setup link model demo test test-slow test-clients test-gpu lint types unit kernels clean

help:
	@echo "make demo       set up, fetch the model, run a branching program"
	@echo "make test       set up, then lint, types and all tests but the slow ones"
	@echo "make test-slow  the slow ones"
	@echo "make test-clients  others' benchmark clients against the server (GBs of installs)"
	@echo "make test-gpu   kernels and runtime on an NVIDIA GPU; PYTHON=… names an interpreter with torch"
	@echo "make lint types unit kernels   the parts of make test"
	@echo "make clean      remove what these made"

$(STAMP): pyproject.toml constraints.txt constraints-cpu.txt
	@$(PYTHON3) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	  f"python3 is {v}; ramet needs 3.11 or later: make PYTHON3=/path/to/python3.11 …")'
	$(PYTHON3) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install -q $(CONSTRAINTS) $(EDITABLE) '.[dev,gpu]' || { \
	  echo "No such combination here; trying with the triton that torch asks for"; \
	  $(BIN)/python -m pip install -q -c constraints.txt $(EDITABLE) '.[dev,gpu]'; }
	@touch $@

setup: $(STAMP) $(CLIENTS)

# lm-eval and instructor ask for other versions than ours: they run from a place of their own.
$(CLIENTS): pyproject.toml constraints.txt tests/clients/requirements.txt | $(STAMP)
	$(BIN)/python -m pip install -q $(CONSTRAINTS) $(EDITABLE) '.[clients]'
	$(PYTHON3) -m venv .venv/clients
	.venv/clients/bin/python -m pip install -q -r tests/clients/requirements.txt
	@touch $@

# A strict editable install is a farm of links to files: new files need a new link.
link: $(STAMP)
	@$(BIN)/python -m pip install -q --no-deps $(EDITABLE) .

model: link
	@$(BIN)/ramet models fetch $(MODEL)

demo: model
	@$(BIN)/python examples/branches.py

test: lint types kernels unit

lint: link
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: link
	$(BIN)/pyright --warnings

unit: model $(CLIENTS)
	$(PYTEST) $(TOGETHER) -m "not slow and not gpu" --ignore=tests/kernels

# Triton's interpreter is chosen when a kernel is defined, hence processes of their own.
kernels: link
	TRITON_INTERPRET=1 $(PYTEST) $(TOGETHER) -m "not slow and not gpu" tests/kernels
	$(PYTEST) -n 2 -m "not slow and not gpu" tests/kernels/test_compile.py

test-slow: model $(CLIENTS)
	$(PYTEST) -m "slow and not gpu" --ignore=tests/kernels
	TRITON_INTERPRET=1 $(PYTEST) -m "slow and not gpu" tests/kernels || [ $$? -eq 5 ]

# Benchmark clients of others, each in an environment of its own: some GB, and several minutes.
test-clients: model
	$(BIN)/python tests/clients/bench_clients.py

# No network and no install: the three folders are put together under their import name. Where
# Python lacks the runtime's packages, the kernels alone are tested.
test-gpu:
	@tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	cp -r frontend_lang "$$tmp/ramet"; cp -r runtime kernels "$$tmp/ramet/"; \
	tests="$(wildcard tests/kernels tests/gpu)"; \
	$(PYTHON) -c 'import msgspec, zmq' 2>/dev/null || { \
	  : > "$$tmp/ramet/__init__.py"; tests=tests/kernels; echo "kernels only: no msgspec or pyzmq"; }; \
	printf '[pytest]\naddopts = --import-mode=importlib -ra\nmarkers =\n slow: slow\n gpu: gpu\n model: model\n' \
	  > "$$tmp/pytest.ini"; \
	PYTHONPATH="$$tmp$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest -c "$$tmp/pytest.ini" \
	  --rootdir . -p no:cacheprovider $$tests

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
