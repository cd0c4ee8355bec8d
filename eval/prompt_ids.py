"""Are the ids of a prompt those of its text? Checked for every example that is run, beside the encoder and without it.

Ids are compared, never counted: a tokenizer's BOS may be its turn marker (SmolLM2's is), of which a prompt has many.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .prompting import EncodedPrompt
from .tasks.base import Example

__all__ = ["check_prompt_ids"]


def check_prompt_ids(tokenizer: Any, example: Example, encoded: EncodedPrompt) -> None:
    """Refuse a prompt with a token that its text does not have.

    A templated prompt is the rendered template and the answer's prefix, tokenised without special tokens, and what
    transformers' own tokenised template begins with. Any other prompt is its text, behind one BOS at most.

    Raises:
        ConfigError: the ids are others.
    """
    ids, question = list(encoded.token_ids), f"{example.context}{example.joint}{example.question}"
    if not (isinstance(tokenizer.chat_template, str) and example.chat_template):
        before = "".join(f"{turn.user}\n{turn.assistant}\n\n" for turn in example.earlier_turns)
        answer = f"\n{example.answer_prefix}" if example.answer_prefix else ""
        plain = _ids(tokenizer, f"{before}{question}{answer}")
        added = ids[: encoded.added_bos_tokens]
        if ids != [*added, *plain] or added not in ([], [tokenizer.bos_token_id]):
            raise _refusal(example, "its text, behind one BOS at most", ids, plain)
        return
    turns = [text for turn in example.earlier_turns for text in (turn.user, turn.assistant)]
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate([*turns, question])
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    plain = _ids(tokenizer, f"{rendered}{example.answer_prefix}")
    for found, expected in ((_ids(tokenizer, rendered), list(theirs)), (ids, plain)):
        if found != expected:
            raise _refusal(example, "the rendered chat template, without special tokens", found, expected)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _refusal(example: Example, expected: str, found_ids: list[int], expected_ids: list[int]) -> ConfigError:
    pairs = enumerate(zip(found_ids, expected_ids, strict=False))
    shorter = min(len(found_ids), len(expected_ids))
    place = next((index for index, (ours, theirs) in pairs if ours != theirs), shorter)
    return ConfigError(
        f"The prompt of example {example.example_id} has {len(found_ids)} ids that are not those of {expected} "
        f"({len(expected_ids)} ids): they differ at token {place}. The tokenizer adds tokens of its own, or tokenises "
        "a chat otherwise than its text; give the model's own tokenizer with its own chat template."
    )
