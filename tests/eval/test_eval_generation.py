"""The decode loop against `generate`, and token-wise NLL against one forward."""

from __future__ import annotations

from typing import Any

import torch
from eval_fakes import FakeCache, tiny_loaded

from hf_kvpolicy.eval import generation

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
