"""A fleet as its user has it: a directory, a state directory, and the real `skyctl` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.forking import command

SKYCTL = str(Path(sys.executable).parent / "skyctl")
_COMMAND = [sys.executable, "-m", "skyctl"]
UP_TIMEOUT_S = 420.0
COMMAND_TIMEOUT_S = 180.0
FEW_BLOCKS = {"num-gpu-blocks-override": 512}
"""Of 128 tokens: tiny models need no more. By itself a server has a GiB of them, and fills it with
zeros for half of its start."""
Prompt = str | list[int]


@dataclass
class FleetCli:
    """Runs `skyctl` in `directory` with a state directory of its own."""

    directory: Path
    home: Path
    extra_env: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
        return {**inherited, "SKYCTL_HOME": str(self.home), "COLUMNS": "160", **self.extra_env}

    def run(
        self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, expect: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end; fail the test with its output on another exit code."""
        with self.start(*arguments) as process:
            try:
                out, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        if expect is not None and process.returncode != expect:
            raise AssertionError(
                f"skyctl {' '.join(arguments)} exited {process.returncode}, expected {expect}\n"
                f"stdout:\n{out}\nstderr:\n{errors}"
            )
        return subprocess.CompletedProcess(arguments, process.returncode, out, errors)

    def json(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """The envelope that `--json` prints."""
        envelope: dict[str, Any] = json.loads(self.run(*arguments, "--json", **options).stdout)
        assert envelope["skyctl"] == 1
        return envelope

    def data(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """The `data` of a command's envelope."""
        data: dict[str, Any] = self.json(*arguments, **options)["data"]
        return data

    @property
    def key(self) -> str:
        """The API key, as a client is told it."""
        return self.run("urls", "--show-key").stdout.strip()

    @property
    def control_token(self) -> str:
        """The control token, from the file that `skyctl urls` names."""
        return Path(self.data("urls")["access"]["control_token_file"]).read_text().strip()

    @contextmanager
    def loaded(self, *arguments: str) -> Iterator[Callable[[], subprocess.Popen[str]]]:
        """A command that has been loaded and waits; calling it lets it run.

        For what must happen within the second or two that loading takes on a busy machine.
        """
        waiting = (
            "import sys; import skyctl.cli.app, skyctl.cli.freeze, skyctl.service.supervised; "
            "import skyctl.supervisor.client, skyctl.fleetfile.load, skyctl.output; "
            "print('loaded', file=sys.stderr, flush=True); sys.stdin.readline(); "
            f"sys.argv = ['skyctl', *{list(arguments)!r}]; "
            "from skyctl.__main__ import main; main()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", waiting],
            cwd=self.directory,
            env=self.env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stderr is not None
            assert process.stderr.readline().strip() == "loaded"

            def run() -> subprocess.Popen[str]:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
                return process

            yield run

    def run_example(self, *command: str, cwd: Path, timeout_s: float) -> str:
        """Run an example on this fleet's file, to its end; what it printed."""
        file = str(self.directory / "fleet.yaml")
        return self.run_python(*command, "-f", file, cwd=cwd, timeout_s=timeout_s)

    def run_python(self, *arguments: str, cwd: Path, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a Python program to its end; what it printed."""
        with self._start([sys.executable, *arguments], cwd) as process:
            try:
                out, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == 0, out + errors
        return out

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command and leave it running."""
        return self._start([*_COMMAND, *arguments], self.directory)

    def _start(self, words: Sequence[str], cwd: Path) -> subprocess.Popen[str]:
        return command(
            words,
            cwd=cwd,
            env=self.env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def ended(process: subprocess.Popen[str], code: int = 0) -> None:
    """Wait for a command to end, with this exit status."""
    _, errors = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == code, errors


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def greedy(
    url: str, model: str, prompt: Prompt, max_tokens: int = 24, *, key: str, rank: int | None = None
) -> list[int]:
    """Greedy token ids of one completion, straight from `url`; by this data-parallel rank there."""
    headers = bearer(key)
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    answer = httpx.post(
        f"{url}/v1/completions",
        json=greedy_body(model, prompt, max_tokens),
        headers=headers,
        timeout=120,
    )
    answer.raise_for_status()
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def greedy_body(model: str, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
