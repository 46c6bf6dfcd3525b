# Everything a newcomer needs: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo demo-all test check unit clean

help:
	@echo "make demo     install, then move a real model's KV cache from prefill to decode processes"
	@echo "make demo-all every shape of the demo, with a process per replica and with a process per rank"
	@echo "make test     install, then run all tests"
	@echo "make check    ruff, mypy, import contract, unit tests"
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
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
