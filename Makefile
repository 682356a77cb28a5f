# Every target sets up the virtual environment that it needs, once.
#   make demo | test | test-slow | lint | format | bench
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --quiet -c constraints.txt
SOURCES := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format bench clean
# Two installations into one environment must not run at once.
.NOTPARALLEL:

help:
	@echo "make demo       train the tiny model, write runs/demo"
	@echo "make test       run the tests (PYTEST_ARGS=... to select)"
	@echo "make test-slow  run the training tests, which take minutes"
	@echo "make lint       ruff, formatting and mypy"
	@echo "make format     format the code and fix what ruff can fix"
	@echo "make bench      run the benchmarks"
	@echo "make clean      remove caches and build products"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV)"

$(PY):
	$(PYTHON) -m venv $(VENV)

# A stamp is newer than the files that it depends on: a second run installs nothing.
$(VENV)/.installed-demo: $(SOURCES) | $(PY)
	@echo "Installing textrl-env[demo] into $(VENV) (a few minutes the first time)"
	$(PIP_INSTALL) -e ".[demo]"
	@touch $@

# dev contains demo, hence both stamps.
$(VENV)/.installed-dev: $(SOURCES) | $(PY)
	@echo "Installing textrl-env[dev] into $(VENV) (a few minutes the first time)"
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.installed-demo

demo: $(VENV)/.installed-demo
	$(PY) -m agents.demo --output runs/demo $(DEMO_ARGS)

test: $(VENV)/.installed-dev
	$(PY) -m pytest $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev
	$(PY) -m pytest -m slow --timeout 3600 $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.installed-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.installed-dev
	$(PY) -m benchmarks $(BENCH_ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
