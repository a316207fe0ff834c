# Each target is enough on a machine that has only make and Python 3.11 or later:
#   make test    all tests            make demo   a server killed and warm again, measured
#   make lint    style and types      make bench  the measurements
#   make models  the sweep over every architecture of mlx-lm, some minutes
#   make crash   kills, power cuts, damage, a full and a slow disk: the long forms, half an hour
#   make docs    the documentation as a site in build/site, and whether its links lead somewhere
#   make wheel   build the package, install it elsewhere and test what was installed
#   make clean   remove all that the others made
# PYTHON=... chooses the interpreter, EXTRA=cuda12 another MLX backend than the default.

PYTHON ?= python3
# MLX itself comes with mlx-lm on macOS; on Linux its backend is an extra.
EXTRA ?= $(if $(filter Linux,$(shell uname -s)),cpu)

comma := ,
EXTRAS := dev$(if $(EXTRA),$(comma)$(EXTRA))
VENV := .venv
BIN := $(VENV)/bin
# Named after the extras, so that another EXTRA installs again.
STAMP := $(VENV)/installed-$(subst $(comma),-,$(EXTRAS))
CHOOSE := Python 3.11 or later is needed, such as: make PYTHON=python3.12 $(MAKECMDGOALS)
BENCHES := $(wildcard bench/bench_*.py)

.PHONY: test models crash demo lint bench docs wheel clean venv model

test: venv model
	@echo "== tests"
	@$(BIN)/python -m pytest

models: venv
	@echo "== every architecture"
	@TIEREDKV_ALL_MODELS=1 $(BIN)/python -m pytest tests/test_architectures.py
	@$(BIN)/python -m bench.architectures

crash: venv
	@echo "== kills"
	@$(BIN)/python -m tests.crash.kill --kills 1000
	@echo "== kills, with LMDB's locks as on macOS"
	@$(BIN)/python -m tests.crash.kill --kills 1000 --posix
	@echo "== power cuts"
	@$(BIN)/python -m tests.crash.powerloss --images 200
	@echo "== a full and a slow disk"
	@$(BIN)/python -m tests.crash.disk --seconds 30
	@echo "== faults while serving"
	@$(BIN)/python -m tests.crash.serving
	@echo "== damage"
	@$(BIN)/python -m tests.crash.damage --count 10000

demo: venv
	@echo "== demo"
	@$(BIN)/python -m bench.demo

lint: venv
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== ruff format"
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== import directions"
	@$(BIN)/python .ci/imports.py

bench: venv model
	@echo "== bench"
	@mkdir -p build
	@$(BIN)/python -m pytest $(BENCHES) --benchmark-only --benchmark-columns=min --durations=0 \
	  --durations-min=5 --benchmark-json=build/bench.json; \
	  status=$$?; $(BIN)/python -m bench.report build/bench.json && exit $$status

docs: venv
	@echo "== docs"
	@$(BIN)/mkdocs build --strict --quiet

wheel: venv
	@echo "== wheel"
	@$(BIN)/python .ci/wheel.py

clean:
	@echo "== remove $(VENV), build and caches"
	@rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(STAMP)

model: venv
	@echo "== model"
	@$(BIN)/python -m bench.model

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: there is no '$(PYTHON)'; $(CHOOSE)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$(PYTHON)' is $$($(PYTHON) --version 2>&1); $(CHOOSE)" >&2; exit 1; }
	@echo "== environment: $(VENV), $$($(PYTHON) --version)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "== install: .[$(EXTRAS)] (the first time this downloads some 100 MB)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@rm -f $(VENV)/installed-*
	@touch $@
