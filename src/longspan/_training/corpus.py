"""A byte-level text corpus: documents back to back, cut into packed sequences. The same on every rank.

Shapes: N tokens of the corpus, S tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longspan.integrations.loss import IGNORED

BEGIN = 256  # token before every document
VOCAB = 257
_MAX_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Attributes:
    stream: Documents, each after a BEGIN token [N], int16.
    starts: Index of each BEGIN [documents], int64.
    digest: Digest of the text.
    """

    stream: Tensor
    starts: Tensor
    digest: str

    def sequence(self, index: int, length: int) -> dict[str, Tensor]:
        """The index-th sequence of S = `length` tokens as fields [1, S] for `prepare_batch`. BEGIN is never a label."""
        offset = (index * length) % (len(self.stream) - length)
        piece = self.stream[offset : offset + length + 1].long()
        index_in_stream = torch.arange(offset, offset + length)
        document = torch.bucketize(index_in_stream, self.starts, right=True)
        first = self.starts[document - 1].clamp(min=offset)
        labels = piece[1:].masked_fill(piece[1:] == BEGIN, IGNORED)
        fields = {"input_ids": piece[:-1], "shift_labels": labels, "document_ids": document, "position_ids": index_in_stream - first}
        return {name: value[None] for name, value in fields.items()}


def corpus(path: str | Path | None, *, length: int, seed: int = 0) -> Corpus:
    """The text of a file or of all files below a directory; without a path, the sources of Python's standard library.

    Files are shuffled by the seed. Raises ValueError if there is no text, or too little for sequences of `length` tokens.
    """
    files = _files(path)
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
    texts: list[bytes] = []
    for i in order:
        text = _text(files[i], strict=path is not None and Path(path).is_file())
        if text and sum(map(len, texts)) < _MAX_BYTES:
            texts.append(text[:_MAX_BYTES])
    pieces = [torch.cat([torch.tensor([BEGIN]), torch.frombuffer(bytearray(t), dtype=torch.uint8)]).to(torch.int16) for t in texts]
    total = sum(map(len, pieces))
    if total < length + 2:
        raise ValueError(f"expected text of {length + 2} bytes or more for sequences of {length} tokens, got {total} in {len(files)} files")
    starts = torch.tensor([0, *[len(p) for p in pieces[:-1]]]).cumsum(0)
    return Corpus(stream=torch.cat(pieces), starts=starts, digest=hashlib.sha256(b"\0".join(texts)).hexdigest()[:16])


def _files(path: str | Path | None) -> list[Path]:
    if path is None:
        return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    root = Path(path)
    if root.is_dir():
        hidden = lambda p: any(part.startswith(".") for part in p.relative_to(root).parts)  # noqa: E731
        return sorted(p for p in root.rglob("*") if p.is_file() and not hidden(p))
    if not root.is_file():
        raise ValueError(f"there is no file or directory {root}")
    return [root]


def _text(path: Path, *, strict: bool) -> bytes:
    """A file's bytes if it is UTF-8 text; otherwise nothing, or a ValueError if `strict`."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        data[: 1 << 20].decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(data[: 1 << 20]) - 4:  # the error is not a character cut at the end
            if strict:
                raise ValueError(f"{path} is not text: byte {error.start} is not UTF-8") from None
            return b""
    if b"\0" in data:
        if strict:
            raise ValueError(f"{path} is not text: zero byte at {data.index(0)}")
        return b""
    return data
