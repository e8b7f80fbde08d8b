"""Text to train on, byte by byte: documents one after the other, cut into packed sequences. The same on every rank.

Legend: N bytes of the corpus, S tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longspan.integrations.loss import IGNORED

BEGIN = 256  # stands before every document
VOCAB = 257
_MOST = 8 << 20  # bytes that are read at most


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """`stream` int16 [N]: documents, each after a BEGIN. `starts`: where each BEGIN stands."""

    stream: Tensor
    starts: Tensor
    digest: str

    def sequence(self, index: int, length: int) -> dict[str, Tensor]:
        """The index-th sequence of `length` tokens, as `prepare_batch` takes it. A document's first token is nobody's successor."""
        offset = (index * length) % (len(self.stream) - length)
        piece = self.stream[offset : offset + length + 1].long()
        place = torch.arange(offset, offset + length)
        document = torch.bucketize(place, self.starts, right=True)
        first = self.starts[document - 1].clamp(min=offset)
        labels = piece[1:].masked_fill(piece[1:] == BEGIN, IGNORED)
        fields = {"input_ids": piece[:-1], "shift_labels": labels, "document_ids": document, "position_ids": place - first}
        return {name: value[None] for name, value in fields.items()}


def corpus(path: str | Path | None, *, length: int, seed: int = 0) -> Corpus:
    """The text files under a path (a file, or a directory with all below it), or the sources of Python's standard library.

    Files come in a random order that follows from the seed. ValueError where there is no text, or too little for `length` tokens.
    """
    files = _files(path)
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
    texts: list[bytes] = []
    for i in order:
        text = _text(files[i], strict=path is not None and Path(path).is_file())
        if text and sum(map(len, texts)) < _MOST:
            texts.append(text[:_MOST])
    pieces = [torch.cat([torch.tensor([BEGIN]), torch.frombuffer(bytearray(t), dtype=torch.uint8)]).to(torch.int16) for t in texts]
    total = sum(map(len, pieces))
    if total < length + 2:
        raise ValueError(f"expected text of {length + 2} bytes or more for sequences of {length} tokens, got {total} in {len(files)} files")
    starts = torch.tensor([0, *[len(p) for p in pieces[:-1]]]).cumsum(0)
    return Corpus(stream=torch.cat(pieces), starts=starts, digest=hashlib.sha256(b"\0".join(texts)).hexdigest()[:16])


def _files(path: str | Path | None) -> list[Path]:
    if path is None:
        return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found = Path(path)
    if found.is_dir():
        return sorted(p for p in found.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.parts[len(found.parts) :]))
    if not found.is_file():
        raise ValueError(f"there is no file or directory {found}")
    return [found]


def _text(path: Path, *, strict: bool) -> bytes:
    """A file's bytes if it is text; else nothing, or a ValueError where it was asked for by name."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        data[: 1 << 20].decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(data[: 1 << 20]) - 4:  # not merely a character cut in two
            if strict:
                raise ValueError(f"{path} is not text: byte {error.start} is no UTF-8") from None
            return b""
    if b"\0" in data:
        if strict:
            raise ValueError(f"{path} is not text: it holds a zero byte at {data.index(0)}")
        return b""
    return data
