"""The decode loop against `generate`, and token-wise NLL against one forward."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_fakes import FakeCache, tiny_loaded

from hf_kvpolicy.eval import generation
from hf_kvpolicy.eval.cells import task_points

PROMPT = [256, *b"a short prompt of some bytes"]


def test_greedy_decoding_equals_generate() -> None:
    loaded = tiny_loaded()
    prompt = torch.tensor([PROMPT])
    expected = loaded.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=257
    )
    prefilled = generation.prefill(loaded.model, [PROMPT], FakeCache())
    found = generation.greedy_decode(loaded.model, prefilled, 12, frozenset({257}))
    tail = [t for t in expected[0, len(PROMPT) :].tolist() if t != 257]
    assert list(found.token_ids) == tail
    assert found.forwards == len(tail) - (found.finish_reason == "length")


def test_decoding_stops_at_a_stop_token_and_leaves_it_out() -> None:
    loaded = tiny_loaded()
    prefilled = generation.prefill(loaded.model, [PROMPT], FakeCache())
    first = int(prefilled.next_logits.argmax())
    found = generation.greedy_decode(loaded.model, prefilled, 12, frozenset({first}))
    assert (found.token_ids, found.finish_reason, found.forwards) == ((), "eos", 0)


def test_answer_nll_equals_one_forward_over_prompt_and_answer() -> None:
    loaded = tiny_loaded()
    answer = list(b" 1234567")
    prefilled = generation.prefill(loaded.model, [PROMPT], FakeCache())
    found = generation.score_answer(loaded.model, generation.fork(prefilled), answer)
    with torch.no_grad():
        logits = loaded.model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
    assert abs(found.nll_per_token - float(expected)) < 1e-5
    assert found.tokens == len(answer)


def test_scoring_on_a_fork_leaves_the_original_cache_alone() -> None:
    loaded = tiny_loaded()
    prefilled = generation.prefill(loaded.model, [PROMPT], FakeCache())
    generation.score_answer(loaded.model, generation.fork(prefilled), list(b"12345"))
    assert prefilled.cache.get_seq_length() == len(PROMPT)


def test_end_tokens_come_from_model_and_tokenizer() -> None:
    loaded = tiny_loaded()
    loaded.model.generation_config.eos_token_id = [3, 5]
    assert generation.end_of_text_ids(loaded.model, loaded.tokenizer) == {3, 5, 257}


def test_an_answer_ends_at_a_stop_and_not_before_its_least_length() -> None:
    loaded = tiny_loaded()
    free = generation.greedy_decode(
        loaded.model, generation.prefill(loaded.model, [PROMPT], FakeCache()), 12, frozenset()
    )
    ending = frozenset([free.token_ids[0]])

    def decode(**options: Any) -> generation.Generated:
        return generation.greedy_decode(
            loaded.model, generation.prefill(loaded.model, [PROMPT], FakeCache()), 12, ending, **options
        )

    assert decode().token_ids == ()
    forced = decode(min_new_tokens=2)
    assert len(forced.token_ids) >= 2
    assert not ending & set(forced.token_ids)
    stopped = decode(min_new_tokens=3, is_complete=lambda tokens: len(tokens) == 2)
    assert (len(stopped.token_ids), stopped.finish_reason) == (2, "stop")


def test_segments_are_forwards_of_their_own() -> None:
    loaded = tiny_loaded()
    whole = generation.prefill(loaded.model, [PROMPT], FakeCache())
    pieces = generation.prefill(loaded.model, [PROMPT[:5], PROMPT[5:]], FakeCache())
    assert (whole.cache.statistics.forwards, pieces.cache.statistics.forwards) == (1, 2)
    torch.testing.assert_close(whole.next_logits, pieces.next_logits, atol=1e-5, rtol=0.0)


def test_perplexity_under_eviction_is_that_of_one_masked_forward(tmp_path: Path) -> None:
    """A sliding window of W rows: a prompt's tokens see all before them, a later one the W newest rows and itself."""
    pytest.importorskip("evaluate")
    from hf_kvpolicy.eval.engine import EngineBuilder
    from hf_kvpolicy.eval.prompting import PromptEncoder
    from hf_kvpolicy.eval.run_directory import RunDirectory
    from hf_kvpolicy.eval.runner import run_sweep
    from hf_kvpolicy.eval.sweep import parse_sweep
    from hf_kvpolicy.eval.tasks.registry import make_task

    window, params = 40, {"continuation_tokens": 32}
    task = {"name": "perplexity_pydoc", "lengths_tokens": [400], "num_examples": 2, "params": params}
    policy = {"name": "sliding_window", "budgets": [window]}
    config = parse_sweep({"model": "tiny", "tasks": [task], "policies": [policy], "include_random": False})
    loaded, plain = tiny_loaded(), tiny_loaded().model
    build = EngineBuilder(loaded.model, loaded.tokenizer)
    run_sweep(config, loaded, RunDirectory(tmp_path), build, say=lambda line: None)
    rows = [row for row in RunDirectory(tmp_path).rows() if row.cell["policy"] == "sliding_window"]
    encoder = PromptEncoder(loaded.tokenizer)
    request = next(task_points(config)).request
    for row, example in zip(rows, make_task("perplexity_pydoc", params).examples(request, encoder), strict=True):
        encoded = encoder.encode(example)
        ids, answer, first = [*encoded.token_ids, *encoded.answer_ids], encoded.answer_ids, len(encoded.token_ids)
        assert len(answer) > 20
        columns = torch.arange(len(ids))
        seen = columns[None, :] <= columns[:, None]
        seen[first:] &= columns[None, :] >= columns[first:, None] - window
        mask = torch.zeros(1, 1, len(ids), len(ids)).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = plain(torch.tensor([ids]), attention_mask=mask).logits[0, first - 1 : -1]
        expected = float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)))
        assert row.quality is not None
        assert row.cache is not None
        assert row.quality.answer_nll == pytest.approx(expected, abs=1e-4)
        assert row.quality.score == pytest.approx(math.exp(-expected), abs=1e-4)
        assert row.cache.rows_dropped > 0
