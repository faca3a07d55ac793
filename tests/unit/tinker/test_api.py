"""The routes of the API process, without one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("google.protobuf")
from skyctl.tinker.api import Api


def test_the_key_shows_in_no_repr() -> None:
    nothing: Any = None
    api = Api(nothing, "tml-s3cret", nothing, nothing, nothing, nothing, nothing, context=64)
    assert "s3cret" not in repr(api) + repr(api.app)
