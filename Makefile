# Needs Python 3.11 or later and make. Everything else goes into .venv, from requirements.lock and checked against its hashes.
#
#   make demo     a tour of decisions against demo providers, then serve until Ctrl-C; ARGS="--once" ends after the tour
#   make test     the tests; ARGS="-k fence" chooses among them
#   make check    what CI checks: lint, format, types, tests

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: setup demo test check lock clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "This Python lacks venv or pip; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup
	@$(BIN)/coordinator demo $(ARGS)

test: setup
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict coordinator adapters
	$(MAKE) test

# After a change of the dependencies; uv is in no lock.
lock:
	uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --extra dev --extra otlp -o requirements.lock

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
