# `make demo` and `make test` work on a fresh clone: they make .venv themselves.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
BIN := .venv/bin
# Kernels that need a GPU, if present, have no example that runs without one.
DOCTEST_IGNORE := --ignore=src/cgx/kernels/cuda --ignore=src/cgx/transports/symmetric.py

.DEFAULT_GOAL := help
.PHONY: help demo test lint doctest evidence format clean

help: ## show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: .venv/.installed-demo ## train with and without compression on two emulated hosts (ARGS="--link 1gbit")
	$(BIN)/cgx demo $(ARGS)

test: lint doctest ## everything that guards main, cheapest first
	$(BIN)/pytest

lint: .venv/.installed-dev ## style, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

doctest: .venv/.installed-dev ## run the examples in the docstrings
	$(BIN)/pytest --doctest-modules $(DOCTEST_IGNORE) src/cgx

evidence: .venv/.installed-dev ## the tests that take minutes each
	$(BIN)/pytest -m evidence -o faulthandler_timeout=0

format: .venv/.installed-dev ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean: ## remove .venv and all caches
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# pip names each package as it comes to it; its errors pass through.
.venv/.installed-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    f"cgx needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}: make PYTHON=...")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	@echo "Installing cgx[$*] into .venv; the first time this takes a minute or two."
	@$(BIN)/python -m pip install -c constraints.txt -e '.[$*]' | while read -r verb what _; do \
	    case $$verb in \
	        Collecting) printf ' %s' "$${what%%[^a-zA-Z0-9._-]*}" ;; \
	        Installing) if [ "$$what" = collected ]; then printf '\nUnpacking ...'; fi ;; \
	    esac; \
	done
	@echo " done."
	@touch $@ $(if $(filter dev,$*),.venv/.installed-demo) # dev includes demo
