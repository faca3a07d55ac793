"""Answers of ranks that are processes of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from skyctl.engines.vllm.inside.answers import keep_answer, kept_answers

NONCE, SHARED_NONCE = "0123456789abcdef", "fedcba9876543210"  # tests may run at the same time
OTHER = """
import sys
from skyctl.engines.vllm.inside.answers import keep_answer
keep_answer(sys.argv[1], (1, 0), {"digest": "bb"})
print("left", flush=True)
sys.stdin.read()
"""


def test_answers_of_other_processes_are_collected_and_go_with_them() -> None:
    keep_answer(NONCE, (0, 0), {"digest": "aa"})
    own = {"rank": [0, 0], "answer": {"digest": "aa"}}
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, NONCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "left\n"
        answers = sorted(kept_answers(NONCE), key=lambda answer: answer["rank"])
        assert answers == [own, {"rank": [1, 0], "answer": {"digest": "bb"}}]
        other.communicate()
    assert kept_answers(NONCE) == [own]


def test_ranks_that_read_at_the_same_time_disturb_nobody() -> None:
    """What another collector has open is closed between the look and the reading."""
    keep_answer(SHARED_NONCE, (0, 0), "own")
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            kept_answers(SHARED_NONCE)

    with ThreadPoolExecutor() as pool:
        others = [pool.submit(read) for _ in range(4)]
        try:
            for _ in range(25):
                answers = kept_answers(SHARED_NONCE)
                assert answers and all(one == answers[0] for one in answers)
        finally:
            done.set()
    for other in others:
        other.result()
