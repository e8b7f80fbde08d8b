"""The kernel contract: a kernel computes attention over a set of tiles and merges the result into a running state; backward likewise.

    capabilities, block_size, check                                     before the call, on every rank: the call itself raises nothing
    AttentionInputs ─┐
    Work ────────────┼──► forward  ──►  State   (out, lse)              once per step; the last step has final=True
    State ───────────┘
    BackwardInputs + Work ──► backward  ──►  Grads                      once per step; `into` accumulates over steps

Legend: B batch, H query heads, G KV heads (H a multiple of G), Q query tokens, K KV tokens of this call,
D query/key head dim, E value head dim.  q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E], out [B, H, Q, E], lse [B, H, Q].
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BlockTable
from longspan._masks.joint import Joint
from longspan._masks.program import Program

ALIGNMENT = 16  # bytes: kernels are compiled for tensors whose addresses are divisible by it
MISALIGNED = ALIGNMENT - 1  # bits of an address that are 0 if it is aligned
MASK_IN_GRAPH = (
    "cannot capture a CUDA graph: the mask reads tensors, the block table follows from their present values, and a replay would not see "
    "a change. Use longspan.StaticMask(mask) and update it before each replay, a mask that reads no tensor, or a plan, which fixes them"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """Keys chosen at run time (`longspan._masks.selected`).

    Attributes:
        indices: int32 [B or 1, choices, rows, k]: a row of `q_granularity` queries sees the keys [i · granularity, (i + 1) · granularity)
            for its entries i >= 0. An entry that repeats counts once. Query head h has choice h // heads_per_choice.
    """

    indices: Tensor
    granularity: int
    q_granularity: int
    heads_per_choice: int


class DeviceTables(Protocol):
    """Block tables on the device, of the kernel that made them (`SelectsKeys`)."""

    @property
    def selection(self) -> Selection:
        """The chosen keys."""

    @property
    def signature(self) -> Hashable:
        """Properties on which launches depend; the contents of the tables are not among them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """The tiles to compute, and how each score is computed. Rows and columns of `table` are tiles of `q_tiles` and `kv_tiles`.

    Attributes:
        table: Partial and full tiles, on the host. Its batch and head dims are those of the tensors of this call, or 1. It may be empty.
        q_tiles, kv_tiles: Where tiles lie in the tensors, and their global positions, which programs read.
        scale: Multiplies q·k before `score`; any number, 0 and negative ones included.
        mask: Decides the pairs of partial tiles; full tiles are computed whole. None: every pair. Tiles that are shorter than a block are
            partial whatever the mask.
        score: Applies to every computed score.
        mask_captured, score_captured: Tensors that the programs read, on the device of the queries.
        joint: Gradient of `score`; needed by backward passes.
        first_batch, first_head: Batch row and query head of a larger attention at which these tensors start: programs read
            b + first_batch and h + first_head.
        mask_is_fixed: `mask_captured` never changes, so a CUDA graph may capture the call.
        mask_is_checked: Kernels need not check lookups of `mask` in `mask_captured`: they were checked, or are in bounds by construction.
        complete_q_tiles: A hint, a bool per query tile, on the host: no later step has KV for this query tile. None in the last step, and
            in every step if a tile completes at different steps in different heads. A kernel may write the final out of these rows now;
            then their rows of `State.out` are undefined. Their lse stays in the state.
        concurrent: A hint: other kernels run on the device at the same time, so idle SMs are no loss.
        invariant: Results of a row must not depend on the other rows of the call, nor on where tiles of queries begin: each row sums over
            KV tiles, each KV row over query tiles, in an order that follows from their positions alone. Tiles of KV (of queries in the
            pass for dK and dV) then begin at places that depend on the row's document only. See `longspan._engine.invariant`.
        selects: `SelectsKeys.select` makes the tiles to compute from a selection, or made them. `table` may have blocks of 64.
        device_tables: The tiles to compute, on the device (`SelectsKeys`); `table` is then an estimate of their number.
    """

    table: BlockTable
    q_tiles: Tiling
    kv_tiles: Tiling
    scale: float
    mask: Program | None = None
    mask_captured: Sequence[Tensor] = ()
    score: Program | None = None
    score_captured: Sequence[Tensor] = ()
    joint: Joint | None = None
    first_batch: int = 0
    first_head: int = 0
    mask_is_fixed: bool = False
    mask_is_checked: bool = False
    complete_q_tiles: Tensor | None = None
    concurrent: bool = False
    invariant: bool = False
    selects: bool = False
    device_tables: DeviceTables | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionInputs:
    """q, k, v of one kernel call.

    Attributes:
        local_kv: (k, v) of the first rows of `Work.kv_tiles`, where they are stored apart from the rest: `k` and `v` then hold the
            remaining rows, and no tile has rows in both buffers. Only for kernels with `Capabilities.two_kv_buffers`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    local_kv: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardInputs:
    """The tensors of one backward call.

    Attributes:
        inputs: q, k, v of the forward pass.
        out, lse: Its final results over the tiles of all steps.
        grad_out, grad_lse: Their gradients, of their dtypes; grad_lse is None where lse was not used.
        needs: Whether each of `Work.score_captured` needs a gradient.
        delta: `Kernel.delta` of these tensors, if it was computed before; grad_lse is part of it and must not be subtracted again.
        norm: `ComputesNorm.norm` of lse, if it was computed before.
        side: The gradients to compute where `Work.invariant`: of q (and captured tensors), of k and v, or all. Others are undefined.
    """

    inputs: AttentionInputs
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None = None
    needs: Sequence[bool] = ()
    delta: Tensor | None = None
    norm: Tensor | None = None
    side: Literal["q", "kv", "all"] = "all"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of a kernel for given inputs and work.

    Attributes:
        unsupported: Why the kernel does not support this work, forward and backward; None if it does. `kernel="auto"` then tries the next.
        two_kv_buffers: KV may be in two buffers (`AttentionInputs.local_kv`), in forward passes and in backward passes with `into`.
        concurrent_backward: Backward calls over different KV may run concurrently and add to the same `into.q`.
        rounds_kv_grads_once: `backward` writes the gradients of k and v once, when complete, so `into` may hold them in a narrow dtype.
    """

    unsupported: str | None = None
    two_kv_buffers: bool = False
    concurrent_backward: bool = False
    rounds_kv_grads_once: bool = False


@dataclass(kw_only=True, eq=False)
class State:
    """A running result over the KV of the steps so far. `out` is normalised. Rows that saw no KV: out 0, lse −inf.

    Attributes:
        out: In float32 (float64 for float64 inputs) between steps, in the dtype of q after the last.
        lse: Natural log, float32 (float64).
        max_scores: Largest score of each row [B, H, Q], if asked for.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor | None = None

    def rows(self, start: int, stop: int) -> State:
        """Views of some rows."""
        max_scores = None if self.max_scores is None else self.max_scores[..., start:stop]
        return State(out=self.out[..., start:stop, :], lse=self.lse[..., start:stop], max_scores=max_scores)

    @property
    def layout(self) -> Hashable:
        """Properties on which a prepared step depends besides shapes: dtypes, strides, and whether addresses are divisible by 16."""
        out, lse = self.out, self.lse
        return out.dtype, out.stride(), lse.stride(), (out.data_ptr() | lse.data_ptr()) & 15


@dataclass(kw_only=True, eq=False)
class Grads:
    """Gradients. `captured[i]`: None if score_captured[i] needs none, else float32 or float64, of its shape."""

    q: Tensor
    k: Tensor
    v: Tensor
    captured: list[Tensor | None]


class Kernel(Protocol):
    """One implementation. Stateless; one instance per name, in `longspan._kernels.registry`."""

    @property
    def name(self) -> str: ...

    def capabilities(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> Capabilities:
        """Capabilities for a call. `needs`: see `BackwardInputs`.

        Of `inputs`, only batch, heads, head dims, dtype and device may be read. Over a mesh, k and v stand for KV that has not arrived:
        numbers of tokens come from `work`, and strides are not known.
        """

    def block_size(self, inputs: AttentionInputs, table: BlockTable) -> tuple[int, int]:
        """Tile size (queries, KV) that the kernel prefers for a mask, given the mask's table in tiles of 128. Equal on all ranks."""

    def check(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> None:
        """Raise the errors of a call before it starts: lookups out of bounds, and, with `needs`, gradients that have no fixed order.

        Over a mesh, all ranks check before any data is sent: an error inside `forward` on one rank would leave the others waiting.
        """

    def forward(self, inputs: AttentionInputs, work: Work, *, state: State | None, final: bool, max_scores: bool) -> State:
        """Attention over `work`'s tiles, merged with `state`.

        NaN and inf in tokens that a row cannot see must not reach the row.

        `state` is consumed: its tensors may be overwritten, and may be part of the result. `final`: out is in the dtype of q and its dims
        are ordered in memory as those of q (`like_query`). `max_scores`: also each row's largest score.
        """

    def backward(self, tensors: BackwardInputs, work: Work, *, wide: bool, into: Grads | None = None) -> Grads:
        """Gradients of `work`'s tiles; 0 for rows whose lse is −inf.

        `wide`: gradients of q, k, v in the dtype of lse, to be summed over steps; otherwise in the dtypes of q, k, v. `into` (with `wide`
        only): the gradients of q and of captured tensors are added to `into`; those of k and v overwrite it. Its tensors may be strided
        views with a contiguous last dim. Returns `into`.
        """

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        """Σ out · grad_out − grad_lse [B, H, Q], in the dtype of lse: the term that every score gradient of a row subtracts."""


class PreparedRowTerms(Protocol):
    """`ComputesNorm.row_terms` of a call that repeats."""

    def __call__(self, q: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(zeros [B, H, Q, D] for the gradient of q, delta, norm)."""


@runtime_checkable
class ComputesNorm(Protocol):
    """A kernel whose backward passes read another form of lse, which is computed once for all steps."""

    def norm(self, lse: Tensor) -> Tensor:
        """`BackwardInputs.norm` of lse [B, H, Q], of its shape and dtype."""

    def row_terms(self, tensors: BackwardInputs, zeroed: Tensor) -> tuple[Tensor, Tensor]:
        """(`Kernel.delta`, norm) of out, lse and their gradients, in one launch that also sets `zeroed` to 0.

        zeroed: Contiguous float32 [B, H, Q, D].
        """

    def prepare_row_terms(self, tensors: BackwardInputs, zeroed: Tensor) -> PreparedRowTerms | None:
        """`row_terms` for tensors of these layouts; None if it cannot be prepared. The rules are those of `PreparesCalls`.

        tensors: With the delta and norm that `row_terms` returned.
        """


@runtime_checkable
class SelectsKeys(Protocol):
    """A kernel that computes selections from their indices on the device, without host work."""

    def selection_block(
        self, inputs: AttentionInputs, selection: Selection, *, captured_grads: bool, by_head: bool
    ) -> tuple[int, int] | None:  # fmt: skip
        """Tile size (queries, KV) of the table that `select` reads; None if the kernel does not support this selection.

        captured_grads: Tensors that the score program captures need gradients.
        by_head: The rest of the mask differs between heads.
        """

    def select(self, inputs: AttentionInputs, work: Work, selection: Selection) -> Work:
        """`work` over the chosen keys only. The table and the mask of `work` are those of the mask besides the selection."""

    def list_tiles(self, inputs: AttentionInputs, work: Work, kinds: Tensor) -> Work | None:
        """`work` over tiles by their kinds on the device, [batch, heads, q_tiles, kv_tiles] int8; None if the block is not supported.

        The table of `work` is empty and has the sizes and the block of the tiles.
        """


class PreparedForward(Protocol):
    """The forward pass of a call that repeats: one step, no state, no max scores."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, score_captured: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(out, lse) as of `Kernel.forward` with final=True."""


class PreparedBackward(Protocol):
    """The backward pass of a call that repeats: one step, no grad_lse, no delta."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, score_captured: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor | None]]:  # fmt: skip
        """Gradients of q, k, v and the captured tensors, as of `Kernel.backward` with wide=False; of q, k and v contiguous."""


@runtime_checkable
class PreparesCalls(Protocol):
    """A kernel with prepared passes for repeated calls.

    A prepared pass launches the same kernels as `forward` or `backward`, without checks and without the choice of tiles. Its tensors must
    have the dtypes, devices, shapes, strides and 16-byte alignment of the tensors given here. It must not run in a CUDA graph capture, nor
    under another setting of deterministic algorithms. The methods launch nothing; they return None for calls that cannot be prepared.
    """

    def prepare_forward(self, inputs: AttentionInputs, work: Work) -> PreparedForward | None: ...

    def prepare_backward(self, tensors: BackwardInputs, work: Work) -> PreparedBackward | None: ...


class KVAddresses(NamedTuple):
    """Addresses of a step's k and v. `local_k`, `local_v`: addresses of `AttentionInputs.local_kv`, 0 if it is None."""

    k: int
    v: int
    local_k: int = 0
    local_v: int = 0


class GradTargets(NamedTuple):
    """Where a backward step writes its gradients: `Grads` with gradients of k and v by address. `views`: makes the `Grads`."""

    q: Tensor
    captured: list[Tensor | None]
    k: int
    v: int
    views: Callable[[], Grads]


class PreparedForwardStep(Protocol):
    """One forward step of a sharded call that repeats."""

    def __call__(self, q: Tensor, kv: KVAddresses, state: State | None, score_captured: Sequence[Tensor]) -> State:
        """As `Kernel.forward` of the work and with the value of `final` that the step was prepared for."""


class PreparedBackwardStep(Protocol):
    """One backward step of a sharded call that repeats."""

    def __call__(self, tensors: BackwardInputs, kv: KVAddresses, into: GradTargets, score_captured: Sequence[Tensor]) -> None:
        """As `Kernel.backward` with `into`, of the work that the step was prepared for. Of `tensors.inputs`, only q is read."""


@runtime_checkable
class PreparesSteps(Protocol):
    """A kernel with prepared steps of sharded calls that repeat. The rules are those of `PreparesCalls`.

    A step is prepared after it was run: `result` is what `forward` returned for these inputs. Max scores are not supported. A prepared
    step takes KV by address: views of buffers take longer to make than the launch.
    """

    def prepare_forward_step(
        self, inputs: AttentionInputs, work: Work, *, state: State | None, result: State, final: bool
    ) -> PreparedForwardStep | None: ...  # fmt: skip

    def prepare_backward_step(self, tensors: BackwardInputs, work: Work, *, into: Grads) -> PreparedBackwardStep | None: ...


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores, sums and running results for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def plain_delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """`Kernel.delta` in torch operations."""
    delta = (out * grad_out.to(state_dtype(out.dtype))).sum(-1)
    return delta if grad_lse is None else delta - grad_lse


def like_query(q: Tensor, last: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor of q's shape except for the last dim, with its dims ordered in memory as q's."""
    shape = (*q.shape[:-1], last)
    order: list[int] = []  # outermost dim first; an insertion sort, since compilers cannot sort symbolic strides
    for dim in range(q.ndim):
        place = len(order)
        while place > 0 and q.stride(order[place - 1]) < q.stride(dim) and q.stride(order[place - 1]) > 0:
            place -= 1
        order.insert(place, dim)
    strides, step = [0] * q.ndim, 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim]
    return torch.empty_strided(shape, strides, dtype=dtype, device=q.device)
