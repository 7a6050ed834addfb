# Two commands do everything: `make demo` and `make test`. `make` alone lists the targets.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
JOBS := $(shell nproc 2>/dev/null || echo 2)
COUNT ?= 200
SEED ?= 0
WAITERS := $(shell expr 2 \* $(JOBS))  # for a lane that mostly waits
unexport PYTHONDONTWRITEBYTECODE  # without compiled files every process of a lane compiles all of it again

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint unit conformance explore mutants sim integration browser full full-sim full-spark full-browser interop computing waiting screenshots recording spark docs test-full test-oxia test-cluster bench lock release clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## prepare .venv; its bin/lakebed is the command

$(VENV)/.ready: requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Lakebed needs Python 3.11 or newer: make PYTHON=python3.12 setup"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup ## start everything, run the scenarios, prove the totals
	@$(BIN)/lakebed demo

test: setup ## every guarantee, in minutes
	@$(TWO_AT_ONCE) computing waiting

test-full: setup ## what is exhaustive: every seed and kill, every page, a Spark cluster, Oxia
	@$(TWO_AT_ONCE) $(FULL_LANES:%=full-lane-%)

# `make test` runs two streams of lanes side by side, so that one computes while the other waits. `make test-full` starts its
# lanes in this order, the next one when one ends, so that both sides end together however long each lane is. A lane's
# output is shown whole when it ends; a lane that fails stops no other, and is named.
TWO_AT_ONCE = $(MAKE) --no-print-directory --keep-going --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
computing: LANES = lint unit sim spark
waiting: LANES = integration conformance browser
FULL_LANES = full-spark full full-sim full-browser test-oxia test-cluster interop

computing waiting: setup
	@failed=; for lane in $(LANES); do $(MAKE) --no-print-directory $$lane || failed="$$failed $$lane"; done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

full-lane-%: setup
	@$(MAKE) --no-print-directory $* || { echo "failed: $*"; exit 1; }

full: setup
	$(BIN)/pytest tests/conformance tests/integration -m full -n $(WAITERS) --dist loadfile

full-sim: setup
	$(BIN)/pytest tests/unit tests/sim -m full -n $(JOBS)

full-spark: setup
	$(BIN)/pytest tests/spark -m full -n $(JOBS) --dist loadfile

interop: setup
	$(BIN)/pytest tests/interop -m full

full-browser: setup
	@! $(BIN)/python tests/support/chromium.py || $(BIN)/pytest tests/browser -m full

lint: setup ## ruff, mypy strict, import layers
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: setup ## memory store, manual clock, no sockets, no Spark
	$(BIN)/pytest tests/unit -n $(JOBS) -m "not full"

explore: setup ## every property on examples never tried before, five times
	for round in 1 2 3 4 5; do LAKEBED_TEST_EXPLORE=1 $(BIN)/pytest tests/unit -m hypothesis -n $(JOBS) || exit 1; done

mutants: setup ## plant random bugs (COUNT, SEED, MODULES) and show which no unit or simulation test notices
	PYTHONPATH=src:tests $(BIN)/python tests/mutants/run.py --count $(COUNT) --seed $(SEED) --jobs $(JOBS) $(MODULES)

conformance: setup ## one contract, run on every backend
	$(BIN)/pytest tests/conformance -n $(WAITERS) --dist loadfile -m "not full"

sim: setup ## seeded worlds with faults and crashes
	$(BIN)/pytest tests/sim -n $(JOBS) -m "not full"

integration: setup ## real servers, real processes, kill -9
	$(BIN)/pytest tests/integration -n $(WAITERS) --dist loadfile -m "not full"

test-oxia: setup ## meta's contract and the log on a real Oxia server, where Go can build one
	$(BIN)/python tests/oxia/run.py

browser: setup ## the console in a real browser; skipped, in so many words, where there is none
	@$(BIN)/python tests/support/chromium.py || echo "browser: skipped, no Chromium is found (install it, or set LAKEBED_TEST_BROWSER)"
	@! $(BIN)/python tests/support/chromium.py || $(BIN)/pytest tests/browser -m "not full"

screenshots: setup ## every page of the console, light, dark and on a phone, into docs/screenshots
	PYTHONPATH=src:tests $(BIN)/python tests/browser/screenshots.py

recording: setup ## run the quick start for real and draw it as an animated SVG for the README
	$(BIN)/python docs/recording/record.py run
	$(BIN)/python docs/charts/comparison.py

docs: setup ## make the reference pages, the dashboards and the alert rules again
	$(BIN)/python -m lakebed.wiring.reference .

spark: setup ## real Spark
	$(BIN)/pytest tests/spark -n $(JOBS) --dist loadfile -m "not full"

test-cluster: setup ## the Spark lane's jobs on a standalone cluster and through Spark Connect
	$(BIN)/pytest tests/cluster

bench: setup ## every bench, as ratios to the bare thing beneath
	$(BIN)/lakebed bench all --quick

PINS := --quiet --generate-hashes --universal --python-version 3.11 --no-header --no-annotate

lock: setup ## pin every dependency again, with hashes and without download addresses: what tests it, then what runs
	$(BIN)/uv pip compile $(PINS) --extra dev --extra oxia --output-file requirements-dev.lock pyproject.toml
	$(BIN)/uv pip compile $(PINS) --extra all --extra connect --constraint requirements-dev.lock --output-file requirements.lock pyproject.toml

release: setup ## the package and its bill of materials, into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m lakebed.wiring.sbom requirements.lock > dist/sbom.cdx.json

clean: ## remove what make made
	rm -rf $(VENV) .mypy_cache .ruff_cache build dist
