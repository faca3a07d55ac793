"""The Python API: a fleet as an object, with the verbs of the command line and typed results.

from skyctl import Fleet

async with Fleet.load("fleet.yaml") as fleet:
    await fleet.pause("keep")
"""

from skyctl.api.fleet import Fleet
from skyctl.api.results import VerbResult
from skyctl.api.trainer import Trainer
from skyctl.api.trainer_opening import BlockingTrainer
from skyctl.api.updates import Update
from skyctl.core.requests import TakenDown
from skyctl.core.results import WeightsState
from skyctl.core.status import FleetStatus
from skyctl.core.urls import FleetUrls
from skyctl.generate.requests import GenerationResult
from skyctl.http.fanout import Outcome, OutcomeStatus
from skyctl.live.outline import Outline
from skyctl.push.request import PushResult, ServerPush
from skyctl.push.trainer import SendTarget
from skyctl.push.verify import Verification

__all__ = [
    "BlockingTrainer",
    "Fleet",
    "FleetStatus",
    "FleetUrls",
    "GenerationResult",
    "Outcome",
    "OutcomeStatus",
    "Outline",
    "PushResult",
    "SendTarget",
    "ServerPush",
    "TakenDown",
    "Trainer",
    "Update",
    "VerbResult",
    "Verification",
    "WeightsState",
]
