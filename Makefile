# Everything from a fresh clone, with Python 3.11+ (pip and venv) and make. `make help` lists the targets.

VENV ?= .venv
BIN := $(VENV)/bin
# What is handed to the command: make run ARGS="--port 9000", make test ARGS="tests/scheduler -x"
ARGS ?=
# The first Python that is new enough; make PYTHON=/path/to/python3.12 chooses another one.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test test-gpu bench lint clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

run: $(VENV)/.installed ## Serve the demo model at http://127.0.0.1:8000 (the first time, install and fetch it)
	$(BIN)/steno serve $(ARGS)

test: lint ## Lint, check types and import directions, run the CPU tests
	$(BIN)/python -m pytest -q $(ARGS)

test-gpu: $(VENV)/.installed-dev ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

bench: $(VENV)/.installed-dev ## Measure speed with the demo model: a table and a JSON line each
	$(BIN)/steno bench decode --compare $(ARGS)
	$(BIN)/steno bench offline $(ARGS)
	$(BIN)/steno bench serve $(ARGS)

lint: $(VENV)/.installed-dev ## Lint, check types and import directions
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## Remove the virtual environment and everything else that was made here
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .grimp_cache .hypothesis
	find stenograph tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and none was found on the PATH." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The stamps make a second run start at once. The package is installed in place: its sources are not dependencies.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@
