"""Every public method of the SDK's clients is in docs/how-to/tinker.md."""

from __future__ import annotations

import pytest

from tests.pages import documented

tinker = pytest.importorskip("tinker")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")


def public(client: type) -> set[str]:
    """Without the deprecated twins that end in _async."""
    names = {name for name in vars(client) if not name.startswith("_")}
    return {name for name in names if name.removesuffix("_async") == name or name[:-6] not in names}


@pytest.mark.parametrize("name", CLIENTS)
def test_the_page_names_every_method(name: str) -> None:
    works, refused = documented()[name]
    assert works | refused == public(getattr(tinker, name))
    assert not works & refused
