#!/usr/bin/env bash
# Set everything up and show the main job on two real vLLM CPU servers and the real vllm-router:
# up, generate, freeze mid-generation, push a checkpoint, thaw, verify, push back, down.
# Needs Python 3.11 or newer, 2 cores, 6 GB of memory; no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec "${VENV:-.venv}/bin/python" scripts/demo.py "$@"
