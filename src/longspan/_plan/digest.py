"""Digests of texts and tensors: ranks compare them to check that they hold the same plan."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

from torch import Tensor


def content(tensor: Tensor) -> bytes:
    """A tensor's bytes, row-major."""
    host = tensor.cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()) if host.numel() else b""


def digest_of(parts: Iterable[str | Tensor]) -> str:
    """The SHA-256 digest of texts and tensors, in order."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"[{part.dtype} {tuple(part.shape)}]".encode())
            digest.update(content(part))
        else:
            digest.update(f"[{len(part)}]{part}".encode())
    return digest.hexdigest()
