"""One decode query over ragged rows whose attention is kept: output and evidence share one softmax.

Letters: B batch rows, S stored heads, O owners (b * S + s), Q query heads, G query heads of one owner, R owners of one
run (of one length), n rows of one owner, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...evidence import mask_logits_
from ...ragged_attention import buckets, shows
from ...storage import RaggedView
from ...weighting import PLAIN, Weighting

__all__ = ["attend_one"]


def attend_one(
    query_BQ1D: Tensor,
    view: RaggedView,
    masks: Sequence[Tensor | None] | None,
    scaling: float,
    weighting: Weighting = PLAIN,
    *,
    dropout: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    """Return the output [B, 1, Q, D], and attention in fp32 in parts [R, G, n] that follow owners.

    Where the query sees every row, one call serves owners that one strided view shows.

    Args:
        masks: per owner, in slot order, a bool [1, n] or a bias [G, 1, n] in fp32 (-inf where hidden), or None where
            the query sees every row. A query that sees nothing gets zeros.
        dropout: of the output's weights, as in training; what is kept as evidence has none.
    """
    batch, heads, _, dim = query_BQ1D.shape
    owners = len(view.starts)
    # Scaled for all at once; the softmax is taken in fp32 at least.
    wide = torch.promote_types(query_BQ1D.dtype, torch.float32)
    queries_OGD = query_BQ1D.reshape(owners, -1, dim).to(wide) * scaling
    runs = buckets(view) if masks is None else [[owner] for owner in range(owners)]
    in_order = all(run[-1] - run[0] == len(run) - 1 for run in runs)
    outputs, parts = [], []
    for run in runs:
        queries_RGD = queries_OGD[run[0] : run[-1] + 1] if in_order else queries_OGD[run]
        mask = None if masks is None else masks[run[0]]
        output, attention = _attend_run(queries_RGD, view, run, mask, weighting, dropout)
        outputs.append(output)
        parts.append(attention)
    if not in_order:
        order = [owner for run in runs for owner in run]
        place = sorted(range(owners), key=order.__getitem__)
        outputs, parts = ([piece for part in of_runs for piece in torch.split(part, 1)] for of_runs in (outputs, parts))
        outputs, parts = [outputs[i] for i in place], [parts[i] for i in place]
    output_OGD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output_OGD.to(query_BQ1D.dtype).view(batch, 1, heads, -1), parts


def _attend_run(
    queries_RGD: Tensor,
    view: RaggedView,
    run: Sequence[int],
    mask: Tensor | None,
    weighting: Weighting,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return output [R, G, D] and attention [R, G, n] of scaled queries over the rows of owners of one length."""
    keys_RnD, values_RnD = view.together(run)
    owners, group, _ = queries_RGD.shape
    logits_RGn = weighting.cap_(torch.bmm(queries_RGD, keys_RnD.to(queries_RGD.dtype).transpose(1, 2)))
    shown = None
    if mask is not None:
        # [1, 1, 1, n], or [1, G, 1, n] of a bias.
        shown = mask.to(logits_RGn.device).view(1, mask.shape[0], 1, -1)
        mask_logits_(logits_RGn.view(1, owners, group, 1, -1), shown)
    logits_1Q1n = logits_RGn.view(1, owners * group, 1, -1)
    attention_RGn = weighting.of_owners(run, view.heads).weights(logits_1Q1n).view(owners, group, -1)
    weights_RGn = torch.nn.functional.dropout(attention_RGn, dropout) if dropout else attention_RGn
    output_RGD = torch.bmm(weights_RGn.to(values_RnD.dtype), values_RnD)
    if shown is not None:
        output_RGD = output_RGD.masked_fill(~shows(shown).any(), 0.0)
    return output_RGD, attention_RGn.float()
