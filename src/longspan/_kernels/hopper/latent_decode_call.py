"""The choice of `hopper.latent_decode` for a call over pages. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.compile_options import REGISTERS as REGISTER_OPTIONS
from longspan._kernels.gpu.split_kernel import SplitKernel
from longspan._kernels.hopper.config import TileConfig
from longspan._kernels.hopper.descriptors import tile_descriptor
from longspan._kernels.hopper.latent_decode import HALF, KEYS, LATENT, REST, ROWS, latent_decode_kernel
from longspan._kernels.paged import PagedKV

_CONFIG = TileConfig(m=ROWS.value, n=KEYS.value, stages=2, start_registers=128, registers=160)


def _share(heads: int) -> int:
    """`SplitKernel.share`. With 128 heads, two CTAs read each split: long sequences then have fewer splits, of twice the tokens.

    H200, 128 heads, 131,072 tokens: 101 µs with splits of 1,024 tokens, 87 µs with 2,048.
    """
    return 4 if heads <= ROWS.value else 16


_KERNEL = SplitKernel(
    kernel=latent_decode_kernel,
    options={"num_warps": 4, "maxnreg": _CONFIG.start_registers, **REGISTER_OPTIONS},
    descriptors={
        "k_desc": partial(tile_descriptor, rows=KEYS.value, columns=HALF.value),
        "rest_desc": partial(tile_descriptor, rows=KEYS.value, columns=REST.value),
    },
    rows=ROWS.value,
    coarse=1024,
    share=_share,
)


def latent_decode(q: Tensor, pages: PagedKV) -> SplitKernel | None:
    """The kernel for few queries q over latent KV in pages on a Hopper GPU; None if it does not support them.

    At most 16 query rows per KV head run by triton's kernel. H200, 16 heads: as fast for 32 × 4k tokens, 7 % faster for 131k.
    """
    if not pages.shared or (pages.k.shape[-1], pages.v.shape[-1]) != (LATENT.value + REST.value, LATENT.value):
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or pages.k.dtype != q.dtype or pages.page_size % KEYS.value:
        return None
    return _KERNEL if launch.describable(pages.k) else None
