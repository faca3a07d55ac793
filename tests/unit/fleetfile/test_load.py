"""Loading fleet.yaml: what is accepted, and how each mistake is reported."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyctl.errors import FleetFileError
from skyctl.fleetfile.load import LoadedFleet, load_fleet, parse_fleet
from skyctl.fleetfile.schema import FleetConfig
from skyctl.fleetfile.sections import ReplicaGroup, RouterSection
from tests.unit.fleetfile.texts import ATTACHED, FILE, STARTED, parse, refused


def test_a_minimal_file_gets_every_default() -> None:
    config = parse("name: demo\nmodel: ./checkpoints/a\n")
    assert (config.name, config.model, config.replicas) == ("demo", "./checkpoints/a", 1)
    assert config.router == RouterSection()


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_key() -> None:
    text = "name: demo\nmodel: x\n\nreplcias: 2\n"
    assert refused(text) == ["fleet.yaml:4: unknown key 'replcias'; did you mean 'replicas'?"]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("router:\n  polcy: random\n", "router: unknown key 'polcy'; did you mean 'policy'?"),
        (
            "weight_transfer:\n  chunk-size: 1\n",
            "weight_transfer: unknown key 'chunk-size'; did you mean 'chunk_size'?",
        ),
        (
            "health:\n  intervl_s: 1\n",
            "health: unknown key 'intervl_s'; did you mean 'interval_s'?",
        ),
        (
            "replicas:\n  - cuont: 1\n",
            "replicas.0: unknown key 'cuont'; did you mean 'count'?",
        ),
    ],
)
def test_unknown_keys_are_found_at_every_level(section: str, expected: str) -> None:
    assert refused(f"name: demo\nmodel: x\n{section}") == [f"fleet.yaml:4: {expected}"]


def test_an_unknown_key_like_no_other_is_pointed_to_args() -> None:
    with pytest.raises(FleetFileError) as caught:
        parse("name: demo\nmodel: x\nmax-model-len: 4096\n")
    assert caught.value.message == "fleet.yaml:3: unknown key 'max-model-len'"
    assert "`args:`" in caught.value.hint


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("replicas: two", "replicas: expected a whole number or a list of groups, got 'two'"),
        ("replicas: yes", "replicas: expected a whole number or a list of groups, got true"),
        ("replicas: 0", "replicas: expected at least 1, got 0"),
        ("replicas: []", "replicas: expected at least one entry, got a list"),
        ("replicas: [3]", "replicas.0: expected a mapping, got 3"),
        ("tensor_parallel_size: on", "tensor_parallel_size: expected a whole number, got true"),
        ("host: [a]", "host: expected text, got a list"),
        ("ports: 8000", "ports: expected a list, got 8000"),
        ("ports: [0]", "ports.0: expected at least 1, got 0"),
        ("args: 3", "args: expected a mapping, got 3"),
        ("env: {A: }", "env.A: expected text, got nothing"),
        ("control_timeout_s: .inf", "control_timeout_s: expected a finite number, got inf"),
        ("control_timeout_s: 0", "control_timeout_s: expected more than 0, got 0"),
        ("router: 5", "router: expected a mapping or text, got 5"),
        (
            "device: gpu",
            "device: expected one of 'auto', 'cpu', 'cuda' (did you mean 'cuda'?), got 'gpu'",
        ),
        (
            "router: {policy: randm}",
            "router.policy: expected one of 'random', 'round_robin', 'cache_aware', 'kv_aware', "
            "'power_of_two', 'consistent_hash', 'sticky_least_loaded' (did you mean 'random'?), "
            "got 'randm'",
        ),
        (
            "weight_transfer: {chunk_size: big}",
            "weight_transfer.chunk_size: 'big' is not a size; write it like 256MiB or 1.5GB",
        ),
        ("router: 'http://r:1'", "`router` as a URL goes with `servers`"),
        (
            "replicas: [{count: 2, ports: [1]}]",
            "replicas.0: ports has 1 entries for 2 replicas",
        ),
    ],
)
def test_a_wrong_value_is_told_what_was_expected(line: str, expected: str) -> None:
    assert refused(f"name: demo\nmodel: x\n{line}\n") == [f"fleet.yaml:3: {expected}"]


def test_all_problems_are_reported_in_the_order_of_the_file() -> None:
    with pytest.raises(FleetFileError) as caught:
        parse("name: Demo\nmodel: x\nreplcias: 2\nrouter:\n  port: 99999\n")
    problems = caught.value.details["problems"]
    assert [problem["line"] for problem in problems] == [1, 3, 5]
    assert caught.value.message.count("\n") == 2
    assert caught.value.message.startswith("fleet.yaml:1: name: expected lower-case letters")


def test_a_missing_key_is_named() -> None:
    assert refused("model: x\n") == ["fleet.yaml:1: key 'name' is missing"]
    assert refused("name: a\n") == [
        "fleet.yaml:1: `model` is missing (or `servers`, for servers already running)"
    ]


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("name: a\nports: [1\n", 2, "not valid YAML: `[` is never closed"),
        ("name: a\n\tmodel: x\n", 2, "not valid YAML"),
        ("name: a\nmodel: x\nname: b\n", 3, "key 'name' was already given on line 1"),
        ("name: a\nmodel: x\nargs:\n  a: 1\n  a: 2\n", 5, "key 'a' was already given on line 4"),
        ("- a\n", 1, "expected a mapping"),
        ("", 1, "the file is empty"),
        ("# only a comment\n", 1, "the file is empty"),
        ("a: 1\n---\nb: 2\n", 2, "a second document begins"),
        ("name: a\nmodel: !!python/object:os.system {}\n", 2, "expected text, got a mapping"),
        ("? [a]\n: b\n", 1, "a key is a single word"),
        ("a: &a [*a]\n", 1, "too large or too deep"),
        ("a: " + "[" * 3000, 1, "nested too deeply"),
        ("name: a\nmodel: \x00\n", 2, "not valid YAML"),
        ("name: a\nmodel: x\nreplicas: " + "9" * 5000, 3, "cannot be read"),
    ],
)
def test_text_that_is_no_fleet_file_is_refused_with_its_line(
    text: str, line: int, part: str
) -> None:
    first = refused(text)[0]
    assert first.startswith(f"fleet.yaml:{line}: ")
    assert part in first


def test_aliases_cannot_make_a_small_file_enormous() -> None:
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12))
    assert "too large or too deep" in refused(f"name: a\nl0: &l0 [x]\n{levels}\n")[0]


def test_merge_keys_work_and_own_keys_win() -> None:
    config = parse(
        "name: a\nmodel: x\nreplicas:\n"
        "  - &base {name: one, args: {seed: 1}}\n"
        "  - {<<: *base, name: two}\n"
    )
    assert isinstance(config.replicas, list)
    assert config.replicas[1] == ReplicaGroup(name="two", args={"seed": 1})


def test_a_section_with_nothing_but_comments_means_the_defaults() -> None:
    config = parse("name: a\nmodel: x\nhealth:\n  # interval_s: 3\nargs:\nrouter:\n  port:\n")
    assert config == parse("name: a\nmodel: x\n")


def test_a_null_argument_is_kept_for_it_takes_an_argument_away() -> None:
    assert parse("name: a\nmodel: x\nargs: {seed: }\n").args == {"seed": None}


def test_variables_are_expanded_and_plain_ones_read_again_as_yaml() -> None:
    config = parse(
        "name: ${NAME}\nmodel: ${ROOT:-/models}/a\nreplicas: ${N:-2}\n"
        "env:\n  A: ${N}\n  B: $${N}\n  C: x${EMPTY:-y}z\n",
        NAME="demo",
        N="3",
        EMPTY="",
    )
    assert (config.name, config.model, config.replicas) == ("demo", "/models/a", 3)
    assert config.env == {"A": "3", "B": "${N}", "C": "xyz"}


def test_a_variables_value_cannot_add_structure() -> None:
    assert parse("name: a\nmodel: ${X}\n", X="{a: 1}\nreplicas: 9").model == "{a: 1}\nreplicas: 9"


def test_a_variable_in_a_flow_mapping_is_told_to_be_quoted() -> None:
    with pytest.raises(FleetFileError, match=":3: not valid YAML") as caught:
        parse("name: a\nmodel: x\nargs: {v: ${N}}\n", N="3")
    assert "quote variables" in caught.value.hint


def test_a_quoted_variable_stays_text() -> None:
    assert parse('name: a\nmodel: x\nargs: {v: "${N}"}\n', N="3").args == {"v": "3"}


def test_an_unset_variable_is_an_error_with_its_line() -> None:
    assert refused("name: a\nmodel: x\nhost: ${NOWHERE}\n") == [
        "fleet.yaml:3: the environment variable NOWHERE is not set"
    ]


@pytest.mark.parametrize("text", ["${", "${1A}", "${A:b}", "${A", "${A:-${B}}"])
def test_a_broken_variable_is_explained(text: str) -> None:
    assert "`${` starts a variable" in refused(f"name: a\nmodel: '{text}'\n", A="x")[0]


def test_environment_values_keep_their_text() -> None:
    config = parse("name: a\nmodel: x\nenv: {A: 017, B: 1.10, C: yes, D: 2026-01-02, E: 1}\n")
    assert config.env == {"A": "017", "B": "1.10", "C": "yes", "D": "2026-01-02", "E": "1"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("args: {port: 3}", "args: argument 'port' is set by skyctl: use the key `ports`"),
        (
            "args: {tensor_parallel_size: 2}",
            "args: argument 'tensor_parallel_size' is set by skyctl: "
            "use the key `tensor_parallel_size`",
        ),
        (
            "args: {--weight-transfer-config: x}",
            "args: argument '--weight-transfer-config' is set by skyctl: "
            "use the key `weight_transfer`",
        ),
        ("args: {a-b: 1, a_b: 2}", "args: argument 'a_b' was already written as 'a-b'"),
        (
            "env: {CUDA_VISIBLE_DEVICES: 1}",
            "env: variable 'CUDA_VISIBLE_DEVICES' is set by skyctl: use the key `gpus`",
        ),
        (
            "router: {args: {policy: random}}",
            "router.args: argument 'policy' is set by skyctl: use the key `router.policy`",
        ),
        (
            "replicas: [{args: {host: x}}]",
            "replicas.0.args: argument 'host' is set by skyctl: use the key `host`",
        ),
    ],
)
def test_arguments_that_skyctl_sets_are_refused_with_the_key_to_use(
    text: str, expected: str
) -> None:
    assert refused(f"name: a\nmodel: x\n{text}\n") == [f"fleet.yaml:3: {expected}"]


def test_an_attached_fleet_takes_urls() -> None:
    config = parse("name: a\nservers: ['http://h:1', 'https://h/x']\nrouter: http://h:3\n")
    assert config.attached
    assert refused("name: a\nservers: [h:1]\n") == [
        "fleet.yaml:2: servers.0: expected a URL like http://127.0.0.1:8000, got 'h:1'"
    ]
    assert "either `model`" in refused("name: a\nmodel: x\nservers: ['http://h:1']\n")[0]


def test_an_attached_fleet_has_each_server_once() -> None:
    text = "name: a\nservers: ['http://h:1', 'http://h:1/']\n"
    assert refused(text) == ["fleet.yaml:2: `servers` lists a URL twice"]


@pytest.mark.parametrize("url", ["http://[::1", "http://h:99999", "http://h:0", "http://:80"])
@pytest.mark.parametrize("key", ["servers: ['{}']", "servers: ['http://h:1']\nrouter: '{}'"])
def test_a_url_that_no_command_could_use_is_refused(url: str, key: str) -> None:
    [line] = refused(f"name: a\n{key.format(url)}\n")
    assert f"'{url}' is not a URL" in line or f"'{url}' is not the URL" in line


@pytest.mark.parametrize("key", ["servers: ['{}']", "servers: ['http://h:1']\nrouter: '{}'"])
def test_a_password_in_a_url_is_refused_and_not_repeated(key: str) -> None:
    """No server would be sent it, and every command would show it."""
    [line] = refused(f"name: a\n{key.format('http://me:s3cret@h:1')}\n")
    assert "no user or password" in line and "s3cret" not in line


def test_a_key_written_where_its_variable_belongs_is_not_repeated() -> None:
    message = refused("name: a\nmodel: x\napi_key_env: sk-123\n")[0]
    assert "the name of an environment variable" in message
    assert "sk-123" not in message


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    cases = {"missing.yaml": "no such file", "folder": "is a directory", "latin": "UTF-8"}
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin").write_bytes(b"name: a\nmodel: \xff\n")
    for name, part in cases.items():
        with pytest.raises(FleetFileError, match=part) as caught:
            load_fleet(tmp_path / name)
        assert caught.value.message.startswith(str(tmp_path / name))
    with pytest.raises(FleetFileError) as caught:
        load_fleet(tmp_path / "missing.yaml")
    assert "skyctl init" in caught.value.hint


def test_an_enormous_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("#" * (1024 * 1024 + 1))
    with pytest.raises(FleetFileError, match="larger than 1 MiB"):
        load_fleet(path)


def test_the_base_directory_is_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fleet.yaml").write_text("name: a\nmodel: x\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_fleet(FILE)
    assert (loaded.path, loaded.base_dir) == (tmp_path / "fleet.yaml", tmp_path)


def loads_or_refuses(text: str) -> None:
    try:
        loaded = parse_fleet(text, FILE, {"A": "1", "B": "${A}"})
    except FleetFileError as error:
        assert error.message.startswith("fleet.yaml:")
        error.message.encode()  # can be printed
    else:
        assert isinstance(loaded, LoadedFleet)


_VALUE, _KEY = 'args: {{a: "{}"}}', 'args: {{"{}": 1}}'


@pytest.mark.parametrize(
    ("place", "text"),
    [*product([_VALUE, _KEY, 'python: "{}"'], [r"\0", r"\ud800"]), (_VALUE, "${NOT_UTF8}")],
)
def test_text_that_no_process_can_be_given_is_refused(place: str, text: str) -> None:
    [line] = refused(f"name: a\nmodel: x\n{place.format(text)}\n", NOT_UTF8="a\udcff")
    assert line.startswith("fleet.yaml:3: no program can be given the character")


def test_a_path_that_is_no_text_is_refused() -> None:
    with pytest.raises(FleetFileError, match="its path is not UTF-8"):
        parse_fleet("name: a\nmodel: x\n", Path("/a\udcff/fleet.yaml"), {})


@given(st.text(max_size=300))
@settings(max_examples=100)
def test_any_text_is_a_fleet_or_an_error(text: str) -> None:
    loads_or_refuses(text)


_PIECES = st.sampled_from(
    ["name", "model", "a", ": ", "\n", "\n  ", "- ", "[", "]", "{", "}", ", ", "replicas", "router",
     "args", "env", "health", "&x ", "*x", "<<", "!!int ", "!!set ", "!!binary ", "!!null ", "'",
     '"', "${A}", "${", "$${", "|\n", ">\n", "? ", "yes", "~", "0x1", "1:30", ".nan", "-.inf",
     "1e9", "2024-99-99", "=", "%", "@", "\\uD800", "\t", "# ", "---\n", "...", "servers", "ports",
     "weight_transfer", "chunk_size", "gpus", "interval_s", "api_key_env"]
)  # fmt: skip


@given(st.lists(_PIECES, max_size=40).map("".join))
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_any_yaml_like_text_is_a_fleet_or_an_error(text: str) -> None:
    loads_or_refuses(text)
    loads_or_refuses(f"name: a\nmodel: x\n{text}")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["count", "port", "args", "x", "1"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(FleetConfig.model_fields)), _VALUES, max_size=4))
@settings(max_examples=100)
def test_any_value_under_a_known_key_is_a_fleet_or_an_error(values: dict[str, object]) -> None:
    import yaml

    loads_or_refuses(yaml.safe_dump({"name": "a", "model": "x", **values}, allow_unicode=True))


def test_an_attached_fleets_token_is_a_variables_name_and_never_repeated() -> None:
    assert parse(ATTACHED + "control_token_env: FAR_TOKEN\n").control_token_env == "FAR_TOKEN"
    (line,) = refused(ATTACHED + "control_token_env: 's3cret-token!'\n")
    assert "s3cret" not in line and "the name of an environment variable" in line
    (line,) = refused(ATTACHED + "auth: all\n")
    assert "is for servers that skyctl starts" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "services:\n  vllm:\n    image: vllm/vllm-openai\nvolumes: {}\n",
            "fleet.yaml:1: this is a Docker Compose file (`services:`), not a fleet file",
        ),
        (
            "name: demo\nversion: '3'\nservices: {}\n",
            "fleet.yaml:3: this is a Docker Compose file (`services:`), not a fleet file",
        ),
        (
            "apiVersion: v1\nkind: Pod\n",
            "fleet.yaml:1: this is a Kubernetes manifest (`apiVersion:` and `kind:`), "
            "not a fleet file",
        ),
        ('{"model_type": "qwen3"}', "fleet.yaml:1: this is a model's config.json (`model_type:`)"),
        (
            "models:\n  q:\n    cmd: vllm serve q --port ${PORT}\n",
            "fleet.yaml:1: this is a llama-swap",
        ),
        (
            "resources: {accelerators: H100}\nrun: vllm serve q\n",
            "fleet.yaml:1: this is a SkyPilot",
        ),
        ("applications: []\n", "fleet.yaml:1: this is a Ray Serve configuration"),
        ("model_list: []\n", "fleet.yaml:1: this is a LiteLLM configuration"),
        ("kind: A\napiVersion: v1\n---\nb: 1\n", "fleet.yaml:1: this is a Kubernetes manifest"),
        ("cluster_name: a\nprovider: {}\n", "fleet.yaml:1: this is a Ray cluster"),
        ("data: {}\nactor_rollout_ref: {}\n", "fleet.yaml:2: this is a verl configuration"),
        ("trainer: {}\ngenerator: {}\n", "fleet.yaml:1: this is a SkyRL configuration"),
    ],
)
def test_another_kind_of_file_is_told_what_it_is(text: str, message: str) -> None:
    with pytest.raises(FleetFileError) as caught:
        parse(text)
    assert caught.value.message.startswith(message)
    assert "skyctl init" in caught.value.hint


def test_a_file_for_vllm_serve_is_told_where_its_arguments_go() -> None:
    with pytest.raises(FleetFileError) as caught:
        parse("model: Qwen/Qwen3-0.6B\nport: 8000\ntensor-parallel-size: 2\n")
    with pytest.raises(FleetFileError, match="this is a file for `vllm serve"):
        parse("max-model-len: 4096\n")
    assert "fleet.yaml:2: this is a file for `vllm serve --config`" in caught.value.message
    assert "under `args:`" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env: [A=1, B=2]\n", "env: expected a mapping such as {NAME: value}, got a list"),
        ("served_model_name: [policy, gpt-4]\n", "served_model_name: expected one name"),
        ("shared_dir: here\n", "shared_dir: expected an absolute path"),
        ("weight_transfer: {backend: '::'}\n", "weight_transfer.backend: expected lower-case"),
        ("tinker: {device: gpu}\n", "tinker.device: expected cpu, cuda or cuda:N"),
        ("tinker: {devices: [cpu, gpu]}\n", "tinker.devices.1: expected cpu, cuda or cuda:N"),
        ("tinker: {devices: [], port: 1}\n", "tinker.devices: "),
        ("tinker: {device: cpu, devices: [cpu]}\n", "write either `device` or `devices`"),
        *(
            (f"tinker: {{devices: [{devices}]}}\n", "`devices` are different GPUs, each with its")
            for devices in ("cuda:1, cuda:1", "cuda, cuda:1", "cpu, cuda:1")
        ),
    ],
)
def test_a_wrong_value_is_told_in_words_of_the_file(text: str, message: str) -> None:
    (line,) = refused(STARTED + text)
    assert message in line and "pattern" not in line


@pytest.mark.parametrize("route", ["/v1", "/v1/", "/v1/chat/completions"])
@pytest.mark.parametrize("key", ["servers: [{}]", "servers: [http://h:1]\nrouter: {}"])
def test_the_url_of_a_route_is_told_the_servers_own(key: str, route: str) -> None:
    (line,) = refused(f"name: a\n{key.format('http://127.0.0.1:8000' + route)}\n")
    assert line.endswith("not to /v1: write http://127.0.0.1:8000")
    assert parse("name: a\nservers: [http://h:1/v1x]\n").servers == ["http://h:1/v1x"]


def test_standard_input_is_one_file() -> None:
    with pytest.raises(FleetFileError, match="only one of the fleet files"):
        load_fleet(Path("-"), Path("-"))


def test_keys_for_the_files_own_use_are_ignored_at_its_top() -> None:
    loaded = parse("x-common: &args {seed: 1}\nname: demo\nmodel: m\nargs: *args\nx-note: hi\n")
    assert loaded.args == {"seed": 1}
    with pytest.raises(FleetFileError, match="unknown key 'x-note'"):
        parse("name: demo\nmodel: m\nhealth: {x-note: 1}\n")
