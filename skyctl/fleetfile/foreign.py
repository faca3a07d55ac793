"""Recognises files of other programs that are given as a fleet file, and says what to do."""

from __future__ import annotations

from skyctl.fleetfile.arguments import flag_name
from skyctl.fleetfile.yaml_source import INIT_HINT, FileProblem, YamlSource

_ATTACH = (
    "to control servers that it runs, list their URLs: skyctl init --servers URL,…; to let skyctl "
    "start servers: skyctl init"
)
_MODEL = "for a fleet of that model: skyctl init --model DIRECTORY"
_RAY = "to start servers on that Ray cluster: skyctl init, then `launcher: ray` in the file"
_TRAINER = "skyctl starts the servers of a run, and gives it their URLs: skyctl init"
_KINDS = (
    ({"services"}, "a Docker Compose file", _ATTACH),
    ({"apiVersion", "kind"}, "a Kubernetes manifest", _ATTACH),
    ({"architectures"}, "a model's config.json", _MODEL),
    ({"model_type"}, "a model's config.json", _MODEL),
    ({"models"}, "a llama-swap configuration", INIT_HINT),
    ({"model_list"}, "a LiteLLM configuration", _ATTACH),
    ({"applications"}, "a Ray Serve configuration", _RAY),
    ({"cluster_name", "provider"}, "a Ray cluster configuration", _RAY),
    ({"actor_rollout_ref"}, "a verl configuration", _TRAINER),
    (
        {"generator", "trainer"},
        "a SkyRL configuration",
        _TRAINER + "; then: skyctl urls --format skyrl",
    ),
    ({"resources"}, "a SkyPilot task", INIT_HINT),
    ({"run"}, "a SkyPilot task", INIT_HINT),
)
"""Keys found only at the top of another kind of file, what that file is, and what to do."""
_VLLM_KEYS = frozenset(
    {"port", "dtype", "max-model-len", "max-num-seqs", "gpu-memory-utilization"}
    | {"tensor-parallel-size", "pipeline-parallel-size", "served-model-name"}
)
"""Arguments by which a file of `vllm serve --config` is recognised, with dashes."""


def another_kind_of_file(source: YamlSource) -> FileProblem | None:
    """The problem of a file that is of another kind, if its first keys show it."""
    keys = set(source.value or ())
    if keys & {"servers", "replicas"} or {"name", "model"} <= keys:
        return None
    arguments = sorted(key for key in keys if flag_name(key) in _VLLM_KEYS)
    if arguments and ("model" in keys or any("-" in key for key in arguments)):
        return FileProblem(
            source.place((arguments[0],)),
            f"this is a file for `vllm serve --config` (`{arguments[0]}:`), not a fleet file",
            "begin with `name:` and `model:`, and put vLLM's arguments under `args:`",
        )
    for signature, kind, hint in _KINDS if "model" not in keys else ():
        if signature <= keys:
            names = " and ".join(f"`{key}:`" for key in sorted(signature))
            place = min(source.place((key,)) for key in signature)
            return FileProblem(place, f"this is {kind} ({names}), not a fleet file", hint)
    return None
