"""`longspan train` and `longspan demo`: the same losses however it is run, stopped and resumed; wrong input in one line."""

from __future__ import annotations

import csv
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from longspan._training.corpus import BEGIN, corpus
from longspan._training.decoder import DecoderConfig
from longspan.cli.app import run

SMALL = "--steps 8 --tokens 200 --width 32 --layers 1 --heads 4/2 --save-every 3".split()


def command(out: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "longspan.cli", *arguments(out, *extra)]


def arguments(out: Path, *extra: str) -> list[str]:
    return ["train", "--out", str(out), *SMALL, *extra]


def losses(out: Path) -> list[float]:
    if not (out / "losses.csv").exists():
        return []
    with (out / "losses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["step"]) for r in rows] == list(range(len(rows)))
    return [float(r["loss"]) for r in rows]


def children(pid: int) -> list[int]:
    outputs = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            outputs.append(int(stat.parent.name))
    return outputs


def wait_for(condition: Any, what: str, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_losses_do_not_depend_on_processes_nor_on_being_stopped_and_killed(tmp_path: Path) -> None:
    ring = ("--strategy", "ring")  # "auto" plans for 0.3 s per step and rank
    one, four, broken = (tmp_path / name for name in ("one", "four", "broken"))
    # Only commands that a signal ends need a process of their own; the ranks of the others fork from this process's server.
    assert run(arguments(one, "--processes", "1")) == 0
    assert run(arguments(four, "--processes", "4", "--cp", "2", "--strategy", "exchange")) == 0
    want = losses(one)
    assert len(want) == 8 and want[-1] < want[0]
    assert max(abs(a - b) for a, b in zip(want, losses(four), strict=True)) < 1e-4
    assert (four / "losses.png").exists() and len(list(four.glob("step-*"))) == 2

    stopped = subprocess.Popen(command(broken, "--processes", "2", *ring), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(losses(broken)) >= 2 or stopped.poll() is not None, "two steps")
    stopped.send_signal(signal.SIGINT)
    stderr = stopped.communicate(timeout=120)[1].decode()
    assert stopped.returncode == 130 and "--resume" in stderr and "Traceback" not in stderr
    done = len(losses(broken))
    assert (broken / f"step-{done:06d}" / "job.json").exists()

    killed = subprocess.Popen(command(broken, "--processes", "2", "--resume", *ring), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(losses(broken)) >= max(4, done + 1) or killed.poll() is not None, "four steps")
    ranks = children(killed.pid)
    assert len(ranks) >= 2
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    wait_for(lambda: not any(_alive(pid) for pid in ranks), "ranks that outlive who started them", 30)

    assert run(arguments(broken, "--processes", "1", "--resume")) == 0
    assert max(abs(a - b) for a, b in zip(want, losses(broken), strict=True)) < 1e-4

    assert run(arguments(one, "--processes", "1", "--resume", "--width", "64")) == 2
    assert run(arguments(one, "--processes", "1", "--resume", "--steps", "7")) == 2


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--processes 4 --cp 3", "--cp: 4 processes cannot be divided"),
        ("--processes 4 --cp 1 --batch 6", "--batch: 6 sequences cannot be divided among 4"),
        ("--data {picture}", "--data: {picture} is not text"),
        ("--data {missing}", "--data: there is no file or directory"),
        ("--data {short}", "--data: expected text of 2050 bytes or more"),
        ("--resume", "--resume: there is no checkpoint"),
        ("--resume --out {other}", "width 999 (here 128)"),
        ("--resume --out {torn}", "job.json cannot be read; no other checkpoint is intact"),
        ("--from-step 5", "--from-step: expected together with --resume"),
        ("--out {other}", "--out: {other} contains checkpoints"),
        ("--width 30", "--width: expected a multiple of twice the 4 heads"),
        ("--heads 5/2", "--heads"),
        ("--tokens none", "--tokens"),
        ("--strategy teleport", "teleport"),
        ("--processes 8 --tokens 5", "--tokens"),
        ("--no-such-option", "--no-such-option"),
    ],
)
def test_wrong_input_is_one_clear_line_and_exit_code_2(extra: str, message: str, tmp_path: Path, capsys: Any) -> None:
    import json

    names = {name: str(tmp_path / name) for name in ("picture", "missing", "short", "other", "torn")}
    Path(names["picture"]).write_bytes(bytes(range(256)) * 20)
    Path(names["short"]).write_text("too short")
    for name, identity in (("other", {"width": 999}), ("torn", None)):
        folder = tmp_path / name / "step-000005"
        folder.mkdir(parents=True)
        files = {name: (0, hashlib.sha256().hexdigest()) for name in (".metadata", "__0_0.distcp")}
        for file in files:
            (folder / file).touch()
        (folder / "job.json").write_text("{" if identity is None else json.dumps({"step": 5, "identity": identity, "files": files}))
    options = extra.format(**names).split()
    where = [] if "--out" in options else ["--out", str(tmp_path / "run")]
    assert run(["train", *where, *options]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("longspan train: ") and message.format(**names) in err, err


def test_usage_errors_of_the_demo_are_one_line(capsys: Any) -> None:
    assert run(["demo", "--tokens", "100"]) == 2
    assert "at least 64 per process for 4 processes" in capsys.readouterr().err


def test_a_corpus_is_documents_in_order_and_never_predicts_across_them(tmp_path: Path) -> None:
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * (30 + 11 * i))
    (tmp_path / "picture.png").write_bytes(bytes(range(256)))
    text = corpus(tmp_path, length=101, seed=3)
    again = corpus(tmp_path, length=101, seed=3)
    assert text.digest == again.digest and text.stream.equal(again.stream) and len(text.starts) == 7
    assert (text.stream[text.starts] == BEGIN).all() and int((text.stream == BEGIN).sum()) == 7
    for index in range(5):
        piece = {name: value[0] for name, value in text.sequence(index, 101).items()}
        ids, labels, documents, positions = (piece[n] for n in ("input_ids", "shift_labels", "document_ids", "position_ids"))
        follows = labels[:-1] != -100
        assert ids[1:][follows].equal(labels[:-1][follows]) and (ids[1:][~follows] == BEGIN).all()
        starts = torch.cat([torch.tensor([True]), documents[1:] != documents[:-1]])
        assert (positions[starts] == 0).all() and (positions[1:] == positions[:-1] + 1)[~starts[1:]].all()


def test_a_decoder_needs_one_of_everything() -> None:
    assert DecoderConfig(layers=1, heads=1, kv_heads=1).layers == 1
    with pytest.raises(ValueError, match="layers must be 1 or more, got 0"):
        DecoderConfig(layers=0)
