"""Other machines: by ssh, which is a script, and by Ray, which is a real cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults.ray_fleet import RayCluster, RayFleet, running_cluster, why_no_cluster
from tests.faults.remote_fleet import RemoteFleet
from tests.faults.ssh_fleet import SshFleet


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    if why := why_no_cluster():
        pytest.skip(why)
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["ssh", "ray"])
def way(request: pytest.FixtureRequest) -> Callable[[Path], RemoteFleet]:
    """Makes a fleet over two machines."""
    if request.param == "ssh":
        return SshFleet
    return partial(RayFleet, cluster=request.getfixturevalue("cluster"))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SshFleet]:
    """Over two machines by ssh, not laid out yet; modules about other fleets have their own."""
    fleet = SshFleet(tmp_path)
    yield fleet
    fleet.end()
