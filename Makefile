# Each target sets up what it needs by itself in .venv (test-vllm: also in .venv-vllm); a second run
# takes seconds.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTEST_ARGS ?=
DEMO_REQUESTS ?= 200

BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMPS := $(VLLM_VENV)/stamps
SOURCES := CMakeLists.txt $(shell find csrc -type f)
TEST_SOURCES := $(shell find tests/cpp -type f)
CXX_FILES = $(shell find csrc tests/cpp benchmarks -name '*.cpp' -o -name '*.h')
PY_FILES := npu_kv_ops graph_passes tests benchmarks examples build_backend setup.py

.PHONY: help demo test test-vllm vllm-python build lint format asan tsan clean
help:
	@echo "make demo    the package at work: npu-kv doctor, a replay of a small trace, a decoder that swaps"
	@echo "make test    C++ and Python tests"
	@echo "make test-vllm  tests of the connector with vLLM's engine, in .venv-vllm"
	@echo "make build   .venv with the package in it, editable"
	@echo "make lint    formatting, lint, types          make format  put formatting right"
	@echo "make asan    C++ tests with AddressSanitizer   make tsan    with ThreadSanitizer"
	@echo "make clean   remove builds, caches and .venv"

demo: build
	$(BIN)/npu-kv doctor
	$(BIN)/npu-kv replay --synthetic $(DEMO_REQUESTS)
	$(BIN)/python examples/paged_decoder.py

test: build $(STAMPS)/tests-built $(STAMPS)/test
	$(BIN)/ctest --test-dir "$$($(BIN)/python build_backend/npu_kv_build.py)" \
	  --output-on-failure --no-tests=error --parallel 2
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-vllm: vllm-python build $(VLLM_STAMPS)/linked
	$(VLLM_BIN)/python -m pytest tests/vllm $(PYTEST_ARGS)

# Before anything that takes minutes.
vllm-python: $(STAMPS)/venv
	@$(BIN)/python -c 'import sys; sys.version_info >= (3, 11) or sys.exit("vLLM wants Python 3.11 or newer; make clean && make test-vllm PYTHON=python3.11")'

build: $(STAMPS)/built $(STAMPS)/installed

lint: $(STAMPS)/dev
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy npu_kv_ops graph_passes

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

asan: SANITIZER := address
tsan: SANITIZER := thread
asan tsan: $(STAMPS)/tools
	$(BIN)/cmake -S . -B build/$@ -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DNPU_KV_SANITIZE=$(SANITIZER) -DNPU_KV_BUILD_TESTS=ON \
	  -DNPU_KV_OUTPUT_DIR=$(CURDIR)/build/$@/package
	$(BIN)/cmake --build build/$@
	$(BIN)/ctest --test-dir build/$@ --output-on-failure --no-tests=error

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info npu_kv_ops/lib npu_kv_ops/_C.*.so
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define CHECK_MACHINE
import os, shutil, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
if not (3, 10) <= sys.version_info[:2] <= (3, 14):
    sys.exit("Python %s: torch_npu 2.13.0 has wheels for Python 3.10 to 3.14; set PYTHON=python3.11" % version)
if not (shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")):
    sys.exit("no C++ compiler found: install one (Debian, Ubuntu: apt-get install g++) or set CXX")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("Python.h not found: install Python's development files (Debian, Ubuntu: apt-get install python3-dev)")
endef
export CHECK_MACHINE

$(STAMPS)/venv:
	@$(PYTHON) -c "$$CHECK_MACHINE"
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/tools: requirements/build.txt $(STAMPS)/venv
	$(BIN)/python -m pip install --quiet $$(grep -v '^torch' requirements/build.txt)
	@touch $@

$(STAMPS)/torch: requirements/build.txt requirements/npu.txt $(STAMPS)/tools
	$(BIN)/python -m pip install --quiet -r requirements/build.txt -r requirements/npu.txt
	@touch $@

$(STAMPS)/test: requirements/run.txt requirements/test.txt requirements/plot.txt $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet -r requirements/run.txt -r requirements/test.txt -r requirements/plot.txt
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/test
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt
	@touch $@

$(STAMPS)/built: $(SOURCES) setup.py $(wildcard build_backend/*) $(STAMPS)/torch
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

$(STAMPS)/installed: setup.py pyproject.toml $(wildcard build_backend/*) $(STAMPS)/torch | $(STAMPS)/built
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .
	@touch $@

$(STAMPS)/tests-built: $(TEST_SOURCES) $(STAMPS)/built
	NPU_KV_BUILD_TESTS=1 $(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# With the interpreter of .venv, for which the binaries were built.
$(VLLM_STAMPS)/venv: $(STAMPS)/venv | vllm-python
	$(BIN)/python -m venv $(VLLM_VENV)
	@mkdir -p $(VLLM_STAMPS) && touch $@

# pip would warn of what requirements/vllm.txt leaves out on purpose.
VLLM_REQUIREMENTS := requirements/build.txt requirements/npu.txt requirements/run.txt requirements/test.txt
$(VLLM_STAMPS)/engine: requirements/vllm.txt tests/vllm/engine_requirements.py $(VLLM_REQUIREMENTS) $(VLLM_STAMPS)/venv
	$(VLLM_BIN)/python -m pip install --quiet --no-deps -r requirements/vllm.txt
	$(VLLM_BIN)/python tests/vllm/engine_requirements.py > $(VLLM_STAMPS)/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-warn-conflicts \
	  -r $(VLLM_STAMPS)/requirements.txt $(VLLM_REQUIREMENTS:%=-r %)
	@touch $@

# The package is used from the source tree, with the binaries of `make build`: they fit, as both
# environments have the same Python and torch, and building them again would take minutes. Python
# reads .pth files sorted by name, and npu_kv_ops.pth imports the package.
SITE_PACKAGES = $$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(VLLM_STAMPS)/linked: build_backend/npu_kv_ops.pth $(VLLM_STAMPS)/engine
	echo "$(CURDIR)" > "$(SITE_PACKAGES)/_npu_kv_ops_source.pth"
	cp build_backend/npu_kv_ops.pth "$(SITE_PACKAGES)"
	@touch $@
