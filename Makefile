# Verbs: install check test bench sim run. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := protocol kernels engine kvcache_pool prefill_pool decode_pool conductor simulator $(wildcard bench) deploy

.DEFAULT_GOAL := help
.PHONY: help install check test bench sim run

help:
	@echo 'make run      fetch a small real model, start everything on http://127.0.0.1:8000'
	@echo '              (ARGS="--prefill 2 --decode 2" are handed to `dango serve`)'
	@echo 'make sim      simulations on virtual time (ARGS="hit-rates"; without ARGS the list of them)'
	@echo 'make install  only the virtual environment, in $(VENV)'
	@echo 'make test     all tests (ARGS="tests/protocol -k rpc" for some of them)'
	@echo 'make check    style, types, architecture'
	@echo 'make bench    measurements (ARGS="tax --runs 9" for one of them)'

install: $(VENV)/.installed

run: install
	@exec $(BIN)/dango serve $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/python -m pytest -q tests/test_architecture.py

bench: $(VENV)/.installed-dev
	$(BIN)/python -m bench $(or $(ARGS),all)

sim: $(VENV)/.installed-sim
	@$(BIN)/python -m simulator $(ARGS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Dango needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than what they were made from: nothing is installed twice.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-sim

$(VENV)/.installed-sim: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[sim]'
	@touch $@ $(VENV)/.installed
