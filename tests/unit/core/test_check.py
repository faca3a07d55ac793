"""What is looked at before anything is spawned."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyctl.checkpoints.checkpoint import INDEX_NAME, read_checkpoint
from skyctl.core import check
from skyctl.core.check import check_plan, model_advice
from skyctl.engines.vllm import arguments
from skyctl.fleetfile.load import load_fleet
from skyctl.launch.base import Gpu
from skyctl.launch.local.host import free_port
from skyctl.units import format_bytes
from tests.tiny import make_tiny_checkpoint
from tests.unit.core.plans import local_plan, problems, with_checkpoint


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    return with_checkpoint(tmp_path)


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter that says every module is there, whatever is installed here, and no more."""
    script = tmp_path / "python"
    script.touch(mode=0o755)
    monkeypatch.setattr(check, "_missing_in", lambda python, modules: [])
    monkeypatch.setattr(arguments, "_run", lambda python, script, timeout_s: "")
    return str(script)


def gpus(count: int, memory_bytes: int = 2**40) -> list[Gpu]:
    return [Gpu(index, f"GPU-{index}", "H100", memory_bytes) for index in range(count)]


def test_a_good_plan_has_no_problems(base_dir: Path, interpreter: str) -> None:
    assert problems(local_plan(base_dir, interpreter)) == []
    assert problems(local_plan(base_dir, interpreter, on=gpus(1), device="cuda"), gpus(1)) == []


def test_hub_models_are_left_to_vllm(base_dir: Path, interpreter: str) -> None:
    assert problems(local_plan(base_dir, interpreter, model="Qwen/Qwen3-0.6B")) == []


@pytest.mark.parametrize("model", ["./checkpoints/b", "checkpoints/b", "/no/where", "a/b/c"])
def test_a_missing_model_directory_is_named(base_dir: Path, interpreter: str, model: str) -> None:
    (message,) = problems(local_plan(base_dir, interpreter, model=model))
    assert message.startswith(f"model '{model}'") and message.endswith("does not exist")


def test_a_directory_without_config_is_no_checkpoint(base_dir: Path, interpreter: str) -> None:
    (message,) = problems(local_plan(base_dir, interpreter, model="./checkpoints"))
    assert "no config.json" in message
    (message,) = problems(local_plan(base_dir, interpreter, model="./checkpoints/a/config.json"))
    assert "is a file" in message


@pytest.mark.parametrize(
    ("index", "part"),
    [
        ('{"weight_map": {"a": "gone.safetensors"}}', "lacks gone.safetensors, which its index"),
        ('{"weight_map": {"a": ', "is not a valid index"),
        (
            '{"weight_map": {"a": "config.json", "mtp.b": "config.json"}}',
            "",
        ),  # vLLM looks no closer
    ],
)
def test_a_model_whose_index_leads_nowhere_is_reported(
    base_dir: Path, interpreter: str, index: str, part: str
) -> None:
    (base_dir / "checkpoints/a" / INDEX_NAME).write_text(index)
    messages = problems(local_plan(base_dir, interpreter))
    assert [part in message for message in messages] == ([True] if part else [])


def test_a_model_that_is_an_adapter_is_told_so(base_dir: Path, interpreter: str) -> None:
    adapter = base_dir / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (message,) = problems(local_plan(base_dir, interpreter, model="./adapter"))
    told = f"model './adapter': {adapter} is a PEFT adapter (LoRA), not a checkpoint of the whole"
    assert message == f"{told} model"


def test_what_the_tinker_api_lacks_is_said_before_anything_is_started(
    base_dir: Path, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.core.tinker.MODULES", ("json", "no_such_module", "nor.this_one"))
    config: dict[str, Any] = {"tinker": {"port": free_port("127.0.0.1")}, "lora": {"max_rank": 32}}
    found = check_plan(local_plan(base_dir, interpreter, **config))
    assert [problem.message for problem in found] == [
        "the Tinker API needs no_such_module, nor.this_one",
        f"how many tokens {base_dir / 'checkpoints/a'} takes is not known",
    ]
    assert found[0].hint == "pip install 'skyctl-fleet[tinker]'"
    monkeypatch.setattr("skyctl.core.tinker.MODULES", ())
    config |= {"args": {"max-model-len": 512}, "replicas": 2}
    assert problems(local_plan(base_dir, interpreter, **config)) == []
    (message,) = problems(local_plan(base_dir, interpreter, **config, router={"enabled": False}))
    assert "needs a router" in message


@pytest.mark.parametrize(
    ("device", "there", "said"),
    [
        ("cuda", 0, "no such GPU; there are: none (nvidia-smi)"),
        ("cuda:2", 2, "no such GPU; there are: cuda:0 to cuda:1"),
        ("cuda:1", 2, ""),
        ("cpu", 0, ""),
        (["cuda:0", "cuda:2"], 2, "no such GPU; there are: cuda:0 to cuda:1"),
        (["cpu", "cpu"], 0, ""),
    ],
)
def test_a_gpu_that_the_trainer_does_not_find_is_named(
    base_dir: Path,
    interpreter: str,
    monkeypatch: pytest.MonkeyPatch,
    device: str | list[str],
    there: int,
    said: str,
) -> None:
    monkeypatch.setattr("skyctl.core.tinker.MODULES", ())
    monkeypatch.setattr("skyctl.core.check.version", lambda name: "2.11.0+cu130")
    devices = {"device": device} if isinstance(device, str) else {"devices": device}
    config: dict[str, Any] = {
        "tinker": {"port": free_port("127.0.0.1"), **devices},
        "lora": {"max_rank": 32},
        "args": {"max-model-len": 512},
    }
    found = problems(local_plan(base_dir, interpreter, device="cpu", **config), gpus(there))
    name = device if isinstance(device, str) else device[-1]
    assert found == ([f"tinker.device {name}: this machine has {said}"] if said else [])


@pytest.mark.parametrize(
    ("dtype", "shares", "holder"),
    [("float32", 1, "the base"), ("bfloat16", 1, ""), ("float32", 2, "a rank's share of the base")],
)
def test_a_base_that_does_not_fit_the_gpus_of_the_trainer_is_refused(
    tmp_path: Path,
    interpreter: str,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    shares: int,
    holder: str,
) -> None:
    make_tiny_checkpoint(tmp_path / "checkpoints" / "a", seed=1)
    needed = (4 // shares) * sum(
        math.prod(tensor.shape)
        for tensor in read_checkpoint(str(tmp_path / "checkpoints" / "a")).tensors
    )
    monkeypatch.setattr("skyctl.core.tinker.MODULES", ())
    monkeypatch.setattr("skyctl.core.check.version", lambda name: "2.11.0+cu130")
    tinker = {"port": free_port("127.0.0.1"), "devices": ["cuda:0", "cuda:1"], "dtype": dtype}
    if shares == 1:
        tinker["shard_base"] = False
    config = {"tinker": tinker, "lora": {"max_rank": 32}, "args": {"max-model-len": 512}}
    planned = local_plan(tmp_path, interpreter, device="cpu", **config)
    large, small = Gpu(0, "GPU-0", "H100", needed), Gpu(1, "GPU-1", "H100", needed - 1)
    found = problems(planned, [large, small])
    assert [message.partition(",")[0] for message in found] == (
        [f"tinker.device cuda:1: {holder} takes {format_bytes(needed)} in float32"]
        if holder
        else []
    )


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("config", "owner"),
    [
        ({"ports": ["PORT"]}, "f-0"),
        ({"router": {"port": "PORT"}}, "router"),
        ({"router": {"metrics_port": "PORT"}}, "router metrics"),
        (
            {
                "tinker": {"port": "PORT"},
                "lora": {"max_rank": 32},
                "args": {"max-model-len": 512},
            },
            "tinker",
        ),
    ],
)
def test_a_taken_port_is_reported_with_its_holder(
    base_dir: Path, interpreter: str, taken: int, config: dict[str, Any], owner: str
) -> None:
    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        return taken if value == "PORT" else value

    planned = local_plan(base_dir, interpreter, **fill(config))
    (message,) = problems(planned)
    assert message.startswith(f"{owner}: port {taken} is taken by pid {os.getpid()} (")
    assert check_plan(planned, own_ports={taken}) == []


def test_one_port_for_two_is_reported_once(base_dir: Path, interpreter: str) -> None:
    port = free_port("127.0.0.1")
    planned = local_plan(base_dir, interpreter, ports=[port], router={"port": port})
    assert problems(planned) == [f"port {port} is given to f-0 and router"]


def test_an_address_that_is_not_ours_is_reported(base_dir: Path, interpreter: str) -> None:
    planned = local_plan(base_dir, interpreter, host="192.0.2.1", router={"enabled": False})
    (message,) = problems(planned)
    assert message.startswith("f-0: cannot listen at 192.0.2.1:")


def test_cuda_without_gpus_is_one_problem(base_dir: Path, interpreter: str) -> None:
    (message,) = problems(local_plan(base_dir, interpreter, device="cuda", gpus=[0, 1]))
    assert "no NVIDIA GPU" in message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"gpus": [7]}, ["GPU 7 does not exist; there are: 0, 1"]),
        (
            {"replicas": [{"gpus": [[9]]}]},
            ["f-0: GPU 9 does not exist; there are: 0, 1"],
        ),
        (
            {"replicas": [{"count": 2, "gpus": [[1], [1]]}]},
            ["GPU 1 is given to f-0 and f-1"],
        ),
        ({"replicas": [{"count": 2, "gpus": [[1], [1]]}], "share_gpus": True}, []),
        (
            {"tensor_parallel_size": 2, "replicas": [{"gpus": [[1, 1]]}]},
            ["f-0: GPU 1 is listed twice"],
        ),
        ({"replicas": 3}, ["f-2: not enough GPUs: it needs 1, and 0 of them can be had"]),
        (
            {"tensor_parallel_size": 4},
            ["f-0: not enough GPUs: it needs 4, and 2 of them can be had"],
        ),
        ({"replicas": [{"gpus": [[0, 1]]}]}, ["f-0: 2 GPUs for 1 worker"]),
    ],
)
def test_gpu_mistakes_are_reported(
    base_dir: Path, interpreter: str, config: dict[str, Any], expected: list[str]
) -> None:
    planned = local_plan(base_dir, interpreter, on=gpus(2), device="cuda", **config)
    found = problems(planned, gpus(2))
    assert len(found) == len(expected)
    assert all(message.startswith(start) for message, start in zip(found, expected, strict=True))


def test_a_missing_interpreter_is_reported(base_dir: Path) -> None:
    (message,) = problems(local_plan(base_dir, "./no-python"))
    assert message.endswith("no-python': no such interpreter")


def test_packages_missing_from_our_own_interpreter_are_reported(
    base_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    planned = dataclasses.replace(local_plan(base_dir, "python"), python=sys.executable)
    assert len(problems(planned)) == 3


def test_all_problems_are_reported_together(base_dir: Path) -> None:
    kinds = problems(local_plan(base_dir, "./no-python", model="./x", device="cuda"))
    assert len(kinds) == 3


NAMES = ("max-model-len", "enforce-eager", "no-enforce-eager", "compilation-config", "headless")


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ("chekpoints/a", "did you mean checkpoints/a?"),
        ("gpt3", "write the hub id with its organisation (ORG/gpt3), or the path as ./gpt3"),
        ("Qwen/Qwen3", "download it first: hf download Qwen/Qwen3"),
        ("./checkpoints/a", None),
        ("org/cached", None),
    ],
)
def test_a_model_that_is_nowhere_is_warned_of(
    base_dir: Path, interpreter: str, model: str, advice: str | None
) -> None:
    snapshot = base_dir / "hub" / "models--org--cached" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    env = {"HF_HUB_CACHE": str(base_dir / "hub")}
    planned = local_plan(base_dir, interpreter, model=model, env=env)
    assert [warning.fix for warning in model_advice(planned)] == ([advice] if advice else [])


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("max-modle-len", 8, "vLLM has no argument 'max-modle-len'; did you mean 'max-model-len'?"),
        ("Max_Modle_Len", 8, "vLLM has no argument 'Max-Modle-Len'"),
        ("zzz", None, None),
        ("zzz", True, "vLLM has no argument 'zzz'"),
        ("headless", False, "'headless' cannot be false: vLLM has no --no-headless"),
        ("enforce-eager", False, None),
        ("--max_model_len", 8, None),
        ("max-mod", 8, None),
        ("compilation-config.mode", 0, None),
        ("no-enforce-eager", True, None),
    ],
)
def test_arguments_that_vllm_does_not_know_are_told_with_their_line(
    base_dir: Path, interpreter: str, name: str, value: Any, complaint: str | None
) -> None:
    def found(**config: Any) -> list[str]:
        file = base_dir / "fleet.yaml"
        document = {"name": "f", "model": "./checkpoints/a", "python": interpreter, **config}
        file.write_text("# a comment\n" + yaml.safe_dump(document, sort_keys=False))
        planned = local_plan(base_dir, interpreter, **config)
        source = load_fleet(file).source
        asked = check_plan(planned, source=source, arguments=lambda python: NAMES)
        return [problem.message.removeprefix(str(file)) for problem in asked]

    expected = [] if complaint is None else [complaint]
    for config, where in (
        ({"args": {name: value}}, ":6: args: "),
        ({"replicas": [{"count": 1, "args": {name: value}}]}, ":8: replicas.0.args: "),
    ):
        messages = found(**config)
        assert len(messages) == len(expected)
        assert all(m.startswith(where + e) for m, e in zip(messages, expected, strict=True))
        assert found(**config, check_args=False) == []
