# Everything here needs Python >= 3.11 and make; the first target you run sets up .venv.
#
#   make demo         train a small model with four workers, into runs/demo
#   make test         ruff, the type checker and the tests (minutes)
#   make test-long    only the tests marked "long", of each at most two cases (most of an hour)
#   make test-every   all cases of these (hours)
#   make soak         an elastic run's processes killed, frozen, cut off, out of disk: 60 times a kind (20 minutes)
#   make lint         ruff and the type checker alone; `make format` mends the layout
#   make bench        every benchmark
#   make comparison   all methods on one job, tuned, five seeds: docs/comparison.md; 20 minutes at most, again until done
#   make clean        remove caches and build products; `make distclean` also .venv and runs/demo
#
#   JOBS=4                    tests at a time (3: some only wait); JOBS=0 runs them one after the other in one process
#   PYTHON=python3.12         another interpreter
#   VENV=/path                another place for the environment
#   TORCH_INDEX=URL           another build of torch, e.g. https://download.pytorch.org/whl/cpu (small, no CUDA);
#                             it counts when the environment is made, so `make distclean` first if there is one

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
JOBS ?= 3

BIN := $(VENV)/bin
STAMP := $(VENV)/.isles-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# Each command of a test is a Python of its own, and would compile the package again where no bytecode may be kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-every soak lint format bench comparison clean distclean

help:
	@sed -n '1,/^$$/{s/^# \{0,1\}//;p;}' Makefile

setup: $(STAMP)

# Made only when absent. Debian's python3 comes without ensurepip (it sits in python3-venv), so that is said in words.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "isles: no '$(PYTHON)' here. Install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "isles: needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "isles: $(PYTHON) cannot make virtual environments (no ensurepip)." \
	       "On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "isles: making $(VENV) with $$($(PYTHON) -V 2>&1)"
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; \
	  echo "isles: '$(PYTHON) -m venv $(VENV)' failed; the lines above say why" >&2; exit 1; }

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "isles: $(VENV) holds a Python older than 3.11; remove it: make distclean" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@echo "isles: installing into $(VENV) (minutes the first time: torch is large)"
	@$(PIP) install -qq -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[dev,data]'
	@touch $@

demo: $(STAMP)
	@rm -rf runs/demo
	$(BIN)/isles train --out runs/demo

# Each process takes a stretch of the tests, so that what a file's tests share is made once; who is done first takes over
# from the others' ends.
test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# pytest answers 5 when no test carries the mark; that is no failure.
test-long: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long || [ $$? -eq 5 ]

test-every: $(STAMP)
	ISLES_EVERY_CASE=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long

soak: $(STAMP)
	ISLES_SOAK=60 ISLES_EVERY_CASE=1 $(BIN)/python -m pytest -m long -p no:xdist -s \
	  tests/training/elastic/test_soak.py tests/training/elastic/test_troubles.py -k "all_troubles or among_fast_ones"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# All of them run, also after one has failed; the target fails if any did.
bench: $(STAMP)
	@failed=""; found=""; \
	for file in benchmarks/[!_]*.py; do \
	  [ -e "$$file" ] || continue; found=yes; name=$$(basename "$$file" .py); \
	  echo "== $$name"; $(BIN)/python -m "benchmarks.$$name" || failed="$$failed $$name"; \
	done; \
	[ -n "$$found" ] || echo "isles: no benchmarks here yet"; \
	[ -z "$$failed" ] || { echo "isles: failed:$$failed" >&2; exit 1; }

# Apart from `bench`: about three hours on two idle cores, in blocks of 10 minutes each. What has a line in
# benchmarks/comparison/*.jsonl is not run again; settings.jsonl is to be committed when it is whole, before the judged runs.
comparison: $(STAMP)
	$(BIN)/python -m benchmarks.comparison --block tune --minutes 10 --at-once 2
	$(BIN)/python -m benchmarks.comparison --block run --minutes 10 --at-once 2
	$(BIN)/python -m benchmarks.comparison --block page --page docs/comparison.md

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find isles tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV) runs/demo
