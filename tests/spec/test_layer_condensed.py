"""Layer-condensed checkpoints: against a decoder written out, in every way of encoding, and what they store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    BACKENDS,
    CACHE,
    assert_same_content,
    dynamic_cache,
    forward,
    generate,
    left_padded,
    prompt,
    tiny,
)
from reference.layer_condensed import Decoder, iterated_logits
from transformers import LlamaConfig

import hf_kvpolicy as kv
from hf_kvpolicy.contract import KVVisibilityPolicyManifest
from hf_kvpolicy.engine import published
from hf_kvpolicy.representation import sandwich_map

from ._condensed import GRAPHS, TEACHING, condensed, fed

# In double precision, but for the angles of rotations, which a Llama computes in single.
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
FAMILIES = ("llama", "llama_head_dim", "mistral", "mistral_window")


# -- against the decoder written out ----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "llama_head_dim"])
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_token_by_token_is_the_plain_decoder(graph: Any, family: str) -> None:
    model, ids = condensed(graph, family).double(), prompt(17)
    plain = Decoder(model.state_dict(), model.config, graph)
    expected = torch.stack([plain.feed(token) for token in ids[0].tolist()])[None]
    for widths in ((17,), (1,) * 17, (9, 1, 1, 6)):
        cache = kv.LayerCondensedCache(model, encoding="sequential")
        torch.testing.assert_close(fed(model, cache, ids, widths), expected, **CLOSE)
        cache.check_integrity()
        for layer, producer in enumerate(graph):
            keys, values = (part[0, :, :17].transpose(0, 1) for part in cache.stored_view(layer))
            for found, part in ((keys, 0), (values, 1)):
                torch.testing.assert_close(found, torch.stack([row[part] for row in plain.rows[producer]]), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("passes", [1, 2, 5])
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_an_iterated_prompt_is_that_of_the_plain_passes(graph: Any, passes: int) -> None:
    model, ids = condensed(graph).double(), prompt(13)
    found = fed(model, kv.LayerCondensedCache(model, encoding="iterated", passes=passes), ids, (13,))
    expected = iterated_logits(model.state_dict(), model.config, graph, ids[0].tolist(), passes)
    torch.testing.assert_close(found[0], expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("graph", "backend", "dtype", "share"),
    [
        *((TEACHING, backend, torch.float32, 1e-5) for backend in BACKENDS),
        # Rounding comes back to every layer with every token; eager attention rounds in single precision.
        *((graph, "sdpa", torch.float64, 1e-12) for graph in GRAPHS),
    ],
    ids=str,
)
def test_as_many_passes_as_tokens_are_exact(
    graph: Any, family: str, backend: str, dtype: torch.dtype, share: float
) -> None:
    """Up to a share of the largest logit."""
    model = condensed(graph, family).to(dtype)
    model.set_attn_implementation(backend)
    ids, mask = left_padded([prompt(n, seed=n) for n in (20, 11)])
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    exact, iterated = (
        kv.LayerCondensedCache(model, encoding=encoding, passes=20) for encoding in ("sequential", "iterated")
    )
    expected, found = forward(model, ids, exact, **given), forward(model, ids, iterated, **given)
    real = mask.bool()
    assert (found - expected)[real].abs().max() <= share * expected.abs().max()
    assert_same_content(iterated, exact)
    # A later turn reads final rows of the past, and needs as many passes as it has tokens.
    mask = torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], dim=1)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1)[:, -9:]}
    more = prompt(9, 7, 2)
    expected, found = forward(model, more, exact, **given), forward(model, more, iterated, **given)
    assert (found - expected).abs().max() <= share * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("graph", [TEACHING, (5,) * 6, (0, 4, 4, 4, 4, 5)], ids=str)
def test_a_token_is_exact_from_its_own_pass_on(graph: Any) -> None:
    model, ids = condensed(graph), prompt(16)
    exact = fed(model, kv.LayerCondensedCache(model, encoding="sequential"), ids, (16,))
    for passes in (1, 3, 8):
        found = fed(model, kv.LayerCondensedCache(model, encoding="iterated", passes=passes), ids, (16,))
        torch.testing.assert_close(found[:, :passes], exact[:, :passes], atol=1e-5, rtol=1e-4)
        assert (found[:, passes] - exact[:, passes]).abs().max() > 1e-3


@torch.no_grad()
def test_a_forward_no_longer_than_the_passes_runs_token_by_token() -> None:
    model = condensed(TEACHING)
    for width, encoding in ((5, "sequential"), (6, "iterated")):
        ids = prompt(width)
        found = fed(model, kv.LayerCondensedCache(model), ids, (width,))
        assert torch.equal(found, fed(model, kv.LayerCondensedCache(model, encoding=encoding), ids, (width,)))


@torch.no_grad()
def test_a_graph_without_a_circle_runs_its_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = condensed((0, 0, 2, 2, 4, 4)), []
    model.model.layers[3].register_forward_hook(lambda *_: calls.append(1))
    cache = kv.LayerCondensedCache(model)
    fed(model, cache, prompt(20), (12, 1, 7))
    assert len(calls) == 3
    assert cache.ledger().kept_ratio.value == 0.5


@torch.no_grad()
@pytest.mark.parametrize(("widths", "runs"), [((20,), 5), ((5,), 5), ((1,), 1), ((4, 1, 6), 4 + 1 + 5)])
def test_layers_run_as_often_as_the_checkpoint_says(widths: Any, runs: int) -> None:
    model, calls = condensed(TEACHING), []
    model.model.layers[3].register_forward_hook(lambda *_: calls.append(1))
    fed(model, kv.LayerCondensedCache(model), prompt(20), widths)
    assert len(calls) == runs


@torch.no_grad()
@pytest.mark.parametrize("encoding", ["sequential", "iterated"])
def test_a_token_whose_window_holds_nothing_gets_zeros(encoding: str) -> None:
    """A row sits out longer than the model's window is wide: its next token sees no row of a later layer."""
    found = []
    for backend in BACKENDS:
        model = condensed(TEACHING, "mistral_window")
        model.set_attn_implementation(backend)
        cache = kv.LayerCondensedCache(model, encoding=encoding, passes=4)
        mask, logits = torch.ones(2, 0, dtype=torch.long), []
        for seed, (width, sits_out) in enumerate([(9, False), (8, True), (1, False), (6, False)]):
            new = torch.ones(2, width, dtype=torch.long)
            new[1] = 0 if sits_out else 1
            mask = torch.cat([mask, new], dim=1)
            given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1)[:, -width:]}
            logits.append(forward(model, prompt(width, seed, 2), cache, **given)[new.bool()])
        found.append(torch.cat(logits))
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("encoding", ["sequential", "iterated"])
@pytest.mark.parametrize("dies_in", [1, 2, 4])
def test_a_forward_that_dies_between_runs_leaves_nothing(encoding: str, dies_in: int) -> None:
    model, ids, runs = condensed(TEACHING), prompt(30), []

    def fail(*_: Any) -> None:
        runs.append(1)
        if len(runs) == dies_in:
            raise KeyboardInterrupt

    died, never = (kv.LayerCondensedCache(model, encoding=encoding, passes=4) for _ in range(2))
    for cache in (died, never):
        fed(model, cache, ids, (7, 1))
    snapshot = died._runtime.snapshot
    handle = model.model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        forward(model, prompt(9, 5), died)
    handle.remove()
    assert len(runs) == dies_in
    assert died._runtime.snapshot is snapshot
    died.check_integrity()
    for cache in (died, never):
        cache.found = fed(model, cache, ids[:, 8:], (6, 1, 9))
    assert torch.equal(died.found, never.found)
    assert_same_content(died, never)


# -- what is stored ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_teaching_graph_stores_two_layers_of_six() -> None:
    model = condensed(TEACHING)
    cache, full = kv.LayerCondensedCache(model), kv.FullCache(tiny("llama", layers=6))
    ids, mask = left_padded([prompt(n, seed=n) for n in (20, 11)])
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    forward(model, ids, cache, **given), forward(tiny("llama", layers=6), ids, dynamic_cache(model), **given)
    kv.attach(twin := tiny("llama", layers=6))
    forward(twin, ids, full, **given)
    ledger = cache.ledger()
    # Tokens, producers, heads, head size, K and V, four bytes.
    assert ledger.payload_bytes == (20 + 11) * 2 * 2 * 8 * 2 * 4
    assert ledger.full_payload_bytes == full.ledger().payload_bytes == 3 * ledger.payload_bytes
    assert ledger.measured_bytes == ledger.declared_bytes < full.ledger().measured_bytes / 2
    for layer in range(6):
        assert cache.stored_rows(layer).tolist() == ([[20] * 2, [11] * 2] if layer in (0, 5) else [[0] * 2] * 2)
        assert [tokens.tolist() for tokens in cache.positions(layer, 1)] == [list(range(11))] * 2
        assert cache.layers[layer].keys.data_ptr() == cache.layers[TEACHING[layer]].keys.data_ptr()
    assert repr(cache).endswith("rows=124)")


def test_the_paper_s_sandwich() -> None:
    assert sandwich_map(6, 2) == TEACHING
    assert sandwich_map(6, 0) == (5,) * 6
    assert sandwich_map(8, 4) == (0, 1, 7, 7, 7, 7, 6, 7)
    assert len(set(sandwich_map(22, 2))) == 2
    assert len(set(sandwich_map(22, 10))) == 10
    entry = kv.LayerCondensedCache.checkpoint_entry(6)
    assert entry == {"kind": "layer_condensed", "map": list(TEACHING), "forward_passes": 7, "backward_passes": 2}
    assert kv.LayerCondensedCache(LlamaConfig(num_hidden_layers=6, kvpolicy=entry)).composition.representation
    for wrong in (1, -2, 8):
        with pytest.raises(kv.ConfigError, match="an even number between 0 and 6"):
            kv.LayerCondensedCache.checkpoint_entry(6, warmup_layers=wrong)


def test_the_manifest_names_the_graph() -> None:
    cache = kv.LayerCondensedCache(condensed(TEACHING))
    manifest = cache.manifest
    assert KVVisibilityPolicyManifest.from_dict(manifest.to_dict()) == manifest
    contract = manifest.representation_contract
    assert (contract.rows, contract.consumer_schema) == ("replacement_rows", "producer_rows_own_row_masked")
    graph = contract.replacement
    assert graph is not None
    assert graph.representation_kind == "condensed_layers"
    assert tuple(graph.consumer_layer_map) == TEACHING
    assert [graph.has_store(layer) for layer in range(6)] == [True, False, False, False, False, True]
    assert manifest.selection_contract.decision_phase == "none"
    assert manifest.recoverability_contract.omitted == "resident_visible"
    other = kv.LayerCondensedCache(condensed((5,) * 6))
    assert other.manifest != manifest
    assert cache.state.replacement_object_ids == ("layer 0", "layer 5")
    assert [store.layers for store in cache.receipt.replaced_rows] == [(0,), (5,)]
    with torch.no_grad():
        forward(condensed(TEACHING), prompt(1), dynamic_cache(condensed(TEACHING)))


@torch.no_grad()
def test_the_receipt_lists_the_producers_rows() -> None:
    model = condensed(TEACHING)
    cache = kv.LayerCondensedCache(model)
    before = cache.receipt.digest
    fed(model, cache, prompt(9), (8, 1))
    receipt = cache.receipt
    assert receipt.digest != before
    assert [store.layers for store in receipt.replaced_rows] == [(0,), (5,)]
    assert receipt.replaced_rows[1].spans == (tuple((t, t) for t in range(9)),) * 2
    assert receipt.payload_bytes == cache.ledger().payload_bytes
    with pytest.raises(kv.ManifestError, match="lossy_replacement"):
        cache.prefix_digest(list(range(9)))


# -- operations that are this policy's own ----------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.proves("turns", policy="layer_condensed")
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_pieces_are_the_exact_whole(family: str) -> None:
    model, ids = condensed(TEACHING, family), prompt(24)
    whole, pieces = (kv.LayerCondensedCache(model, encoding="sequential") for _ in range(2))
    torch.testing.assert_close(
        fed(model, pieces, ids, (10, 4, 1, 9)), fed(model, whole, ids, (24,)), atol=1e-5, rtol=1e-4
    )
    assert_same_content(pieces, whole)


@torch.no_grad()
@pytest.mark.parametrize("encoding", ["auto", "sequential", "iterated"])
def test_rejected_drafts_leave_nothing(encoding: str) -> None:
    """What a run has computed of later tokens reaches no earlier one."""
    model, ids = condensed(TEACHING), prompt(30)
    taken, never = (kv.LayerCondensedCache(model, encoding=encoding, passes=7) for _ in range(2))
    taken.activate_past_recording()
    for width, rejected in ((20, 4), (9, 6), (5, 5)):
        start = taken.get_seq_length()
        forward(model, ids[:, start : start + width], taken)
        taken.crop(-rejected)
        taken.check_integrity()
        if width > rejected:
            forward(model, ids[:, start : start + width - rejected], never)
        assert_same_content(taken, never)
    taken.set_recording(False)
    taken.crop(-9), never.crop(-9)
    assert_same_content(taken, never)


@pytest.mark.allow_deprecated
@pytest.mark.proves("recorded", policy="layer_condensed", family="llama")
@pytest.mark.parametrize("encoding", ["auto", "sequential"])
@pytest.mark.parametrize("kind", ["assistant", "prompt_lookup"])
def test_assisted_ids_are_greedy_ids(kind: str, encoding: str) -> None:
    model, assistant = condensed(TEACHING), tiny("llama", seed=1, layers=1)
    extra = {"assistant_model": assistant} if kind == "assistant" else {"prompt_lookup_num_tokens": 3}
    talks = []
    for given in ({}, extra):
        cache = kv.LayerCondensedCache(model, encoding=encoding, passes=7)
        talks.append(generate(model, prompt(12).repeat(1, 2), cache, 16, **given))
        cache.check_integrity()
    assert torch.equal(*talks)


@torch.no_grad()
def test_a_layer_without_a_store_leaves_with_its_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, away = condensed(TEACHING), torch.device("meta")
    monkeypatch.setattr(published, "OFFLOAD_DEVICE", away)
    cache = kv.LayerCondensedCache(model)
    fed(model, cache, prompt(9), (8, 1))
    ledger = cache.ledger()
    cache.offload(3)
    assert cache._runtime.snapshot.home is None, "it holds nothing"
    cache.offload(0)
    assert [cache.layers[layer].keys.device == away for layer in range(6)] == [True] + [False] * 5
    cache.offload(5)
    assert all(cache.layers[layer].keys.device == away for layer in range(6))
    assert cache._runtime.snapshot.tail.device == away, "what layers share leaves with the last of them"
    assert cache.ledger().declared_bytes == ledger.declared_bytes


@torch.no_grad()
@pytest.mark.parametrize("width", [4, 12])
def test_every_output_is_that_of_all_tokens(width: int) -> None:
    """Hidden states, tuples and embeddings, whether a prompt is run token by token or in passes."""
    model, ids = condensed(TEACHING), prompt(width)
    given = {"use_cache": True, "output_hidden_states": True}
    expected = model(ids, **{CACHE: kv.LayerCondensedCache(model)}, **given)
    assert len(expected.hidden_states) == 7
    assert all(states.shape == (1, width, 32) for states in expected.hidden_states)
    assert torch.equal(model.lm_head(expected.hidden_states[-1]), expected.logits)
    found = model(ids, **{CACHE: kv.LayerCondensedCache(model)}, **given, return_dict=False)
    assert torch.equal(found[0], expected.logits)
    embedded = model(inputs_embeds=model.model.embed_tokens(ids), **{CACHE: kv.LayerCondensedCache(model)}, **given)
    assert torch.equal(embedded.logits, expected.logits)
    last = model.model(ids, **{CACHE: kv.LayerCondensedCache(model)}, use_cache=True, return_dict=False)
    assert torch.equal(last[0], expected.hidden_states[-1])


def test_a_sample_in_half_precision_runs() -> None:
    model = condensed(TEACHING).to(torch.bfloat16)
    cache = kv.LayerCondensedCache(model)
    assert generate(model, prompt(12), cache, 5, do_sample=True).shape == (1, 17)
    cache.check_integrity()
    assert cache.ledger().payload_bytes == 16 * 2 * 2 * 8 * 2 * 2
