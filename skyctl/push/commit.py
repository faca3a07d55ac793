"""Is what arrived what was sent, and the same everywhere? Only then does it get its version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyctl.errors import ServerError
from skyctl.kill_points import reached
from skyctl.push.alike import comparable
from skyctl.push.freeze import require_paused
from skyctl.push.run import Run
from skyctl.push.samples import Sample
from skyctl.push.sites import Holds, Site, alive, each
from skyctl.push.verify import weights_digest


async def verify(run: Run, sites: Sequence[Site], samples: Mapping[str, Sample]) -> None:
    """Drop caches of the old weights, and compare what the servers hold."""
    timeout_s = run.fleet.update_timeout_s
    loaded = alive([site for site in sites if site.holds is Holds.NEW])

    async def digest(site: Site) -> None:
        await _refuse_thawed(site)
        await _reset_cache(site)
        if run.request.verify:
            site.digest, how = await weights_digest(site.vllm, timeout_s=timeout_s, samples=samples)
            if not site.digest:
                run.note(f"{site.name} was not verified: {how}")

    await each(loaded, digest, timeout_s=timeout_s * 2, what="verify")
    _outvote(alive(loaded))
    reached("push.verify.done")


async def _refuse_thawed(site: Site) -> None:
    """Freeze a server again that was thawed while it was loaded; what it answered is not known."""
    try:
        await require_paused(site)
    except ServerError:
        await site.vllm.pause("abort", clear_cache=False)
        raise


async def publish(run: Run, sites: Sequence[Site], label: str) -> None:
    """Label those that hold the new weights with their version; from here on they may serve."""

    async def call(site: Site) -> None:
        await require_paused(site)  # a process that was started meanwhile holds something else
        await site.vllm.set_weight_version(label)
        site.version = label
        site.holds = Holds.VERIFIED
        run.observer.server(site.name, "updated", label)

    loaded = alive([site for site in sites if site.holds is Holds.NEW])
    await each(loaded, call, timeout_s=run.fleet.control_timeout_s, what="publish the version")
    reached("push.published")


async def _reset_cache(site: Site) -> None:
    """vLLM keeps KV blocks of the old weights for new requests unless it is told to drop them."""
    if not await site.vllm.reset_prefix_cache():
        # frozen requests hold blocks: they go back to the queue with the tokens they have
        await site.vllm.reset_prefix_cache(reset_running=True)


def _outvote(sites: Sequence[Site]) -> None:
    """Servers whose digest differs from that of most others like them hold something else."""
    for group in comparable(sites, lambda site: site.digest):
        digests = [site.digest for site in group]
        most = max(set(digests), key=digests.count)
        sure = digests.count(most) * 2 > len(digests)
        for site in group:
            if not (sure and site.digest == most):
                site.failure = f"verify: its weights differ from the others' (digest {site.digest})"
