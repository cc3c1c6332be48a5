# The two commands are `make demo` and `make test`; each sets up .venv on its first run.
#
#   make PYTHON=python3.12 test     another Python (3.11 or newer)
#   make VENV=/path/to/venv test    an environment of your own; what is missing is installed into it
#   make WORKERS=8 test             more test processes

VENV ?= .venv
WORKERS ?= 2
EXTRAS ?= torch,dev
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

PY := $(VENV)/bin/python
STAMP := $(VENV)/.rannc_jax_installed
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal --timeout 600

.PHONY: help install demo test test-all parity lint format types contracts docs clean

help:
	@grep -E '^[a-z-]+:.*#' Makefile | sed -E 's/:[^#]*# /\t/' | expand -t 12

install: $(STAMP) # make .venv and install everything that tests need

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; say make PYTHON=..." >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP) # cut an unchanged BERT into a pipeline on 8 fake CPU devices and train it
	$(PY) -m rannc_jax demo $(DEMO_ARGS)

test: $(STAMP) # the tests of every change (about 15 minutes on 2 cores)
	$(PYTEST) -m "not slow and not long" $(ARGS)

test-all: $(STAMP) # the slow tests too
	$(PYTEST) -m "not long" $(ARGS)

parity: $(STAMP) # the full cross of plans against one device; resumable, appends to parity.json
	$(PY) -m tests.parity.run $(ARGS)

lint: $(STAMP) # style, format, ASCII
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@! LC_ALL=C.UTF-8 git grep -nP '[^\x00-\x7F]' -- '*.py' '*.md' '*.toml' '*.yml' Makefile .ci || \
		{ echo "the lines above are not ASCII" >&2; exit 1; }

format: $(STAMP) # let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(STAMP) # pyright over both packages
	$(PY) -m pyright --pythonpath $(PY)

contracts: $(STAMP) # who may import whom (docs/explain/architecture.md)
	$(VENV)/bin/lint-imports --no-cache

docs: $(STAMP) # the documentation as a site, in site/
	$(PY) -m pip install --quiet '.[docs]'
	$(PY) -m mkdocs build --strict

clean: # remove everything that make made
	rm -rf $(VENV) site .jax_cache .pytest_cache .ruff_cache .hypothesis
