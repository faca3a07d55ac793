"""Answers that workers leave for the one worker that is heard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.engines.vllm.inside.ranks import collect, leave

OTHER = """
import sys
from skyctl.engines.vllm.inside.ranks import leave
leave(sys.argv[1], (1, 0), {"digest": "bb"})
print("left", flush=True)
sys.stdin.read()
"""
NONCE = "0123456789abcdef"


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


def test_a_worker_keeps_its_last_answer_only() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for nonce in ("aa", "bb", "cc"):
        leave(nonce, (0, 0), nonce)
    assert collect("aa") == []
    assert [answer["answer"] for answer in collect("cc")] == ["cc"]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


@pytest.mark.parametrize("nonce", ["a", "ab"])
def test_only_answers_to_this_question_are_collected(nonce: str) -> None:
    leave("abc", (0, 0), "other")
    assert collect(nonce) == []
