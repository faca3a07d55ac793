#!/usr/bin/env bash
# A prefill and a decode server over NIXL on two GPUs of a machine without a network, in some six
# minutes: tests/integration/test_pairs.py, and which ways NIXL took last.
#
#   bash scripts/gpu-pairs.sh SITE NIXL_DIR [OUTDIR] [PYTEST ARGUMENT ...]
#
# SITE is a directory with vLLM, vllm-router and what they need; NIXL_DIR has the wheels `nixl` and
# `nixl-cu13` unpacked, with the hidden directory of the latter. OUTDIR gets run.log and the servers'
# logs.
set -uo pipefail
site=$(realpath "$1")
nixl=$(realpath "$2")
out=$(realpath -m "${3:-/tmp/skyctl-pairs}")
shift $(($# < 3 ? $# : 3))
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH="$PWD:$site:$nixl${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 UCX_LOG_LEVEL="${UCX_LOG_LEVEL:-info}"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
timeout -s INT -k 60 "${LIMIT_S:-570}" python3 -m pytest tests/integration/test_pairs.py -m gpu \
  -rA --durations=0 --tb=short -p no:cacheprovider --basetemp "$work/t" "$@" 2>&1 | tee "$out/run.log"
code=${PIPESTATUS[0]}
(cd "$work" && find . -name '*.log' -exec cp --parents {} "$out" \;)
grep -rhoE "UCX +INFO +.*(intra-node|inter-node|self) cfg.*" "$out" --include='*-0.log' | sort | uniq -c
grep -E "^(PASSED|FAILED|ERROR|SKIPPED|=+ )" "$out/run.log"
exit "$code"
