# make demo: the whole life of a small model, from text to a verified bundle.
# make test: the whole suite. Both make .venv with the `assay` command when it is missing.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test kills soak root lint bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), "Assay needs Python 3.11, 3.12 or 3.13"'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,corpus,ray,dev]'
	touch $(STAMP)

demo: install
	$(BIN)/assay demo

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not kills and not root and not soak'

kills: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist load -m kills

soak: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak

root: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m root

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python bench/accounting.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
