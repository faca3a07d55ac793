"""The text of a fleet file, as the loader takes it or refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.errors import FleetFileError
from skyctl.fleetfile.load import parse_fleet
from skyctl.fleetfile.schema import FleetConfig

FILE = Path("fleet.yaml")


def parse(text: str, **environ: str) -> FleetConfig:
    return parse_fleet(text, FILE, environ).config


def refused(text: str, **environ: str) -> list[str]:
    with pytest.raises(FleetFileError) as caught:
        parse_fleet(text, FILE, environ)
    assert int(caught.value.exit_code) == 2
    return caught.value.message.splitlines()


STARTED = "name: demo\nmodel: x\n"
ATTACHED = "name: demo\nservers: [http://h:1]\n"
