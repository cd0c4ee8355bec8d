"""fastgen on the real engine keeps what its oracle keeps, forward after forward.

The oracle reads the queries and keys of the very run under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from reference.fastgen import FastGen

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument

from ._models import captured, feed, kept, tokens
from .test_dynamic_oracles import LAYERS, llama

SPECIAL, PUNCTUATION = (7, 23), tuple(range(30, 42))
KINDS = {"special_token_ids": SPECIAL, "punctuation_token_ids": PUNCTUATION}


class Run:
    """One sequence fed to a cache and, from its captured queries and keys, to the oracle."""

    def __init__(self, kv_heads: int, **options: Any) -> None:
        self.model = llama(kv_heads)
        self.cache = kv.FastGenCache(self.model, **options, **KINDS)
        options.pop("chunked_prefill", None)
        self.oracle = FastGen(LAYERS, kv_heads, **options, special=SPECIAL, punctuation=PUNCTUATION)
        self.fed, self.kv_heads = 0, kv_heads

    def forwards(self, lengths: Sequence[int]) -> Run:
        for length in lengths:
            ids = tokens(length, seed=self.fed + 1)
            with captured(self.model) as seen:
                feed(self.model, self.cache, ids)
            queries, keys = seen.arrays()
            self.fed += length
            self.oracle.feed(ids[0].tolist(), queries, keys)
            assert self.families() == self.oracle.families(), f"at {self.fed}"
            assert kept(self.cache) == self.oracle.kept(), f"at {self.fed}"
        self.cache.check_integrity()
        return self

    def families(self) -> list[list[str]]:
        return [self.cache.families(layer) for layer in range(LAYERS)]


@pytest.mark.proves("kept_rows", policy="fastgen", family="llama")
@pytest.mark.parametrize("kv_heads", [6, 3], ids=["mha", "gqa"])
@pytest.mark.parametrize(
    ("recovery", "budget"),
    [(0.24, None), (0.24, 24), (0.7, None), (0.86, None), (0.86, 24), (0.86, 12), (0.98, None), (0.98, 70)],
)
def test_a_hundred_decode_steps(recovery: float, budget: int | None, kv_heads: int) -> None:
    run = Run(kv_heads, recovery=recovery, budget=budget).forwards([60, *[1] * 100])
    lengths = {len(rows) for layer in kept(run.cache) for rows in layer}
    if budget is None:
        assert len({name for layer in run.families() for name in layer}) > 1, "heads chose alike by chance"
        assert len(lengths) > 1
    else:
        assert max(lengths) <= budget


def test_a_recovery_of_one_keeps_everything() -> None:
    run = Run(3, recovery=1.0).forwards([60, *[1] * 20])
    assert all(rows == list(range(80)) for layer in kept(run.cache) for rows in layer)
    capped = Run(3, recovery=1.0, budget=62).forwards([60, *[1] * 20])
    assert all(len(rows) == 62 for layer in kept(capped.cache) for rows in layer)


@pytest.mark.parametrize("group", ["mean", "max", "sum"])
@pytest.mark.parametrize("on_append", ["recompress", "append"])
@pytest.mark.filterwarnings("ignore:.*two prompt segments follow")
def test_later_prompt_segments(on_append: str, group: str) -> None:
    run = Run(3, recovery=0.6, group=group, on_append=on_append, sinks=2, protect=[9], budget=40)
    run.forwards([40, *[1] * 6, 15, 8, *[1] * 12])


@pytest.mark.parametrize("lengths", [[1], [2], [3, 1, 1], [5], [1, 9]], ids=str)
def test_short_prompts(lengths: list[int]) -> None:
    Run(3, recovery=0.8, sinks=2).forwards([*lengths, *[1] * 12])


def test_held_chunks_are_profiled_as_one_prompt() -> None:
    model, ids = llama(3), tokens(50)
    whole = kv.FastGenCache(model, recovery=0.74, **KINDS)
    held = kv.FastGenCache(model, recovery=0.74, **KINDS, chunked_prefill="hold")
    feed(model, whole, ids)
    for part in ids.split([20, 25, 5], dim=1):
        feed(model, held, part)
    assert (held.stored_rows(0) == 50).all(), "nothing is chosen before the prompt ends"
    held.finish_prefill()
    for _ in range(10):
        assert [held.families(i) for i in range(LAYERS)] == [whole.families(i) for i in range(LAYERS)]
        assert kept(held) == kept(whole)
        for cache in (held, whole):
            feed(model, cache, tokens(1, seed=cache.get_seq_length()))


def test_accepted_drafts_keep_the_profile() -> None:
    """Tokens accepted one by one are plain decode; several at once are one selection by the families there are."""
    model = llama(3)
    plain, recorded = (kv.FastGenCache(model, recovery=0.74, **KINDS) for _ in range(2))
    for cache in (plain, recorded):
        feed(model, cache, tokens(50))
    recorded.activate_past_recording()
    for step in range(20):
        for cache in (plain, recorded):
            feed(model, cache, tokens(1, seed=step))
        recorded.crop(0)
        assert kept(recorded) == kept(plain)
    feed(model, recorded, tokens(6, seed=99))  # the first several tokens recorded are a prompt segment
    recorded.crop(-2)
    before = [recorded.families(i) for i in range(LAYERS)]
    feed(model, recorded, tokens(5, seed=98))
    recorded.crop(-2)
    assert [recorded.families(i) for i in range(LAYERS)] == before
    recorded.check_integrity()


@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.filterwarnings("ignore:.*two prompt segments follow")
def test_a_prompt_attends_with_the_softmax_of_its_profile(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, families and rows are those of the backend's kernel with a softmax of its own, pads and all."""
    model, mask = llama(3), torch.ones(2, 64, dtype=torch.long)
    mask[0, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def run() -> tuple[kv.FastGenCache, list[torch.Tensor]]:
        cache, logits = kv.FastGenCache(model, recovery=0.7, group=group, **KINDS), []
        for first, end in ((0, 40), (40, 63), (63, 64)):
            part = {"attention_mask": mask[:, :end], "position_ids": positions[:, first:end]}
            with torch.no_grad():
                ids = tokens(64, seed=3).repeat(2, 1)[:, first:end]
                found = model(ids, **part, **{cache_argument(): cache}).logits
            logits.append(found[1] if first else torch.cat([found[0, 7:], found[1]]))
        return cache, logits

    shared, output = run()
    monkeypatch.setattr("hf_kvpolicy.engine.ragged.segment.computes_like_blocks", lambda *_: False)
    apart, expected = run()
    for ours, theirs in zip(output, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    for layer in range(LAYERS):
        for row in range(2):
            assert shared.families(layer, row) == apart.families(layer, row)
            kept_rows = zip(shared.positions(layer, row), apart.positions(layer, row), strict=True)
            assert all(ours.equal(theirs) for ours, theirs in kept_rows)


def test_the_pad_of_a_finished_row_is_no_dropped_row() -> None:
    model, mask = llama(3), torch.ones(2, 9, dtype=torch.long)
    cache = kv.FastGenCache(model, recovery=1.0, **KINDS)
    with torch.no_grad():
        model(tokens(8).repeat(2, 1), attention_mask=mask[:, :8], **{cache_argument(): cache})
        mask[0, 8] = 0
        model(tokens(1).repeat(2, 1), attention_mask=mask, **{cache_argument(): cache})
    assert cache.stored_rows(0).tolist() == [[8] * 3, [9] * 3]
    cache.crop(-9)
    assert cache.get_seq_length() == 0


# -- tokens by kind ---------------------------------------------------------------------------------------------------


class Words:
    """What the policy asks of a tokenizer."""

    all_special_ids = (2, 0)

    def __init__(self, **vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


# SentencePiece and WordPiece write characters; byte-level vocabularies write bytes as symbols. In both, 4 to 7 are
# punctuation: a period, a comma after a space, two marks, an ideographic full stop.
PIECES = Words(**{"<s>": 0, "\u2581the": 3, ".": 4, "\u2581,": 5, "##!?": 6, "\u3002": 7, "\u2581": 8, "a.": 9})
BYTES = Words(**{"\u0120the": 3, ".": 4, "\u0120,": 5, "!?": 6, "\u00e3\u0122\u0124": 7, "\u00a1": 8, "\u0120": 9})


@pytest.mark.parametrize("words", [PIECES, BYTES], ids=["pieces", "bytes"])
def test_ids_are_read_from_a_tokenizer(words: Words) -> None:
    cache = kv.FastGenCache(llama(3).config, tokenizer=words)
    assert cache.composition.options["special_token_ids"] == [0, 2]
    assert cache.composition.options["punctuation_token_ids"] == [4, 5, 6, 7]
    assert cache.composition.options["tokenizer"] is None, "a manifest and a saved cache name ids"
    given = kv.FastGenCache(llama(3).config, tokenizer=words, special_token_ids=[9], punctuation_token_ids=[])
    assert given.composition.options["special_token_ids"] == [9]
    assert given.composition.options["punctuation_token_ids"] == []


def test_ids_are_read_from_a_config() -> None:
    config = llama(3).config
    config = type(config)(**{**config.to_dict(), "bos_token_id": 1, "eos_token_id": [5, 6], "pad_token_id": None})
    cache = kv.FastGenCache(config)
    assert cache.composition.options["special_token_ids"] == [1, 5, 6]
    assert cache.composition.options["punctuation_token_ids"] == []


@pytest.mark.parametrize("bad", [[-1], [1.5], ["a"], [True]])
@pytest.mark.parametrize("name", ["special_token_ids", "punctuation_token_ids"])
def test_bad_ids(name: str, bad: list[Any]) -> None:
    with pytest.raises(kv.ConfigError, match="whole numbers"):
        kv.FastGenCache(llama(3).config, **{name: bad})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"recovery": 1.5}, kv.ConfigError, "recovery"),
        ({"local_ratio": -0.1}, kv.ConfigError, "local_ratio"),
        ({"variant": "reference"}, kv.ConfigError, "no code"),
        ({"unit": "layer"}, kv.ManifestError, "differs by head"),
        ({"unit": "token"}, kv.ManifestError, "differs by head"),
        ({"budget": 4}, kv.BudgetError, "at least 5"),
    ],
)
def test_refused_options(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        kv.FastGenCache(llama(3).config, **options)


def test_embeddings_are_refused_and_leave_the_cache() -> None:
    model = llama(3)
    cache = kv.FastGenCache(model, **KINDS)
    feed(model, cache, tokens(9))
    with pytest.raises(kv.ConfigError, match="Pass input_ids"), torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(tokens(1)), **{cache_argument(): cache})
    assert cache.get_seq_length() == 9
    feed(model, cache, tokens(1))
    cache.check_integrity()
