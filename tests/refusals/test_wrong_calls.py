"""Calls that cannot be right fail at once, name the remedy, and leave the cache as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import (
    CACHE,
    dynamic_cache,
    forward,
    generate,
    neutral_cache,
    prompt,
    tiny,
)
from refusals.started import Started, make

import hf_kvpolicy as kv

# -- the wrong call


def test_batch_size_changed(name: str) -> None:
    for rows in (1, 3):
        started = Started(name)
        with started.refuses(kv.ConfigError, "2 batch rows.*batch_select_indices"):
            forward(started.model, prompt(1, rows=rows), started.cache)


def test_a_shorter_new_prompt(name: str) -> None:
    started = Started(name)
    with started.refuses(kv.ConfigError, r"reset\(\)"):
        generate(started.model, prompt(9, rows=2), started.cache)
    started = Started(name)
    with started.refuses(kv.ConfigError, r"reset\(\)"):
        generate(started.model, prompt(22, rows=2), started.cache)


def test_no_new_token(name: str) -> None:
    started = Started(name)
    with started.refuses(kv.ConfigError, r"reset\(\)"):
        forward(started.model, prompt(4, rows=2)[:, :0], started.cache)
    cache = make(name, started.model)
    with pytest.raises((kv.ConfigError, ValueError, IndexError)):
        generate(started.model, prompt(4)[:, :0], cache)
    with pytest.raises(kv.ConfigError, match="no new token"):
        forward(started.model, prompt(4)[:, :0], cache)
    assert torch.equal(
        generate(started.model, prompt(20), cache), generate(started.model, prompt(20), make(name, started.model))
    )


def test_tokens_fed_again_in_a_loop(name: str) -> None:
    started = Started(name)
    positions = torch.arange(9)[None].expand(2, -1)
    with started.refuses(kv.ConfigError, r"fed again.*reset\(\)"):
        forward(started.model, prompt(9, rows=2), started.cache, position_ids=positions)
    started = Started(name)
    with started.refuses(kv.ConfigError, "skipped"):
        forward(started.model, prompt(1, rows=2), started.cache, position_ids=torch.full((2, 1), 30))
    started = Started(name)
    with started.refuses(kv.ConfigError, "one position per new token"):
        forward(started.model, prompt(2, rows=2), started.cache, position_ids=torch.full((2, 1), 22))


def test_one_row_of_many_fed_again(name: str) -> None:
    started = Started(name)
    with started.refuses(kv.ConfigError, "row 1 continues at position 21"):
        forward(started.model, prompt(1, rows=2), started.cache, position_ids=torch.tensor([[22], [21]]))


@pytest.mark.allow_deprecated
@pytest.mark.parametrize("kind", ["assistant", "prompt_lookup"])
def test_assisted_decoding_on_a_filled_cache_is_right_or_refused(name: str, kind: str) -> None:
    """Some releases feed the whole sequence again here; running wrong is not an option."""
    model = tiny("llama")
    extra = {"assistant_model": tiny("llama", seed=1, layers=1)} if kind == "assistant" else {}
    extra = extra or {"prompt_lookup_num_tokens": 3}
    cache, plain = neutral_cache(name, model, 64), dynamic_cache(model)
    talk = generate(model, prompt(12), cache)
    assert torch.equal(generate(model, prompt(12), plain), talk)
    talk = torch.cat([talk, prompt(5, seed=4)], dim=1)
    try:
        found = generate(model, talk, cache, **extra)
    except kv.ConfigError as error:
        refusal = str(error)
    else:
        assert torch.equal(found, generate(model, talk, plain))
        return
    assert re.search(r"fed again|no token again", refusal, re.IGNORECASE)


def test_use_cache_false(name: str) -> None:
    started = Started(name)
    new = prompt(1, rows=2)
    with started.refuses(kv.ConfigError, "use_cache=True"):
        started.model(new, use_cache=False, **{CACHE: started.cache})
    started = Started(name)
    started.model.config.use_cache = False
    with started.refuses(kv.ConfigError, "use_cache=True"):
        started.model(new, **{CACHE: started.cache})
    model = tiny("llama")
    for kwargs in ({"use_cache": False}, {}):
        model.generation_config.use_cache = bool(kwargs)
        cache = make(name, model)
        with pytest.raises(kv.ConfigError, match="use_cache=True"):
            model.generate(prompt(9), max_new_tokens=3, **{CACHE: cache}, **kwargs)
        assert cache.get_seq_length() == 0


def test_output_attentions(name: str) -> None:
    new = prompt(1, rows=2)
    started = Started(name)
    with started.refuses(kv.ConfigError, "output_attentions=True"):
        started.model(new, output_attentions=True, use_cache=True, **{CACHE: started.cache})
    started = Started(name, model=tiny("llama", "eager"))
    with started.refuses(kv.ConfigError, "output_attentions=True"):
        started.model(new, output_attentions=True, use_cache=True, **{CACHE: started.cache})
    cache = make(name, started.model)
    with pytest.raises(kv.ConfigError, match="output_attentions=True"):
        generate(started.model, prompt(9), cache, output_attentions=True, return_dict_in_generate=True)


def test_gradient_checkpointing_in_training(name: str) -> None:
    started = Started(name)
    model = started.model
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    with pytest.raises(kv.ConfigError, match=r"model\.eval\(\)"):
        forward(model, prompt(1, rows=2), started.cache)
    model.eval()
    started.goes_on()


def test_training_mode_without_checkpointing_works(name: str) -> None:
    model = tiny("llama").train()
    cache = make(name, model)
    loss = forward(model, prompt(20), cache).sum()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        forward(model, prompt(1), cache)
    cache.check_integrity()


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 1, 1, 23, dtype=torch.bool),
        torch.zeros(2, 1, 1, 23),
        {"full_attention": torch.ones(2, 1, 1, 23, dtype=torch.bool)},
    ],
    ids=["bool_4d", "float_4d", "dict"],
)
def test_prepared_masks(name: str, mask: Any) -> None:
    started = Started(name)
    with started.refuses(kv.ConfigError, "2-D"):
        forward(started.model, prompt(1, rows=2), started.cache, attention_mask=mask)


def test_prepared_mask_in_the_first_forward(name: str) -> None:
    model = tiny("llama")
    cache = make(name, model)
    with pytest.raises(kv.ConfigError, match="2-D"):
        forward(model, prompt(9), cache, attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool).tril())
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("shape", [(2, 1), (2, 22), (2, 24), (1, 23), (3, 23)])
def test_wrong_mask_width(name: str, shape: tuple[int, int]) -> None:
    started = Started(name)
    with started.refuses(kv.ConfigError, r"must be \(2, 23\)"):
        forward(started.model, prompt(1, rows=2), started.cache, attention_mask=torch.ones(shape, dtype=torch.long))
