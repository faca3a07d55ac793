"""What answers each verb of a fleet."""

from __future__ import annotations

from skyctl.core import verb_table
from skyctl.core.service import FleetService
from skyctl.core.verb_table import Handlers, by_verb, handle


def handlers(fleet: FleetService) -> Handlers:
    """What answers each verb."""
    verbs = verb_table
    return by_verb(
        handle(verbs.STATUS, fleet.status),
        handle(verbs.PAUSE, fleet.pause),
        handle(verbs.RESUME, fleet.resume),
        handle(verbs.SLEEP, fleet.sleep),
        handle(verbs.WAKE, fleet.wake),
        handle(verbs.START_PUSH, fleet.start_push),
        handle(verbs.OPEN_UPDATE, fleet.open_update),
        handle(verbs.CLOSE_UPDATE, fleet.close_update),
        handle(verbs.OFFER, fleet.offer),
        handle(verbs.PUSH_LIVE, fleet.push_live),
        handle(verbs.WITHDRAW, fleet.withdraw),
        handle(verbs.RENDEZVOUS, fleet.rendezvous),
        handle(verbs.JOBS, fleet.jobs),
        handle(verbs.JOB_CHANGES, fleet.job_changes),
        handle(verbs.CANCEL_JOB, fleet.cancel_job),
        handle(verbs.EVENTS, fleet.events),
        handle(verbs.WEIGHTS, fleet.weights),
        handle(verbs.VERIFY_WEIGHTS, fleet.verify_weights),
        handle(verbs.SAVE_WEIGHTS, fleet.save_weights),
        handle(verbs.KEPT_VERSIONS, fleet.kept_versions),
        handle(verbs.FORGET_VERSION, fleet.forget_version),
        handle(verbs.MODEL_PATH, fleet.model_path),
        handle(verbs.STAGING, fleet.staging),
        handle(verbs.ADAPTERS, fleet.adapters),
        handle(verbs.LOAD_ADAPTER, fleet.load_adapter),
        handle(verbs.UNLOAD_ADAPTER, fleet.unload_adapter),
        handle(verbs.FINDINGS, fleet.findings),
        handle(verbs.RECOVER, fleet.recover),
        handle(verbs.RESTART, fleet.restart),
        handle(verbs.SCALE, fleet.scale),
        handle(verbs.CANARY, fleet.canary),
        handle(verbs.DRAIN, fleet.drain),
        handle(verbs.DOWN, fleet.down),
        handle(verbs.URLS, fleet.urls),
        handle(verbs.PROCESSES, fleet.processes),
        handle(verbs.LOGS, fleet.logs),
    )
