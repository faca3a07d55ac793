"""Answers of the workers of all data-parallel ranks, collected by one of them.

/collective_rpc calls a method on all data-parallel ranks, waits for all of them, and answers with
the results of the first (vLLM 0.32, `v1/engine/core_client.py`,
`DPLBAsyncMPClient.call_utility_async`). So a question to all takes two calls: in the first, each
worker leaves its answer in anonymous memory that is named by the caller's nonce; in the second, the
first rank collects what all others left, as /proc/<pid>/fd/<n>. Nothing is written to a file
system, and nothing outlives the workers. Ranks on other machines are not seen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_ANSWER = "skyctl-answer-"
_descriptors: list[int] = []  # that of this worker's last answer


def keep_answer(nonce: str, rank: tuple[int, int], answer: Any) -> None:
    """Keep this worker's answer until the next one. `rank`: in data parallelism, then within it."""
    while _descriptors:
        os.close(_descriptors.pop())
    descriptor = os.memfd_create(f"{_ANSWER}{nonce}", os.MFD_CLOEXEC)
    _descriptors.append(descriptor)
    os.write(descriptor, json.dumps({"rank": rank, "answer": answer}).encode())


def kept_answers(nonce: str) -> list[dict[str, Any]]:
    """What this server's workers left under `nonce`: `rank` and `answer` of each, in any order.
    One may be there twice: every rank collects at the same time, and has open what it reads.
    """
    answers = []
    for path in _memories(f"/memfd:{_ANSWER}{nonce} "):
        with suppress(OSError):  # another rank has read it, and closed it again
            answers.append(json.loads(path.read_bytes()))
    return answers


def _memories(name: str) -> Iterator[Path]:
    """Memory of this name that processes of this session hold; all of a server's are in one."""
    session = os.getsid(0)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.getsid(int(process.name)) != session:
                continue
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):  # closed since it was listed
                    if str(descriptor.readlink()).startswith(name):
                        yield descriptor
