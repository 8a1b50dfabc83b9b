#!/usr/bin/env bash
# Draws survived.svg: the loss of a real run that loses a node, over that of an undisturbed one, as `holdfast report`
# shows them. Two minutes.   PATH=$PWD/.venv/bin:$PATH docs/survived.sh
set -euo pipefail
cd "$(dirname "$0")/.."
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
holdfast run examples/tiny-cpu.yaml --run-dir "$runs/undisturbed"
holdfast run examples/tiny-cpu.yaml --run-dir "$runs/survived" --fault kill-node:2@20
holdfast report "$runs/survived" --compare "$runs/undisturbed"
# The first chart of the page is the loss.
grep -o 'data:image/svg+xml;base64,[^"]*' "$runs/survived/report.html" | sed -n '1s/.*,//p' | base64 -d > docs/survived.svg
