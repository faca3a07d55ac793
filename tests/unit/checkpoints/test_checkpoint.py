"""Checkpoint directories: shards, indexes, hub caches, and what is wrong with the bad ones."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from skyctl.checkpoints.checkpoint import INDEX_NAME, absolute, locate, read_checkpoint
from skyctl.checkpoints.staging import staged
from skyctl.core.jobs import resolved
from skyctl.errors import NotFoundError, PreflightError
from skyctl.push.request import PushRequest
from skyctl.transfer.reader import CheckpointChanged, ShardFiles
from tests.unit.push.checkpoints import (
    change_index,
    filled,
    rewrite_unseen,
    safetensors,
    tiny_tensors,
    write_checkpoint,
)


def test_one_file_and_many_shards_hold_the_same_model(tmp_path: Path) -> None:
    one = read_checkpoint(str(write_checkpoint(tmp_path / "one")))
    many = read_checkpoint(str(write_checkpoint(tmp_path / "many", shards=3)))
    assert {t.name for t in one.tensors} == {t.name for t in many.tensors} == set(tiny_tensors())
    assert one.total_bytes == many.total_bytes
    assert one.layout_digest == many.layout_digest
    assert one.identity_digest != many.identity_digest


def test_shards_without_an_index_are_found_by_their_numbers(tmp_path: Path) -> None:
    found = read_checkpoint(str(write_checkpoint(tmp_path / "c", shards=3, index=False)))
    assert len(found.shards) == 3


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(tmp_path: Path, index: bool) -> None:
    directory = write_checkpoint(tmp_path / "c", shards=3, index=index)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(PreflightError, match=r"lacks its shard model-00002-of-00003"):
        read_checkpoint(str(directory))


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c", shards=2)
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(PreflightError, match=r"model-00002-of-00002.safetensors is truncated"):
        read_checkpoint(str(directory))


def test_what_an_index_names_and_no_shard_has_is_known(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c", shards=2)
    change_index(directory, {"ghost.weight": "model-00001-of-00002.safetensors"})
    assert read_checkpoint(str(directory)).absent == ("ghost.weight",)


def test_an_index_that_puts_a_tensor_in_another_shard_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c", shards=2)
    change_index(directory, {"model.norm.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(PreflightError, match=r"puts model.norm.weight in model-00001"):
        read_checkpoint(str(directory))
    assert read_checkpoint(str(directory), check_index=False).tensors


def test_a_tensor_that_the_index_lacks_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c", shards=2)
    change_index(directory, {"model.norm.weight": None})
    with pytest.raises(PreflightError, match=r"holds model.norm.weight, the index lacks it"):
        read_checkpoint(str(directory))


def test_what_was_found_of_an_index_holds_for_these_bytes_and_shards_alone(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c", shards=2)
    read_checkpoint(str(directory))
    index = directory / INDEX_NAME
    good = index.read_bytes()
    change_index(directory, {"ghost.weight": "model-00001-of-00002.safetensors"})
    assert read_checkpoint(str(directory)).absent
    index.write_bytes(good)
    assert not read_checkpoint(str(directory)).absent
    other = write_checkpoint(
        tmp_path / "other", {"w": filled([2], 1), "x": filled([2], 1)}, shards=2
    )
    shutil.copy(index, other)
    with pytest.raises(PreflightError, match="the index lacks"):
        read_checkpoint(str(other))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", "sub/x.safetensors"])
def test_an_index_must_not_lead_out_of_its_directory(tmp_path: Path, name: str) -> None:
    directory = write_checkpoint(tmp_path / "c", shards=2)
    change_index(directory, {"model.norm.weight": name})
    with pytest.raises(PreflightError, match="not a file name"):
        read_checkpoint(str(directory))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    directory = write_checkpoint(tmp_path / "c")
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(PreflightError, match="index"):
        read_checkpoint(str(directory))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c", {"w": filled([2], 1)})
    (directory / "more.safetensors").write_bytes(safetensors({"w": filled([2], 2)}))
    with pytest.raises(PreflightError, match=r"w is in both model.safetensors and more"):
        read_checkpoint(str(directory))


def test_a_path_that_is_a_file_is_refused_with_the_directory_as_hint(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c")
    with pytest.raises(PreflightError, match="is a file") as caught:
        read_checkpoint(str(directory / "model.safetensors"))
    assert str(directory) in caught.value.hint


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model.safetensors"]
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """A push that waits for it could not be ended, nor its supervisor."""
    checkpoint = write_checkpoint(tmp_path / "c")
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    writer = os.open(
        checkpoint / name, os.O_RDWR | os.O_NONBLOCK
    )  # so that nobody waits to open it
    with ThreadPoolExecutor(1) as reading:
        found = reading.submit(read_checkpoint, str(checkpoint))
        try:
            error = found.exception(10)
        finally:
            os.close(writer)  # whoever reads it nevertheless comes to its end
    assert isinstance(error, PreflightError) and "not a plain file" in error.message


def test_nothing_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_checkpoint(str(tmp_path / "nope"))


def test_a_directory_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path / "c") / "config.json").unlink()
    with pytest.raises(PreflightError, match=r"no config.json"):
        read_checkpoint(str(tmp_path / "c"))


def test_a_checkpoint_of_pickles_gets_advice(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(PreflightError, match=r"no \*.safetensors") as caught:
        read_checkpoint(str(directory))
    assert "safe_serialization" in caught.value.hint


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        (["adapter_config.json", "adapter_model.bin"], "PEFT adapter (LoRA) of Q/Q, not", "merge"),
        ([".gitattributes", "README.md"], "hub repository without its weights", "hf download"),
        (["refs/main", "snapshots/abc/config.json"], "hub cache entry", "snapshots/abc"),
        (["x-Q4_K_M.gguf", ".gitattributes"], "GGUF", "safetensors"),
        (["original/consolidated.00.pth"], "own format", "safetensors"),
        (["consolidated.safetensors", "params.json"], "own format", "safetensors"),
        (["step-5/config.json"], "no config.json", "there is a checkpoint in it: "),
        (["__0_0.distcp", ".metadata"], "sharded checkpoint", "save_pretrained"),
        (["pytorch_model.bin"], "pickled", "safe_serialization"),
        (["model.safetensors"], "no config.json", "config.json and *.safetensors"),
    ],
)
def test_a_directory_that_is_something_else_is_told_what_it_is(
    tmp_path: Path, files: list[str], message: str, hint: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"base_model_name_or_path": "Q/Q"}')
    with pytest.raises(PreflightError) as caught:
        read_checkpoint(str(tmp_path))
    assert message in caught.value.message and hint in caught.value.hint


def test_a_pointer_of_git_lfs_is_told(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c")
    (directory / "model.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    )
    with pytest.raises(PreflightError, match="Git LFS pointer") as caught:
        read_checkpoint(str(directory))
    assert "git lfs pull" in caught.value.hint


def test_an_adapter_is_not_a_checkpoint(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c")
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    with pytest.raises(PreflightError, match=r"PEFT adapter \(LoRA\)"):
        read_checkpoint(str(directory))


def test_identity_changes_with_bytes_that_are_written_in_place_at_the_same_time(
    tmp_path: Path,
) -> None:
    before = read_checkpoint(str(write_checkpoint(tmp_path)))
    files = ShardFiles(before.shards)
    rewrite_unseen(tmp_path, tiny_tensors(9))
    assert read_checkpoint(str(tmp_path)).identity_digest != before.identity_digest
    with pytest.raises(CheckpointChanged, match="changed during the push"):
        files.check(0)
    files.close()


def test_files_that_are_refused_are_closed(tmp_path: Path) -> None:
    first = read_checkpoint(str(write_checkpoint(tmp_path / "c"))).shards
    gone = replace(first[0], path=str(tmp_path / "gone"))
    before = psutil.Process().num_fds()
    with pytest.raises(CheckpointChanged, match="cannot be opened"):
        ShardFiles([*first, gone])
    assert psutil.Process().num_fds() == before


def test_identity_changes_when_a_file_is_touched_and_layout_does_not(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c")
    before = read_checkpoint(str(directory))
    os.utime(directory / "model.safetensors", ns=(1, 1))
    after = read_checkpoint(str(directory))
    assert before.layout_digest == after.layout_digest
    assert before.identity_digest != after.identity_digest


def hub(tmp_path: Path) -> dict[str, str]:
    """A hub cache with one model, its files linked into blobs."""
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / "abc"
    write_checkpoint(repository / "blobs")
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return {"HF_HUB_CACHE": str(tmp_path / "hub")}


def test_a_hub_id_in_the_cache_counts_as_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = hub(tmp_path)
    assert locate("org/tiny", environ) is not None
    assert locate("org/other", environ) is None
    monkeypatch.setenv("HF_HUB_CACHE", environ["HF_HUB_CACHE"])
    found = read_checkpoint("org/tiny")
    assert len(found.tensors) == len(tiny_tensors())
    assert "blobs" in found.shards[0].path
    assert absolute("org/tiny") == "org/tiny" and found.name == "tiny"


def test_a_push_is_of_the_directory_that_its_path_means_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", hub(tmp_path)["HF_HUB_CACHE"])
    snapshot = locate("org/tiny")
    (tmp_path / "latest").symlink_to(tmp_path / "step-1")
    write_checkpoint(tmp_path / "step-1")
    for written, means in (
        (str(tmp_path / "latest"), tmp_path / "step-1"),
        ("org/tiny", snapshot),
    ):
        request = resolved(PushRequest(written))
        assert (request.checkpoint, request.written) == (str(means), written)
        assert resolved(request) == request  # as recovery repeats it
    for other in ("", "org/absent", str(tmp_path / "step-1")):
        assert resolved(PushRequest(other)) == PushRequest(other)
    with staged(tmp_path / "weights", needed_bytes=1, memory_root=tmp_path) as own:
        assert own.is_symlink() and resolved(PushRequest(str(own))) == PushRequest(str(own))


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    assert absolute("c") == str(tmp_path / "c")


@pytest.mark.parametrize("path", ["~nobody-here/c", "x" * 300, "a\0b"])
def test_a_path_that_cannot_be_looked_at_does_not_exist(path: str) -> None:
    assert locate(path) is None
    for ask in (absolute, read_checkpoint):
        with pytest.raises(NotFoundError, match="does not exist"):
            ask(path)
