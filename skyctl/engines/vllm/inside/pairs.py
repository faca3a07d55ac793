"""vLLM's NixlConnector, with decode servers that do not fetch KV caches past their lease.

A prefill server keeps a KV cache for a lease, and waiting decode servers renew it in each of their
steps. A paused one makes no steps. Past the lease the blocks go to other requests, and fetching
them succeeds: wrong tokens, and a line in the prefill server's log (vLLM 0.32). So prefill servers
here state when the lease ends, in a field that vLLM uses only for the other direction, and a decode
server that is too late computes the prompt itself (`kv_load_failure_policy: recompute`). Named on
the servers' command line.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger

from skyctl.engines.vllm.inside.idle import let_nixl_rest
from skyctl.engines.vllm.inside.leases import Leases

_LOG = init_logger(f"vllm.{__name__}")
_PARAMETER = "remote_blocks_expiry_time"

NixlConnector: Any = KVConnectorFactory.get_connector_class_by_name("NixlConnector")
let_nixl_rest()

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
        NixlPullConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )
except ImportError:
    _LOG.warning("this vLLM keeps KV caches in another way: late fetches are not noticed")
else:

    class _Scheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
        """On prefill servers: reports with a cache when its lease ends, by this process's clock."""

        def request_finished(self, request: Any, block_ids: Any) -> Any:
            kept, parameters = super().request_finished(request, block_ids)
            if kept and parameters is not None:
                parameters[_PARAMETER] = self._reqs_need_send[request.request_id]
            return kept, parameters

    class _Worker(NixlPullConnectorWorker):  # type: ignore[misc]
        """On decode servers: fetches nothing past its lease."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._leases = Leases(self._lease_extension)

        def _send_heartbeats(self, metadata: Any) -> None:
            began = time.perf_counter()
            super()._send_heartbeats(metadata)
            for engine, waiting in metadata.heartbeat_by_engine.items():
                # without a connection nothing was sent
                if self._engine_last_active.get(engine, 0.0) >= began:
                    self._leases.renew(engine, waiting.req_ids, began)

        def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
            remote = meta.remote
            connected = remote.engine_id in self._remote_agents
            if connected and any(meta.local_block_ids) and self._is_too_late(remote):
                _LOG.warning("KV cache of %s: its lease has ended; computed here", req_id)
                self.xfer_stats.record_kv_expired_req()
                self._handle_failed_transfer(
                    req_id, None, self._recv_failures, record_failed_transfer=False
                )
                return
            super()._read_blocks_for_req(req_id, meta)

        def _is_too_late(self, remote: Any) -> bool:
            if remote.blocks_expiry_time is None:  # from a server that does not report it
                return False
            granted = remote.blocks_expiry_time - self._engine_clock_offset[remote.engine_id]
            now = time.perf_counter()
            return not self._leases.lasts(remote.engine_id, remote.request_id, granted, now)

    class _Connector(NixlPullConnector):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            # what its own __init__ does, with other classes: it opens NIXL, which may happen only
            # once
            super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
            part = _Scheduler if role.name == "SCHEDULER" else _Worker
            made = part(vllm_config, self.engine_id, kv_cache_config)
            self.connector_scheduler = made if part is _Scheduler else None
            self.connector_worker = made if part is _Worker else None

    NixlConnector = _Connector
