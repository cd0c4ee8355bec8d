"""Where the rows of a needle prompt went: how many of the needle's are held, and where in the prompt the others lie.

Letters: L layers, H KV heads, N rows of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PARTS = 10


@dataclass(frozen=True)
class Needle:
    """Token positions of the needle sentence and, in it, of the value that is asked for: [begin, end)."""

    sentence: tuple[int, int]
    value: tuple[int, int]


def find_needle(tokenizer: Any, text: str, value: str) -> Needle:
    """Locate the value's first occurrence, and the sentence around it, in tokens."""
    begin = text.index(value)
    start = max(text.rfind(". ", 0, begin) + 2, text.rfind("\n", 0, begin) + 1)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]

    def tokens(first: int, last: int) -> tuple[int, int]:
        inside = [i for i, (left, right) in enumerate(offsets) if right > first and left < last]
        return inside[0], inside[-1] + 1

    return Needle(sentence=tokens(start, begin + len(value) + 1), value=tokens(begin, begin + len(value)))


def kept_mask(rows_LH: Sequence[Sequence[Tensor]], tokens: int) -> Tensor:
    """Which prompt positions each layer and head holds, bool [L, H, N]; later positions are left out."""
    mask_LHN = torch.zeros(len(rows_LH), len(rows_LH[0]), tokens, dtype=torch.bool)
    for layer, heads in enumerate(rows_LH):
        for head, rows in enumerate(heads):
            mask_LHN[layer, head, rows[rows < tokens]] = True
    return mask_LHN


def agreement(ours_LHN: Tensor, theirs_LHN: Tensor) -> tuple[float, float]:
    """Share of rows that both keep, over all heads and in the worst head."""
    share_LH = (ours_LHN & theirs_LHN).sum(2) / theirs_LHN.sum(2)
    return float(share_LH.mean()), float(share_LH.min())


def needle_rows(mask_LHN: Tensor, needle: Needle, attention_LHN: Tensor) -> dict[str, Any]:
    """Shares of the needle that are held.

    `attention_LHN` is what the answer's queries pay to each row under the full cache: of two heads that hold half of
    the value each, the one that reads it counts.
    """
    value = slice(*needle.value)
    paid_LHN = attention_LHN[..., value]
    return {
        "sentence_rows": float(mask_LHN[..., slice(*needle.sentence)].float().mean()),
        "value_rows": float(mask_LHN[..., value].float().mean()),
        "heads_with_whole_value": float(mask_LHN[..., value].all(2).float().mean()),
        "value_attention": float((paid_LHN * mask_LHN[..., value]).sum() / paid_LHN.sum()),
        "value_rows_by_layer": mask_LHN[..., value].float().mean((1, 2)).tolist(),
    }


def budget_parts(mask_LHN: Tensor) -> list[float]:
    """Which share of the kept rows lies in each tenth of the prompt, over all layers and heads."""
    held_N = mask_LHN.float().sum((0, 1))
    return [float(part.sum() / held_N.sum()) for part in held_N.tensor_split(PARTS)]


def percentile(scores_HN: Tensor, needle: Needle) -> float:
    """Mean share of rows that score lower than the value's rows, over heads; 0.5 is no better than any row."""
    value_HV = scores_HN[:, slice(*needle.value)]
    return float((scores_HN[:, None, :] < value_HV[:, :, None]).float().mean())
