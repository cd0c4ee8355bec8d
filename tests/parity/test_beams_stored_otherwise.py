"""Beams over rows that are not held as they are: as fed by hand, and as if no beam had ever changed its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    assert_same_content,
    case_id,
    content,
    drops_tokens,
    forward,
    generate,
    left_padded,
    make_cache,
    prompt,
    small_options,
    tiny,
)
from torch import Tensor

from hf_kvpolicy.registry import policy_class

NEW, BEAMS = 16, 3
# One policy of each schedule and kind of store.
NAMES = ("full", "streaming_llm", "h2o", "scissorhands", "snapkv", "adakv", "fastgen", "pyramidinfer")
FEW_BITS = {"quantize": "int8", "block_rows": 4}
MERGED = {"merge_layers": {"start_layer": 0, "retention": 0.2}}


def _whole(name: str) -> dict[str, Any]:
    return policy_class(name).neutral(64)  # type: ignore[attr-defined, no-any-return]


CASES = [
    *((name, _whole(name) | FEW_BITS) for name in NAMES),
    *((name, small_options(name) | FEW_BITS) for name in NAMES[1:]),
    ("snapkv", _whole("snapkv") | {"unit": "pair"} | MERGED),
    ("snapkv", small_options("snapkv") | {"unit": "pair"} | MERGED),
    ("h2o", small_options("h2o") | {"unit": "token"} | MERGED),
    ("streaming_llm", small_options("streaming_llm") | {"unit": "token", "positions": "original"} | MERGED),
    ("minicache", small_options("minicache")),
]


class Recorded:
    """What `generate` fed to a model, and which beams it went on with, in order."""

    def __init__(self, model: Any, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fed: list[dict[str, Any]] = []
        self.logits: list[Tensor] = []
        # After each forward, which rows go on.
        self.origins: list[Tensor] = []
        reorder = cache.reorder_cache

        def reordered(index: Tensor) -> None:
            self.origins.append(index.clone())
            reorder(index)

        monkeypatch.setattr(cache, "reorder_cache", reordered)
        self._handles = (
            model.register_forward_pre_hook(self._note, with_kwargs=True),
            model.register_forward_hook(lambda module, args, output: self.logits.append(output.logits[:, -1])),
        )

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.fed.append({name: kwargs[name].clone() for name in ("input_ids", "attention_mask", "position_ids")})

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def ancestors(self) -> list[Tensor]:
        """Return for each forward which of its rows each row of the end goes back to."""
        rows = torch.arange(self.fed[0]["input_ids"].shape[0])
        if len(self.origins) == len(self.fed):
            rows = self.origins[-1]
        found = [rows]
        for origin in reversed(self.origins[: len(self.fed) - 1]):
            found.append(origin[found[-1]])
        return found[::-1]


def step(model: Any, cache: Any, fed: dict[str, Any]) -> Tensor:
    more = {"logits_to_keep": 1} if drops_tokens(cache) else {}
    where = {name: fed[name] for name in ("attention_mask", "position_ids")}
    return forward(model, fed["input_ids"], cache, **where, **more)[:, -1]


def assert_same_bits(left: Any, right: Any) -> None:
    a, b = content(left), content(right)
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]) if isinstance(value, Tensor) else value == b[key], key


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_beams_of_a_padded_batch(case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    name, options = case
    model = tiny("llama")
    ids, mask = left_padded([prompt(n, seed=n) for n in (23, 9)])
    cache, by_hand, unmoved = (make_cache(name, model, **options) for _ in range(3))
    seen = Recorded(model, cache, monkeypatch)
    generate(model, ids, cache, NEW, attention_mask=mask, num_beams=BEAMS)
    seen.close()
    cache.check_integrity()
    assert cache.batch_size == 2 * BEAMS
    assert any(not torch.equal(index, torch.arange(2 * BEAMS)) for index in seen.origins), "no beam changed its place"

    for number, fed in enumerate(seen.fed):
        assert torch.equal(step(model, by_hand, fed), seen.logits[number]), number
        if number < len(seen.origins):
            by_hand.reorder_cache(seen.origins[number])
    by_hand.check_integrity()
    assert_same_bits(cache, by_hand)

    for rows, fed in zip(seen.ancestors(), seen.fed, strict=True):
        logits = step(model, unmoved, {name: part[rows] for name, part in fed.items()})
    unmoved.check_integrity()
    expected = seen.logits[-1][seen.ancestors()[-1]]
    if cache.composition.quantizes:
        assert torch.equal(logits, expected)
        assert_same_bits(cache, unmoved)
    else:  # merging takes sines, and vectorised ones round by the place of a number
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
        assert_same_content(cache, unmoved, atol=2e-5)
