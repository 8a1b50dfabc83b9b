# Everything runs from .venv, made on first use.
PY := .venv/bin/python
# Tests and runs start hundreds of processes. Each would compile all of our modules anew where the
# environment forbids to keep what was compiled.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: demo test test-all test-pythons test-torches lint fresh bench chaos exhaustive gpu gpu-shim exactness torchrun docs format wheel clean

.venv/ready: pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv .venv || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv"; exit 1; }
	$(PY) -m pip install --quiet --upgrade 'pip>=23'
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready
	$(PY) -m examples.demo

WORKERS ?= 2
PYTEST := $(PY) -m pytest tests -n $(WORKERS) --dist worksteal --durations 10

# What is quick, and one scenario a kind of fault and a platform.
test: .venv/ready
	$(PYTEST) -m 'not process and not slow and not exhaustive and not gpu and not install'

# About 20 minutes on two cores: no test takes over 45 s, the longer ones are for `make chaos`.
test-all: .venv/ready
	$(PYTEST)

# The package alone, with the newest and with the oldest of what it needs; asks the package index.
fresh: .venv/ready
	$(PY) -m pytest tests -m install -n 2

# Checkpoints are pickles, and Pythons differ in them: their tests on other Pythons than .venv's, as
# the system's own. A wheel of torch for 3.12 and newer brings gigabytes of CUDA libraries along.
PYTHONS ?= /usr/bin/python3

test-pythons:
	for python in $(PYTHONS); do tests/checkpoints_on.sh "$$python" || exit 1; done

# Scripts with the oldest and the newest torch that may be installed, and the trainer with the newest:
# minutes, and 5 GB each.
TORCHES ?= 2.11.0 2.15.0

test-torches:
	for version in $(TORCHES); do tests/torch_on.sh "$$version" || exit 1; done

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# Peers in recovery.py, without what brings a torch along: they run with ours. The wheel of
# nvidia-resiliency-ext is for a newer Python and libc only because of a CUDA module, not used here.
PEERS := --quiet --target benchmarks/.peers
benchmarks/.peers/ready:
	$(PY) -m pip install $(PEERS) --no-deps torchft==0.2.0
	$(PY) -m pip install $(PEERS) --no-deps --platform manylinux_2_39_x86_64 --python-version 3.12 nvidia-resiliency-ext==0.7.0
	$(PY) -m pip install $(PEERS) opentelemetry-sdk opentelemetry-exporter-otlp-proto-http defusedxml grpcio httpx nvidia-ml-py
	touch $@

# About an hour; on an otherwise idle machine.
bench: .venv/ready benchmarks/.peers/ready
	$(PY) benchmarks/run_all.py

# What is marked slow, and every property with 200 examples: about two hours on two cores.
chaos: .venv/ready
	$(PY) -m pytest tests -m "(slow or hypothesis) and not exhaustive and not gpu and not install" --hypothesis-profile chaos --timeout 900 -n $(WORKERS) --dist worksteal --durations 15
	$(MAKE) test-torches

# Every case of what make chaos draws from: hours.
exhaustive: .venv/ready
	$(PY) -m pytest tests -m exhaustive

# Prints what the first hour on a cluster should check, then runs the tests that need a GPU.
gpu: .venv/ready
	@sed -n '/^## The first hour/,$$p' docs/gpus.md
	$(PY) -m pytest tests/gpu -m gpu -rs

# What can be tried of CUDA without a GPU: torch's CUDA build and a driver that counts calls. Skipped
# where .venv-cuda is not there; it takes 4.5 GB. Three equals signs: no other build will do.
gpu-shim: .venv/ready
	$(PY) -m pytest tests/gpu_shim -rs

.venv-cuda/ready: .venv/ready
	$(PY) -m venv .venv-cuda
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= .venv-cuda/bin/python -m pip install --quiet --index-url https://pypi.org/simple torch===2.13.0
	$(PY) -c "import site; print(site.getsitepackages()[0])" > "$$(.venv-cuda/bin/python -c 'import site; print(site.getsitepackages()[0])')/holdfast.pth"
	touch $@

# Every legal layout of up to 8 ranks against one process: about an hour on two cores.
exactness: .venv/ready
	$(PY) tests/cluster/exactness.py > docs/exactness.tmp
	mv docs/exactness.tmp docs/exactness.md

# Runs torchrun and holdfast agent with the same command lines: three minutes.
torchrun: .venv/ready
	$(PY) tests/cluster/conformance.py

docs: .venv/ready
	$(PY) -m launcher.cli.docs > docs/cli.md
	$(PY) -m launcher.cli.docs errors > docs/errors.md
	$(PY) -m launcher.cli.docs resume > docs/resume.md
	$(PY) -m launcher.cli.docs job-file > docs/job-file.md
	$(PY) -m launcher.cli.docs runbooks docs/runbooks

format: .venv/ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

wheel: .venv/ready
	rm -rf build
	$(PY) -m build --wheel

clean:
	rm -rf .venv .venv-cuda build dist *.egg-info
