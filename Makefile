# make train     install what is needed, then train configs/quickstart.yaml
# make test      everything that CI checks
# make docs      the site, in _docs/
# make notebooks run the notebooks and keep their outputs
# make torture   the fault tests at their full size: some hours; writes docs/reliability.md
# make export    write mmgrpo/*.py and README.md from the notebooks
# make pins      write constraints.txt from this environment
# make clean     remove what was built (not the environment, not the runs)
PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
BIN := .venv/bin
RUNTIME := .venv/.stamp-runtime
DEV := .venv/.stamp-dev
SOURCE_TESTS := tests/test_export.py tests/test_layers.py tests/test_shape.py
TORTURE ?= tests
LIMIT := $(if $(shell command -v timeout),timeout 1500)

.PHONY: train test torture check-source check-notebooks check-package check-readme docs notebooks export pins clean
.DEFAULT_GOAL := test
.NOTPARALLEL:

train: $(RUNTIME)
	$(BIN)/mmgrpo_train --config $(CONFIG)

# The cheap checks come first. Each process of the notebook tests and of the two-rank tests gets one thread.
test: export OMP_NUM_THREADS = 1
test: export MKL_NUM_THREADS = 1
test: check-source check-readme check-notebooks check-package docs
	@echo "make test: all checks passed"

check-source: $(DEV)   # export in step, notebooks clean, layers and sizes kept
	$(BIN)/python -m pytest -q $(SOURCE_TESTS)

check-readme: $(DEV)
	$(BIN)/python tools/docs.py --readme --check
	$(BIN)/python tools/results.py --check
	$(BIN)/python tools/reliability.py --check

check-notebooks: $(DEV)
	$(LIMIT) $(BIN)/nbdev_test --flags slow --n_workers 2 --timing

check-package: $(DEV)
	$(BIN)/python -m pytest -q tests $(SOURCE_TESTS:%=--ignore=%)

# The tests that carry a goal, at their full size: MMGRPO_TORTURE_SHARE=0.1 for a tenth, MMGRPO_TORTURE_PIECE=2/5 for a part that adds up.
torture: export OMP_NUM_THREADS = 1
torture: export MKL_NUM_THREADS = 1
torture: $(DEV)
	MMGRPO_TORTURE=1 MMGRPO_TORTURE_RECORD=docs/results/torture.json $(BIN)/python -m pytest -q -m goal $(TORTURE)
	$(BIN)/python tools/reliability.py

docs: $(DEV)
	$(BIN)/python tools/docs.py

notebooks: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python tools/run_nbs.py

export: $(DEV)
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean
	$(BIN)/python tools/docs.py --readme

pins: $(DEV)
	$(BIN)/python tools/pins.py

clean:
	rm -rf _docs _md _proc build dist *.egg-info .pytest_cache .hypothesis
	find mmgrpo nbs tests tools -name __pycache__ -prune -exec rm -rf {} +

# Requirements change rarely: a stamp makes the second `make` start at once.
$(BIN)/python:
	$(PYTHON) -m venv .venv

$(RUNTIME): setup.py settings.ini constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e .
	touch $@

$(DEV): setup.py settings.ini constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $(RUNTIME) $@
