#!/usr/bin/env bash
# SGLang 0.5.17 for a GPU machine without a network, which has Python 3.12, torch 2.11 for CUDA 13, nvcc and
# ninja: one archive of under 62 MiB, the SITE of scripts/gpu-sglang.sh once it is unpacked.
#
#   bash scripts/gpu-sglang-site.sh OUTDIR [WHEELS]   ->  OUTDIR/sglsite.tar.xz
#
# WHEELS is a directory for the wheels (650 MB), which may have them already. To keep it small, FlashInfer,
# xgrammar, IPython and soundfile are stand-ins (scripts/sglang_absent.py), and kernels of other GPUs and of
# FlashAttention-3 are left out: serve with --attention-backend triton --sampling-backend pytorch
# --grammar-backend none. Takes about four minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
out=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheels=$(realpath -m "${2:-$work/wheels}")
site=$work/sglsite
mkdir -p "$wheels" "$site"

platforms=(--platform any --platform manylinux1_x86_64 --platform manylinux2014_x86_64)
for minor in 5 12 17 24 26 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --dest "$wheels" -r requirements/gpu-sglang.txt

for wheel in "$wheels"/*.whl; do
  case $wheel in
    */sglang-*) leave=('sglang/multimodal_gen/*' 'sglang/test/*' 'sglang/benchmark/*' 'sglang/eval/*' 'tools/*') ;;
    */sglang_kernel-*) leave=('*/flash_ops*' '*/flashmla_ops*' '*/sm100/*' '*/infllm_ops*') ;;
    */torch_memory_saver-*) leave=('*_cu12.*') ;;
    *) leave=() ;;
  esac
  unzip -q -o "$wheel" -d "$site" ${leave[0]:+-x "${leave[@]}"}
done
cp scripts/sglang_absent.py "$site/"

stand_in() { # PACKAGE VERSION NAMES
  mkdir "$site/$1"
  printf 'from sglang_absent import package\n\n__version__ = "%s"\npackage(globals(), %s)\n' "$2" "$3" >"$site/$1/__init__.py"
}
stand_in flashinfer 0.6.15 'own="bmm_fp8", sampling="min_p_sampling_from_probs top_k_top_p_sampling_from_probs", prefill="cudnn_batch_prefill_with_kv_cache"'
stand_in xgrammar 0.2.1 'own="CompiledGrammar GrammarCompiler GrammarMatcher StructuralTag StructuralTagItem TokenizerInfo bitmask_dtype get_bitmask_shape get_model_structural_tag", structural_tag="AnyTextFormat AnyTokensFormat ConstStringFormat ExcludeTokenFormat Format JSONSchemaFormat OptionalFormat OrFormat RegexFormat SequenceFormat StarFormat TagFormat TagsWithSeparatorFormat TokenFormat TriggeredTagsFormat"'
stand_in IPython 9.0.0 'own="", display="HTML display"'
stand_in soundfile 0.13.1 'own=""'

cat >"$site/env.sh" <<'ENV'
# To be sourced: SGLang from this directory, in front of the machine's own packages.
sglsite=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$sglsite${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 SGLANG_IS_FLASHINFER_AVAILABLE=false
for libraries in "$(python3 -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cu13", "lib"))' 2>/dev/null)" /usr/local/cuda/lib64; do
  if [ -e "$libraries/libcudart.so.13" ]; then
    export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    break
  fi
done
ENV
tar c -C "$work" sglsite | xz -T2 -6 >"$out/sglsite.tar.xz"
ls -l "$out/sglsite.tar.xz"
