# Two commands do everything on a machine with Python 3.11: `make artifact` and `make test`.
PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PARALLEL ?= -n 2 --dist loadfile

.PHONY: app browser artifact test test-all lint format blender clean

$(STAMP): requirements.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

artifact: $(STAMP)
	$(PY) -m lcs artifact $(ARGS)

# The demo, on http://localhost:7860
app: $(STAMP)
	$(PY) -m lcs app $(ARGS)

test: $(STAMP) browser
	$(PY) -m pytest $(PARALLEL)

test-all: $(STAMP) browser blender
	$(PY) -m pytest $(PARALLEL) -m "slow or not slow"

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Chromium for the browser tests: installed where that is possible, else these tests say why they are skipped.
browser:
	@tests/install_browser.sh

# Blender as a Python module needs numpy<2, so it lives in an environment of its own.
blender: .venv-blender/.installed

.venv-blender/.installed:
	test -x .venv-blender/bin/python || $(PYTHON) -m venv .venv-blender
	.venv-blender/bin/python -m pip install --quiet --disable-pip-version-check bpy==4.5.15
	touch $@

clean:
	rm -rf $(VENV) .venv-blender out
