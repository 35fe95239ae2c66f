# make demo | test | lint | clean: each makes the virtual environment and builds first, if need be.
#   PYTHON=python3.12   the Python to make the environment with (3.10 or newer)
#   VENV=.venv          where the environment lies
#   TORCH=2.13.0        the torch release to install
#   CUDA=1              build the CUDA kernels too: needs nvcc, takes many minutes

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
TORCH ?= 2.13.0
bin := $(VENV)/bin
# One stamp for each torch release, so that TORCH=... alone installs another.
installed := $(VENV)/.installed-torch-$(TORCH)$(if $(CUDA),-cuda)
built := $(VENV)/.built
native := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu*' -o -name '*.def' -o -name '*.py') setup.py

# The first Python that is new enough, can make virtual environments and can compile extensions.
usable := import ensurepip, os, sys, sysconfig, venv; \
    header = os.path.join(sysconfig.get_path("include"), "Python.h"); \
    sys.exit(sys.version_info < (3, 10) or not os.path.exists(header))
candidates := python3 python3.13 python3.12 python3.11 python3.10
ifndef PYTHON
PYTHON = $(shell for python in $(candidates); do \
    if "$$python" -c '$(usable)' >/dev/null 2>&1; then echo "$$python"; break; fi; done)
endif

.PHONY: help demo test lint format clean distclean

help:
	@echo 'make demo   train a small language model on two ranks, eager and compiled; pictures in build/demo'
	@echo 'make test   all checks: lint and the test suite'
	@echo 'make lint   ruff, mypy, clang-format'
	@echo 'make clean  remove what was built (make distclean: the virtual environment too)'

demo: $(built)
	$(bin)/python -m examples.llama_bytes --out build/demo

test: lint
	OMP_NUM_THREADS=1 $(bin)/python -m pytest

lint: $(built)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/clang-format --dry-run -Werror $(filter-out %.py %.def,$(native))

format: $(built)
	$(bin)/ruff check --fix .
	$(bin)/ruff format .
	$(bin)/clang-format -i $(filter-out %.py %.def,$(native))

$(installed): pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo 'No usable Python found. Needed: Python 3.10 or newer with the venv' \
	    'module and Python.h (Debian: python3-venv and python3-dev). Name one: make PYTHON=...' >&2; exit 1; }
	@"$(PYTHON)" -c '$(usable)' || { echo "$(PYTHON) cannot be used: Python 3.10 or newer with the venv" \
	    'module and Python.h is needed (Debian: python3-venv and python3-dev)' >&2; exit 1; }
	@command -v "$${CXX:-g++}" >/dev/null || { echo "No C++ compiler: $${CXX:-g++} is not on the PATH." \
	    'Install one (Debian: g++) or name one: make CXX=...' >&2; exit 1; }
	test -x $(bin)/python || "$(PYTHON)" -m venv $(VENV)
	$(bin)/python -m pip install --quiet 'setuptools>=65,<82' wheel 'pybind11>=2.11' torch==$(TORCH) \
	    || { echo 'pip could not install the packages above. Without a network, point pip to a local' \
	    'copy (PIP_FIND_LINKS, PIP_INDEX_URL) or fill $(VENV) by hand and touch $(installed)' >&2; exit 1; }
	$(if $(CUDA),$(bin)/python -m pip install --quiet --no-deps nvidia-cutlass==4.2.0.0)
	rm -f $(VENV)/.installed-torch-* $(built)
	touch $@

$(built): $(installed) $(native)
	$(bin)/python -m pip install --quiet --no-build-isolation --editable '.[dev,demo]'
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(built)
	find . -name '*.so' -not -path './$(VENV)/*' -delete
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -r {} +

distclean: clean
	rm -rf $(VENV)
