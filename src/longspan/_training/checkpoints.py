"""Checkpoints of a training job: written atomically, verified by checksums, loaded without executing pickles.

    unfinished-step-000050/  ──rename──►  step-000050/
        .metadata, *.distcp                   torch's distributed checkpoint: tensors only
        job.json                              step, identity of the job, size and SHA-256 of every file

A folder named step-* is complete: it is renamed after every file has reached the disk. The last two are kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from longspan._comm.agreement import Agreement, CallDescription, agree, raise_on_all_ranks
from longspan._comm.mesh import as_mesh

KEPT = 2  # checkpoints
_MANIFEST = "job.json"
_CHUNK = 1 << 22  # bytes


class CheckpointError(ValueError):
    """Raised for a checkpoint that is missing, damaged or of another job. The message names it and what to do."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, whose files are not verified yet. `identity`: settings that a resumed job must share."""

    folder: Path
    step: int
    identity: dict[str, Any]
    files: dict[str, tuple[int, str]]

    def damage(self) -> str | None:
        """What is wrong with the files: a name, and the expected and actual size or checksum; None if they are intact."""
        for name, (size, digest) in self.files.items():
            path = self.folder / name
            try:
                actual = path.stat().st_size
                if actual != size:
                    return f"{name} has {actual} bytes, expected {size}"
                if _digest(path) != digest:
                    return f"the checksum of {name} differs"
            except OSError as error:
                return f"{name}: {error.strerror}"
        return None


def checkpoints(out: str | Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first."""
    return sorted(p for p in Path(out).glob("step-*") if p.is_dir() and p.name.removeprefix("step-").isdecimal())


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises CheckpointError if its job.json is missing or malformed."""
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
        step, identity = int(manifest["step"]), dict(manifest["identity"])
    except OSError as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {_MANIFEST}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"the checkpoint {folder} is damaged: {_MANIFEST} cannot be read") from None
    if not any(name.endswith(".distcp") for name in files) or ".metadata" not in files:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {_MANIFEST} names no data")
    return Checkpoint(folder=folder, step=step, identity=identity, files=files)


def intact(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, with verified files. Raises CheckpointError."""
    checkpoint = read(folder)
    damage = checkpoint.damage()
    if damage is not None:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {damage}")
    return checkpoint


def newest_intact(out: str | Path) -> Checkpoint | None:
    """The newest intact checkpoint of a directory, or None."""
    for folder in reversed(checkpoints(out)):
        try:
            return intact(folder)
        except CheckpointError:
            continue
    return None


def pick(out: str | Path, step: int | None) -> Checkpoint:
    """The newest checkpoint, or that of a step, verified. Raises CheckpointError, with the newest intact one as an alternative."""
    folders = checkpoints(out)
    if not folders:
        raise CheckpointError(f"there is no checkpoint in {out}")
    if step is not None:
        folders = [f for f in folders if int(f.name.removeprefix("step-")) == step]
        if not folders:
            raise CheckpointError(f"there is no checkpoint of step {step} in {out}")
    try:
        return intact(folders[-1])
    except CheckpointError as error:
        other = newest_intact(out)
        advice = "; no other checkpoint is intact" if other is None else f"; step {other.step} is intact: --resume --from-step {other.step}"
        raise CheckpointError(f"{error}{advice}") from None


def save(out: str | Path, step: int, identity: dict[str, Any], model: Any, optimizer: Any) -> None:
    """Write a checkpoint, collectively. A process that is killed at any point leaves the earlier checkpoints as they were.

    If rank 0 cannot create or complete the folder, every rank raises.
    """
    folder = Path(out) / f"step-{step:06d}"
    unfinished = folder.with_name(f"unfinished-{folder.name}")
    with _first_rank_then_all(f"checkpoint save, step {step}", lambda: _make_empty(unfinished)):
        save_distributed(_tensors(model, optimizer), checkpoint_id=str(unfinished))
    _first_rank_then_all(f"completion of the checkpoint of step {step}", lambda: _complete(unfinished, folder, step, identity))


def _first_rank_then_all(call: str, fn: Callable[[], None]) -> Agreement:
    """Run fn on rank 0, and return when all ranks know that it succeeded. If it fails, or ranks make different calls, all raise."""
    world = as_mesh(dist.group.WORLD)
    try:
        if world.rank == 0:
            fn()
    except (OSError, ValueError) as error:
        raise_on_all_ranks(world, error)
    return agree(world, CallDescription(call, {}))


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _complete(unfinished: Path, folder: Path, step: int, identity: dict[str, Any]) -> None:
    """Write the manifest, rename the folder, and delete checkpoints beyond the last KEPT."""
    files = {p.name: (p.stat().st_size, _digest(p)) for p in sorted(unfinished.iterdir())}
    (unfinished / _MANIFEST).write_text(json.dumps({"step": step, "identity": identity, "files": files}))
    for path in (*unfinished.iterdir(), unfinished):
        _sync(path)
    if folder.exists():  # the same step, saved again after --from-step
        replaced = folder.with_name(f"replaced-{folder.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(folder, replaced)
    os.replace(unfinished, folder)
    _sync(folder.parent)
    for old in (*checkpoints(folder.parent)[:-KEPT], *folder.parent.glob("replaced-step-*")):
        shutil.rmtree(old, ignore_errors=True)


def load(checkpoint: Checkpoint, model: Any, optimizer: Any) -> int:
    """Load a verified checkpoint, collectively; the number of ranks may differ from that of the save. Returns the next step."""
    call = CallDescription("checkpoint load", {"step": str(checkpoint.step), "files": json.dumps(checkpoint.files, sort_keys=True)})
    with agree(as_mesh(dist.group.WORLD), call):
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments["state"]}
        load_distributed(state, storage_reader=_CheckpointReader(str(checkpoint.folder)), planner=_TensorsOnly())
        optimizer_state = {"state": state["optimizer"], "param_groups": moments["param_groups"]}
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)
    return checkpoint.step


def _tensors(model: Any, optimizer: Any) -> dict[str, Any]:
    """Weights and moments. Settings of the optimizer are left out: the job has them, and they would be stored as pickles."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments["state"]}


class _TensorsOnly(DefaultLoadPlanner):
    """A planner that rejects entries other than tensors, which torch would unpickle."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise CheckpointError(f"the checkpoint has a pickled entry {read_item.dest_index.fqn!r}: expected tensors only")


class _CheckpointReader(FileSystemReader):
    """Reads the metadata of a checkpoint with an unpickler that knows its classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = _MetadataUnpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{self.path}/.metadata: expected the metadata of a checkpoint, got {type(metadata).__name__}")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "StorageMeta", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if name not in _METADATA_CLASSES.get(module, ()):
            raise CheckpointError(f"the checkpoint's metadata names {module}.{name}, which no checkpoint contains; it was not executed")
        return super().find_class(module, name)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
