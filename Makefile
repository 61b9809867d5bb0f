# Everything starts here: `make demo` shows it working, `make test` tests it.
# Each target sets up .venv by itself if it needs one; a second run starts at once.
#   STACK=cpu|gpu     which torch stack to install (default: gpu where nvidia-smi finds one)
#   DATA=DIR          MovieLens csv folder for the demo
#   WAIT=0            end the demo when the job has ended
#   TESTS=PATH        files or folders of tests that `make test` runs
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
STACK ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
WAIT ?= 1
TESTS ?= tests
BIN := .venv/bin
# A worker of a job imports for 17 s instead of 6 s where there is no bytecode.
unexport PYTHONDONTWRITEBYTECODE
STAMP := .venv/.installed-$(STACK)
DEV_STAMP := .venv/.installed-dev-$(STACK)
# Two processes: most tests wait. Files stay together; the long ones begin (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations=40

.PHONY: help setup setup-dev demo demo-survive test test-all chaos fuzz coverage lint format lock images \
	dashboards chart chart-push wheel wheel-push manifests docs bench clean
help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 16

setup: $(STAMP) ## create .venv with what a service and its jobs need
setup-dev: $(DEV_STAMP) ## add what tests, lint and docs need

$(STAMP): pyproject.toml
	@PYTHON='$(PYTHON)' deploy/install.sh run $(STACK)
	@touch $@

$(DEV_STAMP): $(STAMP)
	@deploy/install.sh dev $(STACK)
	@touch $@

demo: setup ## train a 2D-sharded recommender on MovieLens and watch it
	@DATA='$(DATA)' WAIT='$(WAIT)' deploy/demo.sh

demo-survive: setup ## lose a host in the middle of a job, and get it back
	@DATA='$(DATA)' WAIT='$(WAIT)' deploy/demo_survive.sh

test: setup-dev ## run the tests but for the slow ones: ten minutes on two fast cores
	@$(PYTEST) $(TESTS) -m "not slow" $(PYTEST_ARGS)

test-all: setup-dev ## run all tests, with many more made-up cases: half an hour on two fast cores
	@SHARDLOOM_TEST_PROFILE=all $(PYTEST) tests $(PYTEST_ARGS)

coverage: setup-dev ## run the tests that need no Ray and print what share of the lines they run
	@$(PYTEST) tests/unit tests/integration/kube tests/integration/elastic/test_coordinator.py \
		tests/integration/elastic/test_peer_copy.py --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

chaos: setup-dev ## strike 40 elastic jobs with 10 faults each; takes half an hour (SEED=17: that one alone)
	@SHARDLOOM_CHAOS_JOBS=40 SHARDLOOM_CHAOS_SEED='$(SEED)' $(BIN)/python -m pytest tests/integration/elastic/test_chaos.py --timeout 900 $(PYTEST_ARGS)

fuzz: setup-dev ## ask the REST API 10 000 made-up questions; takes some minutes
	@SHARDLOOM_FUZZ_CASES=10000 $(BIN)/python -m pytest tests/integration/service/test_openapi.py $(PYTEST_ARGS)

lint: setup-dev ## check style, types and layers
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@$(BIN)/lint-imports

format: setup-dev ## mend what ruff can mend
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

lock: setup-dev ## resolve the images' requirements anew (UPGRADE=1: newest versions)
	@$(BIN)/python -m deploy.lock $(if $(UPGRADE),--upgrade)

images: ## build the container images, where there is an engine (IMAGES="service trainer-cpu")
	@deploy/build_images.sh

dashboards: setup-dev ## write rules and dashboards into k8s/chart/files, for the chart and compose
	@$(BIN)/python -m deploy.observability.build

chart: dashboards ## lint the Helm chart and package it into dist/
	@$(BIN)/python -m deploy.chart package

chart-push: dashboards ## package the chart and push it to CHART_REPOSITORY
	@$(BIN)/python -m deploy.chart push

# The wheel of an sdist: what lies in build/ is not packed.
wheel: setup-dev ## build sdist and wheel into dist/python/
	@$(BIN)/uv build --clear --out-dir dist/python

wheel-push: wheel ## upload it to the index UV_PUBLISH_URL, which has no default
	@test -n "$$UV_PUBLISH_URL" || { echo "UV_PUBLISH_URL: set the index to upload to" >&2; exit 1; }
	@$(BIN)/uv publish dist/python/*.whl

manifests: setup-dev ## render the chart with each of k8s/examples into build/k8s
	@$(BIN)/python -m deploy.chart render

docs: setup-dev ## build the documentation site in site/; broken links fail
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict && echo "site/index.html"

bench: setup-dev ## run every benchmark and write bench-results/
	@$(BIN)/python -m tests.benchmarks.all --out bench-results

clean: ## remove .venv, caches and local state
	@test ! -x $(BIN)/shardloom || SHARDLOOM_HOME=.shardloom $(BIN)/shardloom down >/dev/null 2>&1 || true
	@rm -rf .venv .shardloom build dist bench-results *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
