# `make test` and `make demo` do all their own set-up, in .venv. VENV=/elsewhere uses another virtual environment.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
DEMO := $(VENV)/.sparring-demo
READY := $(VENV)/.sparring-ready
# Engines that some tests run against for real; where one cannot be had, its tests are skipped and say so.
ENGINES := text serve onnx milvus pgvector pgserver spark
# torchrec asks for the CUDA build of fbgemm, which does not load without CUDA: on CPUs it is put in without what it asks for.
TORCHREC := torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
TORCHREC_NEEDS := tensordict torchmetrics==1.0.3 tqdm pyre-extensions

# Threads that wait for each other by sleeping: spinning, the default, is many times slower as soon as a core is shared.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup demo test lint bench docs clean

setup: $(READY)

# torch comes first and by itself, so that a build already in the environment, or one chosen with TORCH=..., stays.
$(DEMO): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Sparring needs Python 3.11 or later: make PYTHON=python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[demo]"
	@touch $@

$(READY): $(DEMO)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@for engine in $(ENGINES); do $(BIN)/python -m pip install --quiet --editable ".[$$engine]" || echo "no $$engine here: its tests are skipped"; done
	@$(BIN)/python -m pip install --quiet $(TORCHREC_NEEDS) && $(BIN)/python -m pip install --quiet --no-deps $(TORCHREC) || echo "no torchrec here: its tests are skipped"
	@touch $@

demo: $(DEMO)
	$(BIN)/sparring demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# One thread for each of the JOBS processes: more would only compete for the same cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

bench: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	$(BIN)/python benchmarks/all.py

# The site, in build/site: no network is needed once the extra is installed, and warnings are errors.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
