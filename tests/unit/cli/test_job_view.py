"""What is shown of a job."""

from __future__ import annotations

import pytest

from skyctl import output
from skyctl.cli.job_view import JobView, request_rows
from skyctl.push.request import PushRequest
from skyctl.store.journal import JobEvent


def test_of_what_was_asked_only_that_is_listed_which_is_not_the_default() -> None:
    request = PushRequest("runs/b", verify=False, rolling=1).to_json()
    request |= {"allow_config": ["vocab_size", "rope_theta"], "servers": []}  # read from JSON
    assert request_rows(request) == [
        ["checkpoint", "runs/b"],
        ["verify", False],
        ["allow config", "vocab_size, rope_theta"],
        ["rolling", 1],
    ]


def test_a_server_that_fails_is_warned_of_once_for_each_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = JobView()
    with output.live(view.render) as live:
        for detail in ("no answer", "no answer", "other weights"):
            data = {"server": "s-0", "state": "quarantined", "detail": detail}
            view.show(JobEvent.now("server", **data), live)
    told = [line for line in capsys.readouterr().err.splitlines() if "s-0" in line]
    assert told == [
        "warning: s-0 quarantined: no answer",
        "warning: s-0 quarantined: other weights",
    ]
