# Two commands do everything: `make demo` and `make test`. `make` alone lists the targets.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint unit conformance explore sim integration browser screenshots spark docs test-oxia test-cluster bench lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## prepare .venv; its bin/lakebed is the command

$(VENV)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Lakebed needs Python 3.11 or newer: make PYTHON=python3.12 setup"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup ## start everything, run the scenarios, prove the totals
	@$(BIN)/lakebed demo

test: setup lint unit conformance sim integration browser spark ## everything CI runs

lint: setup ## ruff, mypy strict, import layers
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: setup ## memory store, manual clock, no sockets, no Spark
	$(BIN)/pytest tests/unit -n 2

explore: setup ## every property on examples never tried before, five times
	for round in 1 2 3 4 5; do LAKEBED_TEST_EXPLORE=1 $(BIN)/pytest tests/unit -m hypothesis -n 2 || exit 1; done

conformance: setup ## one contract, run on every backend
	$(BIN)/pytest tests/conformance -n 2 --dist loadfile

sim: setup ## seeded worlds with faults and crashes
	$(BIN)/pytest tests/sim -n 2

integration: setup ## real servers, real processes, kill -9
	$(BIN)/pytest tests/integration -n 2 --dist loadfile

test-oxia: setup ## the meta contract on a real Oxia server, where Go can build one
	$(BIN)/python tests/oxia/run.py

browser: setup ## the console in a real browser; skipped, in so many words, where there is none
	@$(BIN)/python tests/support/chromium.py || echo "browser: skipped, no Chromium is found (install it, or set LAKEBED_TEST_BROWSER)"
	@! $(BIN)/python tests/support/chromium.py || $(BIN)/pytest tests/browser

screenshots: setup ## every page of the console, light, dark and on a phone, into docs/screenshots
	PYTHONPATH=src:tests:tests/browser $(BIN)/python tests/browser/screenshots.py

docs: setup ## make the reference pages, the dashboards and the alert rules again
	$(BIN)/python -m lakebed.wiring.reference .

spark: setup ## real Spark
	$(BIN)/pytest tests/spark -n 2 --dist loadfile

test-cluster: setup ## the Spark lane's jobs on a standalone cluster and through Spark Connect
	$(BIN)/pytest tests/cluster

bench: setup ## every bench, as ratios to the bare thing beneath
	$(BIN)/lakebed bench all --quick

lock: setup ## pin every dependency again, without download addresses
	$(BIN)/pip-compile --quiet --extra dev --extra oxia --strip-extras --no-header --no-annotate --no-emit-options --allow-unsafe --output-file requirements.lock pyproject.toml

clean: ## remove what make made
	rm -rf $(VENV) .mypy_cache .ruff_cache build dist
