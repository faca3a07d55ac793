#!/usr/bin/env bash
# tests/gpu on a machine with GPUs and without a network, bounded by LIMIT_S (300 s).
#
#   bash scripts/gpu-tests.sh SITE [OUTDIR] [PYTEST ARGUMENT ...]
#
# SITE is a directory with vLLM and what it needs. OUTDIR gets run.log and the servers' logs.
set -uo pipefail
. "$(dirname "$0")/gpu-site.sh" "$1" "${2:-/tmp/skyctl-gpu}"
shift $(($# < 2 ? $# : 2))

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
timeout -s INT -k 30 "${LIMIT_S:-300}" python3 -m pytest -m gpu -rA --durations=0 --tb=short \
  -p no:cacheprovider --basetemp "$work/t" "$@" 2>&1 | tee "$out/run.log"
code=${PIPESTATUS[0]}
(cd "$work" && find . -name '*.log' -exec cp --parents {} "$out" \;)
tar czf "$out/logs.tar.gz" -C "$out" . 2>/dev/null
grep -E "^(PASSED|FAILED|ERROR|SKIPPED|=+ )" "$out/run.log"
exit "$code"
