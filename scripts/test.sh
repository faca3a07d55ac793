#!/usr/bin/env bash
# Set everything up, then check the code, build the documentation and run every test. Arguments go to pytest:
#   bash scripts/test.sh -m "not real"      without the real servers (many minutes on two cores: hundreds of tests start stubs and commands)
#   bash scripts/test.sh tests/unit         functions alone
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
bin=${VENV:-.venv}/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
"$bin/lint-imports"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
# without --quiet, which hides warnings from --strict
NO_MKDOCS_2_WARNING=1 "$bin/mkdocs" build --strict --site-dir "$site"
rm -rf "$site"
exec "$bin/python" -m pytest "$@"
