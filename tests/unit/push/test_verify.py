"""A check that could not be made has failed; digests of other ways of asking are told apart."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import PreflightError, PushError, ServerError
from skyctl.http.target import ServerTarget
from skyctl.push.verify import CannotDigest, arrangement_of, verify, weights_digest
from tests.stub.faults import Fault
from tests.unit.push.fleets import BEFORE_FREEZE, Stubs, pushed


class Answering(VLLMServer):
    """A server whose workers answer this to the question for a digest."""

    def __init__(self, *answers: Any) -> None:
        self.target = ServerTarget("demo-0", "http://127.0.0.1:1")
        self._answers = answers

    async def ask_workers(self, method: str, *_: Any, **__: Any) -> list[Any]:
        return list(self._answers)


@pytest.mark.parametrize(
    "text",
    [
        "Worker failed with error 'CUDA out of memory'",
        "skyctl_weight_digest() got an unexpected keyword argument 'rows'",
        "Worker failed with error 'skyctl_weight_digest: Method 'other' is not implemented.'",
        "",
    ],
)
async def test_a_digest_that_fails_quarantines_the_server(stubs: Stubs, text: str) -> None:
    fault = Fault("status", text=text, calls=(BEFORE_FREEZE + 1,))
    stubs.servers[1].asgi.faults["/collective_rpc"] = fault
    with pytest.raises(PushError) as caught:
        await pushed(stubs)
    assert [row["state"] for row in caught.value.details["servers"]] == ["ready", "quarantined"]
    assert stubs.engines[1].paused and stubs.engines[1].weight_version == "default"


@pytest.mark.parametrize(
    "answers",
    [
        (),
        ("not a mapping",),
        ({},),
        ({"digest": "ab", "digest_version": "two"},),
        ({"digest": "ab", "shares_out": True},),
    ],
    ids=["none", "a string", "no digest", "no version", "none of what ranks share"],
)
async def test_an_answer_of_another_shape_is_no_digest(answers: tuple[Any, ...]) -> None:
    with pytest.raises(ServerError, match="not understood"):
        await weights_digest(Answering(*answers), timeout_s=5)


async def test_data_parallel_ranks_must_hold_the_same() -> None:
    ranks = [{"digest": digest, "data_parallel_rank": i} for i, digest in enumerate("aab")]
    with pytest.raises(ServerError, match="data-parallel rank 2 holds other weights than rank 0"):
        await weights_digest(Answering(*ranks), timeout_s=5)
    one = await weights_digest(Answering(ranks[0]), timeout_s=5)
    assert await weights_digest(Answering(*ranks[:2]), timeout_s=5) == one


async def test_data_parallel_ranks_that_share_out_experts_hold_the_same_of_all_else() -> None:
    ranks = [
        {"digest": digest, "dense": "d", "data_parallel_rank": i, "shares_out": True}
        for i, digest in enumerate("ab")
    ]
    found = await weights_digest(Answering(*ranks), timeout_s=5)
    other = await weights_digest(Answering(ranks[0], {**ranks[1], "digest": "c"}), timeout_s=5)
    assert found.digest != other.digest
    with pytest.raises(ServerError, match="data-parallel rank 1 holds other weights than rank 0"):
        await weights_digest(Answering(ranks[0], {**ranks[1], "dense": "e"}), timeout_s=5)


async def test_digests_of_two_algorithms_are_never_compared() -> None:
    answer = {"digest": "ab", "arrangement": "tp2-bfloat16"}
    old = await weights_digest(Answering(answer), timeout_s=5)
    new = await weights_digest(Answering({**answer, "digest_version": 2}), timeout_s=5)
    assert arrangement_of(old.digest) == "tp2-bfloat16"
    assert arrangement_of(new.digest) == "v2-tp2-bfloat16"


async def test_checksums_stand_in_only_for_a_missing_method(stubs: Stubs) -> None:
    engine = stubs.engines[0]
    engine.extension = False
    async with stubs.client() as client:
        server = VLLMServer(client, stubs.fleet.servers[0].target)
        found = await weights_digest(server, timeout_s=5)
        assert found.digest and found.compared is None and "checksums" in found.how
        stubs.servers[0].asgi.faults["/weight_checker"] = Fault("status", status=404)
        with pytest.raises(CannotDigest, match="no way to digest"):
            await weights_digest(server, timeout_s=5)
        stubs.servers[0].asgi.faults["/weight_checker"] = Fault("status")
        with pytest.raises(ServerError, match="injected"):
            await weights_digest(server, timeout_s=5)
        targets = [one.target for one in stubs.fleet.servers]
        report = await verify(targets, client=client, timeout_s=5)
    assert [row.ok for row in report.servers] == [False, True] and not report.agree


async def test_servers_that_cannot_be_verified_are_refused_untouched(stubs: Stubs) -> None:
    for engine in stubs.engines:
        engine.extension = False
    with pytest.raises(PreflightError, match="cannot be compared with the checkpoint") as caught:
        await pushed(stubs)
    assert "--no-verify" in caught.value.hint and "--worker-extension-cls" in caught.value.hint
    assert all(engine.log == [] for engine in stubs.engines)


@pytest.mark.parametrize("extension", [True, False])
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"parallel_config": {"enable_eplb": True}}, "moves experts between ranks"),
        ({"speculative_config": {"method": "eagle3"}}, "speculative decoding by eagle3"),
        ({"speculative_config": {"method": None, "model": "d"}}, "speculative decoding by d"),
    ],
)
async def test_servers_with_weights_that_a_push_does_not_reach_are_refused_untouched(
    stubs: Stubs, settings: dict[str, Any], problem: str, extension: bool
) -> None:
    stubs.engines[1].settings = settings
    stubs.engines[1].extension = extension  # without it, /server_info says so
    with pytest.raises(PreflightError, match=f"demo-1: .*{problem}") as caught:
        await pushed(stubs, verify=False)
    assert "restart the servers" in caught.value.hint
    assert all(engine.log == [] for engine in stubs.engines)


async def test_servers_that_draft_from_the_tokens_themselves_take_pushes(stubs: Stubs) -> None:
    for engine in stubs.engines:
        engine.settings = {
            "parallel_config": {"enable_eplb": False},
            "speculative_config": {"method": "ngram"},
        }
    assert (await pushed(stubs)).version
    assert (await pushed(stubs, verify=False)).compared is None


async def test_a_push_says_how_much_it_compared(stubs: Stubs) -> None:
    result = await pushed(stubs)
    assert result.compared is not None
    assert 0 < result.compared["tensors"] <= result.compared["of_tensors"] == 17
    assert 0 < result.compared["bytes"] <= result.compared["of_bytes"] == result.total_bytes


async def test_weights_that_nothing_compares_with_the_checkpoint_are_not_verified(
    stubs: Stubs,
) -> None:
    finish = stubs.engines[1].finish_update

    def forgetful(version: str | None) -> None:
        finish(version)
        stubs.engines[1].contents = {}

    stubs.engines[1].finish_update = forgetful  # type: ignore[method-assign]
    with pytest.raises(PushError, match=r"no tensor could be compared.*did not see its bytes"):
        await pushed(stubs)
    assert [engine.paused for engine in stubs.engines] == [False, True]


async def test_garbage_that_all_servers_agree_on_is_not_what_was_sent(stubs: Stubs) -> None:
    for engine in stubs.engines:
        engine.weigh = lambda updates: "the same"
        receive = engine.update

        def garble(info: dict[str, Any], receive: Any = receive, engine: Any = engine) -> None:
            receive(info)
            for name, (dtype, data) in engine.contents.items():
                if "q_proj" in name:
                    engine.contents[name] = (dtype, data[::-1])

        engine.update = garble  # type: ignore[method-assign]
    with pytest.raises(PushError, match=r"does not hold what was sent: .*q_proj\.weight: row"):
        await pushed(stubs)
    assert all(engine.paused for engine in stubs.engines)


async def test_a_model_whose_updates_go_wrong_is_refused_untouched(stubs: Stubs) -> None:
    stubs.engines[1].update_problem = "experts: an update would leave them unpacked"
    with pytest.raises(PreflightError, match="demo-1: experts: an update would leave"):
        await pushed(stubs, transport="disk")
    assert all(engine.log == [] for engine in stubs.engines)
