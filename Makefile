# Everything runs from .venv, made on first use.
PY := .venv/bin/python
.PHONY: demo test lint bench chaos docs clean

.venv/ready: pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install --quiet --upgrade 'pip>=23'
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready
	$(PY) -m examples.demo

test: .venv/ready
	$(PY) -m pytest tests

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

bench: .venv/ready
	$(PY) benchmarks/check_time.py
	$(PY) benchmarks/membership.py
	$(PY) benchmarks/recovery.py

chaos: .venv/ready
	$(PY) -m pytest tests -m slow

clean:
	rm -rf .venv build dist *.egg-info
