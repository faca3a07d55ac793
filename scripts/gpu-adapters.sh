#!/usr/bin/env bash
# Adapters out of memory, and a replica that takes its weights from its sibling, on a machine with
# GPUs and without a network; each step is bounded by LIMIT_S (330 s).
#
#   bash scripts/gpu-adapters.sh SITE OUTDIR STEP ...
#
# SITE is a directory with vLLM and what it needs. A STEP is checkpoints (33 GB of /dev/shm), adapters
# or sibling: on GPUs 0 and 1, or all on the only one. OUTDIR gets the results; the end of a log is printed,
# and a table last. A step that fails does not stop the others.
set -uo pipefail
. "$(dirname "$0")/gpu-site.sh" "$1" "$2"
shift 2
scratch=${SCRATCH:-/dev/shm/skyctl-bench}
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then gpus=(0 1) both=(0 1); else gpus=(0) both=(0 0); fi

for step in "$@"; do
  case $step in
    checkpoints) command=(-c "import sys, pathlib; from benchmarks.checkpoints import two_checkpoints
two_checkpoints(pathlib.Path(sys.argv[1]), 'qwen3-8b')" "$scratch") ;;
    adapters) command=(-m benchmarks.adapter_memory --gpu "${gpus[@]}" --scratch "$scratch" --out "$out") ;;
    sibling) command=(-m benchmarks.sibling --gpu "${both[@]}" --kills 3 --scratch "$scratch" --out "$out") ;;
    *) echo "no step $step"; continue ;;
  esac
  began=$SECONDS
  timeout -s INT -k 60 "${LIMIT_S:-330}" python3 "${command[@]}" >"$out/$step.log" 2>&1
  code=$?
  echo "$step: exit $code after $((SECONDS - began)) s"
  tail -n "$([ $code -eq 0 ] && echo 8 || echo 25)" "$out/$step.log" | cut -c1-300
  [ $code -eq 0 ] || find "$scratch" -path '*fleet-*' -name '*.log' \
    -exec sh -c 'echo "--- $1"; tail -n 8 "$1" | cut -c1-300' _ {} \; 2>/dev/null | head -n 60
done
python3 - "$out" <<'PY'
import json, pathlib, sys

out = pathlib.Path(sys.argv[1])
if (path := out / "adapter-memory.json").exists():
    result = json.loads(path.read_text())
    print("adapter of", result["bytes"], "bytes: seconds to the first token beyond a usual one")
    for way, row in result["ways"].items():
        print(f"  {way:<10} {row['extra_s']:.3f}  agree {row['agree']:.0%}  runs {row['extra_runs_s']}")
if (path := out / "sibling.json").exists():
    result = json.loads(path.read_text())
    print("sibling:", result["admission_s"], "s from the engine's answer to readiness,", result)
PY
