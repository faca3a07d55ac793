"""Nothing outside `engines/` knows an engine, by its words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import skyctl

PACKAGE = Path(skyctl.__file__).parent
WORDS = re.compile(
    r"""VLLM_\w+            # variables
    | vllm[:_]\w            # metrics, modules
    | vllm\.(?!inside)\w    # modules
    | --[a-z]+-worker-|weight-transfer-config|worker-extension-cls|--worker-urls  # flags
    | enable-sleep-mode|gpu-memory-utilization|enforce-eager
    | ^/(is_paused|pause|resume|sleep|is_sleeping|wake_up|server_info|collective_rpc)\b  # routes
    | ^/(add|remove|list)_workers?|^/readiness|^/metrics|^/health
    | _weight_update|weight_transfer_engine|^/update_weights|^/weight_(info|checker)
    | without\ a\ matching\ start|Model\ reloading|is\ not\ implemented|Engine\ core""",
    re.VERBOSE,
)
