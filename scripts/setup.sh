#!/usr/bin/env bash
# Make (or refresh) .venv with everything the CPU demo and the tests need, from the pinned locks.
# Safe to run again: it does nothing when the locks and the project file have not changed.
#
#   PYTHON=python3.12 bash scripts/setup.sh     another interpreter (3.11 or newer)
#   VENV=/path bash scripts/setup.sh            another place for the environment
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

find_python() {
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or newer with venv was found (on Debian: apt-get install python3-venv; or set PYTHON=…)" >&2
  exit 1
}

stamp="$venv/.skyctl-setup"
wanted=$(cat requirements/cpu.lock requirements/dev.lock pyproject.toml "$0" | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/skyctl" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

python=$(find_python)
echo "==> setting up $venv with $("$python" --version) (about 500 MB, a few minutes the first time)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps)

# torch comes from PyTorch's CPU builds. Where pip is not configured for them, uv knows the index.
torch=$(grep '^torch==' requirements/cpu.lock)
have_torch=$("$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' 2>/dev/null || true)
if [ "$have_torch" != "$torch" ]; then
  "${pip[@]}" "$torch" 2>/dev/null || {
    "${pip[@]}" uv
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --torch-backend=cpu "${torch%+cpu}"
  }
fi

# --no-deps: the locks are complete, and leave out three packages whose CUDA builds break a CPU machine.
"${pip[@]}" -r <(grep -v '^torch==' requirements/cpu.lock) -r requirements/dev.lock
# under the name it had before, its entry points would be there twice
"$venv/bin/python" -m pip uninstall --quiet --yes --disable-pip-version-check skyctl 2>/dev/null || true
"${pip[@]}" --no-build-isolation --editable .
# tests start these by the thousand, and where PYTHONDONTWRITEBYTECODE is set each would compile them
"$venv/bin/python" -m compileall -q skyctl tests
printf '%s' "$wanted" >"$stamp"
echo "==> ready: $("$venv/bin/skyctl" --version)"
