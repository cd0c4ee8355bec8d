"""Did the policy act? A full cache reported under a policy's name is the worst result a harness can give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import engine
from .cells import Cell
from .engine import CacheUse
from .sweep import REFERENCES

__all__ = ["budget_binds", "equals_full", "why_not_acting"]


def budget_binds(cell: Cell, allowed_rows: int | None, prompt_tokens: int) -> bool:
    """Whether the policy has to drop rows of this prompt. Without a budget it is expected to drop some."""
    if cell.policy in REFERENCES:
        return False
    return allowed_rows is None or prompt_tokens > allowed_rows


def equals_full(cell: Cell, empty_cache: Any, model: Any, prompt_tokens: Iterable[int]) -> bool:
    """Whether the cell's budget takes nothing from any of these prompts, so that its cache is the full one.

    Args:
        cell: the cell.
        empty_cache: a cache of the cell that holds nothing yet.
        model: the model.
        prompt_tokens: tokens of each prompt.

    Raises:
        KVPolicyError: the budget cannot be resolved into rows.
    """
    if cell.budget is None:
        return False
    return not any(
        budget_binds(cell, engine.budget_rows(cell, empty_cache, model, tokens), tokens) for tokens in prompt_tokens
    )


def why_not_acting(
    cell: Cell,
    allowed_rows: int | None,
    prompt_tokens: int,
    after_prompt: CacheUse,
    at_end: CacheUse,
    *,
    full_kv_bytes: int,
) -> str | None:
    """Return what contradicts the policy having acted, or None.

    Args:
        cell: the cell, whose policy and options decide what is expected.
        allowed_rows: the budget in rows per layer and head; None when the policy has none.
        prompt_tokens: tokens of the prompt.
        after_prompt: the cache right after the prompt.
        at_end: the cache after decoding; generated rows may lie on top of the budget if the ledger names them.
        full_kv_bytes: what a full cache of the prompt stores.
    """
    if cell.options.get("quantize") and not after_prompt.quantizes:
        return f"rows are stored as they are, where quantize={cell.options['quantize']!r} was asked for"
    if cell.options.get("merge_layers") and not after_prompt.merges_layers:
        return f"every layer stores its own rows, where merge_layers={cell.options['merge_layers']!r} was asked for"
    if not budget_binds(cell, allowed_rows, prompt_tokens):
        return None
    if after_prompt.statistics["publications"] < 1:
        return f"a prompt of {prompt_tokens} tokens led to no publication, so whatever answers is not this cache"
    if after_prompt.replaces_rows:
        if after_prompt.payload_bytes < full_kv_bytes:
            return None
        return f"the prompt takes {after_prompt.payload_bytes} bytes, and {full_kv_bytes} where no row replaces others"
    if after_prompt.statistics["selections"] < 1:
        return f"a prompt of {prompt_tokens} tokens led to no selection at all"
    if after_prompt.rows_mean >= prompt_tokens:
        return f"all {prompt_tokens} rows of the prompt are still stored"
    # The reference variants of a schedule do not conserve the total; they report what they use.
    if allowed_rows is None or cell.options.get("variant") == "reference":
        return None
    # A question that follows a compressed text may be appended to it whole.
    if after_prompt.rows_mean - after_prompt.tail_rows_mean > allowed_rows:
        return f"{after_prompt.rows_mean:.1f} rows a head are stored where the budget allows {allowed_rows}"
    selected = at_end.rows_mean - at_end.tail_rows_mean
    if selected > allowed_rows:
        return (
            f"{selected:.1f} rows a head are stored after decoding, the generated tail not counted, where the "
            f"budget allows {allowed_rows}"
        )
    return None
