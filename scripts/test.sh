#!/usr/bin/env bash
# Set everything up, then check and test the whole project. Arguments go to pytest:
#   bash scripts/test.sh -m "not real"      without the real servers (under a minute)
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
bin=${VENV:-.venv}/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
"$bin/lint-imports"
exec "$bin/python" -m pytest "$@"
