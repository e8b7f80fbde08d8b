"""Checkpoints on one rank: which are kept and read, replaced steps, manifests and metadata of other kinds."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from longspan._training import checkpoints
from longspan._training.checkpoints import CheckpointError, load, newest_intact, pick, read, save


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_and_optimizer(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(3.0)).sum().backward()
    optimizer.step()
    return model, optimizer


def manifest(folder: Path, **changes: Any) -> Path:
    """A complete checkpoint with two small files."""
    folder.mkdir(parents=True)
    files = {}
    for name, content in ((".metadata", b"abc"), ("__0_0.distcp", b"data" * 5)):
        (folder / name).write_bytes(content)
        files[name] = (len(content), hashlib.sha256(content).hexdigest())
    text = {"step": int(folder.name[-6:]), "identity": {"width": 3}, "files": files, **changes}
    (folder / "job.json").write_text(json.dumps(text))
    return folder


@pytest.mark.usefixtures("_one_rank")
def test_two_checkpoints_are_kept_and_a_step_may_be_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(checkpoints, "_sync", lambda path: synced.append(path.name))
    out = tmp_path / "deep" / "out"
    (out / "unfinished-step-000001").mkdir(parents=True)
    (out / "unfinished-step-000001" / "left").touch()
    (out / "step-none").mkdir()
    (out / "step-000009").touch()  # no folder
    models = {step: model_and_optimizer(step) for step in (1, 2, 3)}
    for step, kept in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (2, [2, 3])):
        save(out, step, {"width": step}, *models[step])
        assert [int(f.name[-6:]) for f in checkpoints.checkpoints(out)] == kept and checkpoints.KEPT == 2
    assert sorted(p.name for p in out.iterdir()) == ["step-000002", "step-000003", "step-000009", "step-none"]
    assert sorted(p.name for p in (out / "step-000002").iterdir()) == [".metadata", "__0_0.distcp", "job.json"]
    assert synced[-5:] == [*sorted(synced[-5:-2], key=synced.index), "unfinished-step-000002", "out"]
    assert set(synced[-5:-2]) == {".metadata", "__0_0.distcp", "job.json"}
    made = read(out / "step-000003")
    assert (made.step, made.identity, set(made.files)) == (3, {"width": 3}, {".metadata", "__0_0.distcp"})

    model, optimizer = model_and_optimizer(7)
    assert load(pick(out, 2), model, optimizer) == 2
    assert torch.equal(model.weight, models[2][0].weight)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(optimizer.state[model.bias][name], models[2][1].state[models[2][0].bias][name])
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.usefixtures("_one_rank")
def test_a_folder_that_cannot_be_made_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises((OSError, RuntimeError), match="file"):
        save(tmp_path / "file", 1, {}, *model_and_optimizer(0))


def test_the_checkpoint_of_a_step_or_the_newest_is_picked(tmp_path: Path) -> None:
    for step in (3, 12, 5):
        manifest(tmp_path / f"step-{step:06d}")
    assert [f.name for f in checkpoints.checkpoints(tmp_path)] == ["step-000003", "step-000005", "step-000012"]
    assert (pick(tmp_path, None).step, pick(tmp_path, 5).step) == (12, 5)
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 0 in"):
        pick(tmp_path, 0)
    os.truncate(tmp_path / "step-000012" / "__0_0.distcp", 19)
    message = "step-000012 is damaged: __0_0.distcp has 19 bytes, expected 20; step 5 is intact: --resume --from-step 5"
    with pytest.raises(CheckpointError, match=message):
        pick(tmp_path, None)
    newest = newest_intact(tmp_path)
    assert newest is not None and newest.step == 5 and newest_intact(tmp_path / "none") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {".metadata": (3, "")}},
        {"files": {"__0_0.distcp": (3, ""), "__0_1.distcp": (3, "")}},
        {"files": {"x": (3, ""), ".metadata": (1, "")}},
        {"files": {}},
    ],
)
def test_a_manifest_names_the_metadata_and_data(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"job\.json names no data"):
        read(manifest(tmp_path / "step-000004", **changes))


@pytest.mark.parametrize("changes", [{"files": []}, {"files": {"a": 3}}, {"step": None}, {"identity": 5}, {"step": "x"}])
def test_a_manifest_of_another_kind_cannot_be_read(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"job\.json cannot be read"):
        read(manifest(tmp_path / "step-000004", **changes))


def test_digests_of_files_longer_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    monkeypatch.setattr(checkpoints, "_CHUNK", 64)
    assert checkpoints._digest(path) == hashlib.sha256(bytes(range(200))).hexdigest()
    checkpoints._sync(path)
    checkpoints._sync(tmp_path)


def test_metadata_has_known_classes_and_dtypes_only() -> None:
    for good in (torch.Size([2, 3]), torch.bfloat16, StorageMeta(), PurePosixPath("a")):
        assert checkpoints._MetadataUnpickler(io.BytesIO(pickle.dumps(good))).load() == good
    for bad, name in ((print, "builtins.print"), (torch.save, "torch.serialization.save"), (io.BytesIO, "_io.BytesIO")):
        with pytest.raises(CheckpointError, match=f"names {name}, which no checkpoint contains; it was not executed"):
            checkpoints._MetadataUnpickler(io.BytesIO(pickle.dumps(bad))).load()
    for module, name in (("longspan", "Size"), ("torch", "load"), ("longspan", "float32")):
        with pytest.raises(CheckpointError, match=rf"{module}\.{name}"):
            checkpoints._MetadataUnpickler(io.BytesIO()).find_class(module, name)


@pytest.mark.parametrize("storage", [None, StorageMeta(save_id="saved")])
def test_metadata_gets_the_id_of_the_load(storage: StorageMeta | None, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={}, storage_meta=storage)))
    reader = checkpoints._CheckpointReader(str(tmp_path))
    made = reader.read_metadata().storage_meta
    assert made is not None and made.load_id == reader.load_id and made.save_id == (storage.save_id if storage else None)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(StorageMeta()))
    with pytest.raises(CheckpointError, match="expected the metadata of a checkpoint, got StorageMeta"):
        reader.read_metadata()


def test_pickled_entries_are_rejected() -> None:
    with pytest.raises(CheckpointError, match=r"has a pickled entry 'model\.x': expected tensors only"):
        checkpoints._TensorsOnly().load_bytes(SimpleNamespace(dest_index=SimpleNamespace(fqn="model.x")), io.BytesIO())
