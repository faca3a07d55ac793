#!/usr/bin/env bash
# Set everything up, then check the code, build the documentation and run every test, those with real
# servers beside the others. Arguments go to pytest:
#   bash scripts/test.sh -m "not real" -n auto      without the real servers, on all cores
#   bash scripts/test.sh tests/unit -n auto         functions alone, which start no process
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
bin=${VENV:-.venv}/bin
unset PYTHONDONTWRITEBYTECODE # otherwise each pytest would rewrite the assertions of all tests anew
"$bin/python" -m pytest --collect-only --quiet >/dev/null & # beside mypy, for those below to find
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
"$bin/lint-imports"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
# without --quiet, which hides warnings from --strict
NO_MKDOCS_2_WARNING=1 "$bin/mkdocs" build --strict --site-dir "$site"
rm -rf "$site"
if [ $# -gt 0 ]; then
  exec "$bin/python" -m pytest "$@"
fi
# All at once: each waits for other processes for a part of its time. A server that starts keeps one
# core busy: two lanes of them, no more.
messages=$(mktemp -d)
lanes=()
trap 'kill -INT "${lanes[@]}" 2>/dev/null || true; rm -rf "$site" "$messages"' EXIT
for beside in "beside" "not beside"; do
  "$bin/python" -m pytest -m "real and $beside" --ignore tests/unit >"$messages/$beside" 2>&1 &
  lanes+=($!)
done
code=0
"$bin/python" -m pytest -m "not real" -n $(($(nproc) + 2)) --dist worksteal || code=$?
for lane in "${lanes[@]}"; do
  wait "$lane" || code=$?
done
cat "$messages"/*
exit "$code"
