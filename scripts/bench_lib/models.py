"""The model under a policy and its stock twin, and one forward of either."""

from __future__ import annotations

import copy
from typing import Any

import torch
from script_lib.loading import synchronize
from transformers import DynamicCache

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument

DENSE = ("streaming_llm", "sliding_window", "snapkv", "random", "h2o", "scissorhands", "keyformer")
# Their rows are stored ragged; they are compared with snapkv, which holds as many rows in a rectangle.
RAGGED = ("pyramidkv", "zigzagkv", "adakv", "headkv")
POLICIES = (*DENSE, *RAGGED)
# Policies whose rows depend on the prompt and not on a budget: decode is compared with snapkv at the rows they took.
UNBUDGETED = ("fastgen",)
# Policies that drop tokens while a prompt runs; they are timed on prompts only, with the schedule they have by default.
PRUNING_POLICIES = ("pyramidinfer",)
EVERY_POLICY = (*POLICIES, *UNBUDGETED, *PRUNING_POLICIES)


def stock_twin(model: Any) -> Any:
    """A second model on the same weights with its own config: transformers with nothing attached."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def new_cache(policy: str | None, model: Any, budget: int) -> Any:
    """A policy's cache, or transformers' own for None."""
    if policy is None:
        return DynamicCache(config=model.config)
    try:
        return kv.make_cache(policy, model, budget=None if policy in (*PRUNING_POLICIES, *UNBUDGETED) else budget)
    except kv.CheckpointAdmissionError:
        # No profile is shipped for this model; what is measured here does not depend on which head has how many rows.
        return kv.make_cache(policy, model, budget=budget, profile="uniform")


def forward(model: Any, input_ids: torch.Tensor, cache: Any) -> None:
    """One raw forward, complete when it returns; logits of the last token only, or they drown the rest."""
    model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{cache_argument(): cache})
    synchronize(model.device)


def batch_ids(filler: list[int], batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(filler[:tokens], device=device).expand(batch, -1).contiguous()


def stored_rows(cache: Any, layers: int) -> float:
    """Mean rows a KV head holds."""
    return float(torch.stack([cache.stored_rows(layer).float().mean() for layer in range(layers)]).mean())
