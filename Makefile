# Everything starts here: `make demo` shows it working, `make test` tests it.
# Each target sets up .venv by itself; a second run starts at once.
#   STACK=cpu|gpu     which torch stack to install (default: gpu where nvidia-smi finds one)
#   DATA=DIR          MovieLens csv folder for the demo
#   WAIT=0            end the demo when the job has ended
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
STACK ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
WAIT ?= 1
BIN := .venv/bin
STAMP := .venv/.installed-$(STACK)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on
# What is there already is no news.
NEWS := | { grep -v 'already satisfied' || true; }

.PHONY: help setup demo demo-survive test chaos fuzz test-unit lint format lock sbom images bench clean
help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 16

setup: $(STAMP) ## create .venv with everything installed

$(STAMP): pyproject.toml
	@echo "Shardloom set-up ($(STACK) stack) into .venv: about two minutes the first time."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "[1/3] PyTorch" && $(PIP) torch==2.13.0 $(NEWS)
	@echo "[2/3] Shardloom and what it needs" && \
		$(PIP) -e '.[service,trainer-$(STACK),dev]' $(NEWS)
	@if [ $(STACK) = cpu ]; then echo "[3/3] TorchRec" && \
		$(PIP) --no-deps torchrec==1.8.0 $(NEWS); fi
	@$(BIN)/python -m trainer.versions
	@touch $@

demo: setup ## train a 2D-sharded recommender on MovieLens and watch it
	@DATA='$(DATA)' WAIT='$(WAIT)' deploy/demo.sh

demo-survive: setup ## lose a host in the middle of a job, and get it back
	@DATA='$(DATA)' WAIT='$(WAIT)' deploy/demo_survive.sh

test: setup ## run the tests
	@$(BIN)/python -m pytest tests $(PYTEST_ARGS)

test-unit: setup ## run the tests that need no Ray, network or browser
	@$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

chaos: setup ## strike elastic jobs with 200 faults; takes ten minutes
	@SHARDLOOM_CHAOS_JOBS=20 $(BIN)/python -m pytest tests/integration/test_chaos.py --timeout 900 $(PYTEST_ARGS)

fuzz: setup ## ask the REST API 10 000 made-up questions; takes some minutes
	@SHARDLOOM_FUZZ_CASES=10000 $(BIN)/python -m pytest tests/integration/test_openapi.py tests/integration/test_fuzzed_specs.py $(PYTEST_ARGS)

lint: setup ## check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: setup ## mend what ruff can mend
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

lock: setup ## resolve the images' requirements anew (UPGRADE=1: newest versions)
	@$(BIN)/python -m deploy.lock $(if $(UPGRADE),--upgrade) && $(BIN)/python -m deploy.sbom

sbom: setup ## write the images' bills of materials anew
	@$(BIN)/python -m deploy.sbom

images: ## build the container images, where there is an engine (IMAGES="service trainer-cpu")
	@deploy/build_images.sh

bench: setup ## run every benchmark and write bench-results/
	@$(BIN)/python -m tests.benchmarks.all --out bench-results

clean: ## remove .venv, caches and local state
	@test ! -x $(BIN)/shardloom || SHARDLOOM_HOME=.shardloom $(BIN)/shardloom down >/dev/null 2>&1 || true
	@rm -rf .venv .shardloom build bench-results *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
