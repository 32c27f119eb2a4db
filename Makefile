# Assay on one machine. `make demo` and `make test` build .venv by themselves when it is missing or out of date.
#
#   make demo                      a whole network with a tiny model; ends by itself in a few minutes
#   make demo MODEL=smollm2        the same with SmolLM2-135M on arithmetic word problems
#   make demo MODEL=smollm2 TASK=gsm8k DATA=path/to/train.jsonl
#   make demo DIR=.demo/NAME       go on with a run that was stopped (or choose the folder of a new one)
#
# From the system: Python 3.11 with venv, make, bash; about 2 GB of disk. No compiler, no GPU, no database, no root.

SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.built-from-lock
PARTS := assay.py protocol node coordinator verifier learner

DIR ?= .demo/$(or $(MODEL),tiny)-$(shell date +%Y%m%d-%H%M%S)
# Only what was asked for: a run that is gone on with keeps its own choices.
UP_FLAGS := $(if $(MODEL),--preset $(MODEL)) $(if $(SEED),--seed $(SEED)) $(if $(TASK),--task $(TASK)) $(if $(DATA),--data "$(abspath $(DATA))")
PYTEST_FLAGS ?=
BENCH_FLAGS ?=
ZOO_FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow fuzz crash zoo yardsticks bench check format lock clean

help: ## This list.
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## Build .venv from the locked versions.

demo: $(STAMP) ## Run the network: MODEL=tiny|smollm2 TASK= DATA= SEED= DIR=
	$(BIN)/python -m assay up "$(DIR)" $(UP_FLAGS)

test: $(STAMP) ## All tests that end within minutes; starts what they need.
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not e2e" $(PYTEST_FLAGS)
	$(BIN)/python -m pytest -m "e2e and not slow" $(PYTEST_FLAGS)

test-slow: $(STAMP) ## The long tests too.
	$(BIN)/python -m pytest -n 2 --dist worksteal -o faulthandler_timeout=0 -m "slow and not fuzz and not crash" \
	  $(PYTEST_FLAGS)

fuzz: $(STAMP) ## Bytes nobody foresaw against every decoder, at length.
	$(BIN)/python -m pytest -m "fuzz" $(PYTEST_FLAGS)

crash: $(STAMP) ## Processes killed at random points, at length.
	$(BIN)/python -m pytest -m "crash" $(PYTEST_FLAGS)

yardsticks: $(STAMP) ## What needs TRL (330 MB), TOPLOC or TensorBoard: they go to .venv.yardsticks, beside .venv.
	test -x $(VENV).yardsticks/bin/python || $(PYTHON) -m venv --without-pip $(VENV).yardsticks
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(VENV).yardsticks/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/locked.pth"
	$(BIN)/pip --python $(VENV).yardsticks/bin/python install --quiet "trl>=1.16" "tensorboard>=2.19" "toploc>=0.1.6"
	$(VENV).yardsticks/bin/python -m pytest tests/unit/learner/test_losses_trl.py tests/unit/learner/test_views.py \
	  $(PYTEST_FLAGS)
	$(VENV).yardsticks/bin/python benchmarks/learner_speed.py $(BENCH_FLAGS)
	$(VENV).yardsticks/bin/python benchmarks/detection_power.py $(BENCH_FLAGS)

zoo: $(STAMP) ## Measure how soon each attack is caught and that no honest node is hurt; write docs/attack-zoo.md.
	$(BIN)/python -m tests.adversary.report $(ZOO_FLAGS)

bench: $(STAMP) ## Measure every claim and write docs/benchmarks.md: BENCH_FLAGS="--quick --only NAME"
	$(BIN)/python benchmarks/report.py $(BENCH_FLAGS)

check: $(STAMP) ## Lint, types, generated pages, then all tests.
	$(BIN)/ruff check .
	$(BIN)/mypy $(PARTS)
	$(BIN)/python docs/generate_errors.py --check
	$(BIN)/python docs/generate_settings.py --check
	$(MAKE) test

format: $(STAMP) ## Mend what ruff can mend.
	$(BIN)/ruff check --fix .

lock: ## Resolve pyproject.toml anew and write requirements.lock (builds one package: needs gcc and libgmp-dev).
	rm -rf $(VENV).lock && $(PYTHON) -m venv $(VENV).lock
	$(VENV).lock/bin/pip install --quiet ".[s3,postgres,smollm2,plots,swarm,dev]" "setuptools>=77" "torch==2.13.0"
	{ echo "# Exact versions of everything .venv holds; written by 'make lock'."; \
	  $(VENV).lock/bin/pip freeze --all --exclude assay-rl --exclude pip --exclude libp2p \
	    | sed -E 's/\+cpu$$//; s/^fastecdsa==2.3.2$$/fastecdsa==4.0.0/'; } > requirements.lock
	rm -rf $(VENV).lock

clean: ## Remove .venv, caches and demo runs.
	rm -rf $(VENV) $(VENV).lock $(VENV).yardsticks .demo build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(STAMP): requirements.lock requirements-nodeps.lock pyproject.toml
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Assay needs Python 3.11 or newer with venv, found none as '$(PYTHON)'."; \
	  echo "On Debian or Ubuntu: apt install python3.11 python3.11-venv; elsewhere: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Building $(VENV) (once; two to five minutes, about 2 GB) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.lock
	$(BIN)/pip install --quiet --no-deps -r requirements-nodeps.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@$(BIN)/python -m protocol.kernels
	@touch $@
