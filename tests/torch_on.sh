#!/usr/bin/env bash
# torch_on.sh VERSION: what scripts need of torch, and from 2.13 the trainer, with another torch than
# .venv's, in build/torch-VERSION. On Linux a wheel of torch from the index is CUDA's: 5 GB each.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1
venv=build/torch-$version
if [[ ! -e $venv/ready || pyproject.toml -nt $venv/ready || tests/torch_on.sh -nt $venv/ready ]]; then
  python3 -m venv "$venv"
  # Three equals signs: no build of that version for the CPU that is at hand, whatever pip is told.
  PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS='' PIP_EXTRA_INDEX_URL='' \
    "$venv/bin/pip" install --quiet --no-cache-dir "torch===$version"
  "$venv/bin/pip" install --quiet --editable '.[tokenizers]' 'numpy>=1.26' 'safetensors>=0.8' \
    pytest pytest-timeout pytest-xdist hypothesis psutil py-spy
  touch "$venv/ready"
fi
scripts=(
  tests/unit/elastic_trainer/test_{torch_private,process_groups,preload_choice,zygote,progress}.py
  tests/unit/elastic_trainer/test_{agent,agent_options,agent_main,agent_scripts,agent_store}.py
  tests/unit/elastic_trainer/test_{script_state,script_checkpointer}.py
  tests/cluster/test_{scripts,torchrun}.py
)
trainer=(
  tests/unit/elastic_trainer/test_{model,parallelize,optimizer,checkpoint_state,rank_part}.py
  tests/cluster/test_{trainer,mesh,reshard,standby}.py
)
[[ $version == 2.1[12].* ]] && trainer=()
echo "torch $version"
PATH=$PWD/$venv/bin:$PATH exec "$venv/bin/python" -m pytest -n 2 --dist worksteal -p no:cacheprovider \
  -m 'not slow and not exhaustive and not gpu and not install' "${scripts[@]}" "${trainer[@]}"
