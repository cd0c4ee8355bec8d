"""The presses' half of the comparison with kvpress; runs in kvpress's own environment, without hf_kvpolicy.

Every press sees the context alone, as kvpress's pipeline feeds it: the inner model under the press's context manager,
then the question and the answer through the model at the positions that follow the context. The pipeline itself takes
texts and applies a template; here both sides get the same token ids.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
from collections.abc import Sequence
from contextlib import nullcontext
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


class Peer:
    """Examples of one run through one model."""

    def __init__(self, model: Any, stop_ids: frozenset[int], max_new_tokens: int) -> None:
        self._model, self._stop_ids, self._max_new_tokens = model, stop_ids, max_new_tokens
        self._dense_keys: list[Tensor] = []

    @torch.no_grad()
    def run(self, example: dict[str, Any], contender: Contender) -> dict[str, Any]:
        """One example under one press; the full cache has to come first, for its keys."""
        context, question = example["context_ids"], example["question_ids"]
        self._model.set_attn_implementation(contender.press.attention if contender.press else "sdpa")
        cache, press = DynamicCache(), press_of(contender, len(context))
        with press(self._model) if press is not None else nullcontext():
            self._model.model(input_ids=torch.tensor([context]), past_key_values=cache)
        if contender is FULL:
            self._dense_keys = [layer.keys[0].clone() for layer in cache.layers]
        kept_LHN = self._kept(cache, contender, len(context))
        held_bytes = storage_bytes(part for layer in cache.layers for part in (layer.keys, layer.values))
        step = 1 if contender.press and contender.press.one_token_at_a_time else len(question)
        position, logits = len(context), None
        for begin in range(0, len(question), step):
            logits = self._feed(cache, question[begin : begin + step], position + begin)
        position += len(question)
        nll = self._answer_nll(copy.deepcopy(cache), logits, example["answer_ids"], position)
        answer = self._answer(cache, logits, position)
        return {
            "example": example["id"],
            "contender": contender.key,
            "answer_ids": answer,
            "answer_nll": nll,
            "held_bytes": held_bytes,
            "kept_LHN": kept_LHN,
        }

    def _kept(self, cache: Any, contender: Contender, tokens: int) -> Tensor:
        """The rows that attention may read."""
        if contender.press is not None and contender.press.masks:
            masks = []
            for block, keys_HND in zip(self._model.model.layers, self._dense_keys, strict=True):
                _, heads, rows = block.self_attn.masked_key_indices
                masks.append(mask_without(tokens, keys_HND.shape[0], heads, rows))
            return torch.stack(masks)
        pairs = zip(cache.layers, self._dense_keys, strict=True)
        return kept_mask([list(find_rows(layer.keys[0], keys_HND)) for layer, keys_HND in pairs], tokens)

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
        trials += [peer.run(example, contender) for contender in contenders(run["budgets"])]
        print(f"kvpress: {example['id']}", file=sys.stderr, flush=True)
    environment = {
        "kvpress": version("kvpress"), "torch": str(torch.__version__), "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    torch.save({"environment": environment, "trials": trials}, folder / "theirs.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
