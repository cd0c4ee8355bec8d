"""Logits of every query over the rows it sees: one decode query with its output, or a prompt in blocks.

Memory of a prompt's evidence does not grow with the square of its length: a block of queries is sized so that its
logits and weights stay within a fixed workspace. Where a prompt's output may be computed here, one softmax serves both.

Letters: B batch rows, Q query heads, S stored heads, G query heads of one, T queries, N rows, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..evidence import CarriedEvidence, QueryBlock, mask_logits_
from ..storage import RowMap
from ..weighting import PLAIN, Weighting

if TYPE_CHECKING:
    from .visibility import Visibility

__all__ = [
    "WORKSPACE_BYTES",
    "SegmentQueries",
    "attend_queries",
    "attend_with_logits",
    "block_queries",
    "layers_at_once",
    "observe_queries",
    "query_clock",
    "sinks_of",
    "workspace_bytes",
]

# Transient of scoring one layer, and what one logit of it costs: logit, weight and a temporary, fp32.
WORKSPACE_BYTES = 64 << 20
_COPIES_BYTES = 12
# Blocks whose output is wanted are at most this share of the segment (but not tiny): what they compute above the
# diagonal is thrown away.
_LARGEST_SHARE, _SMALLEST_QUERIES = 16, 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentQueries:
    """The queries of one layer's segment and the rows they may see; the newest rows are their own, in order."""

    layer: int
    queries_BQTD: Tensor
    columns_BT: Tensor
    query_tokens_BT: Tensor
    # Which queries are real tokens; None when all are.
    real_BT: Tensor | None
    clock_BT: Tensor
    keys_BSND: Tensor
    view: RowMap
    visibility: Visibility
    scaling: float
    weighting: Weighting = PLAIN

    def blocks(self, first: int, end: int, width: int) -> Iterator[tuple[slice, int, QueryBlock]]:
        """Yield the queries from `first` to `end`, `width` at a time: (which, rows that any of them sees, block)."""
        total, device = self.queries_BQTD.shape[2], self.keys_BSND.device
        for start in range(first, end, width):
            part = slice(start, min(end, start + width))
            mask, seen = self.visibility.for_block(self.view, self.columns_BT[:, part], start, total)
            queries, keys = self.queries_BQTD[:, :, part], self.keys_BSND[:, :, :seen]
            logits = grouped_logits(queries, keys, mask, self.scaling, weighting=self.weighting)
            # A bias is as large as the logits, and would lie beside their weights.
            del mask
            yield (
                part,
                seen,
                QueryBlock(
                    layer=self.layer,
                    logits_BSGTN=logits,
                    query_tokens_BT=self.query_tokens_BT[:, part].to(device),
                    row_tokens_BMN=self.view.tokens_BMW[:, :, :seen].to(device),
                    real_BT=None if self.real_BT is None else self.real_BT[:, part].to(device),
                    clock_BT=self.clock_BT[:, part].to(device),
                    dtype=self.keys_BSND.dtype,
                    sinks_BSG=sinks_of(self.weighting, self.keys_BSND.shape[1]),
                ),
            )


def attend_with_logits(
    query_BQ1D: Tensor,
    keys_BSND: Tensor,
    values_BSND: Tensor,
    mask_BMTN: Tensor | None,
    scaling: float,
    weighting: Weighting = PLAIN,
    *,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with one decode query; return (output [B, 1, Q, D], logits and attention [B, S, G, 1, N] in fp32).

    The output has the model's precision: in fp64 the softmax is taken in fp64, in half precision in fp32. Dropout is of
    its weights alone.
    """
    wide = torch.promote_types(query_BQ1D.dtype, torch.float32)
    logits = grouped_logits(query_BQ1D, keys_BSND, mask_BMTN, scaling, dtype=wide, weighting=weighting)
    attention = weighting.weights(logits)
    if mask_BMTN is not None:
        # A query that sees nothing gets zeros: what is no number would reach other queries through its row.
        attention = attention.masked_fill(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)
    batch, stored, size, _, rows = logits.shape
    weights = torch.nn.functional.dropout(attention, dropout) if dropout else attention
    weights = weights.view(batch * stored, size, rows).to(values_BSND.dtype)
    output = torch.bmm(weights, values_BSND.flatten(0, 1)).view(batch, 1, stored * size, -1)
    return output, logits.float(), attention.float()


def grouped_logits(
    query_BQTD: Tensor,
    keys_BSND: Tensor,
    mask_BMTN: Tensor | None,
    scaling: float,
    *,
    dtype: torch.dtype = torch.float32,
    weighting: Weighting = PLAIN,
) -> Tensor:
    """Return scaled, capped logits [B, S, G, T, N], -inf where a query does not see a row; masked by `mask_logits_`."""
    batch, heads, tokens, dim = query_BQTD.shape
    stored, rows = keys_BSND.shape[1], keys_BSND.shape[2]
    folded = query_BQTD.reshape(batch * stored, heads // stored * tokens, dim).to(dtype) * scaling
    # One plain product: a general one makes more calls, and those are what a decode step of a small model waits for.
    logits = weighting.cap_(torch.bmm(folded, keys_BSND.to(dtype).flatten(0, 1).transpose(1, 2)))
    logits = logits.view(batch, stored, heads // stored, tokens, rows)
    if mask_BMTN is not None:
        mask_logits_(logits, mask_BMTN)
    return logits


def sinks_of(weighting: Weighting, stored: int) -> Tensor | None:
    """Return a layer's sinks as a block of queries has them, fp32 [1, S, G]."""
    return None if weighting.sinks_Q is None else weighting.sinks_Q.float().view(1, stored, -1)


def block_queries(batch: int, query_heads: int, rows: int) -> int:
    """Return how many queries fit into the workspace at once."""
    return max(1, WORKSPACE_BYTES // (_COPIES_BYTES * batch * query_heads * rows))


def layers_at_once(logits_BSGTN: Tensor) -> int:
    """Return in how many layers one decode token's logits may be taken into the workspace at once."""
    return max(1, WORKSPACE_BYTES // (_COPIES_BYTES * logits_BSGTN.numel()))


def workspace_bytes(evidence: CarriedEvidence, query_BQTD: Tensor, rows: int) -> int:
    """Return the bytes alive at once while a segment's queries are observed."""
    batch, heads, tokens, _ = query_BQTD.shape
    queries = min(tokens, evidence.last_queries or tokens, block_queries(batch, heads, rows))
    return _COPIES_BYTES * batch * heads * rows * queries


def query_clock(query_tokens_BT: Tensor, segment_tokens: tuple[int, ...], is_prompt: bool) -> Tensor:
    """Return decode tokens accepted since the last prompt segment, counted with each query; zeros in a prompt."""
    if is_prompt or not segment_tokens:
        return torch.zeros_like(query_tokens_BT)
    start = torch.tensor(segment_tokens, device=query_tokens_BT.device)[:, None]
    return (query_tokens_BT - start + 1).clamp(min=0)


def observe_queries(
    evidence: CarriedEvidence,
    group: str,
    state_BSNX: Tensor,
    queries: SegmentQueries,
    *,
    stop: int | None = None,
    keep_all: bool = False,
) -> None:
    """Add the queries of a segment (up to `stop`) to the states of the rows they see, in place and in blocks."""
    batch, heads, total, _ = queries.queries_BQTD.shape
    end = total if stop is None else stop
    width = block_queries(batch, heads, queries.keys_BSND.shape[2])
    first, last = 0, evidence.last_queries
    if last is not None:
        # A block may not reach around the history; what lies before it is read only where the end may be taken back.
        first, width = 0 if keep_all else max(0, end - last), min(width, last)
    for _, seen, block in queries.blocks(first, end, width):
        evidence.observe_(state_BSNX[:, :, :seen], block, group)


def attend_queries(
    evidence: CarriedEvidence, group: str, state_BSNX: Tensor, queries: SegmentQueries, values_BSND: Tensor
) -> Tensor:
    """Do what `observe_queries` does with every query, and return their output [B, T, Q, D] from the same softmax."""
    batch, heads, total, _ = queries.queries_BQTD.shape
    width = block_queries(batch, heads, queries.keys_BSND.shape[2])
    width = min(width, max(_SMALLEST_QUERIES, total // _LARGEST_SHARE))
    output = values_BSND.new_empty((batch, total, heads, values_BSND.shape[3]))
    for part, seen, block in queries.blocks(0, total, width):
        weights = block.attention_BSGTN.flatten(2, 3)
        attended = torch.matmul(weights, values_BSND[:, :, :seen])
        output[:, part] = attended.view(batch, heads, -1, values_BSND.shape[3]).transpose(1, 2)
        evidence.observe_(state_BSNX[:, :, :seen], block, group)
    return output
