# Two commands on a fresh machine with Python >= 3.11 and make: `make demo` and `make test`. CI runs `make test-part` and
# `make emulated`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-part test-all emulated lint types format bench docs golden clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint]'
	touch $(READY)

demo: $(READY)  ## train a small mixture of experts and compare with eager and torch.utils.checkpoint
	$(BIN)/python examples/demo.py

# A worker a core, four at most, as each holds all of PyTorch. One thread a worker: they share the cores.
CORES := $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)
XDIST := -n $(shell echo $$(($(CORES) < 4 ? $(CORES) : 4))) --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(XDIST) tests

test: $(READY)  ## all but the long tests
	$(PYTEST) -m 'not long'

test-part: $(READY)  ## the same and a third of the long tests: after the next commit, another one
	$(PYTEST) --long-part $(shell git rev-list --count HEAD)/3

test-all: $(READY)
	$(PYTEST)

# Two workers: memory of emulated devices is the host's, and some tests take all of a device's.
emulated: $(READY)  ## tests/gpu but the long ones, on CUDA devices that are emulated on the host; needs g++
	OMP_NUM_THREADS=1 LD_PRELOAD=$$($(BIN)/python -m tests.emulated_cuda.build) \
		$(BIN)/python -m pytest -p tests.emulated_cuda.plugin -n 2 --dist worksteal -m 'not long' tests/gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## side by side with peers; one table a benchmark
	$(BIN)/python -W ignore -m benchmarks.run_all

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)  ## the documentation as a site, in site/; a broken link is an error, which --quiet would hide
	$(BIN)/mkdocs build --strict

golden: $(READY)  ## regenerate golden/, and what tests of passes expect, on purpose; review the diff
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest tests/test_golden.py tests/passes

clean:
	rm -rf $(VENV) .emulated_cuda build site dist *.egg-info
