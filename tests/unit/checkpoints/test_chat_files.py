"""Files that a push does not carry, and that decide what clients get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyctl.push.fit import chat_note

FILES: dict[str, Any] = {
    "config.json": {"eos_token_id": 0, "hidden_size": 8},
    "tokenizer.json": {"model": {"vocab": {"a": 0}}, "padding": None},
    "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": "{{ a }}"},
    "generation_config.json": {"eos_token_id": [0], "transformers_version": "4.51.0"},
}


def written(directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    for name, content in {**FILES, **changes}.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (directory / name).write_text(text)
    return directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"tokenizer.json": {"padding": {"length": 4}, "model": {"vocab": {"a": 0}}}}, ""),
        ({"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}}}, "the tokenizer"),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, "its special tokens"),
        ({"tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": "b"}}, "template"),
        ({"chat_template.jinja": "{{ b }}"}, "the chat template"),
        ({"chat_template.jinja": "{{ a }}", "tokenizer_config.json": {"eos_token": "<|end|>"}}, ""),
        ({"generation_config.json": {"eos_token_id": [0], "transformers_version": "5.0"}}, ""),
        ({"generation_config.json": {"eos_token_id": [0, 5]}}, "generation_config.json"),
        ({"generation_config.json": {"eos_token_id": [0], "temperature": 0.6}}, "sampling"),
        ({"config.json": {"eos_token_id": 5}}, "eos_token_id of config.json"),
        # a trainer that saves tensors alone means nothing by it
        (dict.fromkeys([name for name in FILES if name != "config.json"]), ""),
        ({"tokenizer.json": "{"}, ""),
    ],
)
def test_what_differs_is_in_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    base = written(tmp_path / "base")
    note = chat_note(written(tmp_path / "ours", **changes), str(base))
    assert bool(note) == bool(words)
    assert words in note and "\n" not in note


def test_nothing_is_said_of_servers_whose_files_are_not_here(tmp_path: Path) -> None:
    ours = written(tmp_path / "ours")
    assert chat_note(ours, None) == chat_note(ours, "org/not-here") == ""
