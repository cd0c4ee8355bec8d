"""Logits of every query over the rows it sees: one decode query with its output, or a prompt in blocks.

Memory of a prompt's evidence does not grow with the square of its length: a block of queries is sized so that its
logits and weights stay within a fixed workspace.

Letters: B batch rows, Q query heads, S stored heads, G query heads of one, T queries, N rows, D head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..evidence import CarriedEvidence, QueryBlock
from ..storage import RowMap

if TYPE_CHECKING:
    from .visibility import Visibility

__all__ = [
    "WORKSPACE_BYTES",
    "attend_with_logits",
    "block_queries",
    "observe_queries",
    "query_clock",
    "workspace_bytes",
]

# Transient of scoring one layer, and what one logit of it costs: logit, weight and a temporary, fp32.
WORKSPACE_BYTES = 64 << 20
_COPIES_BYTES = 12


def attend_with_logits(
    query_BQ1D: Tensor, keys_BSND: Tensor, values_BSND: Tensor, mask_BMTN: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with one decode query; return (output [B, 1, Q, D], logits and attention [B, S, G, 1, N] in fp32)."""
    logits = grouped_logits(query_BQ1D, keys_BSND, mask_BMTN, scaling)
    attention = torch.softmax(logits, dim=-1)
    batch, stored, size, _, rows = logits.shape
    weights = attention.view(batch, stored, size, rows).to(values_BSND.dtype)
    output = torch.matmul(weights, values_BSND).reshape(batch, 1, stored * size, -1)
    return output, logits, attention


def grouped_logits(query_BQTD: Tensor, keys_BSND: Tensor, mask_BMTN: Tensor | None, scaling: float) -> Tensor:
    """Return scaled logits [B, S, G, T, N] fp32, -inf where a query does not see a row."""
    batch, heads, tokens, dim = query_BQTD.shape
    stored, rows = keys_BSND.shape[1], keys_BSND.shape[2]
    folded = query_BQTD.reshape(batch, stored, heads // stored * tokens, dim).float()
    logits = torch.matmul(folded, keys_BSND.float().transpose(2, 3)).mul_(scaling)
    logits = logits.view(batch, stored, heads // stored, tokens, rows)
    if mask_BMTN is not None:
        logits.masked_fill_(~mask_BMTN.unsqueeze(2), float("-inf"))
    return logits


def block_queries(batch: int, query_heads: int, rows: int) -> int:
    """Return how many queries fit into the workspace at once."""
    return max(1, WORKSPACE_BYTES // (_COPIES_BYTES * batch * query_heads * rows))


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
    *,
    layer: int,
    queries_BQTD: Tensor,
    columns_BT: Tensor,
    query_tokens_BT: Tensor,
    real_BT: Tensor | None,
    clock_BT: Tensor,
    keys_BSND: Tensor,
    view: RowMap,
    visibility: Visibility,
    scaling: float,
    stop: int | None = None,
    keep_all: bool = False,
) -> None:
    """Add the queries of a segment (up to `stop`) to the states of the rows they see, in place and in blocks."""
    total, rows = queries_BQTD.shape[2], keys_BSND.shape[2]
    end = total if stop is None else stop
    width = block_queries(queries_BQTD.shape[0], queries_BQTD.shape[1], rows)
    first, last = 0, evidence.last_queries
    if last is not None:
        # A block may not reach around the history; what lies before it is read only where the end may be taken back.
        first, width = 0 if keep_all else max(0, end - last), min(width, last)
    for start in range(first, end, width):
        part = slice(start, min(end, start + width))
        mask, seen_rows = visibility.for_block(view, columns_BT[:, part], start, total)
        tokens = view.tokens_BMW[:, :, :seen_rows]
        block = QueryBlock(
            layer=layer,
            logits_BSGTN=grouped_logits(queries_BQTD[:, :, part], keys_BSND[:, :, :seen_rows], mask, scaling),
            query_tokens_BT=query_tokens_BT[:, part],
            row_tokens_BMN=tokens,
            real_BT=None if real_BT is None else real_BT[:, part],
            clock_BT=clock_BT[:, part],
            dtype=keys_BSND.dtype,
        )
        evidence.observe_(state_BSNX[:, :, :seen_rows], block, group)
