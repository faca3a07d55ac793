"""Planning: from a configuration to exact argv, environment, ports and GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyctl.core.plan import ServerSpec, config_digest
from skyctl.core.planning import at_present, planned, scaled
from skyctl.core.tinker import TinkerSettings
from skyctl.engines import routing
from skyctl.errors import FleetFileError, UsageError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.store.credentials import AT_SPAWN
from tests.unit.core.plans import PYTHON, gpus, plan, value_of


def test_a_cpu_server_gets_exactly_this_command_and_environment(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    planned = plan(tmp_path, model="./a", device="cpu", args={"max_model_len": 2048})
    (server,) = planned.servers
    assert server.argv == (
        PYTHON, "-m", "skyctl.engines.vllm.inside.serve",
        "--model", str(tmp_path / "a"), "--served-model-name", "a",
        "--host", "127.0.0.1", "--port", "20000",
        "--weight-transfer-config", '{"backend":"skyctl"}',
        "--dtype", "float32",
        "--worker-extension-cls", "skyctl.engines.vllm.inside.worker.SkyctlWorkerExtension",
        "--max-model-len", "2048",
        "--middleware", "skyctl.engines.inside.versions.Versioned",
        "--middleware", "skyctl.engines.inside.gate.Gate",
        "--middleware", "skyctl.engines.inside.guard.Guard",
    )  # fmt: skip
    assert server.env == {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "SKYCTL_SPIN_S": "0.02",
        "VLLM_SERVER_DEV_MODE": "1",
        # secrets are not planned
        "VLLM_API_KEY": AT_SPAWN,
        "SKYCTL_CONTROL_TOKEN": AT_SPAWN,
    }
    assert (server.name, server.url, server.gpus) == ("demo-0", "http://127.0.0.1:20000", ())
    assert (server.backend, server.world_size) == ("skyctl", 1)


def test_the_router_gets_exactly_this_command() -> None:
    planned = plan(
        device="cpu", router={"args": {"retry_max_retries": 2, "disable-retries": False}}
    )
    assert planned.router is not None
    assert planned.router.argv == (
        PYTHON, "-m", "vllm_router.launch_router",
        "--host", "127.0.0.1", "--port", "20001", "--policy", "cache_aware",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", "20002",
        "--health-check-interval-secs", "5", "--request-timeout-secs", "1800",
        "--retry-max-retries", "2",
    )  # fmt: skip


def test_prefill_and_decode_servers_know_their_part(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "device": "cpu",
        "auth": "control",
        "replicas": [{"role": "prefill"}, {"role": "decode", "count": 2, "name": "d"}],
    }
    planned = plan(tmp_path, **config)
    assert [server.name for server in planned.servers] == ["demo-prefill-0", "d-0", "d-1"]
    assert [server.role for server in planned.servers] == ["prefill", "decode", "decode"]
    roles, ports = set(), set()
    for server in planned.servers:
        transfer = json.loads(value_of(server, "--kv-transfer-config"))
        roles.add((server.role, transfer["kv_role"]))
        assert transfer["kv_connector_extra_config"] == {"kv_lease_duration": 6}
        assert transfer["kv_connector_module_path"] == "skyctl.engines.vllm.inside.pairs"
        ports |= {server.port, int(server.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])}
    assert roles == {("prefill", "kv_producer"), ("decode", "kv_consumer")}
    assert len(ports) == 6
    assert planned.router is not None and "--vllm-pd-disaggregation" in planned.router.argv
    workers = routing("vllm").workers({"prefill": ["http://p"], "decode": ["http://d", "http://e"]})
    assert workers == ["--prefill", "http://p", "--decode", "http://d", "--decode", "http://e"]
    with pytest.raises(UsageError, match="set by skyctl for servers with a `role`"):
        plan(tmp_path, args={"kv-transfer-config": {}}, **config)
    with pytest.raises(UsageError, match="SGLang servers have no prefill and decode servers"):
        plan(tmp_path, engine="sglang", **config)


def test_a_disabled_router_is_not_planned() -> None:
    assert plan(device="cpu", router={"enabled": False}).router is None


def test_values_become_flags_by_their_kind() -> None:
    (server,) = plan(
        device="cpu",
        args={
            "enforce_eager": True,
            "enable-prefix-caching": False,
            "seed": None,
            "allowed-origins": ["a", "b"],
            "hf_overrides": {"rope_theta": 1.5},
            "stop": "-x",
        },
    ).servers
    tail = server.argv[server.argv.index("--enforce-eager") : -6]
    assert tail == (
        "--enforce-eager", "--no-enable-prefix-caching",
        "--allowed-origins", "a", "b", "--hf-overrides", '{"rope_theta":1.5}', "--stop=-x",
    )  # fmt: skip


def test_router_arguments_that_repeat_get_one_flag_per_value() -> None:
    router = plan(
        device="cpu",
        router={"args": {"kv-event-source": ["a", "b"], "request-id-headers": ["x", "y"]}},
    ).router
    assert router is not None
    assert router.argv[-7:] == (
        "--kv-event-source", "a", "--kv-event-source", "b", "--request-id-headers", "x", "y",
    )  # fmt: skip


def test_argument_paths_written_as_relative_start_at_the_fleet_file(tmp_path: Path) -> None:
    (server,) = plan(tmp_path, device="cpu", args={"chat-template": "./chat.jinja"}).servers
    assert value_of(server, "--chat-template") == str(tmp_path / "chat.jinja")


def test_dtype_can_be_overridden_and_appears_once() -> None:
    (server,) = plan(device="cpu", args={"dtype": "bfloat16"}).servers
    assert server.argv.count("--dtype") == 1
    assert value_of(server, "--dtype") == "bfloat16"


def test_a_hub_model_stays_online_and_keeps_its_id() -> None:
    planned = plan(device="cpu", model="Qwen/Qwen3-0.6B")
    assert planned.model_path == planned.served_model_name == "Qwen/Qwen3-0.6B"
    assert "HF_HUB_OFFLINE" not in planned.servers[0].env


def test_defaults_yield_to_the_file_and_to_the_inherited_environment() -> None:
    (server,) = plan(
        device="cpu",
        env={"VLLM_CPU_KVCACHE_SPACE": "8"},
        environ={"DO_NOT_TRACK": "0"},
    ).servers
    assert server.env["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert "DO_NOT_TRACK" not in server.env  # inherited


def test_a_kv_cache_of_so_many_bytes_is_not_overridden_by_a_default() -> None:
    """vLLM on CPU puts the variable over the argument."""
    (server,) = plan(device="cpu", args={"kv-cache-memory-bytes": 2**28}).servers
    assert "VLLM_CPU_KVCACHE_SPACE" not in server.env
    assert value_of(server, "--kv-cache-memory-bytes") == str(2**28)


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("ports", {"args": {"port": 1}}),
        ("gpus", {"env": {"CUDA_VISIBLE_DEVICES": "0"}}),
        ("router.port", {"router": {"args": {"port": 1}}}),
    ],
)
def test_what_skyctl_sets_is_refused_in_code_too(key: str, config: dict[str, Any]) -> None:
    with pytest.raises(FleetFileError, match=key):
        plan(device="cpu", **config)


def test_groups_override_and_are_numbered_by_name() -> None:
    planned = plan(
        device="cpu",
        args={"seed": 1, "max-num-seqs": 8},
        env={"A": "1", "B": "1"},
        replicas=[
            {"count": 2},
            {"name": "big", "args": {"max_num_seqs": 64, "seed": None}, "env": {"B": "2"}},
            {"count": 1, "ports": [9000]},
        ],
    )
    assert [server.name for server in planned.servers] == ["demo-0", "demo-1", "big-0", "demo-2"]
    big = planned.servers[2]
    assert value_of(big, "--max-num-seqs") == "64"
    assert "--seed" not in big.argv
    assert (big.env["A"], big.env["B"]) == ("1", "2")
    assert planned.servers[3].port == 9000


def test_ports_come_from_the_file_then_from_before_then_are_free() -> None:
    planned = plan(
        device="cpu",
        replicas=3,
        ports=[20000],
        known_ports={"demo-1": 20001, "router": 20002, "demo-0": 5},
    )
    # 20000 to 20002 are used, so the free ones start after them
    assert [server.port for server in planned.servers] == [20000, 20001, 20003]
    assert planned.router is not None
    assert (planned.router.port, planned.router.metrics_port) == (20002, 20004)
    assert any("ports: 1 for 3 replicas" in warning for warning in planned.warnings)


def test_scaling_keeps_what_the_first_replicas_have() -> None:
    before = plan(device="cpu", replicas=1)
    known = {server.name: server.port for server in before.servers}
    after = plan(device="cpu", replicas=2, known_ports=known)
    assert after.servers[0] == before.servers[0]


def test_where_load_decides_a_server_is_the_same_with_any_number_of_others() -> None:
    def of(replicas: int, ports: dict[str, int]) -> dict[str, ServerSpec]:
        whole = plan(machine_gpus=gpus(4), known_ports=ports, replicas=replicas, scale={"max": 3})
        assert whole.free_gpus == (3,)  # also while fewer run
        return {server.name: server for server in whole.servers}

    alone = of(1, {})
    assert list(alone) == ["demo-0"]
    every = of(3, {"demo-0": alone["demo-0"].port})
    assert every["demo-0"] == alone["demo-0"]
    # those that run, in the order of their ports; here the last, and then the first that sleeps
    ports = {"demo-2": every["demo-2"].port, "demo-1": every["demo-1"].port}
    assert of(1, ports) == {"demo-2": every["demo-2"]}
    assert list(of(2, ports)) == ["demo-1", "demo-2"]


def test_where_load_decides_the_number_that_runs_is_kept_within_the_bounds() -> None:
    def kept(running: int, **scale: int) -> int:
        file = {"name": "demo", "model": "x", "scale": {"min": 2, "max": 4, **scale}}
        ports = {f"demo-{index}": 8000 + index for index in range(running)} | {"router": 9000}
        config = at_present(FleetConfig.model_validate(file), ports)
        assert isinstance(config.replicas, int)
        return config.replicas

    assert [kept(running) for running in range(6)] == [2, 2, 2, 3, 4, 4]
    config = FleetConfig.model_validate({"name": "demo", "model": "x", "scale": {"max": 4}})
    assert config_digest(config) == config_digest(scaled(config, 3))
    fixed = FleetConfig.model_validate({"name": "demo", "model": "x"})
    assert config_digest(fixed) != config_digest(scaled(fixed, 3))
    assert at_present(fixed, {"demo-0": 1, "demo-1": 2}) is fixed


def test_two_replicas_on_two_cores_get_one_each() -> None:
    planned = plan(device="cpu", replicas=2, cpus=2)
    bindings = [server.env["VLLM_CPU_OMP_THREADS_BIND"] for server in planned.servers]
    assert bindings == ["0", "1"]


def test_cuda_replicas_are_packed_onto_their_own_gpus() -> None:
    planned = plan(machine_gpus=gpus(8), replicas=3, tensor_parallel_size=2)
    assert planned.device == "cuda"
    assert [server.gpus for server in planned.servers] == [(0, 1), (2, 3), (4, 5)]
    server = planned.servers[1]
    assert server.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert server.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert value_of(server, "--tensor-parallel-size") == "2"
    assert "--enable-sleep-mode" in server.argv
    assert "--dtype" not in server.argv
    assert value_of(server, "--worker-extension-cls").startswith("skyctl.")
    assert planned.free_gpus == (6, 7)


def test_the_transport_is_nccl_while_a_gpu_is_left_for_the_sender_else_ipc() -> None:
    spare = plan(machine_gpus=gpus(2), replicas=1).servers[0]
    full = plan(machine_gpus=gpus(2), replicas=2).servers[0]
    assert value_of(spare, "--weight-transfer-config") == '{"backend":"nccl"}'
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in spare.env
    assert value_of(full, "--weight-transfer-config") == '{"backend":"ipc"}'
    assert full.env["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


@pytest.mark.parametrize("count", [0, 2])
def test_disk_needs_no_backend(count: int) -> None:
    (server,) = plan(machine_gpus=gpus(count), weight_transfer={"transport": "disk"}).servers
    assert server.backend == ""
    assert "--weight-transfer-config" not in server.argv


@pytest.mark.parametrize(
    ("transport", "count", "backend"),
    [("gloo", 0, "skyctl"), ("shm", 0, "skyctl"), ("ipc", 2, "ipc"), ("nccl", 2, "nccl")],
)
def test_a_transport_names_its_backend(transport: str, count: int, backend: str) -> None:
    planned = plan(machine_gpus=gpus(count), weight_transfer={"transport": transport})
    assert planned.servers[0].backend == backend


@pytest.mark.parametrize(("transport", "count"), [("nccl", 0), ("ipc", 0), ("gloo", 1), ("shm", 1)])
def test_a_transport_for_the_other_device_is_refused(transport: str, count: int) -> None:
    with pytest.raises(UsageError, match=transport):
        plan(machine_gpus=gpus(count), weight_transfer={"transport": transport})


def test_sleep_mode_can_be_refused_on_cuda_and_never_reaches_a_cpu_server() -> None:
    (on_gpu,) = plan(machine_gpus=gpus(1), args={"enable_sleep_mode": False}).servers
    assert "--no-enable-sleep-mode" in on_gpu.argv and "--enable-sleep-mode" not in on_gpu.argv
    on_cpu = plan(args={"enable_sleep_mode": True})
    assert not any("sleep-mode" in argument for argument in on_cpu.servers[0].argv)
    assert any("enable-sleep-mode is left out" in warning for warning in on_cpu.warnings)


def test_a_backend_for_gpus_on_cpu_servers_is_warned_of() -> None:
    for backend in ("nccl", "ipc"):
        (warning,) = plan(weight_transfer={"backend": backend}).warnings
        assert f"weight_transfer.backend {backend} needs GPUs" in warning
        on_gpus = plan(machine_gpus=gpus(1), weight_transfer={"backend": backend})
        assert not any("needs GPUs" in warning for warning in on_gpus.warnings)


def test_gpus_of_the_file_and_of_the_environment_limit_the_choice() -> None:
    by_file = plan(machine_gpus=gpus(4), gpus=[3, 1], replicas=2)
    assert [server.gpus for server in by_file.servers] == [(3,), (1,)]
    by_environment = plan(machine_gpus=gpus(4), environ={"CUDA_VISIBLE_DEVICES": "2"})
    assert by_environment.servers[0].gpus == (2,)
    nothing_visible = plan(machine_gpus=gpus(4), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert nothing_visible.device == "cpu"


@pytest.mark.parametrize(
    ("config", "used", "free", "shared"),
    [
        ({"tinker": {"device": "cuda"}}, [(1,), (2,)], (3,), False),
        ({"tinker": {"device": "cuda:3"}}, [(0,), (1,)], (2,), False),
        ({"tinker": {"device": "cuda:3"}, "gpus": [2, 3]}, [(2,), (3,)], (), True),
        ({"tinker": {"device": "cpu"}}, [(0,), (1,)], (2, 3), False),
        ({"tinker": {"devices": ["cuda:1", "cuda:3"]}}, [(0,), (2,)], (), False),
        ({"tinker": {"devices": ["cuda:1", "cuda:2"]}, "gpus": [0, 2]}, [(0,), (2,)], (), True),
    ],
)
def test_no_server_and_no_sender_gets_a_gpu_of_the_trainer_unasked(
    config: dict[str, Any], used: list[tuple[int, ...]], free: tuple[int, ...], shared: bool
) -> None:
    planned = plan(replicas=2, device="cuda", lora={"max_rank": 32}, machine_gpus=gpus(4), **config)
    assert [server.gpus for server in planned.servers] == used
    assert planned.free_gpus == free
    assert any("servers use that GPU, too" in line for line in planned.warnings) is shared


def test_a_server_short_of_gpus_sees_only_what_it_got() -> None:
    planned = plan(machine_gpus=gpus(1), replicas=2)
    assert planned.servers[1].gpus == ()
    assert planned.servers[1].env["CUDA_VISIBLE_DEVICES"] == ""


def test_the_tinker_api_is_told_all_it_needs_in_its_command_line(tmp_path: Path) -> None:
    section = {"max_rank": 8, "storage": "runs", "host": "::", "port": 20000}
    planned = plan(
        tmp_path,
        device="cpu",
        python="./venv/bin/python",
        lora={"max_rank": 16, "max_adapters": 3},
        tinker=section,
        args={"max_model_len": 512},
    )
    assert planned.tinker is not None
    python, *entry, argument = planned.tinker.argv
    assert (python, entry) == (PYTHON, ["-m", "skyctl.tinker"])  # skyctl's own, not the servers'
    settings = TinkerSettings.of_argument(argument)
    assert settings.storage == str(tmp_path / "runs")
    assert (settings.fleet, settings.base_model, settings.context) == ("demo", "org/model", 512)
    assert (settings.max_rank, settings.max_adapters) == (8, 3)
    assert planned.tinker.url == "http://127.0.0.1:20000"
    assert 20000 not in {server.port for server in planned.servers}


def test_the_tinker_api_is_another_where_it_reaches_the_servers_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def api(*, router: bool = True, **config: Any) -> TinkerSettings:
        config = {
            "name": "demo",
            "model": "org/model",
            "device": "cpu",
            "lora": {"max_rank": 32},
            "tinker": {"base_model": "base"},
            "router": {"port": 9000},
            "ports": [9001],
        } | config
        fleet = FleetConfig.model_validate(config)
        found = planned(fleet, Path("/nowhere"), {}, router=router).tinker
        assert found is not None
        return TinkerSettings.of_argument(found.argv[-1])

    usual = api()
    assert (usual.entry, usual.served_model_name) == ("http://127.0.0.1:9000", "org/model")
    assert usual.key_source == "file"
    assert api(router=False).entry == "http://127.0.0.1:9001"
    assert api(served_model_name="s").served_model_name == "s"
    assert api(auth="control").key_source is None
    monkeypatch.setenv("PLANNED_KEY", "s3cret")
    assert api(api_key_env="PLANNED_KEY").key_source == "PLANNED_KEY"


def test_an_attached_fleet_has_nothing_to_plan() -> None:
    with pytest.raises(UsageError, match="attached"):
        plan(model=None, servers=["http://h:1"])


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:20000"),
        ("10.0.0.1", "http://10.0.0.1:20000"),
        ("::1", "http://[::1]:20000"),
    ],
)
def test_urls_are_those_of_this_machine(host: str, url: str) -> None:
    assert plan(device="cpu", host=host).servers[0].url == url


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"host": "0.0.0.0"}, "cross the network unencrypted"),
        ({"tinker": {"host": "0.0.0.0"}, "lora": {"max_rank": 32}}, "reader of the key can train"),
        ({"host": "0.0.0.0", "auth": "control"}, "inference needs no key"),
        ({"auth": "none"}, "every user of this machine"),
        ({"router": {"host": "0.0.0.0"}}, "router.host"),
        ({"router": {"request_timeout_s": 20}}, "request_timeout_s 20"),
        ({"router": {"health_interval_s": 60}}, "for 180 s"),
        ({"ports": [1, 2, 3]}, "last ones are not used"),
        ({"pipeline_parallel_size": 2, "args": {"enforce-eager": True}}, "of the first request"),
        ({"args": {"enable-eplb": True}}, "refused: it moves experts"),
        (
            {"engine": "sglang", "args": {"speculative-algorithm": "EAGLE"}},
            "speculative decoding by EAGLE",
        ),
        (
            {"engine": "sglang", "args": {"weight-cache-mode": "client"}},
            "refused: it shares its weights with other servers",
        ),
    ],
)
def test_what_is_probably_not_meant_is_warned_about(config: dict[str, Any], part: str) -> None:
    assert [warning for warning in plan(device="cpu", **config).warnings if part in warning]


@pytest.mark.parametrize(
    ("size", "fix"),
    [({"replicas": 3}, "lower `replicas`"), ({"scale": {"max": 3}}, "lower `scale: max`")],
)
def test_what_to_do_about_too_few_cores_names_the_key_of_the_file(
    size: dict[str, Any], fix: str
) -> None:
    [warning] = plan(device="cpu", cpus=2, **size).warnings
    assert (warning, warning.fix) == ("3 workers share 2 CPU cores", fix)


@pytest.mark.parametrize(
    "args", [{}, {"enable-eplb": False}, {"speculative-config": {"method": "mtp"}}]
)
def test_an_ordinary_fleet_has_no_warnings(args: dict[str, Any]) -> None:
    assert plan(device="cpu", replicas=2, cpus=4, args=args).warnings == ()


def test_the_interpreter_is_relative_to_the_file_and_its_link_is_kept(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "python").symlink_to("real")
    planned = plan(tmp_path / "sub", device="cpu", python="../python")
    assert planned.python == str(tmp_path / "python")
    assert planned.servers[0].argv[0] == planned.python
    assert plan(device="cpu", python="python3.12").python == "python3.12"


def test_the_home_of_a_user_who_does_not_exist_is_a_path_like_any_other(tmp_path: Path) -> None:
    planned = plan(tmp_path, device="cpu", python="~nobody-here/python", model="~nobody-here/m")
    assert planned.python == str(tmp_path / "~nobody-here" / "python")
    assert planned.model_path == str(tmp_path / "~nobody-here" / "m")


@pytest.mark.parametrize("replicas", [0, 513, 10**20])
def test_a_fleet_is_scaled_to_no_more_than_its_file_may_say(replicas: int) -> None:
    config = FleetConfig(name="demo", model="x")
    with pytest.raises(UsageError, match=f"cannot scale to {replicas}"):
        scaled(config, replicas)
    assert scaled(config, 512).replicas == 512


def test_a_fleet_that_shrank_has_the_ports_of_its_file_when_it_grows_again() -> None:
    config = FleetConfig(name="demo", model="x", replicas=3, ports=[8001, 8002, 8003])
    assert scaled(scaled(config, 1), 3) == config
    with pytest.raises(UsageError, match="names 3 ports for 4 replicas"):
        scaled(config, 4)
