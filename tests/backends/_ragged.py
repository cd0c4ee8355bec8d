"""Ragged views for tests: random lengths and gaps, with NaN in every slot that no owner names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_kvpolicy.storage import RaggedView


def ragged_view(
    lengths: Sequence[int],
    heads: int,
    *,
    gaps: Sequence[int] | None = None,
    key_dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    tail_rows: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> RaggedView:
    """Owners in order, `gaps[o]` dead slots before each and one behind the last."""
    generator = torch.Generator().manual_seed(seed)
    gaps = [1] * len(lengths) if gaps is None else gaps
    starts, slot = [], 0
    for gap, rows in zip(gaps, lengths, strict=True):
        starts.append(slot + gap)
        slot += gap + rows
    keys = torch.full((slot + 1, key_dim), float("nan"), dtype=dtype)
    values = torch.full((slot + 1, value_dim or key_dim), float("nan"), dtype=dtype)
    for start, rows in zip(starts, lengths, strict=True):
        for flat in (keys, values):
            flat[start : start + rows] = torch.randn(rows, flat.shape[1], generator=generator)
    return RaggedView(
        keys_ND=keys.to(device),
        values_ND=values.to(device),
        heads=heads,
        starts=tuple(starts),
        lengths=tuple(lengths),
        tail_rows=tail_rows,
    )


def ragged_query(view: RaggedView, group: int, tokens: int, seed: int = 1) -> Tensor:
    """Queries as a model hands them over: [B, Q, T, D], transposed from [B, T, Q, D]."""
    shape = (view.batch, tokens, view.heads * group, view.keys_ND.shape[1])
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(view.keys_ND.dtype).transpose(1, 2)


def ragged_masks(view: RaggedView, tokens: int, seed: int = 2) -> list[Tensor]:
    """Random masks under which every query of an owner with rows sees at least its first row."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.rand(tokens, rows, generator=generator) > 0.4 for rows in view.lengths]
    for mask in masks:
        mask[:, :1] = True
    return masks


def written_out(query: Tensor, view: RaggedView, masks: Sequence[Tensor | None] | None, scaling: float) -> Tensor:
    """Attention one query, one head, one row at a time in fp64; [B, T, Q, D]."""
    batch, heads, tokens, _ = query.shape
    group = heads // view.heads
    output = torch.zeros(batch, tokens, heads, view.values_ND.shape[1], dtype=torch.float64)
    for b in range(batch):
        for q in range(heads):
            owner = b * view.heads + q // group
            start, rows = view.starts[owner], view.lengths[owner]
            for t in range(tokens):
                mask = None if masks is None else masks[owner]
                seen = [n for n in range(rows) if mask is None or mask[t, n]]
                if not seen:
                    continue
                slots = [start + n for n in seen]
                logits = (view.keys_ND[slots].double() * query[b, q, t].double()).sum(-1) * scaling
                weights = (logits - logits.max()).exp()
                output[b, t, q] = (weights[:, None] * view.values_ND[slots].double()).sum(0) / weights.sum()
    return output
