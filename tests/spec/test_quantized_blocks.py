"""Blocks of quantized rows in which rows die: what stays keeps its codes, and bytes stay bounded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import content, forward, generate, prompt, tiny

import hf_kvpolicy as kv
from hf_kvpolicy.storage import growth_slots
from hf_kvpolicy.storage.coded import CodedRows

from ._quantized import BLOCK, OPTIONS, RAGGED, UNBOUNDED, accept, quantized, rows_of


@pytest.mark.parametrize("name", ["h2o", "keyformer", "sliding_window", "streaming_llm"])
def test_blocks_do_not_pile_up(name: str) -> None:
    model = tiny("llama")
    cache, most = quantized(name, model), 0
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for step in range(150):
            forward(model, prompt(1, step), cache)
            most = max(most, rows_of(cache)[0].coded_slots // BLOCK)
    cache.check_integrity()
    # All blocks of an owner but one are more than half live where another is added.
    assert most <= 24 // (BLOCK // 2 + 1) + 2
    if name == "sliding_window":
        assert most <= 24 // BLOCK + 1
    assert cache.ledger().payload_rows == 2 * 2 * 24


def most_blocks(rows: int) -> int:
    """Return how many blocks an owner of so many rows may have: all but one are more than half full as one is made."""
    return rows // (BLOCK // 2 + 1) + 1


def blocks_of_tokens(cache: Any) -> dict[tuple[int, int, int], int]:
    """Return the block in which a row of a layer, owner and token lies."""
    found, snapshot = {}, cache._runtime.snapshot
    for index, rows in enumerate(snapshot.rows):
        table = snapshot.full_map(index)
        coded = slice(rows.pinned, rows.residual) if isinstance(rows, CodedRows) else slice(0)
        live, tokens = (part[0, :, coded] for part in (table.live_BMW, table.tokens_BMW))
        for head in range(cache.geometry.num_kv_heads):
            own = head % table.map_heads
            for slot in live[own].nonzero()[:, 0].tolist():
                found[index, head, int(tokens[own, slot])] = slot // BLOCK
    for index, layer in enumerate(snapshot.packed().ragged):
        if not layer.rows.coded_slots:
            continue
        blocks = layer.rows.blocks
        places = blocks.places().split(list(blocks.slots))
        for owner, part in enumerate(layer.map.owners()):
            tokens = part.tokens_BMW[0, 0].tolist()
            # Behind them lie the tail's rows, none of which is dropped here.
            found |= {(index, owner, token): int(at) // BLOCK for token, at in zip(tokens, places[owner], strict=False)}
    return found


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "full"])
def test_what_stays_in_a_block_is_coded_once(name: str) -> None:
    """Decoding, accepting, the next turn and packing leave a row's codes alone, unless its block is half empty then."""
    model, again = tiny("llama"), 0
    cache = quantized(name, model, "int4")
    turns = [(width, width > 1) for width in [*[1] * 24, 6, *[1] * 9, 5, *[1] * 9]]
    # Nothing waits for acceptance where the tokens of an answer are chosen from.
    drafts = [] if name == "pyramidinfer" else [(width, None) for width in [1, 3, 2, 1, 4, 1, 1, 3] * 6]
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for step, (width, plain) in enumerate([*turns, *drafts, (1, False), (30, True)]):
            before, was = blocks_of_tokens(cache), content(cache)
            if plain is None:
                accept(cache, model, width, step)
            else:
                forward(model, prompt(width, step), cache)
            now = content(cache)
            heads = cache.geometry.num_kv_heads
            left = [key for key in before if key[2] in now[f"tokens {key[0]} 0 {key[1] % heads}"]]
            stays = Counter((layer, owner, before[layer, owner, token]) for layer, owner, token in left)
            for layer, owner, token in left:
                where = f"{layer} 0 {owner % heads}"
                old, new = (held[f"tokens {where}"].index(token) for held in (was, now))
                same = torch.equal(was[f"keys {where}"][old], now[f"keys {where}"][new])
                again += not same
                assert same or stays[layer, owner, before[layer, owner, token]] <= BLOCK // 2
            for rows in cache._runtime.snapshot.rows:
                assert rows.coded_slots <= (24 // (BLOCK // 2 + 1) + 2) * BLOCK or name in UNBOUNDED
    cache.check_integrity()
    if name == "pyramidinfer":
        assert again, "some blocks were repacked"


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize(("budget", "draft"), [(36, 1), (36, 3), (29, 1), (24, 7), (20, 19), (29, None)])
def test_sinks_do_not_drift(budget: int, draft: int | None, precision: str) -> None:
    """Rows that stay for good lie in a block whose other rows have died: it is left alone, however long it takes.

    Also where it is at most half live, and so is the next one whenever a block is due: by drafts, or without any.
    """
    model = tiny("llama")
    cache = kv.StreamingLLMCache(
        model, budget=budget, sinks=4, positions="original", quantize=precision, block_rows=2 * BLOCK
    )
    with torch.no_grad():
        forward(model, prompt(50), cache)
        accept(cache, model, 8, 0)
        first = content(cache)
        for step in range(120):
            if draft is None:
                forward(model, prompt(1, step), cache)
            else:
                accept(cache, model, draft, step)
            now = content(cache)
            for key in (key for key in now if key.startswith(("keys", "values"))):
                assert torch.equal(first[key][:4], now[key][:4])
            assert rows_of(cache)[0].coded_slots // (2 * BLOCK) <= budget // (BLOCK + 1) + 2


@pytest.mark.parametrize("name", RAGGED)
def test_bytes_of_ragged_blocks_stay_bounded(name: str) -> None:
    """Many short turns and answers: what dropped rows leave behind is given up."""
    model, most_rows = tiny("llama"), 0
    cache = quantized(name, model)
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for step in range(96):
            forward(model, prompt(5 if step % 16 == 15 else 1, step), cache)
            for layer in cache._runtime.snapshot.ragged:
                if not layer.rows.coded_slots:
                    continue
                rows = [n + cache._runtime.snapshot.tail_width for n in layer.map.lengths]
                most_rows = max(most_rows, *rows)
                assert max(layer.rows.blocks.counts) <= most_blocks(most_rows)
                # A residual and its slack.
                assert layer.rows.plain().slots <= len(rows) * growth_slots(3 * BLOCK)
    ledger = cache.ledger()
    assert most_rows <= 24 * 2 + 16, "the budget, what its owner is given more, and one answer"
    assert ledger.declared_bytes == ledger.measured_bytes


@pytest.mark.parametrize("limit", [None, 24])
def test_fastgen_decodes_long_without_a_leak(limit: int | None) -> None:
    """At every step rows die in blocks: slots are those of the rows that live, twice over, and of a residual."""
    model = tiny("llama")
    cache = quantized("fastgen", model, budget=limit)
    # Codes of keys and values, scale and zero of values; scales and zeros of a block's keys; a row that is not coded.
    coded_bytes, block_bytes, plain_bytes = 2 * 8 + 2 * 4, 2 * 8 * 4, 2 * 8 * 4
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for step in range(160):
            forward(model, prompt(1, step), cache)
            ledger, most = cache.ledger(), 0
            assert ledger.declared_bytes == ledger.measured_bytes
            for layer in cache._runtime.snapshot.ragged:
                # Up to two blocks of rows may have died since blocks were repacked.
                rows = [n + 2 * BLOCK if limit is None else limit for n in layer.map.lengths]
                blocks = [most_blocks(n) for n in rows]
                assert all(a <= b for a, b in zip(layer.rows.blocks.counts, blocks, strict=True))
                most += sum(blocks) * (BLOCK * coded_bytes + block_bytes) + 4 * sum(rows)
                most += len(rows) * growth_slots(3 * BLOCK) * plain_bytes
            assert ledger.payload_bytes + ledger.slack_bytes <= most


@pytest.mark.parametrize("name", ["h2o", "keyformer", "scissorhands", "fastgen"])
def test_bytes_stay_bounded_while_drafts_are_accepted(name: str) -> None:
    """300 tokens of an answer, drafted five at a time and some of them rejected, a token without a draft at times."""
    model, budget, draft = tiny("llama"), 24, 5
    cache = quantized(name, model)
    owners, accepted = 2, 0
    coded_bytes, block_bytes, plain_bytes = 2 * 8 + 2 * 4, 2 * 8 * 4, 2 * 8 * 4
    blocks = most_blocks(budget) + 1
    most = blocks * (BLOCK * coded_bytes + block_bytes) + growth_slots(3 * BLOCK) * plain_bytes + 4 * budget
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for cycle in range(100):
            cache.activate_past_recording()
            forward(model, prompt(draft, cycle), cache)
            ledger, rejected = cache.ledger(), 7 * cycle % draft
            assert ledger.declared_bytes == ledger.measured_bytes
            frontier = cache._runtime.waiting.snapshot.frontier
            per_column = sum(part is not None for part in (frontier.seen_BF, frontier.kinds_BF))
            # Rows as they are with numbers and states, and the queries of the draft.
            held = 2 * owners * growth_slots(budget + draft) * (plain_bytes + 9 + 12) + 2 * draft * 4 * 8 * 4
            assert ledger.waiting_bytes - per_column * frontier.columns <= held
            cache.crop(-rejected)
            accepted += draft - rejected
            if cycle % 3 == 0:
                cache.set_recording(False)
                forward(model, prompt(1, cycle), cache)
                accepted += 1
            ledger = cache.ledger()
            assert ledger.declared_bytes == ledger.measured_bytes
            assert ledger.payload_bytes + ledger.slack_bytes <= 2 * owners * most
            cache.check_integrity()
    assert accepted >= 300
    assert int(cache.stored_rows(0).max()) <= budget


def test_a_budget_within_the_residual_is_never_quantized() -> None:
    model = tiny("llama")
    cache, plain = (kv.H2OCache(model, budget=8, **o) for o in ({"quantize": "int4"}, {}))
    assert torch.equal(generate(model, prompt(40), cache, 80), generate(model, prompt(40), plain, 80))
    assert not any(rows.coded_slots for rows in rows_of(cache))
    assert cache._runtime.snapshot.width < 64


@pytest.mark.parametrize("name", ["streaming_llm", "h2o"])
def test_the_transient_peak_has_stores_that_are_made_while_others_live(name: str) -> None:
    """Blocks made anew by a decode step, and accepted drafts: old and new stores, and one layer as it is read."""
    model = tiny("llama", layers=4)
    cache = quantized(name, model)
    most = 0
    with torch.no_grad():
        forward(model, prompt(60), cache)
        start = cache.ledger().transient_peak_bytes
        for step in range(40):
            before = {id(t): t for rows in rows_of(cache) for t in rows.tensors()}
            accept(cache, model, 9, step)
            after = {id(t): t for rows in rows_of(cache) for t in rows.tensors()}
            most = max(most, sum(t.nbytes for t in (before | after).values()))
            assert cache.ledger().transient_peak_bytes >= most
    assert cache.ledger().transient_peak_bytes < 4 * max(start, most), "no peak is made up"
