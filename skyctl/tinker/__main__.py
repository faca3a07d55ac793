"""`python -m skyctl.tinker SETTINGS`: the API process, started by the fleet's supervisor.

Ledger, worker, scheduler and HTTP server, until TERM. It asks that supervisor, and never starts
one: a supervisor started from here would end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from skyctl.core.tinker import TinkerSettings, context_of
from skyctl.errors import ConflictError, SkyctlError
from skyctl.http.listener import listen_at
from skyctl.store.credentials import ensure_tinker_key
from skyctl.store.owned import FileLock
from skyctl.store.paths import create_private_file, fleet_paths, private_directory
from skyctl.supervisor.client import RemoteFleet
from skyctl.tinker.api import Api
from skyctl.tinker.fleet_servers import connected
from skyctl.tinker.housekeeping import Housekeeping, Keep
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.open_models import Limits
from skyctl.tinker.sampling import Sampling, Servers
from skyctl.tinker.training import Training
from skyctl.tinker.training_process import Worker, WorkerSettings
from skyctl.tinker.weights import ServedWeights


async def beside(settings: TinkerSettings) -> None:
    """Serve the API of a running fleet, until TERM.

    Raises:
        FleetDownError: the fleet does not run. SkyctlError: an address cannot be used.
    """
    paths = fleet_paths(settings.fleet)
    directory = Path(settings.storage) if settings.storage else paths.tinker
    model, whole, most = settings.model, settings.full_parameters, settings.max_adapters
    context = settings.context or context_of(model)
    async with RemoteFleet.on_this_machine(paths) as fleet:
        weights = ServedWeights(fleet, model, directory, offered=whole)
        async with connected(fleet, weights, context=context, most=most) as servers:
            limits = Limits(
                open_models=settings.open_models,
                parked_bytes=settings.parked_memory,
                join_requests=settings.join_requests,
                join_tokens=settings.batch_tokens,
            )
            await serve(settings, directory, ensure_tinker_key(paths), servers, limits)


async def serve(
    settings: TinkerSettings, directory: Path, key: str, servers: Servers, limits: Limits
) -> None:
    """Answer the SDK until TERM or INT. Accepted, unfinished requests are left to the next process.
    `directory` holds the ledger and every checkpoint; port 0 picks a free one.

    Raises:
        ConflictError: another process serves this directory.
        SkyctlError: the address or the ledger cannot be used.
    """
    directory = private_directory(directory)
    lock = _lock(directory)
    listener = _listen(settings.host, settings.port)
    ledger, bell = Ledger(directory / "ledger.sqlite"), Doorbell()
    worker = _worker(settings, directory)
    training = Training(ledger, worker, directory, bell, limits)
    sampling = Sampling(ledger, servers, worker, bell)
    keep = Keep(settings.keep_runs_s, settings.keep_samplers, settings.keep_samplers_s)
    api = Api(settings, key, ledger, worker, training, sampling, bell, servers.context)
    starting = asyncio.create_task(worker.start())  # its faults show before a client needs it
    try:
        await training.load()
        await sampling.load()
        server = _http_server(api)
        tasks = [
            asyncio.create_task(server.serve(sockets=[listener])),
            asyncio.create_task(training.run()),
            asyncio.create_task(Housekeeping(ledger, training, sampling, keep).run()),
        ]
        # a part that fails ends the process: its supervisor restarts it
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks[1:]:
            task.cancel()
        for task in done:
            task.result()
    finally:
        starting.cancel()
        await asyncio.wait({starting})
        await sampling.stop()
        await worker.stop()
        ledger.close()
        listener.close()
        lock.close()


def _worker(settings: TinkerSettings, directory: Path) -> Worker:
    node, seen = settings.node, directory / f"seen-{secrets.token_hex(8)}"
    for earlier in directory.glob("seen-*"):
        earlier.unlink(missing_ok=True)
    if node is not None:
        seen.touch(mode=0o600)
    return Worker(
        WorkerSettings(
            settings.base_model,
            settings.model,
            settings.devices,
            settings.dtype,
            settings.threads,
            settings.batch_tokens,
            settings.gradient_checkpointing,
            settings.shard_base,
            node=node,
            seen=str(seen) if node else "",
        )
    )


def _http_server(api: Api) -> _Server:
    """A server that TERM or INT ends."""
    config = uvicorn.Config(
        api.app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",  # which it would import
        proxy_headers=False,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    return server


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # uvicorn's own handling would kill this process before it has closed the ledger


def _lock(directory: Path) -> FileLock:
    """The directory's lock, taken."""
    path = directory / "lock"
    lock = FileLock(path, lambda: create_private_file(path))
    if not lock.take():
        lock.close()
        raise ConflictError(f"another process serves {directory}")
    return lock


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen_at(host, port, backlog=1024)
    except OSError as error:
        raise SkyctlError(
            f"cannot listen at {host}:{port}: {error.strerror}",
            hint="another process may have the port: choose one with `tinker: port`",
        ) from error


def main() -> int:
    settings = TinkerSettings.of_argument(sys.argv[1])
    sys.argv = ["tinker"]  # shown to others as the command that acts
    try:
        asyncio.run(beside(settings))
    except SkyctlError as error:
        sys.stderr.write(f"{error.kind}: {error.message}\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
