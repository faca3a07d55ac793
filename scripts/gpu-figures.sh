#!/usr/bin/env bash
# Figures of `benchmarks.push_matrix` on a machine with GPUs and without a network, and how they
# compare with those of an earlier vLLM; bounded by LIMIT_S (290 s).
#
#   bash scripts/gpu-figures.sh SITE OUTDIR FIGURE[,FIGURE ...]
#   BEFORE=OUTDIR bash scripts/gpu-figures.sh SITE OUTDIR2 FIGURE[,FIGURE ...]
#
# SITE is a directory with vLLM and what it needs. Two GPUs do for ipc-1,nccl-1 and for
# ipc-1-moe31,nccl-1-moe31. OUTDIR gets a JSON for each figure, push-matrix.log and summary.json.
# BEFORE is the OUTDIR of another vLLM on this machine (default: benchmarks/results).
set -uo pipefail
before=$(realpath -m "${BEFORE:-$(dirname "$0")/../benchmarks/results}")
. "$(dirname "$0")/gpu-site.sh" "$1" "$2"

for figure in ${3//,/ }; do rm -f "$out/$figure.json"; done
timeout -s INT -k 30 "${LIMIT_S:-290}" python3 -m benchmarks.push_matrix --out "$out" --only "$3" \
  --deadline-s "$((${LIMIT_S:-290} - 20))" --runs "${RUNS:-5}" --warmups 2
code=$?
python3 - "$out" "$before" "$3" <<'PY'
import json, pathlib, sys

out, before = map(pathlib.Path, sys.argv[1:3])
summary = {}
for name in sys.argv[3].split(","):
    if not (out / f"{name}.json").exists():
        summary[name] = {"problem": "not measured: see push-matrix.log"}
        continue
    now = json.loads((out / f"{name}.json").read_text())
    row = {key: now[key] for key in ("versions", "median_s", "freeze_window_s", "layout_share")}
    # what is recorded was measured with both layouts
    earlier = (before / f"{name}-copied.json", before / f"{name}.json")
    if found := next((path for path in earlier if path.exists()), None):
        then = json.loads(found.read_text())
        row["before"] = {"versions": then["versions"], "freeze_window_s": then["freeze_window_s"]}
        row["ratio"] = round(now["freeze_window_s"] / then["freeze_window_s"], 2)
    summary[name] = row
(out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
print(f"\n{'figure':<16}{'vLLM':<10}{'push':>8}{'frozen':>9}{'before':>9}{'ratio':>7}  copied")
for name, row in summary.items():
    if "problem" in row:
        print(f"{name:<16}{row['problem']}")
        continue
    then = row.get("before", {}).get("freeze_window_s")
    print(f"{name:<16}{row['versions']['vllm']:<10}{row['median_s']:>8.3f}"
          f"{row['freeze_window_s']:>9.4f}{then or float('nan'):>9.4f}"
          f"{row.get('ratio', float('nan')):>7.2f}  {row['layout_share']:.0%}")
PY
exit "$code"
