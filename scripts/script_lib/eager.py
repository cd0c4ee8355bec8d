"""Evidence of the scored policies from eager attention, and the rows it asks them to keep.

Written from the methods, without the library's own evidence or selection: an eager model hands out every layer's
attention, and each rule is a few lines over it. Only Keyformer's noise, a hash, is the library's.

Letters: H KV heads, Q query heads, T queries, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_kvpolicy.evidence import gumbel_noise

# The defaults of the policies, as their papers' constants.
H2O_RECENT, KEYFORMER_RECENT = 0.5, 0.3
HISTORY, SCISSORHANDS_RECENT = 400, 10
WINDOW, KERNEL = 32, 7
# Queries whose noise is held at once.
_NOISE_QUERIES = 128


@dataclass(frozen=True)
class LayerScores:
    """What each rule reads of every prompt row in one layer, [H, N]; votes are of the rows before the window."""

    column_sums_HN: Tensor
    gumbel_sums_HN: Tensor
    low_counts_HN: Tensor
    votes_HN: Tensor


@contextmanager
def attention_of_layers(model: Any, receive: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `receive(layer, attention [Q, T, N])` in every forward; one layer's attention lives at a time."""

    def hook_of(layer: int) -> Callable[..., None]:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            receive(layer, output[1][0].float())

        return hook

    handles = [block.self_attn.register_forward_hook(hook_of(i)) for i, block in enumerate(model.model.layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layer_scores(attention_QTN: Tensor, layer: int, kv_heads: int) -> LayerScores:
    """Score the rows of a prompt from its causal attention."""
    tokens = attention_QTN.shape[1]
    mean_HTN = attention_QTN.unflatten(0, (kv_heads, -1)).mean(1)
    places_N = torch.arange(tokens)
    # A query at position t sees t + 1 rows.
    low_HTN = (mean_HTN < 1.0 / (places_N + 1)[:, None]) & (places_N <= places_N[:, None])
    return LayerScores(
        column_sums_HN=attention_QTN.sum(1).unflatten(0, (kv_heads, -1)).sum(1),
        gumbel_sums_HN=_gumbel_sums(attention_QTN, layer).unflatten(0, (kv_heads, -1)).sum(1),
        low_counts_HN=low_HTN[:, -HISTORY:].sum(1),
        votes_HN=mean_HTN[:, -WINDOW:, :-WINDOW].sum(1),
    )


def kept_rows(policy: str, scores: LayerScores, budget: int) -> Tensor:
    """The rows each KV head keeps right after the prompt, ascending, [H, budget].

    "h2o by mean" is h2o with each sum divided by the queries that saw the row, so that age is no advantage.
    """
    heads, tokens = scores.column_sums_HN.shape
    if policy == "sliding_window":
        return _newest_and_best(scores.column_sums_HN, budget, budget)
    if policy == "h2o":
        return _newest_and_best(scores.column_sums_HN, int(H2O_RECENT * budget), budget)
    if policy == "h2o by mean":
        return _newest_and_best(scores.column_sums_HN / torch.arange(tokens, 0, -1), int(H2O_RECENT * budget), budget)
    if policy == "keyformer":
        return _newest_and_best(scores.gumbel_sums_HN, int(KEYFORMER_RECENT * budget), budget)
    if policy == "scissorhands":
        # Of equal counts the lower position goes first; counts are whole numbers, so this orders them only.
        later_wins = torch.arange(tokens) / tokens
        return _newest_and_best(later_wins - scores.low_counts_HN, SCISSORHANDS_RECENT, budget)
    votes_HN = scores.votes_HN if policy == "snapkv" else scores.votes_HN.mean(0, keepdim=True)
    pooled_HN = functional.max_pool1d(votes_HN, KERNEL, 1, KERNEL // 2)
    return _newest_and_best(functional.pad(pooled_HN, (0, WINDOW)), WINDOW, budget).expand(heads, -1)


def _newest_and_best(scores_HN: Tensor, newest: int, budget: int) -> Tensor:
    """The newest rows and, of the others, those with the highest scores; ties keep the lower position."""
    heads, tokens = scores_HN.shape
    order_HN = scores_HN[:, : tokens - newest].sort(dim=1, descending=True, stable=True).indices
    newest_HN = torch.arange(tokens - newest, tokens).expand(heads, -1)
    return torch.cat([order_HN[:, : budget - newest], newest_HN], dim=1).sort(dim=1).values


def _gumbel_sums(attention_QTN: Tensor, layer: int) -> Tensor:
    """Sums of softmax(logits + noise) at temperature 1; a query's log attention is its logits but for a constant."""
    query_heads, tokens, _ = attention_QTN.shape
    rows = torch.arange(tokens)
    sums_QN = attention_QTN.new_zeros(query_heads, tokens)
    for block in rows.split(_NOISE_QUERIES):
        noise_QTN = gumbel_noise(0, layer, query_heads, block[None], rows[None, None])[0]
        sums_QN += torch.softmax(attention_QTN[:, block].log() + noise_QTN, dim=-1).sum(1)
    return sums_QN
