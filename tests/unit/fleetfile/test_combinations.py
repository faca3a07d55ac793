"""Settings that do not go together are refused."""

from __future__ import annotations

import pytest

from skyctl.fleetfile.scaling import ScaleSection
from tests.unit.fleetfile.texts import STARTED, parse, refused

LORA = "model: x\nlora: {max_rank: 32}\n"
ON_A = f"{LORA}launcher: ssh\nssh: {{hosts: [a]}}\nshared_dir: /s\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: x\ntinker: {}\n", "without `lora` they take none: write `lora: {max_rank: 32}`"),
        ("model: x\ntinker: {}\nlora: {max_rank: 16}\n", "their `lora: max_rank` is 16"),
        ("servers: [http://h:1]\ntinker: {}\n", "`tinker` goes with servers that skyctl starts"),
        (f"{LORA}launcher: ray\nshared_dir: /s\ntinker: {{}}\n", "write `launcher: ssh`, with"),
        (f"{LORA}tinker: {{machine: a}}\n", "is one of `ssh: hosts`"),
        (f"{ON_A}tinker: {{machine: b, storage: /s}}\n", "is one of `ssh: hosts`"),
        (f"{ON_A}tinker: {{machine: a}}\n", "needs a `storage` at a path that it shares"),
    ],
)
def test_a_tinker_api_without_servers_for_its_adapters_is_refused(text: str, expected: str) -> None:
    (line,) = refused(f"name: demo\n{text}")
    place = [number for number, key in enumerate(text.splitlines(), 2) if key.startswith("tinker")]
    assert line.startswith(f"fleet.yaml:{place[0]}: ") and expected in line
    assert parse("name: demo\nmodel: x\nlora: {max_rank: 32}\ntinker: {}\n").tinker is not None


@pytest.mark.parametrize(
    ("discovery", "expected"),
    [
        ("{command: ' '}", "servers.command: expected a shell command, got ' '"),
        ("{dns: 'h:0'}", "servers.dns: expected a host name and a port"),
        ("{dns: 'h:65536'}", "servers: `dns: h:65536` names no port: they end at 65535"),
        ("{}", "servers: write either `dns` or `command`"),
    ],
)
def test_a_place_where_no_server_can_be_found_is_refused(discovery: str, expected: str) -> None:
    (line,) = refused(f"name: demo\nservers: {discovery}\n")
    assert line.startswith(f"fleet.yaml:2: {expected}")
    assert parse("name: demo\nservers: {dns: 'h:65535'}\n").servers


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("replicas: 4\nargs: {max-model-len: 4}\n", "`replicas`, `args` go"),
        ("launcher: ssh\nssh: {hosts: [a]}\n", "`launcher`, `ssh` go"),
        ("env: {A: b}\n", "`env` goes"),
        ("on_event: {push_failed: x}\nscale: {max: 2}\n", "`on_event`, `scale` go"),
        ("trainer: {port: 1}\ntinker: {}\n", "`tinker`, `trainer` go"),
    ],
)
def test_keys_by_which_servers_are_started_do_not_go_with_servers_that_run(
    text: str, keys: str
) -> None:
    (line,) = refused(f"name: demo\nservers: [http://h:1]\n{text}")
    assert f"{keys} with servers that skyctl starts" in line


PAIR = "replicas: [{role: prefill}, {role: decode}]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replicas: [{role: prefill}]\n", "there must be a group with `role: decode`"),
        ("replicas: [{role: decode}]\n", "there must be a group with `role: prefill`"),
        ("replicas: [{role: decode}, {}]\n", "there must be a `role` in every group"),
        (PAIR + "auth: all\n", "write `auth: control`"),
        (PAIR + "router: {enabled: false}\n", "need the router"),
        (PAIR + "data_parallel_size: 2\n", "write more replicas"),
        (PAIR + "lora: {}\n", "`lora` does not go with prefill and decode servers yet"),
        (PAIR + "kv_lease_s: 5\n", "expected at least 6"),
        ("kv_lease_s: 10\n", "`kv_lease_s` goes with groups that have a `role`"),
    ],
)
def test_half_a_pair_is_refused(text: str, expected: str) -> None:
    auth = "" if "auth" in text else "auth: control\n"
    assert expected in "\n".join(refused(f"name: demo\nmodel: x\n{auth}{text}"))
    assert parse(f"name: demo\nmodel: x\nauth: control\n{PAIR}").pairs


SSH = "launcher: ssh\nssh: {hosts: [a]}\n"
SPAN = "nodes_per_replica: 2\npipeline_parallel_size: 2\nlauncher: ssh\nssh: {hosts: [a, b]}\n"


@pytest.mark.parametrize("written", ["all", "control", "none", "'none'"])
def test_auth_is_one_of_three_words_and_all_when_not_said(written: str) -> None:
    assert parse(STARTED).auth == "all"
    assert parse(STARTED + f"auth: {written}\n").auth == written.strip("'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auth: off\n", "3: auth: expected one of 'all', 'control', 'none', got false"),
        ("auth: true\n", "3: auth: expected one of 'all', 'control', 'none', got true"),
        ("auth: nnoe\n", "did you mean 'none'?"),
        ("auth: none\nhost: 0.0.0.0\n", "`auth: none` with host 0.0.0.0"),
        ("auth: none\nhost: 127.evil.example\n", "every client that reaches these ports"),
        ("auth: none\nrouter: {host: 10.0.0.1}\n", "`auth: none` with router.host 10.0.0.1"),
        ("auth: none\nweight_transfer: {transport: ipc}\n", "servers unpickle what is sent"),
        ("control_token_env: T\n", "`control_token_env` goes with `servers`"),
        ("env: {SKYCTL_CONTROL_TOKEN: x}\n", "skyctl makes it; see the key `auth`"),
        ("env: {VLLM_ALLOW_INSECURE_SERIALIZATION: 1}\n", "skyctl sets it"),
    ],
)
def test_settings_that_leave_servers_open_are_refused(text: str, expected: str) -> None:
    (line,) = refused(STARTED + text)
    assert expected in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("launcher: ssh\n", "needs `ssh: {hosts: [...]}`"),
        ("launcher: ssh\nssh: {hosts: [a, a]}\n", "each machine once"),
        ("launcher: ssh\nssh: {hosts: [-oProxyCommand=x]}\n", "4: ssh.hosts.0: expected"),
        ("ssh: {hosts: [a]}\n", "`ssh` goes with `launcher: ssh`"),
        (SSH + "host: 0.0.0.0\n", "a server binds its machine's address"),
        (SSH + "auth: none\n", "every client that reaches the machines could replace the weights"),
        (SSH + "lora: {}\n", "`lora` needs a directory that all machines share"),
        (SSH + "shared_dir: copies\n", "5: shared_dir: expected"),
        ("shared_dir: /s\n", "`shared_dir` goes with `launcher: ssh` or `launcher: ray`"),
        (SSH + "replicas: [{gpus: [[0]]}]\n", "a group's `gpus` goes with one machine"),
    ],
)
def test_settings_of_one_machine_are_refused_with_several(text: str, expected: str) -> None:
    (line,) = refused(STARTED + text)
    assert expected in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nodes_per_replica: 2\n", "goes with `launcher: ssh`"),
        ("nodes_per_replica: 2\nlauncher: ray\n", "goes with `launcher: ssh`"),
        (SPAN.replace("size: 2", "size: 3"), "write a multiple of 2"),
        (SPAN.replace("pipeline_parallel_size: 2\n", ""), "write a multiple of 2"),
        (SPAN.replace("[a, b]", "[a]"), "`ssh: hosts` names 1: add machines"),
        (SPAN + "data_parallel_size: 2\n", "does not go with `data_parallel_size`"),
        (SPAN + "share_gpus: true\n", "does not go with `share_gpus`"),
        (SPAN + "weight_transfer: {transport: ipc}\n", "with transport ipc: a sender reaches"),
        (SPAN + "weight_transfer: {backend: sparse_nccl}\n", "with backend sparse_nccl: a sender"),
        (SPAN + "replicas: [{nodes_per_replica: 4}]\n", "write a multiple of 4"),
        (SPAN + "args: {node-rank: 1}\n", "use the key `nodes_per_replica`"),
    ],
)
def test_settings_of_one_machine_are_refused_for_a_replica_on_several(
    text: str, expected: str
) -> None:
    assert parse(STARTED + SPAN).nodes_per_replica == 2
    (line,) = refused(STARTED + text)
    assert expected in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("scale: {}\n", "scale.max"),
        ("scale: {min: 3, max: 2}\n", "`scale: min` is 3, and `max` 2"),
        ("scale: {max: 2, target: tokens}\n", "`scale: {target: tokens}` needs `value`"),
        ("scale: {max: 2, target: kv, value: 80}\n", "write `value: 0.8` for 80 %"),
        (
            "scale: {max: 2}\nreplicas: 3\n",
            "`replicas: 3`, and `scale:` in the fleet file says 1 to",
        ),
        ("scale: {max: 2}\nreplicas: [{count: 1}]\n", "not with groups"),
        ("scale: {max: 2}\nrouter: {enabled: false}\n", "`scale` needs the router"),
        ("scale: {max: 2}\nlauncher: ray\n", "does not go with `launcher: ray`"),
        ("scale: {max: 2, sleep_s: -1}\n", "sleep_s"),
    ],
)
def test_a_scale_that_cannot_be_kept_is_refused(text: str, expected: str) -> None:
    (line,) = refused(STARTED + text)
    assert expected in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("scale: {max: 2}\n", "does not go with `scale`: load would start servers"),
        ("launcher: ray\n", "does not go with `launcher: ray`"),
        ("args: {enable_sleep_mode: false}\n", "`sleep_group` needs enable-sleep-mode"),
        ("replicas: [{args: {enable-sleep-mode: null}}]\n", "`sleep_group` needs enable-sleep-"),
        ("engine: sglang\nargs: {enable-memory-saver: false}\n", "needs enable-memory-saver"),
        ("lora: {max_rank: 32}\ntinker: {}\n", "does not go with `tinker`"),
    ],
)
def test_a_fleet_that_cannot_sleep_is_in_no_group(text: str, expected: str) -> None:
    assert expected in str(refused(STARTED + "sleep_group: pair\n" + text))


def test_what_scale_leaves_out_depends_on_its_target() -> None:
    def scale(text: str) -> ScaleSection:
        section = parse(STARTED + f"scale: {text}\n").scale
        assert section is not None
        return section

    assert (scale("{max: 4}").per_replica, scale("{max: 4, target: kv}").per_replica) == (32, 0.8)
    assert scale("{max: 4, up_after_s: 3}").interval_s == 1
    assert scale("{max: 4, up_after_s: 60}").interval_s == 5


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_auth_none_is_allowed_where_only_this_machine_gets(host: str) -> None:
    text = f"auth: none\nhost: '{host}'\nrouter: {{enabled: false, host: 0.0.0.0}}\n"
    assert parse(STARTED + text).auth == "none"
    assert parse(STARTED + "host: 0.0.0.0\nweight_transfer: {transport: ipc}\n").auth == "all"
