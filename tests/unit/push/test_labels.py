"""A label that named another checkpoint is told before it is given again."""

from __future__ import annotations

import pytest

from skyctl.errors import UsageError
from skyctl.push.request import PushRequest
from skyctl.push.source import full_version, reused_label
from skyctl.store.journal import PushRecord


def push(number: int, version: str, checkpoint: str, *, ok: bool = True) -> PushRecord:
    return PushRecord(f"push-{number}", 0.0, ok, version, checkpoint, None, {})


def test_a_label_of_another_checkpoint_is_told_with_the_push_that_gave_it() -> None:
    request = PushRequest(checkpoint="/runs/2", weight_version="best")
    newest_first = [push(3, "other", "/runs/9"), push(2, "best", "/runs/1")]
    assert reused_label(request, newest_first).startswith(
        "version best was /runs/1 until now (push-2)"
    )


def test_the_same_checkpoint_a_failed_push_and_no_label_are_no_reuse() -> None:
    request = PushRequest(checkpoint="/runs/2", weight_version="best")
    assert reused_label(request, [push(2, "best", "/runs/2"), push(1, "best", "/runs/1")]) == ""
    assert reused_label(request, [push(1, "best", "/runs/1", ok=False)]) == ""
    assert reused_label(PushRequest(checkpoint="/runs/2"), [push(1, "best", "/runs/1")]) == ""


def test_a_name_without_its_digest_means_the_only_version_of_that_name() -> None:
    versions = ["step-200@ab", "step-100@cd", "step-200@ab", "best"]
    assert full_version("step-200", versions) == "step-200@ab"
    assert full_version("step-200@ab", versions) == "step-200@ab"
    assert full_version("best", versions) == "best"
    assert full_version("step", versions) == "step"
    assert full_version("step-200", ["step-200", "step-200@ab"]) == "step-200"


def test_a_name_of_several_versions_is_refused_with_all_of_them() -> None:
    with pytest.raises(UsageError) as refused:
        full_version("step-200", ["step-200@ab", "step-200@cd"])
    assert "step-200@ab, step-200@cd" in refused.value.hint
