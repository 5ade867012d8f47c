# Every target sets up what it needs: a virtual environment in .venv, made once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# MLX's Linux wheel brings a slow BLAS; OpenBLAS in front of it is about 4 times faster on long prompts.
# Used by the targets below where it is installed; nothing needs it.
OPENBLAS := $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib64/libopenblas.so.0))
RUN := $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS)) $(BIN)/python

# A model that only `eval` fetches: 1.1 GB, and 7.1 GB in float32.
LARGER := qwen2.5-coder-1.5b-instruct

.PHONY: help demo test lint docs bench bench-gpu bench-shapes eval mlx-lm-tests agents soak real-models clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /	/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) mlx_snapkv/prerequisites.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)/.installed-real: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[real]'
	touch $@

demo: $(VENV)/.installed ## facts in a long document asked for, from all of its entries and from 1/16, and the speed
	$(RUN) -m mlx_snapkv demo

# Tests start many processes, which start faster from compiled files, and wait for them: one worker more than cores.
test: $(VENV)/.installed-dev ## the tests, in parallel
	PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(RUN) -m pytest \
		-n $$($(BIN)/python -c "import os; print(os.cpu_count() + 1)") --dist worksteal

lint: $(VENV)/.installed-dev ## ruff, mypy, and which room may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed ## write docs/policies.md, commands.md, models.md and the tables of all pages again
	$(RUN) scripts/write_docs.py

bench: $(VENV)/.installed-dev ## speed and memory of caches, books, batches and servers; writes docs/*.json and their tables (two hours)
	mkdir -p build
	$(RUN) -m mlx_snapkv bench -n 1 --steps 20 --output build/benchmarks
	cp build/benchmarks.json docs/
	$(RUN) scripts/speed_picture.py
	$(RUN) scripts/measure_books.py
	$(RUN) scripts/measure_batches.py
	$(RUN) scripts/measure_servers.py
	$(RUN) scripts/write_docs.py

bench-gpu: $(VENV)/.installed ## one model on this machine's GPU: a table to paste into an issue (ten minutes; MODEL=REPOSITORY for another model)
	@$(RUN) scripts/bench_gpu.py $(if $(MODEL),--model $(MODEL))

bench-shapes: $(VENV)/.installed-dev ## the kernels' tests, and random models with the shapes of an 8B and a 30B-A3B, on this machine's GPU
	$(RUN) -m pytest -q tests/sparse/kernels/test_on_device.py
	$(RUN) scripts/bench_shapes.py

mlx-lm-tests: $(VENV)/.installed-dev ## mlx-lm's own tests, with this package patched in and without
	$(RUN) scripts/run_mlx_lm_tests.py

agents: $(VENV)/.installed-dev ## Claude Code, Codex, opencode, aider and client libraries against the server; writes docs/agents.json and its tables (needs npm; an hour)
	$(RUN) scripts/try_agents.py
	$(RUN) scripts/write_docs.py

soak: $(VENV)/.installed-dev real-models ## eight agents' sessions on the server, with two models: memory, equal answers, no errors (half an hour)
	$(RUN) scripts/soak.py

real-models: $(VENV)/.installed-real ## two small language models and essays into real-models/, for tests that need them (2 GB)
	$(RUN) scripts/make_real_models.py

eval: $(VENV)/.installed-dev real-models ## how far do answers move, are facts still found? writes docs/quality, bits, facts, reading, residual, associations, long-answers (about ten hours, 10 GB)
	$(RUN) scripts/make_real_models.py --model $(LARGER)
	$(RUN) scripts/make_ruler.py real-models/smollm2-135m-instruct real-models/ruler/smollm2-135m-instruct --length 2048 --length 4096
	$(RUN) scripts/make_ruler.py real-models/$(LARGER) real-models/ruler/$(LARGER) --length 2048 --length 16384
	$(RUN) scripts/measure_quality.py
	$(RUN) scripts/quality_picture.py
	$(RUN) scripts/measure_facts.py
	$(RUN) scripts/measure_bits.py
	$(RUN) scripts/measure_sparse.py
	$(RUN) scripts/measure_residual.py
	$(RUN) scripts/measure_residual.py --models real-models/$(LARGER) --text real-models/code --documents 1 --lengths 1400 6000 --out docs/residual-code
	$(RUN) scripts/measure_associations.py --lengths 2048 --texts 2 --variants one several contradicting
	$(RUN) scripts/measure_associations.py --lengths 2048 --texts 6 --variants one several \
		--methods sparse:budget=6.25% sparse:budget=3.125% sparse:budget=1024
	$(RUN) scripts/measure_associations.py --lengths 2048 --texts 1 --variants late
	$(RUN) scripts/measure_associations.py --lengths 8192 --texts 4 --variants several --methods sparse:budget=6.25% sparse:budget=3.125%
	$(RUN) scripts/measure_associations.py --lengths 16384 --texts 1 --variants several \
		--methods snapkv:budget=12.5% keydiff:budget=12.5%,schedule=once sparse:budget=6.25% sparse:budget=3.125%
	$(RUN) scripts/measure_associations.py --lengths 16384 --texts 4 --variants several --methods sparse:budget=6.25% sparse:budget=3.125%
	$(RUN) scripts/measure_long_answers.py
	$(RUN) scripts/write_docs.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
