"""Where a fleet is reached: the router for generation, every server for control and metrics; the
keys they require; and all of it in the formats of other programs: trainers, clients of OpenAI's and
Tinker's APIs, a shell, Prometheus.

Key names come from these projects' own sources; each function cites its source. `notes` says what a
trainer's weight sync needs beyond URLs.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skyctl.errors import UsageError
from skyctl.store.credentials import read_secret

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef
    from skyctl.fleetfile.schema import FleetConfig
    from skyctl.store.paths import FleetPaths

KEY_VARIABLE = "OPENAI_API_KEY"
OWN_KEY_VARIABLE = "SKYCTL_API_KEY"
"""Stands for the key that skyctl made, where a format can only name a variable."""
FLEET_URL_VARIABLE = "SKYCTL_FLEET_URL"
NO_KEY = "EMPTY"
"""What vLLM's own examples pass as a key where none is required."""
SKYRL_ARGS = ("enable-scale-out",)
"""vLLM arguments without which SkyRL's rollouts (`/inference/v1/generate`) have no route."""
TRAINER_TOKEN_VARIABLE = "SKYCTL_TRAINER_TOKEN"
"""Stands for the control token, where a trainer takes it out of a variable."""
_WITHOUT_FLEET_URL = {
    "skyrl": "its weight updates want the fleet URL: write `trainer:` and `weight_transfer: "
    "{backend: nccl}` into the fleet file; or push with skyctl. It sends no key: set `auth: none`",
    "prime-rl": "its weight updates (weight_broadcast.type = 'filesystem') want the fleet URL: "
    "write `trainer:` into the fleet file; or push with skyctl",
}
_TARGETS_MODE = 0o644  # Prometheus runs as another user, and the file holds no secret


@dataclass(frozen=True)
class Access:
    """Where the secrets are that the servers require; never the secrets themselves.

    At most one of `api_key_env` (a variable) and `api_key_file` is set; none if inference needs no
    key. The control routes require what is in `control_token_file`, or in the variable
    `control_token_env` if another skyctl started the servers.
    """

    api_key_env: str | None = None
    api_key_file: str | None = None
    control_token_env: str | None = None
    control_token_file: str | None = None


def access(config: FleetConfig, paths: FleetPaths) -> Access:
    """What the fleet file requires of clients."""
    if config.attached:
        key = config.api_key_env or config.control_token_env
        return Access(api_key_env=key, control_token_env=config.control_token_env)
    own_key = config.api_key_env is None and config.auth == "all"
    return Access(
        api_key_env=config.api_key_env,
        api_key_file=str(paths.api_key) if own_key else None,
        control_token_file=str(paths.control_token) if config.auth != "none" else None,
    )


@dataclass(frozen=True)
class FleetUrls:
    """Where a fleet is reached. URLs are without a trailing slash."""

    name: str
    """The fleet's."""
    model: str | None
    """The name to put into requests; None if unknown."""
    router: str | None
    """Its URL; None for a fleet without one."""
    servers: Mapping[str, str]
    """URLs by name."""
    router_metrics: str | None = None
    """The URL of the router's Prometheus page; None if unknown."""
    access: Access = Access()
    """Where the keys are."""
    engine: str = "vllm"
    """The servers'."""
    routed: bool | None = None
    """False while the router has no server, and none is starting; None if unknown."""
    trainer: str | None = None
    """The fleet URL, which speaks vLLM's RL API for all servers; None without a `trainer:`."""

    @property
    def entry(self) -> str | None:
        """Where requests go: the router, or the first server of a fleet without one."""
        return self.router or next(iter(self.servers.values()), None)

    def to_json(self) -> dict[str, Any]:
        """What `skyctl urls --json` prints."""
        return {
            "model": self.model,
            "router": self.router,
            "trainer": self.trainer,
            "servers": dict(self.servers),
            "access": asdict(self.access),
        }


def api_key(access: Access) -> str | None:
    """The key for inference. Raises SkyctlError if others can access its file."""
    return _secret(access.api_key_env, access.api_key_file)


def control_token(access: Access) -> str | None:
    """The token of the control routes; the inference key if they have none of their own.

    Raises:
        SkyctlError: others can access its file.
    """
    return _secret(access.control_token_env, access.control_token_file) or api_key(access)


def _secret(variable: str | None, file: str | None) -> str | None:
    if variable:
        return os.environ.get(variable)
    return read_secret(Path(file)) if file else None


def as_skyrl(urls: FleetUrls) -> str:
    """SkyRL: command-line overrides, one per line, for `$(skyctl urls --format skyrl)`.

    Source: NovaSky-AI/SkyRL a956457, skyrl/train/config/config.py (InferenceEngineConfig) and
    docs/content/docs/examples/remote_server.mdx. Overrides are parsed by OmegaConf.from_cli, as
    YAML values. External servers exclude `colocate_all`. A fleet URL is the only server; rollouts
    go past it where they need no key.
    """
    engine = "generator.inference_engine"
    lines = [f"{engine}.run_engines_locally=false"]
    proxy, servers = urls.router, list(urls.servers.values())
    if urls.trainer:
        token = urls.access.control_token_file
        fleet = f"${{oc.env:{FLEET_URL_VARIABLE}}}" if token else urls.trainer
        proxy, servers = (fleet if _variable(urls) else proxy or fleet), [fleet]
    if proxy:
        lines.append(f"{engine}.external_proxy_url={proxy}")
    # no spaces: the shell splits the substituted text there; the quotes are YAML's, for IPv6
    # addresses
    quoted = ",".join(f"'{url}'" for url in servers)
    lines.append(f"{engine}.external_server_urls=[{quoted}]")
    if urls.model:
        lines.append(f"{engine}.served_model_name={urls.model}")
    lines.append("trainer.placement.colocate_all=false")
    return "\n".join(lines)


def as_prime_rl(urls: FleetUrls) -> str:
    """prime-rl: the TOML table of the policy's client, for an `rl` config without `[inference]`.

    Source: PrimeIntellect-ai/prime-rl 559b447, packages/prime-rl-configs/src/prime_rl/configs:
    shared.py (ClientConfig), orchestrator.py (ModelConfig), rl.py (SharedModelConfig), which forbid
    extra keys. `[model] name` is the trainer's model as well. It sends one key for everything:
    rollouts go by the fleet URL as well where there are keys.
    """
    lines = []
    if urls.model:
        lines += ["[model]", f"name = {json.dumps(urls.model)}", ""]
    base, admin, variable = _entry(urls), list(urls.servers.values()), _variable(urls)
    if urls.trainer:
        admin = [urls.trainer]
        if urls.access.control_token_file:
            base, variable = urls.trainer, TRAINER_TOKEN_VARIABLE
    lines += ["[orchestrator.model.client]", f"base_url = {json.dumps(f'{base}/v1')}"]
    lines.append(f"admin_base_url = {json.dumps([f'{url}/v1' for url in admin])}")
    if variable:
        lines.append(f"api_key_var = {json.dumps(variable)}")
    return "\n".join(lines)


def as_openai(urls: FleetUrls) -> str:
    """OpenAI clients: an env file with the variables they read, for `--env-file` and .env.

    The client refuses to start without a key, so one is always set; a real one is referenced, never
    printed. The model goes into each request: its variable is for programs that ask for one.
    Source: openai-python, src/openai/_client.py (OPENAI_BASE_URL, OPENAI_API_KEY).
    """
    variables = {"OPENAI_BASE_URL": f"{_entry(urls)}/v1", KEY_VARIABLE: NO_KEY}
    if variable := _variable(urls):
        variables[KEY_VARIABLE] = f"${{{variable}}}"
    if urls.model:
        variables["OPENAI_MODEL"] = urls.model
    return "\n".join(f"{name}={value}" for name, value in variables.items())


def as_env(urls: FleetUrls) -> str:
    """Lines for a POSIX shell. Without a router, OPENAI_BASE_URL is the first server's."""
    variables: dict[str, str] = {}
    if urls.router:
        variables["SKYCTL_ROUTER_URL"] = urls.router
    variables["OPENAI_BASE_URL"] = f"{_entry(urls)}/v1"
    variables["SKYCTL_SERVER_URLS"] = ",".join(urls.servers.values())
    if urls.model:
        variables["SKYCTL_MODEL"] = urls.model
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    # by reference: the key itself is not printed
    if urls.access.api_key_file:
        lines.append(f'export {KEY_VARIABLE}="$(cat {shlex.quote(urls.access.api_key_file)})"')
    elif urls.access.api_key_env is None:
        lines.append(f"export {KEY_VARIABLE}={NO_KEY}")
    elif urls.access.api_key_env != KEY_VARIABLE:
        lines.append(f'export {KEY_VARIABLE}="${urls.access.api_key_env}"')
    return "\n".join(lines)


def as_trainer(urls: FleetUrls) -> str:
    """A line for a POSIX shell: the fleet URL, with the control token as its password.

    The HTTP libraries of vLLM's, TRL's and SkyRL's clients take it from there.
    """
    if urls.trainer is None:
        raise UsageError(
            f"fleet {urls.name} has no fleet URL for trainers",
            hint="write `trainer: {port: 8791}` into its fleet file; then: skyctl up",
        )
    scheme, _, address = urls.trainer.partition("://")
    if file := urls.access.control_token_file:
        return (
            f'export {FLEET_URL_VARIABLE}="{scheme}://trainer:$(cat {shlex.quote(file)})@{address}"'
        )
    return f"export {FLEET_URL_VARIABLE}={shlex.quote(urls.trainer)}"


FORMATS: Mapping[str, Callable[[FleetUrls], str]] = {
    "skyrl": as_skyrl,
    "prime-rl": as_prime_rl,
    "openai": as_openai,
    "env": as_env,
    "trainer": as_trainer,
}


def refused_rollouts(servers: Sequence[str], *, attached: bool = False) -> str:
    """The warning for SkyRL about servers started without its route; "" if there are none."""
    if not servers:
        return ""
    flags = ", ".join(f"{name}: true" for name in SKYRL_ARGS)
    fix = f"write `{flags}` under `args:` of the fleet file, then: skyctl up"
    if attached:
        fix = f"start them with: {' '.join(f'--{name}' for name in SKYRL_ARGS)}"
    refuse = "refuse" if len(servers) > 1 else "refuses"
    return (
        f"SkyRL's rollouts will fail: {', '.join(servers)} {refuse} /inference/v1/generate; {fix}"
    )


def notes(name: str, urls: FleetUrls) -> list[str]:
    """What to know before using a format's output."""
    lines = []
    if urls.trainer is None and name in _WITHOUT_FLEET_URL:
        lines.append(_WITHOUT_FLEET_URL[name])
    token, key = urls.access.control_token_file, urls.access.api_key_file
    if name == "skyrl" and urls.trainer and token:
        lines.append('it names a variable: eval "$(skyctl urls --format trainer)"')
    variable, file = OWN_KEY_VARIABLE, key if name in ("openai", "prime-rl") else None
    if name == "prime-rl" and urls.trainer and token:
        variable, file = TRAINER_TOKEN_VARIABLE, token
    if file:
        lines.append(f'it names a variable: export {variable}="$(cat {shlex.quote(file)})"')
    return lines


def _variable(urls: FleetUrls) -> str | None:
    """The variable that holds the inference key, or is to hold it; None if no key is required."""
    own = OWN_KEY_VARIABLE if urls.access.api_key_file else None
    return urls.access.api_key_env or own


def _entry(urls: FleetUrls) -> str:
    if urls.entry is None:
        raise UsageError(f"fleet {urls.name} has neither a router nor a server")
    return urls.entry


@dataclass(frozen=True)
class TinkerPlace:
    """Where clients find the Tinker API: its URL, and the file (mode 0600) with their key."""

    url: str
    key_file: Path

    def as_env(self) -> str:
        """Lines for a POSIX shell; the key itself is not printed."""
        return (
            f"export TINKER_BASE_URL={shlex.quote(self.url)}\n"
            f'export TINKER_API_KEY="$(cat {shlex.quote(str(self.key_file))})"'
        )


def tinker_place(ref: FleetRef) -> TinkerPlace:
    """Where the Tinker API of this fleet is, or will be.

    Raises:
        UsageError: its fleet file has no section `tinker:`.
    """
    from skyctl.core.plan import local_url

    section = ref.config.tinker
    if section is None:
        raise UsageError(
            f"fleet {ref.name} has no Tinker API",
            hint="write `tinker: {base_model: ORG/NAME}` and `lora: {max_rank: 32}` into its "
            "fleet file; then: skyctl up",
        )
    return TinkerPlace(local_url(section.host, section.port), ref.paths.tinker_key)


def target_groups(urls: FleetUrls) -> list[dict[str, Any]]:
    """One group per server and one for the router, with labels fleet, server, role and model.

    Source: prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
    """
    groups = [_group(urls, name, "server", url) for name, url in urls.servers.items()]
    if urls.router_metrics:
        groups.append(_group(urls, "router", "router", urls.router_metrics))
    return groups


def write_targets(urls: FleetUrls, path: Path) -> int:
    """Write the groups to a .json file, whole or not at all; returns how many there are.

    Raises:
        UsageError: it cannot be written, or Prometheus would not read it.
    """
    if path.suffix != ".json":
        raise UsageError(
            f"{path}: Prometheus reads file_sd files only when they end in .json, .yml or .yaml",
            hint=f"name it {path.with_suffix('.json')}",
        )
    groups = target_groups(urls)
    # same directory: a rename is atomic within a file system; Prometheus watches no such suffix
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _TARGETS_MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, _TARGETS_MODE)  # regardless of the umask
            file.write(json.dumps(groups, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return len(groups)


def _group(urls: FleetUrls, name: str, role: str, url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    labels = {"fleet": urls.name, "server": name, "role": role}
    if urls.model:
        labels["model"] = urls.model
    if parts.scheme != "http":
        labels["__scheme__"] = parts.scheme
    return {"targets": [parts.netloc], "labels": labels}
