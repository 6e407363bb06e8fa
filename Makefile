# make demo   convert a small real model and let it answer
# make test   linters and the whole test suite
# Both find a Python, make .venv and install what they need.

PYTHON := $(shell sh scripts/find_python.sh)
VENV := .venv
BIN := $(VENV)/bin
MODEL := .cache/SmolLM2-135M-Instruct
# Compiled steps are kept here, so that a second run need not compile.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

.PHONY: demo test test-oldest lint model clean

demo: $(MODEL)/config.json
	$(BIN)/python examples/demo.py $(MODEL)

model: $(MODEL)/config.json

test: $(VENV)/gpu-compile.stamp $(MODEL)/config.json
	$(BIN)/python -m pytest -q

lint: $(VENV)/lint.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# The suite on the oldest jax that is supported.
test-oldest: .venv-oldest/gpu-compile.stamp $(MODEL)/config.json
	.venv-oldest/bin/python -m pytest -q

$(MODEL)/config.json: $(VENV)/install.stamp
	$(BIN)/python scripts/get_smollm2.py $(MODEL)

$(VENV)/install.stamp: pyproject.toml scripts/find_python.sh
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

.venv-oldest/test.stamp: pyproject.toml scripts/find_python.sh
	@test -n "$(PYTHON)" || { sh scripts/find_python.sh >/dev/null; exit 1; }
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet --editable . --group test jax==0.11.2 jaxlib==0.11.2
	touch $@

# The compiler for GPUs, of jaxlib's own version. Not beside jax: without NVIDIA's
# libraries jax would complain of it at every start. tests/gpu_target.py uses it.
%/gpu-compile.stamp: %/test.stamp
	rm -rf $*/gpu-compile
	version=`$*/bin/python -c 'import jaxlib; print(jaxlib.__version__)'` && \
	$*/bin/python -m pip install --quiet --target $*/gpu-compile \
	    --group gpu-compile jax-cuda13-plugin==$$version
	touch $@

clean:
	rm -rf .venv .venv-oldest .cache
