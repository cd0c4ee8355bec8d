"""Models that put images before a text decoder: the decoder is attached, placeholders are tokens like any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    BRIEF,
    CACHE,
    FULL,
    PRUNING,
    assert_same_content,
    dynamic_cache,
    forward,
    generate,
    has_budget,
    neutral_cache,
    options_for,
    policies,
    prompt,
    small_options,
)
from torch import Tensor

import hf_kvpolicy as kv
from hf_kvpolicy.attach import attached_backend
from hf_kvpolicy.evidence import LayerObservation, WindowVotes
from hf_kvpolicy.replay import capture_prompt, replay_prompt

from ._reference import MaskedReference
from ._wrappers import IMAGE, WRAPPERS, tiny_wrapper, with_images

LENGTHS = (21, 15)
SMALL: dict[str, Any] = {"budget": 8, "window": 3, "kernel_size": 3}
POLICIES = policies() if FULL else ("snapkv",) if BRIEF else ("snapkv", "streaming_llm", "adakv")
EVICTING = [name for name in POLICIES if has_budget(name) and name not in PRUNING]
MIXED = ("gemma3_images", "llama4_images")
# Where every layer may lose tokens, and positions are those of text.
PLAIN = [name for name, wrapper in WRAPPERS.items() if not wrapper.has_axes and name not in MIXED]
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
AXES = [name for name, wrapper in WRAPPERS.items() if wrapper.has_axes]

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")


def _neutral(name: str, family: str, model: Any) -> Any:
    if name in PRUNING and family not in PLAIN:
        pytest.skip("refused below")
    return neutral_cache(name, model, 64, **({"positions": "original"} if name == "streaming_llm" else {}))


@pytest.mark.parametrize(
    "beams",
    [
        pytest.param(1, marks=pytest.mark.proves("parity_padded"), id="greedy"),
        pytest.param(3, marks=pytest.mark.proves("parity_beams", "parity_padded"), id="beams"),
    ],
)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", WRAPPERS)
def test_equals_transformers_own_cache(family: str, name: str, beams: int) -> None:
    model, twin = tiny_wrapper(family), tiny_wrapper(family)
    ids, given = with_images(family, LENGTHS)
    found, wanted = (
        generate(each, ids, cache, 4, return_dict_in_generate=True, output_logits=True, num_beams=beams, **given)
        for each, cache in ((model, _neutral(name, family, model)), (twin, dynamic_cache(twin)))
    )
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), atol=1e-5, rtol=0)
    getattr(found, CACHE).check_integrity()


@pytest.mark.proves("parity_turns", "parity_chunked")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", WRAPPERS)
def test_turns_and_chunks(family: str, name: str) -> None:
    """An image in the first chunk and another in the second turn; what lies between them is fed without any."""
    model, twin = tiny_wrapper(family), tiny_wrapper(family)
    ids, given = with_images(family, LENGTHS[:1])
    outputs = []
    for each, cache in ((model, _neutral(name, family, model)), (twin, dynamic_cache(twin))):
        logits = []
        with torch.no_grad():
            for start, stop in ((0, 12), (12, 21)):
                told = {key: part for key, part in given.items() if part.ndim != 2 or part.shape != ids.shape}
                told = told if not start else {}
                if "mm_token_type_ids" in given:
                    told["mm_token_type_ids"] = given["mm_token_type_ids"][:, start:stop]
                if "token_type_ids" in given and not start:
                    told["token_type_ids"] = given["token_type_ids"][:, :stop]
                logits.append(forward(each, ids[:, start:stop], cache, **told)[:, -1])
            for token in prompt(3, seed=4).split(1, dim=1):
                logits.append(forward(each, token, cache)[:, -1])
        if not WRAPPERS[family].has_axes:
            # With axes, transformers numbers a later image of its own prompt only through generate.
            more, again = with_images(family, (11,), seed=5)
            told = {key: part for key, part in again.items() if key != "attention_mask"}
            if "token_type_ids" in told:  # of all columns
                told["token_type_ids"] = torch.cat(
                    [torch.zeros(1, 24, dtype=torch.long), told["token_type_ids"]], dim=1
                )
            with torch.no_grad():
                logits.append(forward(each, more, cache, **told)[:, -1])
        outputs.append(torch.stack(logits))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)


@pytest.mark.proves("logits")
@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("family", WRAPPERS)
def test_logits_equal_dense_attention_over_the_kept_rows(family: str, name: str) -> None:
    model, reference = tiny_wrapper(family), MaskedReference(tiny_wrapper(family, "eager"))
    options = {"positions": "original"} if name == "streaming_llm" else {}
    cache = kv.make_cache(name, model, **options_for(model, name, small_options(name) | options))
    ids, given = with_images(family, LENGTHS)
    mask, pads = given["attention_mask"], [max(LENGTHS) - n for n in LENGTHS]
    # `generate` tells positions; those of a prompt with axes the wrapper finds itself.
    axes = WRAPPERS[family].has_axes
    told = {} if axes else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        reference.feed(ids, **given, **told)
        forward(model, ids, cache, **given, **told)
        for step in range(5):
            reference.seen = {
                layer: [
                    [(owner + pads[row]).tolist() for owner in cache.positions(layer, batch=row)]
                    for row in range(len(LENGTHS))
                ]
                for layer in cache.policy_layers
            }
            mask = torch.cat([mask, torch.ones(len(LENGTHS), 1, dtype=mask.dtype)], dim=1)
            tokens = mask.sum(-1, keepdim=True) - 1
            # Of text, then three axes, on which an image took fewer places than it has tokens.
            places = torch.stack([tokens, *[tokens + model.model.rope_deltas] * 3]) if axes else tokens
            told = {"position_ids": places}
            piece = prompt(1, seed=step, rows=len(LENGTHS))
            found = forward(model, piece, cache, attention_mask=mask, **told)
            wanted = reference.feed(piece, attention_mask=mask, **told)
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert int(cache.stored_rows(cache.policy_layers[0]).max()) < max(LENGTHS)


@pytest.fixture
def votes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The votes that observation windows gave, by layer, before heads are reduced."""
    found: list[Tensor] = []
    own = WindowVotes.votes

    def recorded(self: WindowVotes, seen: LayerObservation, *, group: str, score_heads: int) -> Tensor:
        found.append(own(self, seen, group=group, score_heads=score_heads))
        return found[-1]

    monkeypatch.setattr(WindowVotes, "votes", recorded)
    return found


@pytest.mark.proves("evidence", policy="snapkv")
@pytest.mark.parametrize("family", WRAPPERS)
def test_votes_of_an_image_equal_eager_attention(family: str, votes: list[Tensor]) -> None:
    """The window is the image itself, whose tokens may look ahead."""
    ids, given = with_images(family, LENGTHS, before=None)
    with torch.no_grad():
        weights = tiny_wrapper(family, "eager")(ids, **given, output_attentions=True, use_cache=False).attentions
        model = tiny_wrapper(family)
        cache = kv.SnapKVCache(model, **SMALL, owner="query_head")
        forward(model, ids, cache, **given)
    by_layer = dict(zip(cache.geometry.attending_layers, weights, strict=True))
    for layer, found in zip(cache.policy_layers, votes, strict=True):
        wanted = by_layer[layer][:, :, -3:]
        if family == "gemma3_images":
            assert (wanted.triu(wanted.shape[-1] - 2) > 1e-4).any(), "no token looked ahead"
        for row, length in enumerate(LENGTHS):
            torch.testing.assert_close(found[row, :, -length:], wanted.sum(2)[row, :, -length:], atol=1e-5, rtol=0)


@pytest.mark.proves("evidence", policy="h2o")
@pytest.mark.parametrize("family", WRAPPERS)
def test_carried_scores_equal_sums_of_eager_attention(family: str) -> None:
    ids, given = with_images(family, LENGTHS[:1])
    with torch.no_grad():
        weights = tiny_wrapper(family, "eager")(ids, **given, output_attentions=True, use_cache=False).attentions
        model = tiny_wrapper(family)
        cache = neutral_cache("h2o", model, 64, group="sum")
        forward(model, ids, cache, **given)
    by_layer = dict(zip(cache.geometry.attending_layers, weights, strict=True))
    for number, layer in enumerate(cache.policy_layers):
        found = cache._runtime.snapshot.scores_LBSWX[number, 0, :, : ids.shape[1], 0]
        wanted = by_layer[layer][0].sum(dim=1).view(found.shape[0], -1, ids.shape[1]).sum(dim=1)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", WRAPPERS)
def test_placeholders_are_kept_and_dropped_like_other_tokens(family: str) -> None:
    model = tiny_wrapper(family)
    ids, given = with_images(family, LENGTHS[:1])
    images = (ids[0] == IMAGE).nonzero()[:, 0].tolist()
    cache, kept = kv.SnapKVCache(model, **SMALL), kv.SnapKVCache(model, **SMALL, protect=images[:3])
    with torch.no_grad():
        found, other = (forward(model, ids, each, **given)[:, -1] for each in (cache, kept))
        changed = {**given, "pixel_values": -given["pixel_values"]}
        assert not torch.allclose(forward(model, ids, kv.SnapKVCache(model, **SMALL), **changed)[:, -1], found)
    assert torch.equal(found, other)
    layer = cache.policy_layers[0]
    assert cache.stored_rows(layer).tolist() == [[8, 8]]
    assert all(set(images[:3]) <= set(owner.tolist()) for owner in kept.positions(layer))
    assert all(len(owner) == 8 and int(owner[-1]) == ids.shape[1] - 1 for owner in cache.positions(layer))


@pytest.mark.parametrize("family", WRAPPERS)
def test_only_the_decoder_is_attached(family: str) -> None:
    model, twin = tiny_wrapper(family), tiny_wrapper(family)
    towers = {name: part for name, part in model.named_modules() if hasattr(part, "config")}
    names = {name: str(part.config._attn_implementation) for name, part in towers.items()}
    kv.attach(kv.attach(model))
    decoder = model.get_decoder()
    assert attached_backend(model) == "sdpa"
    for name, part in towers.items():
        found = str(part.config._attn_implementation)
        assert found == ("kvpolicy" if part.config is decoder.config else names[name])
    ids, given = with_images(family, LENGTHS)
    stock = [generate(each, ids, dynamic_cache(each), 3, **given) for each in (model, twin)]
    assert torch.equal(*stock)
    kv.detach(model)
    assert {name: str(part.config._attn_implementation) for name, part in towers.items()} == names
    # transformers leaves hooks of its own on towers whose layers it reads.
    hooks = [hook for part in model.modules() for kind in _HOOKS for hook in getattr(part, kind).values()]
    assert not any(str(getattr(hook, "__module__", "")).startswith("hf_kvpolicy") for hook in hooks)


@pytest.mark.proves("cache_local", policy="streaming_llm", refused=True)
@pytest.mark.parametrize("family", AXES)
def test_positions_with_axes_are_not_moved(family: str) -> None:
    with pytest.raises(kv.UnsupportedModelError, match=r"three axes.*positions='original'"):
        kv.StreamingLLMCache(tiny_wrapper(family), budget=8, sinks=2)


def test_a_decoder_that_moves_text_does_not_move_images() -> None:
    """A cache made from the decoder, or its config, knows of no axes before it meets them."""
    model = tiny_wrapper("qwen3_5_images")
    ids, given = with_images("qwen3_5_images", [20])
    for source in (model.config.text_config, model.get_decoder()):
        cache = kv.StreamingLLMCache(source, budget=8, sinks=2)
        with pytest.raises(kv.ConfigError, match=r"several axes.*positions='original'"), torch.no_grad():
            kv.attach(model)(ids, **given, **{CACHE: cache})


@pytest.mark.proves("any", policy="pyramidinfer", refused=True)
@pytest.mark.parametrize("family", [*AXES, *MIXED])
def test_tokens_are_not_dropped_between_layers(family: str) -> None:
    with pytest.raises(kv.UnsupportedModelError, match="snapkv"):
        kv.PyramidInferCache(tiny_wrapper(family), budget=8)


@pytest.mark.parametrize("family", PLAIN)
def test_cache_local_positions_and_tokens_dropped_between_layers(family: str) -> None:
    """As in the text decoder alone, fed with the same embeddings."""
    model = tiny_wrapper(family)
    ids, given = with_images(family, LENGTHS[:1])
    for name in ("streaming_llm", "pyramidinfer"):
        alone = tiny_wrapper(family)
        decoder, head = alone.get_decoder(), alone.get_output_embeddings()
        seen: dict[str, Tensor] = {}
        handle = model.get_decoder().register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.update(embeds=kwargs["inputs_embeds"].clone()), with_kwargs=True
        )
        cache, straight = kv.make_cache(name, model, **small_options(name)), None
        with torch.no_grad():
            found = forward(model, ids, cache, **given, logits_to_keep=1)
            handle.remove()
            straight = kv.make_cache(name, decoder, **small_options(name))
            if name == "streaming_llm":
                arguments = {CACHE: straight, "use_cache": True, "inputs_embeds": seen["embeds"]}
                wanted = head(decoder(**arguments).last_hidden_state[:, -1:])
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
                assert_same_content(cache, straight)
        assert int(cache.stored_rows(3).max()) < ids.shape[1]


def test_tokens_are_told_apart_by_the_ids_of_the_whole_model() -> None:
    model = tiny_wrapper("llava")
    ids, given = with_images("llava", LENGTHS[:1])
    cache = kv.FastGenCache(model, recovery=0.5, special_token_ids=[IMAGE], punctuation_token_ids=[3])
    with torch.no_grad():
        forward(model, ids, cache, **given)
        images = set((ids[0] == IMAGE).nonzero()[:, 0].tolist())
        assert any(images <= set(owner.tolist()) for layer in range(4) for owner in cache.positions(layer))
        embedded = model.get_input_embeddings()(prompt(5))
        with pytest.raises(kv.ConfigError, match="inputs_embeds"):
            model(inputs_embeds=embedded, **{CACHE: kv.FastGenCache(model, special_token_ids=[5])}, use_cache=True)


class Died(Exception):
    """Raised on purpose inside a forward."""


@pytest.mark.proves("failures", policy="snapkv")
@pytest.mark.parametrize("family", ["llava", "gemma3_images", "qwen3_5_images", "qwen2_vl"])
def test_a_forward_that_dies_leaves_no_trace(family: str) -> None:
    model = tiny_wrapper(family)
    cache, calm = (kv.SnapKVCache(model, **SMALL) for _ in range(2))
    ids, given = with_images(family, LENGTHS[:1])

    def die(*_: Any) -> None:
        raise Died

    for each in (cache, calm):
        generate(model, ids, each, **given)
    receipt = cache.receipt
    # In a layer of the decoder, and in what feeds it: there no forward of the cache has begun.
    for place in (model.get_decoder().layers[2], model.model):
        handle = place.register_forward_pre_hook(die)
        with pytest.raises(Died), torch.no_grad():
            forward(model, prompt(1, seed=3), cache)
        handle.remove()
        cache.rollback()
        assert cache.receipt == receipt
    with torch.no_grad():
        assert torch.equal(*(forward(model, prompt(1, seed=4), each) for each in (cache, calm)))


@pytest.mark.proves("saved", policy="snapkv")
@pytest.mark.parametrize("family", ["llava", "gemma3_images", "qwen3_5_images", "qwen2_vl"])
def test_saved_and_loaded(family: str, tmp_path: Path) -> None:
    model = tiny_wrapper(family)
    cache = kv.SnapKVCache(model, **SMALL)
    ids, given = with_images(family, LENGTHS)
    with torch.no_grad():
        forward(model, ids, cache, **given)
        cache.save_pretrained(tmp_path)
        loaded = kv.load_cache(tmp_path, model)
        found, wanted = (forward(model, prompt(1, rows=2, seed=6), each) for each in (loaded, cache))
    assert torch.equal(found, wanted)


@pytest.mark.proves("parity_assisted", policy="snapkv", family="llava")
@pytest.mark.allow_deprecated  # transformers' own candidate generator passes a generation_config and arguments
def test_prompt_lookup_behind_an_image() -> None:
    ids, given = with_images("llava", (20,))
    ids = torch.cat([ids, ids[:, 8:18]], dim=1)
    given = {**given, "attention_mask": torch.ones_like(ids)}
    answers = []
    for neutral in (False, True):
        model = tiny_wrapper("llava")
        cache = neutral_cache("snapkv", model, 64) if neutral else dynamic_cache(model)
        answers.append(generate(model, ids, cache, 10, prompt_lookup_num_tokens=3, **given))
    assert torch.equal(*answers)


@pytest.mark.parametrize("family", ["llava", "gemma3_images"])
def test_a_text_prompt_is_captured_and_replayed(family: str) -> None:
    model = tiny_wrapper(family)
    run, replayed = (kv.SnapKVCache(model, **SMALL) for _ in range(2))
    with torch.no_grad():
        forward(model, prompt(20), run)
        replay_prompt(replayed, model, capture_prompt(model, prompt(20)))
        assert attached_backend(model) == "sdpa"
        assert_same_content(replayed, run)


def test_a_model_without_a_head_is_attached_too() -> None:
    model = tiny_wrapper("llava").model
    cache = kv.SnapKVCache(model, **SMALL)
    ids, given = with_images("llava", LENGTHS)
    with torch.no_grad():
        model(ids, **{CACHE: cache}, use_cache=True, **given)
    assert cache.stored_rows(0).tolist() == [[8, 8]] * 2


def test_a_decoder_of_a_family_without_a_patch_is_refused() -> None:
    model = tiny_wrapper("llava")
    model.config.text_config.model_type = "stablelm"
    with pytest.raises(kv.UnsupportedModelError, match="stablelm"):
        kv.SnapKVCache(model, **SMALL)
