"""With neutral options every policy equals `DynamicCache`, in every way transformers can drive a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import (
    CACHE,
    FAMILIES,
    PRUNING,
    WINDOW_TOKENS,
    dynamic_cache,
    forward,
    generate,
    greedy_loop,
    has_budget,
    left_padded,
    neutral_cache,
    policies,
    prompt,
    tiny,
)
from torch import Tensor

import hf_kvpolicy as kv

TOTAL = 64
LENGTHS = (19, 4, 11)
# Every family, both backends, and every pair of them where masks or shapes differ.
PLACES = [
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("llama_head_dim", "sdpa"),
    ("mistral", "sdpa"),
    ("mistral_window", "sdpa"),
    ("mistral_window", "eager"),
]
CHUNKED = (None, "hold", "bounded")

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")


@pytest.fixture(params=PLACES, ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model and its unattached twin."""
    family, backend = request.param
    return tiny(family, backend), tiny(family, backend)


@pytest.fixture(params=policies())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def same(name: str, pair: tuple[Any, Any], ids: Tensor, new: int = 6, options: Any = None, **kwargs: Any) -> Any:
    """Generate with the policy and with `DynamicCache`; compare ids and logits; return the policy's cache."""
    model, twin = pair
    outputs = []
    cache = neutral_cache(name, model, TOTAL, **(options or {}))
    for runner, used in ((twin, dynamic_cache(twin)), (model, cache)):
        torch.manual_seed(7)
        outputs.append(
            generate(runner, ids, used, new, return_dict_in_generate=True, output_logits=True, **copy.deepcopy(kwargs))
        )
    stock, ours = outputs
    assert torch.equal(ours.sequences, stock.sequences)
    for step, (left, right) in enumerate(zip(ours.logits, stock.logits, strict=True)):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=0, msg=lambda m, step=step: f"step {step}: {m}")
    assert getattr(ours, CACHE) is cache
    cache.check_integrity()
    return cache


@pytest.mark.proves("parity")
def test_one_prompt(name: str, pair: tuple[Any, Any]) -> None:
    cache = same(name, pair, prompt(19))
    assert cache.get_seq_length() == 19 + 5


@pytest.mark.parametrize("family", FAMILIES)
def test_double_precision(name: str, family: str) -> None:
    """The answer is as precise as the model, also where its tokens are attended and scored by one softmax.

    On SDPA: transformers' eager function takes every softmax in fp32, and has no finite mask for pads in fp64.
    """
    model, twin = tiny(family).double(), tiny(family).double()
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    found = greedy_loop(model, ids, neutral_cache(name, model, TOTAL), 12, mask)
    expected = greedy_loop(twin, ids, dynamic_cache(twin), 12, mask)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-12, rtol=0)


def test_prompt_of_one_token(name: str, pair: tuple[Any, Any]) -> None:
    same(name, pair, prompt(1))


@pytest.mark.proves("parity_padded")
def test_left_padded_batch(name: str, pair: tuple[Any, Any]) -> None:
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    same(name, pair, ids, attention_mask=mask)


@pytest.mark.proves("parity_beams", "parity_padded")
def test_beams_over_a_left_padded_batch(name: str, pair: tuple[Any, Any]) -> None:
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    same(name, pair, ids, attention_mask=mask, num_beams=4, num_return_sequences=2)


@pytest.mark.proves("parity_sampling")
def test_sampling(name: str, pair: tuple[Any, Any]) -> None:
    same(name, pair, prompt(19), do_sample=True, temperature=1.5, top_k=0, num_return_sequences=3)


def test_rows_that_finish_early(name: str, pair: tuple[Any, Any]) -> None:
    _, twin = pair
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    first = generate(twin, ids, dynamic_cache(twin), 2, attention_mask=mask)
    same(name, pair, ids, attention_mask=mask, eos_token_id=int(first[1, -1]), pad_token_id=0)


@pytest.mark.proves("parity_chunked")
@pytest.mark.parametrize("chunked", CHUNKED)
@pytest.mark.parametrize("padded", [False, True], ids=["solo", "padded"])
def test_chunked_prefill(name: str, pair: tuple[Any, Any], chunked: str | None, padded: bool) -> None:
    if chunked is not None and not has_budget(name):
        pytest.skip("a cache that selects nothing has no chunked_prefill option")
    if name in PRUNING and chunked == "hold":
        pytest.skip("a prompt that is pruned while it runs cannot be held; tests/spec/test_pyramidinfer.py")
    options = {} if chunked is None else {"chunked_prefill": chunked}
    ids, mask = left_padded([prompt(n, seed=n) for n in (LENGTHS if padded else LENGTHS[:1])])
    same(name, pair, ids, options=options, attention_mask=mask, prefill_chunk_size=5)


def test_chunked_prefill_whose_first_chunk_is_all_padding(name: str, pair: tuple[Any, Any]) -> None:
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS], width=27)
    same(name, pair, ids, attention_mask=mask, prefill_chunk_size=5)


@pytest.mark.proves("parity_turns", "parity_padded")
def test_two_turns(name: str, pair: tuple[Any, Any]) -> None:
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    answers = []
    model, twin = pair
    cache = neutral_cache(name, model, TOTAL)
    for runner, used in ((twin, dynamic_cache(twin)), (model, cache)):
        talk, seen = ids, mask
        for turn in range(3):
            talk = generate(runner, talk, used, 5, attention_mask=seen)
            talk = torch.cat([talk, prompt(6, seed=90 + turn, rows=len(LENGTHS))], dim=1)
            seen = torch.cat([mask, mask.new_ones(mask.shape[0], talk.shape[1] - mask.shape[1])], dim=1)
        answers.append(talk)
    assert torch.equal(*answers)
    assert cache.get_seq_length() == answers[0].shape[1] - 7
    cache.check_integrity()


def test_two_beam_turns(name: str, pair: tuple[Any, Any]) -> None:
    answers = []
    model, twin = pair
    for runner, used in ((twin, dynamic_cache(twin)), (model, neutral_cache(name, model, TOTAL))):
        talk = generate(runner, prompt(9), used, 4, num_beams=3)
        talk = torch.cat([talk, prompt(6, seed=90)], dim=1)
        answers.append(generate(runner, talk, used, 4, num_beams=3))
    assert torch.equal(*answers)


def drive(runner: Any, cache: Any, pieces: list[Tensor], mask: Tensor | None, positions: bool) -> Tensor:
    """Feed pieces one after another; returns the logits of all of them."""
    logits, done = [], 0
    with torch.no_grad():
        for piece in pieces:
            kwargs: dict[str, Any] = {}
            done += piece.shape[1]
            if mask is not None:
                kwargs["attention_mask"] = mask[:, :done]
            if positions:
                every = torch.arange(done).expand(piece.shape[0], -1)
                every = every if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, :done]
                kwargs["position_ids"] = every[:, done - piece.shape[1] :]
            logits.append(forward(runner, piece, cache, **kwargs))
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("masked", ["no_mask", "ones", "left_padded"])
@pytest.mark.parametrize("positions", [False, True], ids=["no_position_ids", "position_ids"])
def test_forward_loops(name: str, pair: tuple[Any, Any], masked: str, positions: bool) -> None:
    model, twin = pair
    ids = prompt(30, rows=3)
    mask = None if masked == "no_mask" else torch.ones_like(ids)
    if mask is not None and masked == "left_padded":
        mask[1, :4] = 0
        mask[2, :9] = 0
    pieces = list(ids.split([12, 1, 1, 6, 1, 4, 1, 1, 3], dim=1))
    expected = drive(twin, dynamic_cache(twin), pieces, mask, positions)
    found = drive(model, neutral_cache(name, model, TOTAL), pieces, mask, positions)
    real = torch.ones(3, 30, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)
    assert found.isfinite().all()


def test_inputs_embeds(name: str, pair: tuple[Any, Any]) -> None:
    model, twin = pair
    if name == "fastgen":
        # It knows special tokens and punctuation by their ids, which embeddings do not carry.
        with pytest.raises(kv.ConfigError, match="Pass input_ids"):
            model.generate(
                inputs_embeds=twin.get_input_embeddings()(prompt(11)), **{CACHE: neutral_cache(name, model, TOTAL)}
            )
        return
    answers = []
    for runner, used in ((twin, dynamic_cache(twin)), (model, neutral_cache(name, model, TOTAL))):
        embeds = runner.get_input_embeddings()(prompt(11)).detach()
        answers.append(
            runner.generate(
                inputs_embeds=embeds,
                attention_mask=torch.ones(1, 11, dtype=torch.long),
                do_sample=False,
                max_new_tokens=5,
                **{CACHE: used},
            )
        )
    assert torch.equal(*answers)


def test_cache_given_positionally(name: str) -> None:
    model, twin = tiny("llama"), tiny("llama")
    ids = prompt(9)
    with torch.no_grad():
        expected = twin(ids).logits
        cache = neutral_cache(name, model, TOTAL)
        found = model(ids, None, None, cache).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert cache.get_seq_length() == 9


@pytest.mark.proves("parity_assisted")
@pytest.mark.allow_deprecated  # transformers' own candidate generator passes a generation_config and arguments
@pytest.mark.parametrize("kind", ["assistant", "prompt_lookup"])
@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_decoding(name: str, family: str, kind: str) -> None:
    model, twin, assistant = tiny(family), tiny(family), tiny(family, seed=1, layers=1)
    ids = torch.cat([prompt(9), prompt(9)], dim=1)
    extra = {"assistant_model": assistant} if kind == "assistant" else {"prompt_lookup_num_tokens": 3}
    cache = same(name, (model, twin), ids, 12, **extra)
    assert cache.statistics.forwards > 0


@pytest.mark.allow_deprecated  # transformers' own candidate generator passes a generation_config and arguments
@pytest.mark.parametrize("kind", ["assistant", "prompt_lookup"])
def test_second_turn_after_assisted_decoding(name: str, kind: str) -> None:
    """Recording stays on after assisted decoding; the next turn accepts what waits."""
    answers = []
    for neutral in (False, True):
        model = tiny("llama")
        assistant = tiny("llama", seed=1, layers=1)
        extra = {"assistant_model": assistant} if kind == "assistant" else {"prompt_lookup_num_tokens": 3}
        used = neutral_cache(name, model, TOTAL) if neutral else dynamic_cache(model)
        talk = generate(model, prompt(12), used, 8, **extra)
        talk = torch.cat([talk, prompt(5, seed=5)], dim=1)
        answers.append(generate(model, talk, used, 8))
    assert torch.equal(*answers)


def test_window_is_smaller_than_the_sequences() -> None:
    assert min(LENGTHS) < WINDOW_TOKENS < max(LENGTHS)


@pytest.mark.slow  # the first call compiles flex attention, a minute on CPU
def test_flex_attention(name: str) -> None:
    model, twin = tiny("llama", "flex_attention"), tiny("llama", "sdpa")
    try:
        with torch.no_grad():
            tiny("llama", "flex_attention")(prompt(5))
    except Exception as error:
        pytest.skip(f"flex attention does not run here: {type(error).__name__}: {str(error)[:80]}")
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    expected = generate(twin, ids, dynamic_cache(twin), attention_mask=mask)
    cache = neutral_cache(name, model, TOTAL)
    if cache.composition.storage == "ragged":
        # Its block masks are built for rectangles, and rows are not padded for it.
        with pytest.raises(kv.BackendAdmissionError, match="rows of unequal number per head"):
            generate(model, ids, cache, attention_mask=mask)
        return
    assert torch.equal(generate(model, ids, cache, attention_mask=mask), expected)
