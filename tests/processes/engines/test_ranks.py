"""Answers of ranks that are processes of their own."""

from __future__ import annotations

import subprocess
import sys

from skyctl.engines.vllm.inside.ranks import collect, leave

NONCE = "0123456789abcdef"
OTHER = """
import sys
from skyctl.engines.vllm.inside.ranks import leave
leave(sys.argv[1], (1, 0), {"digest": "bb"})
print("left", flush=True)
sys.stdin.read()
"""


def test_answers_of_other_processes_are_collected_and_go_with_them() -> None:
    leave(NONCE, (0, 0), {"digest": "aa"})
    own = {"rank": [0, 0], "answer": {"digest": "aa"}}
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, NONCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "left\n"
        answers = sorted(collect(NONCE), key=lambda answer: answer["rank"])
        assert answers == [own, {"rank": [1, 0], "answer": {"digest": "bb"}}]
        other.communicate()
    assert collect(NONCE) == [own]
