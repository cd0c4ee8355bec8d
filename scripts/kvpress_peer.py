"""The presses' half of the comparison with kvpress; runs in kvpress's own environment, without hf_kvpolicy.

A press acts when a layer's attention has returned, so a context's forward is the same for all of them. It runs once,
and every press's own hook gets what kvpress would hand it, with a cache of its own. Question and answer then go through
the model at the positions that follow the context. kvpress's pipeline does the same, but takes texts; here both sides
get the same token ids.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
import transformers
from kvpress_lib.contenders import FULL, Contender, contenders
from kvpress_lib.rows import find_rows, mask_without, storage_bytes
from script_lib.needle_rows import kept_mask
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


def press_of(contender: Contender, tokens: int) -> Any:
    """The press, or None where nothing is dropped."""
    spec = contender.press
    if spec is None or contender.rows is None:
        return None
    press = getattr(kvpress, spec.name)(compression_ratio=spec.ratio(tokens, contender.rows), **spec.options)
    return getattr(kvpress, spec.wrapper)(press=press, **spec.wrapper_options) if spec.wrapper else press


@dataclass
class Compressed:
    """What one press left of a context; a press that masks also leaves indices for every layer's attention."""

    cache: Any = field(default_factory=DynamicCache)
    masked: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


@torch.no_grad()
def compressed_contexts(model: Any, context: list[int], pairs: list[Contender]) -> dict[str, Compressed]:
    """One forward of the context, compressed by the presses of all pairs, by the pair's key."""
    found = {pair.key: Compressed() for pair in pairs}
    presses = {pair.key: press_of(pair, len(context)) for pair in pairs}

    def hook(module: Any, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
        dense = keywords["past_key_values"].layers[module.layer_idx]
        for key, press in presses.items():
            # Copies: a press that masks later writes into its keys.
            found[key].cache.update(dense.keys.clone(), dense.values.clone(), module.layer_idx)
            if press is not None:
                press.forward_hook(module, arguments, {**keywords, "past_key_values": found[key].cache}, output)
            if getattr(module, "masked_key_indices", None) is not None:
                found[key].masked.append(module.masked_key_indices)
                module.masked_key_indices = None

    handles = [block.self_attn.register_forward_hook(hook, with_kwargs=True) for block in model.model.layers]
    try:
        model.model(input_ids=torch.tensor([context]), past_key_values=DynamicCache())
    finally:
        for handle in handles:
            handle.remove()
    return found


class Peer:
    """Examples of one run through one model."""

    def __init__(self, model: Any, stop_ids: frozenset[int], max_new_tokens: int) -> None:
        self._model, self._stop_ids, self._max_new_tokens = model, stop_ids, max_new_tokens

    @torch.no_grad()
    def trials(self, example: dict[str, Any], pairs: list[Contender]) -> Iterator[dict[str, Any]]:
        """One example under every press; `pairs` begin with the full cache, whose keys are the prompt's."""
        dense_keys: list[Tensor] = []
        for attention in ("sdpa", "eager"):
            self._model.set_attn_implementation(attention)
            alike = [pair for pair in pairs if (pair.press.attention if pair.press else "sdpa") == attention]
            compressed = compressed_contexts(self._model, example["context_ids"], alike)
            if attention == "sdpa":
                dense_keys = [layer.keys[0].clone() for layer in compressed[FULL.key].cache.layers]
            for pair in alike:
                held = compressed.pop(pair.key)
                parts = [part for layer in held.cache.layers for part in (layer.keys, layer.values)]
                yield {
                    "example": example["id"],
                    "contender": pair.key,
                    "held_bytes": storage_bytes(parts),
                    "kept_LHN": _kept(held, dense_keys),
                    **self._asked(example, held, one_at_a_time=bool(pair.press and pair.press.one_token_at_a_time)),
                }

    def _asked(self, example: dict[str, Any], held: Compressed, *, one_at_a_time: bool) -> dict[str, Any]:
        """Feed the question; the greedy answer, and the likelihood of the right one on a copy."""
        question, position, logits = example["question_ids"], len(example["context_ids"]), None
        self._mask(held.masked)
        for part in [[token] for token in question] if one_at_a_time else [question]:
            logits = self._feed(held.cache, part, position)
            position += len(part)
        nll = self._answer_nll(copy.deepcopy(held.cache), logits, example["answer_ids"], position)
        answer = self._answer(held.cache, logits, position)
        self._mask([])
        return {"answer_ids": answer, "answer_nll": nll}

    def _mask(self, masked: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Tell every layer which keys its attention must not read, where kvpress's own patch looks for them."""
        for layer, block in enumerate(self._model.model.layers):
            block.self_attn.masked_key_indices = masked[layer] if masked else None

    def _feed(self, cache: Any, token_ids: Sequence[int], position: int) -> Tensor:
        positions = torch.arange(position, position + len(token_ids))[None]
        output = self._model(
            input_ids=torch.tensor([list(token_ids)]), past_key_values=cache, position_ids=positions, logits_to_keep=1
        )
        return output.logits[0, -1]

    def _answer_nll(self, cache: Any, logits: Tensor, answer_ids: Sequence[int], position: int) -> float:
        followed = [logits]
        followed += [self._feed(cache, [token], position + i) for i, token in enumerate(answer_ids[:-1])]
        log_probs_TV = torch.log_softmax(torch.stack(followed).float(), dim=-1)
        return -float(log_probs_TV.gather(1, torch.tensor(answer_ids)[:, None]).double().mean())

    def _answer(self, cache: Any, logits: Tensor, position: int) -> list[int]:
        tokens: list[int] = []
        while (token := int(logits.argmax())) not in self._stop_ids:
            tokens.append(token)
            if len(tokens) == self._max_new_tokens:
                break
            logits = self._feed(cache, [token], position + len(tokens) - 1)
        return tokens


def _kept(held: Compressed, dense_keys: list[Tensor]) -> Tensor:
    """The rows that attention may read, bool [L, H, N]."""
    heads, tokens = dense_keys[0].shape[:2]
    if held.masked:
        return torch.stack([mask_without(tokens, heads, *where) for _, *where in held.masked])
    layers = zip(held.cache.layers, dense_keys, strict=True)
    return kept_mask([list(find_rows(layer.keys[0], keys_HND)) for layer, keys_HND in layers], tokens)


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvpress_peer", description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="the run's folder, with examples.json in it")
    folder = parser.parse_args().work
    run = json.loads((folder / "examples.json").read_text())
    torch.set_num_threads(run["threads"])
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(run["source"], dtype=torch.float32).eval()
    peer = Peer(model, frozenset(run["stop_ids"]), run["max_new_tokens"])
    trials = []
    for example in run["examples"]:
        trials += peer.trials(example, list(contenders(run["budgets"])))
        print(f"kvpress: {example['id']}", file=sys.stderr, flush=True)
    environment = {
        "kvpress": version("kvpress"), "torch": str(torch.__version__), "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    torch.save({"environment": environment, "trials": trials}, folder / "theirs.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
