"""Attention whose rows have the same bits wherever they lie: in torch operations on tiles of one fixed shape, in a fixed order.

Every tile is padded to BLOCK_SIZE × BLOCK_SIZE. A row's sums over a KV tile are one matrix product of fixed shape, and KV tiles are
accumulated in the order of the table's columns. Padding, masked pairs and tiles without a visible pair add exact zeros, so that neither
the other rows of a tile nor skipped tiles change a bit. Gradients of KV rows are accumulated over query tiles in the same way.

What is left to the libraries: a matrix product must compute each element in an order that depends on the product's shape alone. Most
do so for contiguous operands whose dims are multiples of 16, to which head dims are padded; `_invariant_product` takes another product
where they do not. Elementwise operations round each element on its own.

Legend as in `longspan._kernels.protocol`; N = B · H, T = BLOCK_SIZE, W a head dim padded to a multiple of 16. Padded tiles are
[N, T, ...], KV repeated for every query head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan._kernels.nonfinite import masked_product
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Grads, State, Work, like_query, state_dtype
from longspan._kernels.tile_math import add_lookup_grads_
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BLOCK_SIZE, FULL

WIDTH = 16  # head dims are padded to a multiple
Product = Callable[[Tensor, Tensor], Tensor]  # of contiguous batches of matrices


@dataclass(frozen=True, kw_only=True, eq=False)
class _TilePair:
    """One tile of scores [N, T, T]. `raw`: before the score program. `seen`: pairs that exist; None for all."""

    scores: Tensor
    raw: Tensor
    seen: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class _QueryRows:
    """A padded query tile of a backward pass: q, grad_out [N, T, W]; lse (+inf in blind rows and padding) and delta [N, T, 1]."""

    q: Tensor
    grad_out: Tensor
    lse: Tensor
    delta: Tensor


class InvariantTiles:
    """The tensors of one call. Tiles of `work` have at most BLOCK_SIZE rows and columns."""

    def __init__(self, inputs: AttentionInputs, work: Work) -> None:
        assert inputs.local_kv is None and max(work.q_tiles.block, work.kv_tiles.block) <= BLOCK_SIZE
        self.q, self.k, self.v, self.work = inputs.q, inputs.k, inputs.v, work
        self.wide = state_dtype(self.q.dtype)
        self.ratio = self.q.shape[1] // self.k.shape[1]
        self.items = self.q.shape[0] * self.q.shape[1]
        self.bmm = _invariant_product(self.wide, _width(self.q.shape[-1]), _width(self.v.shape[-1]))
        kinds = work.table.to_dense().flatten(0, 1)  # [batch · heads, query tiles, KV tiles]
        self.computed, self.whole = (kinds > 0).any(0), (kinds == FULL).all(0)
        self._kv_tiles: dict[tuple[bool, int], Tensor] = {}

    def forward(self, state: State | None, *, max_scores: bool) -> State:
        """out in the dtype and memory order of q, lse, and max scores if asked for. `state`: that of a sink, or None."""
        q, wide = self.q, self.wide
        out = like_query(q, self.v.shape[-1], q.dtype)
        lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        row_max = torch.empty_like(lse) if max_scores else None
        for i in range(self.work.q_tiles.tiles):
            rows = _rows(self.work.q_tiles, i)
            top, total, acc = self._start(state, rows)
            largest = torch.full_like(top, -torch.inf)
            queries = _wide_rows(q[:, :, rows], wide)
            for j in self.computed[i].nonzero()[:, 0].tolist():
                pair = self._scores(queries, i, j)
                tile_max = pair.scores.amax(-1, keepdim=True)
                largest = torch.maximum(largest, tile_max)
                new_top = torch.maximum(top, tile_max)
                base = new_top.masked_fill(new_top == -torch.inf, 0.0)  # rows that saw nothing yet: −inf − −inf would be NaN
                weights, shrink = torch.exp(pair.scores - base), torch.exp(top - base)
                total = total * shrink + tree_sum(weights)
                acc = acc * shrink + self._product(weights, self._kv_tile(self.v, j), pair.seen)
                top = new_top
            seen = total != 0  # also where total is NaN: a row that sees a NaN has lse NaN
            total = total.masked_fill(~seen, 1.0)
            out[:, :, rows] = self._unpadded(acc / total + 0.0, rows, out.shape[-1])  # + 0.0: skipped tiles may leave −0
            lse[:, :, rows] = self._unpadded(torch.where(seen, top + torch.log(total), -torch.inf), rows, 1)[..., 0]
            if row_max is not None:
                row_max[:, :, rows] = self._unpadded(largest, rows, 1)[..., 0]
        return State(out=out, lse=lse, max_scores=row_max)

    def backward(self, tensors: BackwardInputs, *, wide: bool) -> Grads:
        """Gradients of q, k, v as `tensors.side` asks for; the others are zeros."""
        q, k, v, work = self.q, self.k, self.v, self.work
        delta = row_delta(tensors.out, tensors.grad_out, tensors.grad_lse) if tensors.delta is None else tensors.delta
        for_q, for_kv = tensors.side != "kv", tensors.side != "q"
        # Per query head: the heads of a group are added last, in order.
        dq, dk, dv = (
            torch.zeros((*q.shape[:2], t.shape[2], t.shape[3]), dtype=self.wide, device=q.device) for t in (q, k, v)
        )  # fmt: skip
        captured = [
            torch.zeros_like(c, dtype=torch.float64) if n and for_q else None for c, n in zip(work.score_captured, tensors.needs)
        ] or [None] * len(work.score_captured)
        for i in range(work.q_tiles.tiles):
            rows = _rows(work.q_tiles, i)
            queries = self._query_rows(tensors, delta, rows)
            for j in self.computed[i].nonzero()[:, 0].tolist():
                columns = _rows(work.kv_tiles, j)
                p, ds, seen = self._gradients(queries, i, j, captured)
                if for_q:
                    dq[:, :, rows] += self._unpadded(self._product(ds, self._kv_tile(k, j), seen), rows, dq.shape[-1])
                if for_kv:
                    seen_by_key = None if seen is None else seen.mT
                    dk[:, :, columns] += self._unpadded(self._product(ds.mT, queries.q, seen_by_key), columns, dk.shape[-1])
                    dv[:, :, columns] += self._unpadded(self._product(p.mT, queries.grad_out, seen_by_key), columns, dv.shape[-1])
        grads = [dq * work.scale, self._group_sum(dk) * work.scale, self._group_sum(dv)]
        grads = [(g + 0.0).to(self.wide if wide else t.dtype) for g, t in zip(grads, (q, k, v), strict=True)]
        return Grads(q=grads[0], k=grads[1], v=grads[2], captured=captured)

    def _start(self, state: State | None, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(running max, running sum, accumulator) of padded rows before the first tile."""
        shape, dtype, device = (self.items, BLOCK_SIZE, 1), self.wide, self.q.device
        acc = torch.zeros((self.items, BLOCK_SIZE, _width(self.v.shape[-1])), dtype=dtype, device=device)
        if state is None:
            return torch.full(shape, -torch.inf, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device), acc
        top = _padded(state.lse[:, :, rows, None], dtype)
        return top, torch.ones_like(top), acc  # a sink of −inf: the first tile multiplies the sum by exp(−inf)

    def _kv_tile(self, x: Tensor, tile: int) -> Tensor:
        """A padded tile of k or v [N, T, W], repeated for each query head. Cached for the call."""
        key = (x is self.k, tile)
        if key not in self._kv_tiles:
            rows = _rows(self.work.kv_tiles, tile)
            self._kv_tiles[key] = _wide_rows(x[:, :, rows].repeat_interleave(self.ratio, 1), self.wide)
        return self._kv_tiles[key]

    def _product(self, a: Tensor, x: Tensor, seen: Tensor | None) -> Tensor:
        """a @ x over the pairs of `a` where `seen`; hidden pairs count as 0 whatever x holds."""
        return self.bmm(a, x) if seen is None else masked_product(self.bmm, a, x, seen)

    def _unpadded(self, x: Tensor, rows: slice, dim: int) -> Tensor:
        """The first rows and elements of a padded tile, [B, H, rows, dim]."""
        return x[:, : rows.stop - rows.start, :dim].unflatten(0, self.q.shape[:2])

    def _group_sum(self, grads: Tensor) -> Tensor:
        """Gradients [B, H, K, ...] summed over the query heads of each KV head, in order."""
        by_head = grads.unflatten(1, (self.k.shape[1], self.ratio))
        total = by_head[:, :, 0]
        for head in range(1, self.ratio):
            total = total + by_head[:, :, head]
        return total

    def _indices(self, i: int, j: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, q, kv of a padded tile, broadcasting to [B, H, T, T]. Padding repeats the last position, which lookups may read."""
        device, work = self.q.device, self.work
        b = torch.arange(self.q.shape[0], device=device) + work.first_batch
        h = torch.arange(self.q.shape[1], device=device) + work.first_head
        q, kv = _positions(work.q_tiles, i, device), _positions(work.kv_tiles, j, device)
        return b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), q.view(1, 1, -1, 1), kv.view(1, 1, 1, -1)

    def _seen(self, i: int, j: int) -> Tensor | None:
        """Pairs of a tile that exist [N, T, T]; None for all."""
        work = self.work
        rows, columns = work.q_tiles.span(i)[1], work.kv_tiles.span(j)[1]
        short = min(rows, columns) < BLOCK_SIZE
        masked = work.mask is not None and not bool(self.whole[i, j])
        if not short and not masked:
            return None
        at = torch.arange(BLOCK_SIZE, device=self.q.device)
        inside = ((at < rows)[:, None] & (at < columns))[None, None]
        if masked:
            assert work.mask is not None
            inside = inside & work.mask(*self._indices(i, j), *work.mask_captured)
        return inside.expand(*self.q.shape[:2], BLOCK_SIZE, BLOCK_SIZE).flatten(0, 1)

    def _scores(self, queries: Tensor, i: int, j: int) -> _TilePair:
        raw = self.bmm(queries * self.work.scale, self._kv_tile(self.k, j).mT)
        scores = raw
        if self.work.score is not None:
            scores = self._by_head(lambda s, at: self._score_program(s, at), raw, i, j)
        seen = self._seen(i, j)
        return _TilePair(scores=scores if seen is None else torch.where(seen, scores, -torch.inf), raw=raw, seen=seen)

    def _score_program(self, raw: Tensor, at: Sequence[Tensor]) -> Tensor:
        assert self.work.score is not None
        return self.work.score(raw, *at, *self.work.score_captured).to(self.wide).expand_as(raw)

    def _by_head(self, fn: Callable[[Tensor, Sequence[Tensor]], Tensor], raw: Tensor, i: int, j: int) -> Tensor:
        """fn of each tile [1, 1, T, T] and its indices: programs run on tensors of one shape, whatever the batch and the heads."""
        b, h, q, kv = self._indices(i, j)
        heads = self.q.shape[1]
        tiles = [fn(raw[n].view(1, 1, *raw.shape[1:]), (b[n // heads, None], h[:, n % heads, None], q, kv)) for n in range(self.items)]
        return torch.cat([t.reshape(1, *raw.shape[1:]) for t in tiles])

    def _query_rows(self, tensors: BackwardInputs, delta: Tensor, rows: slice) -> _QueryRows:
        lse = _padded(tensors.lse[:, :, rows, None], self.wide, value=-torch.inf)
        return _QueryRows(
            q=_wide_rows(self.q[:, :, rows], self.wide),
            grad_out=_wide_rows(tensors.grad_out[:, :, rows], self.wide),
            lse=lse.masked_fill(lse == -torch.inf, torch.inf),
            delta=_padded(delta[:, :, rows, None], self.wide),
        )

    def _gradients(self, rows: _QueryRows, i: int, j: int, captured: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor | None]:
        """(p, ds, seen) of a tile: probabilities and the gradient of q·k · scale. Hidden pairs may have any."""
        pair, work = self._scores(rows.q, i, j), self.work
        p = torch.exp(pair.scores - rows.lse)
        ds = p * (self.bmm(rows.grad_out, self._kv_tile(self.v, j).mT) - rows.delta)
        if work.score is not None:
            assert work.joint is not None
            joint, result = work.joint, work.score.result.meta["val"].dtype
            seen = None if pair.seen is None else pair.seen.view(self.items, 1, 1, BLOCK_SIZE, BLOCK_SIZE)
            item = iter(range(self.items))

            def gradient(raw: Tensor, at: Sequence[Tensor]) -> Tensor:
                n = next(item)
                grad, read_grads, read_indices = joint(ds[n].view_as(raw).to(result), raw, *at, *work.score_captured)
                add_lookup_grads_(captured, work, read_grads, read_indices, None if seen is None else seen[n], raw.shape)
                return grad.to(self.wide).expand_as(raw)

            ds = self._by_head(gradient, pair.raw, i, j)
        return p, ds, pair.seen


def row_delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """`Kernel.delta` with a fixed order of summation, whatever the strides."""
    delta = tree_sum(out * grad_out.to(state_dtype(out.dtype)))[..., 0]
    return delta if grad_lse is None else delta - grad_lse


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dim [..., 1], by halves: each addition is elementwise, so no shape changes the order."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([folded, x[..., 2 * half :]], -1) if x.shape[-1] % 2 else folded
    return x


def _invariant_product(dtype: torch.dtype, *widths: int) -> Product:
    """The first matrix product whose rows and columns have the same bits at every place, beside any others and in any batch."""
    products, threads = (_bmm, _bmm_of_wider), torch.get_num_threads()
    invariant = (one for one in products if all(_is_invariant(one, dtype, width, threads) for width in set(widths)))
    return next(invariant, _sum_of_outer_products)


def _bmm(a: Tensor, x: Tensor) -> Tensor:
    """a @ x of contiguous copies: libraries have separate routines for transposed operands."""
    return torch.bmm(a.contiguous(), x.contiguous())


def _bmm_of_wider(a: Tensor, x: Tensor) -> Tensor:
    """a @ x with columns of zeros up to a multiple of 48: MKL on AMD rounds columns after the last multiple of 24 in another way."""
    return _bmm(a, pad(x, (0, -x.shape[-1] % 48)))[..., : x.shape[-1]]


def _sum_of_outer_products(a: Tensor, x: Tensor) -> Tensor:
    """a @ x by elementwise operations."""
    total = torch.zeros((a.shape[0], a.shape[1], x.shape[2]), dtype=a.dtype, device=a.device)
    for k in range(a.shape[2]):
        total += a[:, :, k, None] * x[:, k, None]
    return total


@cache
def _is_invariant(product: Product, dtype: torch.dtype, width: int, threads: int) -> bool:
    """Whether a row of a product has the same bits at every place, by random tiles. threads: of torch; a key of the cache only."""
    generator = torch.Generator().manual_seed(width)
    a, b, p = (
        torch.randn(3, *size, generator=generator, dtype=dtype) for size in ((BLOCK_SIZE, width), (BLOCK_SIZE, width), (BLOCK_SIZE,) * 2)
    )
    order = torch.randperm(BLOCK_SIZE, generator=generator)
    scores, sums = product(a, b.mT), product(p, b)
    moved = (
        (product(a[:, order], b.mT), scores[:, order]),
        (product(a, b[:, order].mT), scores[:, :, order]),
        (product(p[:, order], b), sums[:, order]),
        (product(a[1:2], b[1:2].mT), scores[1:2]),
        (product(p[1:2], b[1:2]), sums[1:2]),
    )
    return all(torch.equal(x, y) for x, y in moved)


def _rows(tiling: Tiling, tile: int) -> slice:
    row, count, _ = tiling.span(tile)
    return slice(row, row + count)


def _positions(tiling: Tiling, tile: int, device: torch.device) -> Tensor:
    _, count, position = tiling.span(tile)
    return position + torch.arange(BLOCK_SIZE, device=device).clamp(max=count - 1)


def _width(dim: int) -> int:
    return -(-dim // WIDTH) * WIDTH


def _wide_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [B, H, n, D] as a contiguous [B · H, T, W] in `dtype`, padded with zeros."""
    return _padded(x, dtype, width=_width(x.shape[-1]))


def _padded(x: Tensor, dtype: torch.dtype, *, width: int = 1, value: float = 0.0) -> Tensor:
    """x [B, H, n, D] as a contiguous [B · H, T, width] in `dtype`; the padding holds `value`."""
    out = torch.full((x.shape[0] * x.shape[1], BLOCK_SIZE, width), value, dtype=dtype, device=x.device)
    out[:, : x.shape[2], : x.shape[3]] = x.flatten(0, 1)
    return out
