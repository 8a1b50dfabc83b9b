#!/usr/bin/env bash
# checkpoints_on.sh PYTHON: the tests of checkpoints on another Python, in build/python-VERSION.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
if ! version=$("$python" -c 'import ensurepip, platform; print(platform.python_version())'); then
  echo "left out: there is no $python here that can make an environment" \
    "(on Debian: apt-get install python3-venv)" >&2
  exit 0
fi
venv=build/python-$version
if [[ ! -e $venv/ready || pyproject.toml -nt $venv/ready || constraints.txt -nt $venv/ready ]]; then
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --constraint constraints.txt --editable '.[train,tokenizers]' \
    pytest pytest-timeout hypothesis psutil
  touch "$venv/ready"
fi
echo "checkpoints on Python $version"
PATH=$PWD/$venv/bin:$PATH exec "$venv/bin/python" -m pytest -p no:cacheprovider \
  tests/unit/elastic_trainer/test_{checkpoint_state,checkpoint_manager,hf_convert}.py \
  tests/unit/launcher/test_checkpoints.py \
  tests/cluster/test_{start_from,checkpoint_saves}.py \
  tests/cluster/test_run.py::test_after_ctrl_c_and_after_the_launchers_death_the_run_goes_on
