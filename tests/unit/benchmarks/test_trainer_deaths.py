"""What counts as an answer of committed weights."""

from __future__ import annotations

import pytest

from benchmarks.trainer_deaths import TOKENS, given_by
from tests.stub.generation import expected

OLD, NEW = expected("old", "ab", TOKENS), expected("new", "ab", TOKENS)


@pytest.mark.parametrize(
    ("tokens", "aborted", "right"),
    [
        (OLD, False, True),
        (NEW, False, False),
        (OLD[:2], True, True),
        (OLD[:2], False, False),
        (NEW[:2], True, False),
        ([*OLD[:2], *NEW[2:]], False, False),
    ],
)
def test_an_aborted_answer_is_judged_by_the_tokens_that_it_has(
    tokens: list[int], aborted: bool, right: bool
) -> None:
    assert given_by({"old", "older"}, "ab", tokens, aborted) is right
