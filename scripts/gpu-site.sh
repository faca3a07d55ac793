# For scripts that run on a machine with GPUs and without a network; sourced as
#
#   . "$(dirname "$0")/gpu-site.sh" SITE OUTDIR
#
# Sets `site` and `out`, goes to the repository, and lets Python find that first and then SITE, with the
# repository's entry points: without them vLLM does not load skyctl's plug-in.
site=$(realpath "$1")
out=$(realpath -m "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$out"
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0
python3 - "$site" <<'PY'
import pathlib, sys, tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
name, version = project["name"], project["version"]
metadata = pathlib.Path(sys.argv[1]) / f"{name.replace('-', '_')}-{version}.dist-info"
metadata.mkdir(exist_ok=True)
(metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
lines = []
for group, points in project["entry-points"].items():
    lines += [f"[{group}]", *(f"{point} = {target}" for point, target in points.items())]
(metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
PY
