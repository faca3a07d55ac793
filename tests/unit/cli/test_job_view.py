"""What is shown of a job."""

from __future__ import annotations

from skyctl.cli.job_view import request_rows
from skyctl.push.request import PushRequest


def test_of_what_was_asked_only_that_is_listed_which_is_not_the_default() -> None:
    request = PushRequest("runs/b", verify=False, rolling=1).to_json()
    request |= {"allow_config": ["vocab_size", "rope_theta"], "servers": []}  # read from JSON
    assert request_rows(request) == [
        ["checkpoint", "runs/b"],
        ["verify", False],
        ["allow config", "vocab_size, rope_theta"],
        ["rolling", 1],
    ]
