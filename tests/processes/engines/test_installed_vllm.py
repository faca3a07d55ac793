"""What runs inside vLLM's workers, beside the vLLM that is installed and without what 0.26 does not
have.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

INSTALLED = """
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from skyctl.engines.vllm.inside.experts import pack_after_updates

pack_after_updates()
assert UnquantizedFusedMoEMethod.process_weights_after_loading.packs_after_updates
assert callable(CPUUnquantizedExperts.process_weights_after_loading)
"""
OLDER = """
import sys
import vllm.model_executor.layers.attention as attention
import vllm.model_executor.model_loader.reload
from vllm.distributed.weight_transfer.base import WeightTransferEngine

vars(attention).pop("is_deferred_attention_layer", None)
sys.modules["vllm.model_executor.model_loader.mtp_validation"] = None
WeightTransferEngine.__abstractmethods__ |= {"trainer_send_weights"}

from skyctl.engines.vllm.inside import completeness, engine, layout_load

assert completeness.is_deferred_attention_layer.__module__ == completeness.__name__
assert not engine.SkyctlWeightTransferEngine.__abstractmethods__
with engine.disable_mtp_completeness_check():
    print("fits")
"""


def test_workers_of_the_installed_and_of_an_older_vllm_find_all_they_need() -> None:
    pytest.importorskip("vllm")
    # in one process of its own: vLLM takes ten seconds to import, and stays as it is left here
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED + OLDER], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.endswith("fits\n"), done.stderr[-2000:]
