# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo demo-all test test-long faults check unit gpu image multinode multinode-short multinode-clean clean

help:
	@echo "make demo     install, then move a real model's KV cache from prefill to decode processes"
	@echo "make demo-all every shape of the demo, with a process per replica and with a process per rank"
	@echo "make test     install, then run the tests: less than ten minutes"
	@echo "make test-long the tests that take long: benches, stopped processes, all shapes of the demo, Triton"
	@echo "make faults   the whole fault matrix, poison runs, fuzz, restarts and soak: about 20 minutes"
	@echo "make multinode four nodes on this machine, engine and sidecar apart, and every fault between them: five minutes"
	@echo "make image    the container image of the sidecar, with the docker that runs here"
	@echo "make check    ruff, mypy, import contract, unit tests"
	@echo "make gpu      kernel and GPU tests, on a machine with CUDA, torch and triton (GPU_PYTHON=python3)"
	@echo "make install  only the virtual environment .venv"
	@echo "make clean    remove .venv and caches"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rdma-kv needs Python 3.11+; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "== installing into $(VENV) (a few minutes the first time: torch, transformers, nixl)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[nixl,ucx,demo,dev]'
	@touch $(STAMP)

demo: install
	$(BIN)/rdma-kv demo

demo-all: install
	$(BIN)/rdma-kv demo --all
	$(BIN)/rdma-kv demo --all --processes rank

test: install
	$(BIN)/python -m pytest -m "not long"

test-long: install
	$(BIN)/python -m pytest -m long

# One line of JSON per cell and run goes to build/faults.jsonl. FAULTS="--seed 7 lanes" runs a part, or with another seed.
FAULTS ?=

faults: install
	@mkdir -p build
	$(BIN)/python -m tests.faults --report build/faults.jsonl $(FAULTS)

# Four nodes in containers, or in network namespaces where Docker cannot run. MULTINODE="--lane netns --json -k partition" says more.
MULTINODE ?=

multinode: install
	$(BIN)/python -m tests.multinode $(MULTINODE)

multinode-short: install
	$(BIN)/python -m tests.multinode --short $(MULTINODE)

multinode-clean: install
	$(BIN)/python -m tests.multinode --clean

# BASE: another base image with Python 3.11 or newer.
BASE ?= python:3.11-slim-bookworm

image: install
	$(BIN)/python docker/context.py --out build/image
	docker build --build-arg BASE=$(BASE) --target runtime --tag rdma-kv:latest build/image
	docker build --build-arg BASE=$(BASE) --target engine --tag rdma-kv-engine:latest build/image

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit

# No install: a machine with a GPU brings its own torch, and the kernels need nothing but that, triton and NumPy.
GPU_PYTHON ?= python3
SANITIZER := $(shell command -v compute-sanitizer 2>/dev/null)

gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "make gpu needs a CUDA device, and a torch that finds it"; exit 1; }
	$(GPU_PYTHON) -m rdma_kv.kernels.bench.gpu_check
	$(GPU_PYTHON) -m pytest -q tests/kernels tests/gpu
ifneq ($(SANITIZER),)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck --error-exitcode 1 $(GPU_PYTHON) -m rdma_kv.kernels.bench.gpu_check --small --programs 7
	$(SANITIZER) --tool racecheck --error-exitcode 1 $(GPU_PYTHON) -m rdma_kv.kernels.bench.gpu_check --small --programs 7
endif

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
