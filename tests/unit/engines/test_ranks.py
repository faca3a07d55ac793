"""Answers that workers leave for the one worker that is heard."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.engines.vllm.inside.answers import keep_answer, kept_answers


def test_a_worker_keeps_its_last_answer_only() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for nonce in ("aa", "bb", "cc"):
        keep_answer(nonce, (0, 0), nonce)
    assert kept_answers("aa") == []
    assert [answer["answer"] for answer in kept_answers("cc")] == ["cc"]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


@pytest.mark.parametrize("nonce", ["a", "ab"])
def test_only_answers_to_this_question_are_collected(nonce: str) -> None:
    keep_answer("abc", (0, 0), "other")
    assert kept_answers(nonce) == []
