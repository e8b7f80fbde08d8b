"""Checkpoints of `longspan train`: damage is named, the intact one is offered, and nothing in a file is executed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from longspan._training import checkpoints, job
from longspan._training.checkpoints import CheckpointError, intact, load, newest_intact, pick, save
from longspan._training.corpus import corpus
from longspan._training.decoder import DecoderConfig
from longspan.testing import run_processes

pytestmark = pytest.mark.processes
IDENTITY = {"width": 32}


def sharded_model(ranks: int) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(7, 10), torch.nn.Linear(10, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(14.0).view(2, 7)).square().mean().backward()
    optimizer.step()


def weights(model: Any) -> dict[str, Any]:
    return {name: p.full_tensor().tolist() for name, p in model.named_parameters()}


def _save_three(out: str, ranks: int) -> dict[str, Any]:
    """Save after each of three steps; return the weights after one more."""
    model, optimizer = sharded_model(ranks)
    for step in (1, 2, 3):
        train_step(model, optimizer)
        save(out, step, IDENTITY, model, optimizer)
    train_step(model, optimizer)
    return weights(model)


def _load_and_step(out: str, ranks: int) -> tuple[int, dict[str, Any]]:
    model, optimizer = sharded_model(ranks)
    step = load(pick(out, None), model, optimizer)
    train_step(model, optimizer)
    return step, weights(model)


def _load_error(out: str) -> str:
    model, optimizer = sharded_model(1)
    try:
        load(pick(out, None), model, optimizer)
    except BaseException as error:  # torch wraps errors of ranks
        return repr(error)
    return "loaded"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("saved")
    return out, run_processes(_save_three, 2, str(out), 2)[0]


@pytest.fixture
def out(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "out"))


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Replace a file together with its checksum, as somebody who plants a file would."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "job.json").read_text())
    manifest["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    (folder / "job.json").write_text(json.dumps(manifest))


def test_the_last_two_are_kept_and_another_number_of_ranks_continues_from_them(saved: tuple[Path, dict[str, Any]]) -> None:
    out, want = saved
    assert [p.name for p in checkpoints.checkpoints(out)] == ["step-000002", "step-000003"]
    assert not list(out.glob("unfinished-*"))
    step, got = run_processes(_load_and_step, 1, str(out), 1)[0]
    assert step == 3
    for name, value in want.items():
        torch.testing.assert_close(torch.tensor(got[name]), torch.tensor(value))


DAMAGE = {
    "truncated shard": (lambda f: os.truncate(next(f.glob("*.distcp")), 100), "has 100 bytes, expected"),
    "missing shard": (lambda f: next(f.glob("*.distcp")).unlink(), "No such file"),
    "flipped bit": (lambda f: flip(next(f.glob("*.distcp"))), "the checksum of .*distcp differs"),
    "missing job.json": (lambda f: (f / "job.json").unlink(), "job.json: No such file"),
    "truncated job.json": (lambda f: os.truncate(f / "job.json", 20), "job.json cannot be read"),
    "job.json of another kind": (lambda f: (f / "job.json").write_text('{"step": 3, "identity": {}}'), "job.json cannot be read"),
    "job.json without data": (lambda f: (f / "job.json").write_text('{"step": 3, "identity": {}, "files": {}}'), "names no data"),
    "missing metadata": (lambda f: (f / ".metadata").unlink(), ".metadata: No such file"),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_is_offered(kind: str, out: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(out / "step-000003")
    with pytest.raises(CheckpointError, match=f"step-000003 is damaged: .*{message}.*--resume --from-step 2"):
        pick(out, None)
    assert pick(out, 2).step == 2
    newest = newest_intact(out)
    assert newest is not None and newest.step == 2
    damage(out / "step-000002")
    with pytest.raises(CheckpointError, match="no other checkpoint is intact"):
        pick(out, None)
    assert newest_intact(out) is None


def test_missing_checkpoints_are_named(out: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 7 in"):
        pick(out, 7)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        pick(tmp_path / "empty", None)


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def test_a_pickle_in_the_metadata_is_not_executed(out: Path, tmp_path: Path) -> None:
    rewrite(out / "step-000003", ".metadata", pickle.dumps(Planted(str(tmp_path / "executed"))))
    assert intact(out / "step-000003").step == 3
    error = run_processes(_load_error, 1, str(out))[0]
    assert "which no checkpoint contains" in error and not (tmp_path / "executed").exists()


def test_a_pickled_entry_is_not_executed(out: Path, tmp_path: Path) -> None:
    folder = out / "step-000003"
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = next(n for n in metadata.state_dict_metadata if n.startswith("model."))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    rewrite(folder, ".metadata", pickle.dumps(metadata))
    error = run_processes(_load_error, 1, str(out))[0]
    assert error != "loaded" and not (tmp_path / "executed").exists()


def test_a_save_that_is_killed_leaves_the_checkpoints_before(out: Path) -> None:
    unfinished = out / "unfinished-step-000004"
    shutil.copytree(out / "step-000003", unfinished)
    (unfinished / "job.json").unlink()
    assert pick(out, None).step == 3


def test_a_job_resumes_from_a_checkpoint_of_its_last_step_but_not_of_a_later_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.write_text("some words " * 100)
    text = corpus(source, length=8)
    settings: dict[str, Any] = {"out": str(tmp_path), "model": DecoderConfig(), "resume": True}
    checkpoint = checkpoints.Checkpoint(folder=tmp_path, step=5, identity=job.Job(**settings).identity(text), files={})
    monkeypatch.setattr(job, "pick", lambda out, step: checkpoint)
    assert job.check_resume(job.Job(**settings, steps=5), text) is checkpoint
    with pytest.raises(ValueError, match="--resume: 5 steps are done, --steps asks for 4"):
        job.check_resume(job.Job(**settings, steps=4), text)
    with pytest.raises(ValueError, match="belongs to another model or job: seed 0"):
        job.check_resume(job.Job(**settings, seed=1), text)
