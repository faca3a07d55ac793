"""The Python API: a fleet as an object, with the verbs of the command line and typed results.

from skyctl import Fleet

async with Fleet.load("fleet.yaml") as fleet:
    await fleet.pause("keep")
"""

from skyctl.api.fleet import Fleet
from skyctl.api.results import VerbResult, WeightsState
from skyctl.control.fanout import Outcome, OutcomeStatus
from skyctl.control.generate import GenerationResult
from skyctl.fleet.status import FleetStatus
from skyctl.operations.bring_up import TakenDown
from skyctl.operations.urls import FleetUrls
from skyctl.weights.request import PushResult, ServerPush
from skyctl.weights.verify import Verification

__all__ = [
    "Fleet",
    "FleetStatus",
    "FleetUrls",
    "GenerationResult",
    "Outcome",
    "OutcomeStatus",
    "PushResult",
    "ServerPush",
    "TakenDown",
    "VerbResult",
    "Verification",
    "WeightsState",
]
