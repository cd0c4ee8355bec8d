"""What a head earns at one decode step of a needle test (Fu et al. 2024, arXiv 2410.19258).

Letters: L layers, Q query heads, N tokens seen so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ConfigError
from ..prompting import EncodedPrompt, PromptEncoder
from ..tasks.base import Example

__all__ = ["needle_positions", "reasoning_scores", "retrieval_scores"]


def retrieval_scores(attention_LQN: Tensor, needle: Sequence[int], token_ids: Sequence[int], generated: int) -> Tensor:
    """Return 1 / (needle length) for heads whose most attended token lies in the needle and is the one generated.

    Args:
        attention_LQN: attention of the query that generated the token.
        needle: positions of the needle's tokens.
        token_ids: the tokens at positions 0..N-1.
        generated: the token that this step generated.

    Returns:
        float64 [L, Q].
    """
    top_LQ = attention_LQN.argmax(-1)
    copied = _inside(needle, attention_LQN)[top_LQ] & (torch.tensor(list(token_ids))[top_LQ] == generated)
    return copied.double() / len(needle)


def reasoning_scores(attention_LQN: Tensor, needle: Sequence[int]) -> Tensor:
    """Return the attention on those of a head's K most attended tokens that lie in the needle, over K = its length.

    Args:
        attention_LQN: attention of one query.
        needle: positions of the needle's tokens.

    Returns:
        float64 [L, Q].
    """
    top = attention_LQN.double().topk(min(len(needle), attention_LQN.shape[-1]), dim=-1)
    return (top.values * _inside(needle, attention_LQN)[top.indices]).sum(-1) / len(needle)


def needle_positions(encoder: PromptEncoder, example: Example, prompt: EncodedPrompt) -> list[int]:
    """Return the positions of the tokens that touch the needle's sentence in an encoded prompt.

    Raises:
        ConfigError: the tokenizer does not say which characters a token stands for.
    """
    text, needle = encoder.text(example), f"{example.answer_prefix} {example.answers[0]}."
    begin = text.index(needle)
    spans = encoder.character_spans(text)
    # Encoding a prompt adds or takes away leading BOS tokens only.
    shift = len(prompt.token_ids) - len(spans)
    found = [i + shift for i, (first, last) in enumerate(spans) if first < begin + len(needle) and last > begin]
    if not found:
        raise ConfigError("The tokenizer gives no token for the needle's sentence. Use another tokenizer.")
    return found


def _inside(needle: Sequence[int], attention_LQN: Tensor) -> Tensor:
    inside = torch.zeros(attention_LQN.shape[-1], dtype=torch.bool)
    inside[list(needle)] = True
    return inside
