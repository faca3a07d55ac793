"""The main job of skyctl, start to end, on two real vLLM CPU servers and the real vllm-router.

Every step is an ordinary `skyctl` command, printed before it runs. Run it through scripts/demo.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

SKYCTL = str(Path(sys.executable).parent / "skyctl")
PROMPT = "the fleet is up and"
LONG = 1900
STEP_TIMEOUT_S = 600


class DemoFailed(Exception):
    """A step did not end as it must."""


class Demo:
    """Runs skyctl commands in a directory of its own and keeps what they said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        home = directory / "state"
        self.env = {**os.environ, "SKYCTL_HOME": str(home)}
        self.env.pop("SKYCTL_FLEET", None)
        self.env.pop("SKYCTL_FILE", None)

    def show(self, *arguments: str) -> None:
        """Print a command, run it on this terminal, and stop the demo when it fails."""
        print(f"\n\033[1m$ skyctl {shlex.join(arguments)}\033[0m", flush=True)
        command = [SKYCTL, *arguments]
        done = subprocess.run(
            command, cwd=self.directory, env=self.env, timeout=STEP_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise DemoFailed(f"`skyctl {shlex.join(arguments)}` exited {done.returncode}")

    def data(self, *arguments: str) -> dict[str, Any]:
        """The data of a command's JSON envelope, not shown."""
        command = [SKYCTL, *arguments, "--json"]
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise DemoFailed(f"`skyctl {shlex.join(arguments)}` exited {done.returncode}")
        data: dict[str, Any] = json.loads(done.stdout)["data"]
        return data

    def tokens(self, max_tokens: int = 12) -> list[int]:
        """Greedy token ids of one generation through the router."""
        arguments = ["generate", PROMPT, "--max-tokens", str(max_tokens), "--temperature", "0"]
        answer = self.data(*arguments, "--ignore-eos")
        ids: list[int] = answer["results"][0]["token_ids"]
        return ids


def say(text: str) -> None:
    print(f"\n\033[36m# {text}\033[0m", flush=True)


class LongGeneration:
    """One long greedy generation, streamed through the router; it is not told of the freeze."""

    def __init__(self, url: str, model: str, key: str) -> None:
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self._request = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": LONG,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        self._url = f"{url}/v1/completions"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url, json=self._request, headers=self._headers, timeout=120
            ) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line.removeprefix("data: "))["choices"][0]
                        self.tokens += choice.get("token_ids") or []
        except Exception as error:
            self.error = error

    def wait_for_first_token(self) -> None:
        deadline = time.monotonic() + 60
        while not self.tokens:
            if self.error or time.monotonic() > deadline:
                raise DemoFailed(f"the generation did not begin: {self.error}")
            time.sleep(0.005)

    def settle(self) -> int:
        """Wait until no more tokens arrive; how many there are."""
        count = -1
        while count != len(self.tokens):
            count = len(self.tokens)
            time.sleep(0.5)
        return count

    def result(self) -> list[int]:
        self._thread.join(STEP_TIMEOUT_S)
        if self.error is not None or len(self.tokens) != LONG:
            raise DemoFailed(f"the long generation did not end well: {self.error}")
        return self.tokens


def freeze_in_the_middle(demo: Demo) -> LongGeneration:
    """Start a long generation and pause the fleet under it.

    The tiny model is quick: should it be done before the pause arrives, the next try has luck.
    """
    urls, key = demo.data("urls"), demo.data("urls", "--show-key")["api_key"]
    for _ in range(8):
        long = LongGeneration(urls["router"], urls["model"], key)
        long.wait_for_first_token()
        demo.show("pause", "--mode", "keep")
        if long.settle() < LONG:
            return long
        print("(it was done before the pause: once more)")
        demo.show("resume")
    raise DemoFailed("every generation was done before the pause")


def run_demo(demo: Demo) -> None:
    began = time.monotonic()
    say(
        "Two tiny checkpoints with different random weights, and a fleet file that serves the first"
    )
    demo.show("init", "--tiny", ".", "--name", "demo")
    demo.show("validate")
    say("Two vLLM servers and the router; on two cores they take about a minute and a half")
    demo.show("up")
    demo.show("status")
    say("The fleet answers through the router")
    demo.show("generate", PROMPT, "--max-tokens", "12", "--temperature", "0", "--ignore-eos")
    before = demo.tokens()
    undisturbed = demo.tokens(LONG)

    say(f"A generation of {LONG} tokens starts, and is frozen in the middle")
    long = freeze_in_the_middle(demo)
    frozen_at = len(long.tokens)
    demo.show("status")
    time.sleep(2)
    if len(long.tokens) != frozen_at:
        raise DemoFailed("tokens came out of a paused fleet")
    print(f"\nThe generation stands at {frozen_at} of {LONG} tokens.")
    say("A push of the same weights, in chunks, leaves it frozen …")
    demo.show("sync-weights", "checkpoints/a", "--chunk-size", "64KiB")
    say("… and resume lets it go on to its last token")
    demo.show("resume")
    frozen = long.result()

    say("Now a push of the other checkpoint: pause, chunks, verify, resume in one command")
    demo.show("sync-weights", "checkpoints/b", "--weight-version", "b", "--chunk-size", "64KiB")
    demo.show("weights")
    after = demo.tokens()
    say("And the first one back")
    demo.show("sync-weights", "checkpoints/a", "--weight-version", "a", "--transport", "gloo")
    demo.show("weights", "verify")
    restored = demo.tokens()
    demo.show("down")

    print("\n\033[1mProof (greedy token ids through the router)\033[0m")
    print(f"  before            {before}")
    print(f"  after pushing b   {after}")
    print(f"  after pushing a   {restored}")
    checks = {
        "b answers differently": before != after,
        "a answers as before": before == restored,
        f"the frozen generation's {len(frozen)} tokens are those of an undisturbed one": (
            frozen == undisturbed
        ),
    }
    for what, holds in checks.items():
        print(f"  {'✓' if holds else '✗'} {what}")
    print(f"  in {time.monotonic() - began:.0f} s")
    if not all(checks.values()):
        raise DemoFailed("the proof does not hold")


def main() -> int:
    parser = argparse.ArgumentParser(description="The main job of skyctl on two CPU servers.")
    parser.add_argument("--keep", action="store_true", help="keep the fleet's directory")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="skyctl-demo-"))
    demo = Demo(directory)
    try:
        run_demo(demo)
    except DemoFailed as failure:
        print(f"\ndemo failed: {failure}", file=sys.stderr)
        return 1
    finally:
        if (directory / "fleet.yaml").exists():
            subprocess.run(
                [SKYCTL, "down", "--quiet"],
                cwd=directory,
                env=demo.env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=STEP_TIMEOUT_S,
                check=False,
            )
        if options.keep:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
