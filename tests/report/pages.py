"""Report pages for tests: their text, and the arrays and metadata inside."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import torch
from torch import Tensor

import longspan as ls
from longspan._report.page import page


def page_of(plan: ls.Plan, *, title: str | None = None) -> str:
    """The HTML text of a plan's report page."""
    return page(plan.report(), plan.considered(), title=title)


def page_contents(text: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(metadata, arrays by name) as the page's script reads them."""
    meta = json.loads(re.findall(r'id="meta">(.*?)</script>', text, re.DOTALL)[0])
    block = zlib.decompress(base64.b64decode(re.findall(r'id="block">(.*?)</script>', text, re.DOTALL)[0]))
    arrays = {}
    for name, a in meta["arrays"].items():
        dtype, count = {"i4": torch.int32, "f4": torch.float32}[a["type"]], torch.Size(a["shape"]).numel()
        values = torch.frombuffer(bytearray(block), dtype=dtype, count=count, offset=a["at"]) if count else torch.empty(0, dtype=dtype)
        arrays[name] = values.view(a["shape"])
    return meta, arrays
