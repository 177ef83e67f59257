# make demo    set up and fine-tune a small real model end to end
# make test    set up and run every test that needs no GPU
# make help    the rest
#
# PYTHON      the Python (>= 3.11) that makes the environment, and that test-gpu uses as it is
# TORCH_SPEC  which torch to install;  TORCH_INDEX  a package index to take it from (see README.md, Install)
PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX ?=
PYTEST_ARGS ?=
# tests run side by side, each in one thread
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/.ready
NEWEST := .venv-newest
OLDEST_TRL := .venv-trl115
LLAMA_CPP := .venv-llama-cpp

# No test may need a model hub.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test test-slow test-gpu test-newest test-trl115 test-gguf lint clean

help:
	@echo "make demo         fine-tune SmolLM2-135M to turn orders into JSON (examples/quickstart.py)"
	@echo "make test         every test that needs no GPU"
	@echo "make test-slow    the long tests"
	@echo "make test-gpu     the GPU tests, with \$$(PYTHON) as it is: it needs torch for CUDA and fastlm's dependencies"
	@echo "make test-newest  parity and trainer tests with the newest transformers, without the package 'kernels'"
	@echo "make test-trl115  parity and trainer tests with TRL 1.15"
	@echo "make test-gguf    GGUF files against llama.cpp, which is built from its source package on first use (minutes)"
	@echo "make lint         ruff and mypy"
	@echo "make clean        remove the environments"

demo: $(READY)
	$(BIN)/python examples/quickstart.py

test: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --durations=10 $(PYTEST_ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -q -m "slow and not gpu" --durations=10 $(PYTEST_ARGS)

test-gpu:
	$(PYTHON) -m pytest -q -m "gpu and not multi_gpu" $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first and by itself: later installs then find it satisfied whatever build it is. A CUDA build brings its own Triton.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fastlm needs Python >= 3.11: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH_SPEC)"
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.7.1
	$(PIP) -c constraints.txt -e '.[dev]' kernels
	touch $@

# The legs start from hard links to the environment and replace a few packages: pip unlinks what it replaces, so the first stays as it was.
$(NEWEST)/.ready: $(READY) .ci/newest.txt
	rm -rf $(NEWEST) && cp -al $(VENV) $(NEWEST) && rm -f $@
	$(NEWEST)/bin/python -m pip uninstall --quiet --yes kernels kernels-data
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -r .ci/newest.txt
	touch $@

$(OLDEST_TRL)/.ready: $(READY) .ci/trl115.txt
	rm -rf $(OLDEST_TRL) && cp -al $(VENV) $(OLDEST_TRL) && rm -f $@
	$(OLDEST_TRL)/bin/python -m pip install --quiet --disable-pip-version-check -r .ci/trl115.txt
	touch $@

LEG_TESTS := $(wildcard tests/test_parity.py tests/test_families.py tests/test_block.py tests/test_checkpoints.py tests/test_signals.py tests/test_guards.py tests/test_train*.py tests/test_chat_templates.py tests/test_responses.py)

test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/python .ci/versions.py .ci/newest.txt --without kernels
	$(NEWEST)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(LEG_TESTS) $(PYTEST_ARGS)

test-trl115: $(OLDEST_TRL)/.ready
	$(OLDEST_TRL)/bin/python .ci/versions.py .ci/trl115.txt
	$(OLDEST_TRL)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(LEG_TESTS) $(PYTEST_ARGS)

# For any x86-64 of the last ten years: what the machine's own flags would choose, some virtual machines do not run. One thread, so no OpenMP.
$(LLAMA_CPP)/.ready: $(READY) .ci/llama-cpp.txt
	rm -rf $(LLAMA_CPP) && cp -al $(VENV) $(LLAMA_CPP) && rm -f $@
	CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAVA_BUILD=OFF" \
		$(LLAMA_CPP)/bin/python -m pip install --quiet --disable-pip-version-check --no-binary llama-cpp-python -r .ci/llama-cpp.txt
	touch $@

test-gguf: $(LLAMA_CPP)/.ready
	$(LLAMA_CPP)/bin/python -m pytest -q -rA tests/gguf_llama_cpp.py $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(NEWEST) $(OLDEST_TRL) $(LLAMA_CPP)
