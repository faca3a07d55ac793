# For scripts that run on a machine with GPUs and without a network; sourced as
#
#   . "$(dirname "$0")/gpu-site.sh" SITE OUTDIR
#
# Sets `site` and `out`, goes to the repository, and lets Python find that first and then SITE.
site=$(realpath "$1")
out=$(realpath -m "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$out"
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0
