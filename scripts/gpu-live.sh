#!/usr/bin/env bash
# Cases of `benchmarks.live` on a machine with GPUs and without a network; each step is bounded.
#
#   bash scripts/gpu-live.sh SITE OUTDIR STEP ...
#
# SITE is a directory with vLLM and what it needs. A STEP is CASE:PHASE, for example
# dense-other:up, dense-other:push, dense-other:down (`python -m benchmarks.live --help`); steps
# joined by commas run side by side. OUTDIR gets the results; the end of a log is printed where a
# step fails, and a table last.
set -uo pipefail
. "$(dirname "$0")/gpu-site.sh" "$1" "$2"
shift 2

run_step() {
  local began=$SECONDS log=$out/${1/:/-}.log
  timeout -s INT -k 30 "${LIMIT_S:-200}" \
    python3 -m benchmarks.live --case "${1%:*}" --phase "${1#*:}" --out "$out" >"$log" 2>&1
  local code=$?
  echo "$1: exit $code after $((SECONDS - began)) s"
  [ $code -eq 0 ] || tail -n 12 "$log" | cut -c1-400
}
for group in "$@"; do
  for step in ${group//,/ }; do run_step "$step" & done
  wait
done
python3 - "$out" <<'EOF'
import json, pathlib, sys

print("case whole frozen vllm extra transport times-the-case-beside-it")
paths = sorted(pathlib.Path(sys.argv[1]).glob("live-*.json"))
results = {path.stem: json.loads(path.read_text()) for path in paths}
for name, r in results.items():
    beside = results.get(r.get("beside"))
    ratio = f"{r['whole_s'] / beside['whole_s']:.2f}" if beside else "-"
    print(name, r["whole_s"], r["frozen_s"], r["native_median_s"], r["extra_share_of_a_rank"], r["transport"], ratio)
EOF
