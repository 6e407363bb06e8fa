# make demo               convert a small real model and let it answer
# make test               the test suite
# make lint               linters and types
# make test-gpu-compile   what is compiled for an H200, without one
# make test-oldest        the test suite on the oldest jax
# make test-long          that, what is compiled for an H200 with it, and many more
#                         random state machines
# make gpu                on a machine with an NVIDIA GPU: its tests and a benchmark
# Each finds a Python, makes an environment (.venv, .venv-oldest, .venv-gpu) and installs
# what it needs; `make gpu GPU_PYTHON=python3` takes a Python that has it.

PYTHON := $(shell sh scripts/find_python.sh)
VENV := .venv
BIN := $(VENV)/bin
GPU_PYTHON := .venv-gpu/bin/python
# What an installation is made of: C++ is compiled then.
INSTALLED := pyproject.toml hatch_build.py $(wildcard cpu_kernels/src/*)
MODEL := .cache/SmolLM2-135M-Instruct
# Compiled steps are kept here, so that a second run need not compile.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

.PHONY: demo test test-gpu-compile test-oldest test-long gpu lint model clean

demo: $(MODEL)/config.json
	$(BIN)/python examples/demo.py $(MODEL)

model: $(MODEL)/config.json

test: $(VENV)/test.stamp $(MODEL)/config.json
	@ls cpu_kernels/lib/*.so >/dev/null 2>&1 || \
	    echo "not tested: the CPU kernels, which could not be compiled (GCC 12, x86-64 Linux)"
	$(BIN)/python -m pytest -q

# A stamp is missing where pip could not get the compiler.
test_gpu_compile = if [ -e $(1)/gpu-compile.stamp ]; then \
	    $(1)/bin/python -m pytest -q -m gpu_compile; \
	else \
	    echo "skipped: pip could not get the compiler for GPUs ($(1)/gpu-compile.log)"; \
	fi

test-gpu-compile: $(VENV)/gpu-compile.stamp
	@$(call test_gpu_compile,$(VENV))

lint: $(VENV)/lint.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

test-oldest: .venv-oldest/test.stamp $(MODEL)/config.json
	.venv-oldest/bin/python -m pytest -q

test-long: test-oldest .venv-oldest/gpu-compile.stamp
	@$(call test_gpu_compile,.venv-oldest)
	JAXKV_STATE_MACHINE_FACTOR=20 .venv-oldest/bin/python -m pytest -q \
	    tests/jaxkv/host/test_scheduler.py tests/jaxkv/engine/test_state_machine.py

# Executables are not kept: each run shows what the compiler at hand makes. Shapes are
# not checked by type annotations: a Python that has jax may not have beartype.
gpu: export JAX_PLATFORMS = cuda,cpu
gpu: export JAX_ENABLE_COMPILATION_CACHE = false
gpu: $(if $(filter .venv-gpu/%,$(GPU_PYTHON)),.venv-gpu/gpu.stamp)
	@$(GPU_PYTHON) -c 'import jax, sys; \
	    sys.exit(jax.default_backend() != "gpu" and "jax sees no NVIDIA GPU")'
	$(GPU_PYTHON) -m pytest -q -o addopts=--import-mode=importlib -m gpu tests/pallas_kernels
	$(GPU_PYTHON) -m benchmarks.kernels --quick --output benchmarks/results

$(MODEL)/config.json: $(VENV)/install.stamp
	$(BIN)/python scripts/get_smollm2.py $(MODEL)

$(VENV)/install.stamp: $(INSTALLED) scripts/find_python.sh
	@test -n "$(PYTHON)" || { sh scripts/find_python.sh >/dev/null; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/test.stamp: $(VENV)/install.stamp
	$(BIN)/python -m pip install --quiet --group test
	touch $@

$(VENV)/lint.stamp: $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet --group lint
	touch $@

.venv-oldest/test.stamp: $(INSTALLED) scripts/find_python.sh
	@test -n "$(PYTHON)" || { sh scripts/find_python.sh >/dev/null; exit 1; }
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet --editable . --group test jax==0.11.2 jaxlib==0.11.2
	touch $@

# The compiler for GPUs, of jaxlib's own version. Not beside jax: without NVIDIA's
# libraries jax would complain of it at every start. benchmarks/gpu_target.py uses it.
%/gpu-compile.stamp: %/test.stamp
	rm -rf $*/gpu-compile $@
	version=`$*/bin/python -c 'import jaxlib; print(jaxlib.__version__)'` && \
	if $*/bin/python -m pip install --quiet --target $*/gpu-compile \
	    --group gpu-compile jax-cuda13-plugin==$$version >$*/gpu-compile.log 2>&1; \
	then touch $@; else rm -rf $*/gpu-compile; fi

.venv-gpu/gpu.stamp: $(INSTALLED) scripts/find_python.sh
	@test -n "$(PYTHON)" || { sh scripts/find_python.sh >/dev/null; exit 1; }
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --upgrade pip
	.venv-gpu/bin/python -m pip install --quiet --editable '.[cuda]' --group test --group bench
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-gpu .cache
