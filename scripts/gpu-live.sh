#!/usr/bin/env bash
# Cases of `benchmarks.live` on a machine with GPUs and without a network; each step is bounded.
#
#   bash scripts/gpu-live.sh SITE OUTDIR STEP ...
#
# SITE is a directory with vLLM and what it needs. A STEP is CASE:PHASE, for example
# dense-other:up, dense-other:push, dense-other:down (docs of benchmarks/live.py). OUTDIR gets the
# results and, for a step that fails, the end of its log is printed. A table comes last.
set -uo pipefail
site=$(realpath "$1")
out=$(realpath -m "$2")
shift 2
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0

for step in "$@"; do
  began=$SECONDS log=$out/${step/:/-}.log
  timeout -s INT -k 30 "${LIMIT_S:-240}" \
    python3 -m benchmarks.live --case "${step%:*}" --phase "${step#*:}" --out "$out" >"$log" 2>&1
  echo "$step: exit $? after $((SECONDS - began)) s"
  grep -q "^Traceback\|SystemExit\|error" "$log" && tail -n 25 "$log"
done
python3 - "$out" <<'EOF'
import json, pathlib, sys

print("case whole frozen vllm extra transport")
for path in sorted(pathlib.Path(sys.argv[1]).glob("live-*.json")):
    r = json.loads(path.read_text())
    print(path.stem, r["whole_s"], r["frozen_s"], r["native_median_s"], r["extra_share_of_a_rank"], r["transport"])
EOF
