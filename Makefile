# Every target sets up what it needs: a virtual environment in .venv, made once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# MLX's Linux wheel brings a slow BLAS; OpenBLAS in front of it is about 4 times faster on long prompts.
# Used by the targets below where it is installed; nothing needs it.
OPENBLAS := $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib64/libopenblas.so.0))
RUN := $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS)) $(BIN)/python

.PHONY: help demo test lint docs bench eval mlx-lm-tests soak agents real-models clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /	/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)/.installed-real: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[real]'
	touch $@

demo: $(VENV)/.installed ## hide facts in a long document and ask for them, with and without compression
	$(RUN) -m mlx_snapkv demo

test: $(VENV)/.installed-dev ## the tests, one process a core
	OPENBLAS_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal

lint: $(VENV)/.installed-dev ## ruff, mypy, and which room may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed ## write docs/policies.md, commands.md and models.md and the README's tables again
	$(RUN) scripts/write_docs.py

bench: $(VENV)/.installed-dev ## speed and memory of all caches side by side; writes docs/benchmarks* (three hours)
	$(RUN) -m mlx_snapkv bench --verified "" --output docs/benchmarks
	$(RUN) -m mlx_snapkv bench --context "" -p "" --long-prompts "" --steps 30 --output docs/benchmarks-answers
	$(RUN) -m mlx_snapkv bench --book --output docs/benchmarks-book
	$(RUN) scripts/book_page.py
	$(RUN) -m mlx_snapkv bench --model demo --batches 1,4,8,16 --output docs/benchmarks-batches
	$(RUN) -m mlx_snapkv bench --model demo --server 1,4,8 --output docs/benchmarks-server
	$(RUN) -m mlx_snapkv bench --model demo --needle --context 2048,4096,8192 --steps 20 -p 2048,4096 \
		--long-prompts 4096,8192 --verified "" --questions 4 --output docs/benchmarks-demo

mlx-lm-tests: $(VENV)/.installed-dev ## mlx-lm's own tests, with this package patched in and without
	$(RUN) scripts/run_mlx_lm_tests.py

soak: $(VENV)/.installed-dev ## a server under good, bad, slow and leaving clients: nothing may grow or die (10 minutes)
	$(RUN) scripts/soak_server.py

agents: $(VENV)/.installed-dev ## Claude Code, Codex and opencode against the server; writes docs/agents* (needs npm; ten minutes)
	$(RUN) scripts/try_agents.py

real-models: $(VENV)/.installed-real ## two small language models and essays into real-models/, for tests that need them (2 GB)
	$(RUN) scripts/make_real_models.py

eval: $(VENV)/.installed ## are facts still found? every policy, the question known or later; writes docs/quality, kv-bits, answers, book (three hours)
	$(RUN) scripts/measure_quality.py
	$(RUN) scripts/measure_kv_bits.py
	$(RUN) scripts/measure_answers.py
	$(RUN) scripts/measure_book.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
