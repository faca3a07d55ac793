#!/usr/bin/env bash
# SGLang servers through skyctl on one GPU of a machine without a network, in some six minutes: starts,
# the engine's contract, pushes, pauses, sleeps, restarts and random verbs, and a table last
# (tests/gpu/sglang.py), which is printed within 330 s whatever happens; LIMIT_S=seconds changes its 310.
#
#   bash scripts/gpu-sglang.sh SITE [OUTDIR] [STEP ...]
#
# SITE is a directory with SGLang and what it needs, and an env.sh to source. STEPs are names of that
# table, otherwise all. OUTDIR gets run.log and the servers' logs, and jit.tar.gz, the kernels that
# SGLang compiled: JIT=that file spares a later run the compiling. The router takes part where
# `vllm_router` can be imported.
set -uo pipefail
site=$(realpath "$1")
out=$(realpath -m "${2:-/tmp/skyctl-sglang}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
. "$site/env.sh"
export PYTHONPATH="$PWD:$PYTHONPATH" PYTHONUNBUFFERED=1
export TVM_FFI_CACHE_DIR="${TVM_FFI_CACHE_DIR:-/tmp/sgl-jit}"
mkdir -p "$TVM_FFI_CACHE_DIR"

# all at once, since a server compiles them one after the other
if [ -n "${JIT:-}" ] && [ -e "$JIT" ]; then
  tar xzf "$JIT" -C "$TVM_FFI_CACHE_DIR"
else
  compile() {
    while read -r module function arguments; do
      timeout 90 python3 -c "import torch; from sglang.$module import $function as compile_it; compile_it($arguments)" \
        > "$out/kernel-$function.log" 2>&1 || echo "kernel $function was not compiled: the server tries" &
    done
    wait
  }
  if [ -d "$site/sglang/jit_kernel" ]; then
    compile <<'KERNELS'
jit_kernel.norm _jit_qknorm_module 128, torch.bfloat16
jit_kernel.norm _jit_fused_add_rmsnorm_module torch.bfloat16, False
jit_kernel.activation _jit_activation_module torch.bfloat16
jit_kernel.rope _jit_fused_rope_module True, 128, torch.bfloat16
jit_kernel.kvcache _jit_kvcache_module 1024
jit_kernel.clamp_position _jit_clamp_position_module torch.int64
jit_kernel.resolve_future_token_ids _jit_resolve_future_token_ids_module torch.int64
KERNELS
  else # where 0.5.17 has them
    compile <<'KERNELS'
kernels.ops.layernorm.norm _jit_qknorm_module 128, torch.bfloat16
kernels.ops.layernorm.norm _jit_fused_add_rmsnorm_module torch.bfloat16, False
kernels.ops.activation.activation activation_module torch.bfloat16
kernels.ops.attention.rope _jit_fused_rope_module True, 128, torch.bfloat16, torch.bfloat16
kernels.ops.kvcache.kvcache _jit_kvcache_module 1024, 1024
kernels.ops.attention.clamp_position _jit_clamp_position_module torch.int64
KERNELS
  fi
  tar czf "$out/jit.tar.gz" -C "$TVM_FFI_CACHE_DIR" .
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m tests.gpu.sglang "$work" "$out" "${@:3}" 2>&1 | tee "$out/run.log"
exit "${PIPESTATUS[0]}"
