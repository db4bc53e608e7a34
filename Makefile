# Everything starts here; `make` lists it. The environment is made by whatever needs it first.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

RDMA_TESTS ?= tests/transport/test_conformance.py tests/transport/test_conformance_messages.py \
	tests/transport/test_conformance_links.py tests/transport/test_several_nics.py tests/transport/test_two_processes.py \
	tests/pdserve/messenger/test_messenger.py

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-full test-rdma lint format bench

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## makes .venv with the locked dependencies; a no-op when done
	@echo "setup: $(VENV) is ready"

$(READY): pyproject.toml constraints.txt .ci/setup
	@.ci/setup $(VENV)
	@touch $@

demo: $(READY)  ## one prefill node, two decode nodes, real prompts, and a report of every handoff
	@$(BIN)/pdserve demo

serve: $(READY)  ## an OpenAI-compatible server on http://127.0.0.1:8000
	@$(BIN)/pdserve serve

test: $(READY)  ## the tests that fit ten minutes on two cores
	@$(BIN)/python -m pytest

test-full: $(READY)  ## all tests, slow ones too
	@$(BIN)/python -m pytest -m ""

test-rdma: $(READY)  ## conformance over verbs, on Soft-RoCE in a virtual machine (Debian, root: installs qemu)
	@$(BIN)/python tests/rdma_vm/guest.py --env PDSERVE_TEST_TRANSPORTS=verbs $(VENV)/bin/python -m pytest -m "" -k verbs -v -p no:cacheprovider $(RDMA_TESTS)

lint: $(READY)  ## ruff, mypy, import layers, file lengths
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/file-lengths

format: $(READY)  ## lets ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## transfers against other libraries; prefill/decode against colocated
	@.ci/peers $(VENV)-peers
	@$(BIN)/pdserve bench transport --peers $(VENV)-peers/bin/python
	@$(BIN)/pdserve bench serve
