# Every target sets up .venv itself; `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := $(VENV)-lowest
# Written as the last act of a set-up, so one that was interrupted starts again where pip left off.
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready

DEMO_DIR ?= runs/demo
DEMO_ARGS ?=
GUARD_ARGS ?=
PYTEST_ARGS ?=
# Test processes: three for two cores, since some wait for ranks, servers or disks. Each computes on one thread.
JOBS ?= $(shell $(BIN)/python -c 'import os; print((3 * os.cpu_count() + 1) // 2)')
REPEATS ?= 100
TYPED := $(wildcard sage_fast kernels/sage_kernels benchmarks experiments examples)

# PyPI's Linux build of PyTorch carries the CUDA libraries (gigabytes). On a machine without a GPU, PIP_INDEX_URL or
# PIP_EXTRA_INDEX_URL can point pip at an index with a CPU build; pip reads both by itself. Users get the ranges of
# setup.py, development the versions of constraints.txt.
# Modules are compiled below: by all cores, and also where PYTHONDONTWRITEBYTECODE would have every process compile them.
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt

# Tests start hundreds of processes, and each would compile the project.
export PYTHONDONTWRITEBYTECODE :=

# The version of an interpreter, as 3.11.
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifneq ($(and $(filter command line,$(origin PYTHON)),$(wildcard $(READY))),)
asked := $(call version,$(PYTHON))
ifeq ($(asked),)
$(error PYTHON=$(PYTHON) does not run. Leave it out: $(VENV) is ready)
else ifneq ($(asked),$(call version,$(BIN)/python))
$(error $(VENV) is of Python $(call version,$(BIN)/python), not of $(PYTHON). Delete it, or name another: VENV=.venv-other)
endif
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-lowest test-faults test-repeat guard lint format docs clean
# Set-up, training and tests each use the whole machine: `make -j` must not overlap them.
.NOTPARALLEL:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  PYTHON=python3.12               the interpreter for .venv (3.11 or newer)"
	@echo "  VENV=.venv-other                another virtual environment, such as one for another interpreter"
	@echo "  DEMO_DIR=runs/second            where make demo writes (a finished demo is shown again, not repeated)"
	@echo "  DEMO_ARGS=\"--seed=1\"            overrides for make demo, as for sage-fast train; take another DEMO_DIR"
	@echo "  GUARD_ARGS=\"--only block\"       arguments for make guard"
	@echo "  REPEATS=10                      how often make test-repeat runs each test"
	@echo "  PYTEST_ARGS=\"-k sde -x\"         arguments for make test"

setup: $(READY)  ## create .venv and install the project into it

$(READY): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "SAGE-Fast needs Python 3.11 or newer, and $(PYTHON) is not that."; \
		echo "Name another interpreter: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) (the first time takes one to three minutes, mostly downloads)"
	@echo "  1/2 virtual environment"
	@rm -f $@
	@$(PYTHON) -m venv $(VENV)
	@echo "  2/2 SAGE-Fast, its dependencies and the development tools"
	@$(PIP) -e ".[dev]"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # templates in some packages do not compile
	@touch $@
	@echo "Ready: $(BIN)/sage-fast --help"

# One thread: with two the same demo takes as long, and rounds its sums in another order.
demo: $(READY)  ## train the toy model on the CPU and write runs/demo
	OMP_NUM_THREADS=1 $(BIN)/sage-fast train toy_nft --output_dir $(DEMO_DIR) --resume auto $(DEMO_ARGS)

test: $(READY)  ## run the tests, but for the slow ones
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" --durations=15 $(PYTEST_ARGS)

test-slow: $(READY)  ## run the slow tests: kills at every file operation, layouts of ranks, DeepSpeed, fuzz
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m slow --durations=25 $(PYTEST_ARGS)

test-faults: $(READY)  ## let every file-system call of a run fail in every way; test-slow tries each in one way
	SAGE_TEST_ALL_FAULTS=1 $(BIN)/python -m pytest -n $(JOBS) tests/invariants/test_faults.py $(PYTEST_ARGS)

# Releases by the lower ends of the ranges. Torch is that of constraints.txt: older builds for CPUs are not everywhere.
$(LOWEST)/.ready: setup.py constraints.txt
	@echo "Setting up $(LOWEST) with the lowest releases"
	@rm -rf $(LOWEST)
	@$(PYTHON) -m venv $(LOWEST)
	@sed -nE "s/^ *[\"']([A-Za-z0-9._-]+)>=([0-9.]+).*/\1==\2/p" setup.py | grep -Ev "^(torch|triton)=" >$(LOWEST)/lowest.txt
	@grep "^torch=" constraints.txt >>$(LOWEST)/lowest.txt
	@$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check -c $(LOWEST)/lowest.txt -e ".[dev]"
	@touch $@

test-lowest: $(LOWEST)/.ready  ## run the tests of the models with the lowest releases of all packages but torch
	$(LOWEST)/bin/python -m pytest -n $$(nproc) --dist loadfile -m "not slow" tests/models tests/policy tests/run $(PYTEST_ARGS)

# Four processes for each core: a race shows when processes have to wait for one another.
test-repeat: $(READY)  ## repeat the tests of signals and kills REPEATS times, under load
	SAGE_TEST_REPEATS=$(REPEATS) $(BIN)/python -m pytest -n $$((4 * $$(nproc))) -m signals $(PYTEST_ARGS)

guard: $(READY)  ## hold costs to benchmarks/budgets.yaml; the tests do so too
	$(BIN)/python -m benchmarks guard $(GUARD_ARGS)

lint: $(READY)  ## check style, layout, types and English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/python -m docs.tools.english

format: $(READY)  ## lay out the code and mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

$(DOCS_READY): $(READY)
	@echo "Installing MkDocs"
	@$(PIP) -e ".[docs]"
	@touch $@

docs: $(DOCS_READY)  ## build the documentation as a site: build/docs/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Built build/docs/index.html. With search: python -m http.server --directory build/docs"

clean:  ## delete caches and build output; keeps environments and runs
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .benchmarks
	find . \( -path './.venv*' -o -path ./$(VENV) \) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
