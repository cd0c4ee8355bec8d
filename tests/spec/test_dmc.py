"""DMC on whole models: against segments made token by token, exact where nothing is merged, with the bytes it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import _table
from helpers import content, declared, dynamic_cache, forward, generate, greedy_loop, left_padded, prompt, tiny
from reference import dmc as plain
from torch import Tensor
from transformers.models.llama import modeling_llama

import hf_kvpolicy as kv
from hf_kvpolicy.compat import register_attention
from hf_kvpolicy.engine import Composition
from hf_kvpolicy.evidence import Recency
from hf_kvpolicy.representation.token_segments import TokenSegments

FAMILIES = ("llama", "llama_head_dim", "mistral", "mistral_window")
CHUNKS = [(40,), (1,) * 40, (7, 1, 22, 1, 9), (39, 1), (2, 38)]


def trained(family: str = "llama", backend: str = "sdpa", **says: Any) -> Any:
    """A random model whose config says what a checkpoint of this policy would."""
    model = declared(tiny(family, backend), "dmc")
    model.config.kvpolicy |= says
    return model


def fed(model: Any, ids: Tensor, cache: Any, pieces: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        return torch.cat([forward(model, part, cache) for part in ids.split(pieces, dim=1)], dim=1)


class PlainAttention:
    """Attention of a Llama over lists of segments, a token at a time; keys and queries are read before rotation."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.says, self.turn = model.config.kvpolicy, modeling_llama.apply_rotary_pos_emb
        heads, layers = model.config.num_key_value_heads, model.config.num_hidden_layers
        self.segments: list[list[list[plain.Segment]]] = [[[] for _ in range(heads)] for _ in range(layers)]
        self.angles: list[tuple[Tensor, Tensor]] = []
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", self.keep)
        register_attention("dmc_plain", self.attend, lambda *args, **kwargs: None)
        model.config._attn_implementation = "dmc_plain"
        self.model = model

    def keep(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.latest = (cos, sin)
        return q, k

    def zeroed(self, rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[..., self.says["channel"]] = 0
        return rows

    def rotated(self, row: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        row = self.zeroed(row)[None, None, None]
        return self.zeroed(self.turn(row, row, *angles)[0])[0, 0, 0]

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        layer, channel, group = module.layer_idx, self.says["channel"], query.shape[1] // key.shape[1]
        if layer == 0:
            self.angles.append(self.latest)
        token = len(self.angles) - 1
        outputs = []
        for head in range(key.shape[1]):
            queries = query[0, head * group : (head + 1) * group, 0]
            alpha, omega = plain.decision(
                float(key[0, head, 0, channel]), queries[:, channel].tolist(), self.says.get("offset", 0.0)
            )
            own = self.zeroed(key[0, head, 0]).tolist(), value[0, head, 0].tolist()
            held = self.segments[layer][head] = plain.updated(self.segments[layer][head], token, alpha, omega, *own)
            keys = torch.stack([self.rotated(torch.tensor(each.key), self.angles[each.anchor]) for each in held])
            values = torch.tensor([each.value for each in held])
            for each in queries:
                weights = (keys @ self.rotated(each, self.angles[token]) * kwargs["scaling"]).softmax(0)
                outputs.append(weights @ values)
        return torch.stack(outputs)[None, None], None

    def run(self, ids: Tensor) -> Tensor:
        steps = [
            self.model(ids[:, t : t + 1], position_ids=torch.tensor([[t]]), use_cache=False).logits
            for t in range(ids.shape[1])
        ]
        return torch.cat(steps, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "llama_head_dim"])
@pytest.mark.parametrize(
    "says", [{"channel": 0}, {"channel": 5, "offset": 0.4}, {"channel": 3, "offset": -2.0}], ids=str
)
def test_every_step_is_that_of_the_plain_segments(
    family: str, says: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, found = prompt(40), []
    for pieces in CHUNKS:
        model = trained(family, **says)
        cache = kv.DMCCache(model)
        found.append((fed(model, ids, cache, pieces), cache))
    oracle = PlainAttention(trained(family, **says), monkeypatch)
    expected = oracle.run(ids)
    for logits, cache in found:
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
        for layer, heads in enumerate(oracle.segments):
            stored = cache._runtime.snapshot.ragged[layer]
            closed = torch.split(stored.map.states_PX[:, 0], list(stored.map.lengths))
            for head, segments in enumerate(heads):
                assert cache.source_spans(layer)[head].tolist() == [list(each.span) for each in segments]
                assert cache.positions(layer)[head].tolist() == [each.anchor for each in segments]
                masses = [*closed[head].tolist(), float(stored.trailing.masses_BH[0, head])]
                assert masses == pytest.approx([each.mass for each in segments], rel=1e-4)
        cache.check_integrity()
    rows = [len(head) for layer in oracle.segments for head in layer]
    assert max(rows) < 40, "every head merges"
    assert len(set(rows)) > 1, "owners differ"


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pieces", CHUNKS[1:], ids=str)
def test_a_prompt_in_pieces_is_the_prompt(family: str, pieces: tuple[int, ...]) -> None:
    model, ids = trained(family), prompt(40)
    whole, chunked = kv.DMCCache(model), kv.DMCCache(model)
    torch.testing.assert_close(fed(model, ids, chunked, pieces), fed(model, ids, whole, (40,)), atol=1e-5, rtol=1e-4)
    assert chunked.receipt.replaced_rows == whole.receipt.replaced_rows


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "llama_head_dim"])
def test_nothing_merged_equals_the_dense_cache_of_the_model_without_the_channel(
    family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No logit reaches the offset, so that alpha is 0 everywhere."""
    ids, mask = left_padded([prompt(n, seed=n) for n in (30, 9)])
    model = trained(family, backend, channel=2, offset=1e4)
    cache = kv.DMCCache(model)
    found = greedy_loop(model, ids, cache, 12, mask)
    assert cache.stored_rows(0).tolist() == [[41, 41], [20, 20]]
    turn = modeling_llama.apply_rotary_pos_emb

    def without(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        for rows in (q, k):
            rows[..., 2] = 0
        turned = turn(q, k, *args, **kwargs)
        for rows in turned:
            rows[..., 2] = 0
        return turned

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", without)
    twin = tiny(family, backend)
    expected = greedy_loop(twin, ids, dynamic_cache(twin), 12, mask)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=0)


KEY_SOURCES = ["llama-llama3", "qwen2-yarn", "phi3-partial", "gpt_neox", "glm4", "qwen3", "olmo2", "smollm3"]


@torch.no_grad()
@pytest.mark.parametrize("name", KEY_SOURCES)
def test_decisions_are_those_of_the_keys_before_rotation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated in half the channels or in pairs of neighbours, scaled, or in some layers only."""
    model, ids, seen = declared(_table.tiny(name), "dmc"), prompt(24), []
    module = sys.modules[type(model).__module__]
    turn = module.apply_rotary_pos_emb

    def noting(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(k)
        return turn(q, k, *args, **kwargs)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", noting)
    whole, stepped = kv.DMCCache(model), kv.DMCCache(model)
    logits = fed(model, ids, whole, (24,))
    rotated = [layer for layer in range(4) if whole._rotary.rotates(layer)]
    assert len(seen) == len(rotated) >= 2
    for layer, keys in zip(rotated, seen, strict=True):
        for head, spans in enumerate(whole.source_spans(layer)):
            alphas = [round(float(logit.sigmoid())) for logit in keys[0, head, :, 0]]
            assert [first for first, _ in spans.tolist()] == [t for t, a in enumerate(alphas) if not a or not t]
    torch.testing.assert_close(fed(model, ids, stepped, (5, *(1,) * 19)), logits, atol=2e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_the_formula(dtype: torch.dtype) -> None:
    model = trained("llama_head_dim").to(dtype)
    cache = kv.DMCCache(model)
    ids, mask = left_padded([prompt(n, seed=n) for n in (300, 120)])
    greedy_loop(model, ids, cache, 8, mask)
    rows, dim, owners = sum(int(cache.stored_rows(layer).sum()) for layer in range(2)), 12, 2 * 2 * 2
    ledger = cache.ledger()
    expected = (rows - owners) * 2 * dim * dtype.itemsize + owners * 2 * dim * 4
    assert ledger.payload_bytes == expected == cache.receipt.payload_bytes
    assert ledger.scores_bytes == 4 * rows
    assert ledger.declared_bytes == ledger.measured_bytes
    assert ledger.payload_rows == rows < 0.75 * owners * (307 + 127) / 2
    assert ledger.kept_ratio.value < 0.75
    assert cache.statistics.rows_dropped == 0, "what is merged is not dropped"


@torch.no_grad()
def test_records_say_what_rows_stand_for() -> None:
    model = trained(channel=-1, ratio=2.5, offset=0.25, window=None)
    cache = kv.DMCCache(model)
    assert cache.receipt.rows_per_owner == ((), ())
    assert [spans.tolist() for spans in cache.source_spans(0)] == [[], []]
    fed(model, prompt(30), cache, (30,))
    record = cache.manifest.representation_contract
    assert (record.rows, record.semantic_class) == ("replacement_rows", "lossy_replacement")
    assert record.replacement.representation_kind == "merged_segments"
    assert record.replacement.original_position_contract == "latest_of_span"
    assert dict(record.replacement.parameters) == {"channel": 7, "offset": 0.25, "ratio": 2.5}
    assert cache.manifest.selection_contract.unit == "head"
    assert cache.manifest.selection_contract.update_cadence == "every_step"
    assert cache.state.selected_original_positions is None
    assert cache.state.replacement_object_ids == ("layer 0", "layer 1")
    receipt = cache.receipt
    assert receipt.selected_original_positions is None
    assert receipt.consumer_schema == record.consumer_schema == "weighted_token_segments"
    for layer, store in enumerate(receipt.replaced_rows):
        assert store.layers == (layer,)
        assert [list(map(list, owner)) for owner in store.spans] == [s.tolist() for s in cache.source_spans(layer)]
    with pytest.raises(kv.ManifestError, match="lossy_replacement"):
        cache.prefix_digest(range(30))


@torch.no_grad()
def test_what_waits_is_merged_as_it_is_accepted() -> None:
    model, ids = trained(), prompt(40)
    taken, never = kv.DMCCache(model), kv.DMCCache(model)
    taken.activate_past_recording()
    for accepted, rejected in ((20, 3), (1, 0), (4, 2), (0, 5), (6, 1)):
        before = taken.receipt.replaced_rows
        start = taken._runtime.snapshot.frontier.columns
        fed(model, ids[:, start : start + accepted + rejected], taken, (accepted + rejected,))
        assert taken.receipt.replaced_rows == before, "nothing is published yet"
        assert taken.ledger().waiting_bytes > 0
        taken.crop(-rejected)
        if accepted:
            fed(model, ids[:, start : start + accepted], never, (accepted,))
        assert taken.receipt.replaced_rows == never.receipt.replaced_rows
        taken.check_integrity()
    for key, value in content(never).items():
        found = content(taken)[key]
        torch.testing.assert_close(found, value, atol=1e-6, rtol=1e-5) if isinstance(value, Tensor) else None
    taken.set_recording(False)
    with pytest.raises(kv.StaleGenerationError, match="activate_past_recording"):
        taken.crop(-1)


@pytest.mark.allow_deprecated
@pytest.mark.parametrize("kind", ["assistant", "prompt_lookup"])
def test_assisted_decoding_finds_the_greedy_ids(kind: str) -> None:
    model = trained()
    ids = torch.cat([prompt(15), prompt(15)], dim=1)
    extra: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if kind == "assistant":
        extra = {"assistant_model": tiny("llama", seed=1, layers=1)}
    helped = generate(model, ids, kv.DMCCache(model), 12, **extra)
    assert torch.equal(helped, generate(model, ids, kv.DMCCache(model), 12))


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_beams_of_a_padded_batch_are_those_of_each_row(family: str) -> None:
    model = trained(family)
    prompts = [prompt(n, seed=n) for n in (30, 8)]
    ids, mask = left_padded(prompts)
    out = generate(model, ids, kv.DMCCache(model), 8, attention_mask=mask, num_beams=3)
    for row, tokens in enumerate(prompts):
        alone = generate(model, tokens, kv.DMCCache(model), 8, num_beams=3)
        assert out[row, ids.shape[1] :].tolist() == alone[0, tokens.shape[1] :].tolist()


@torch.no_grad()
def test_a_mask_hides_segments_by_their_newest_token() -> None:
    model, ids = trained(), prompt(20)
    cache, plainly = kv.DMCCache(model), kv.DMCCache(model)
    for each in (cache, plainly):
        fed(model, ids, each, (20,))
    mask = torch.ones(1, 21, dtype=torch.long)
    mask[0, :12] = 0
    position = torch.tensor([[20]])
    hidden = forward(model, prompt(1), cache, attention_mask=mask, position_ids=position)
    shown = forward(model, prompt(1), plainly, position_ids=position)
    assert (hidden - shown).abs().max() > 1e-3
    for each, other in zip(cache.source_spans(0), plainly.source_spans(0), strict=True):
        assert torch.equal(each, other), "what a mask hides is merged all the same"


def test_gradients_reach_the_forwards_own_tokens() -> None:
    model = trained()
    cache = kv.DMCCache(model)
    fed(model, prompt(9), cache, (9,))
    for length in (1, 5):
        model.zero_grad()
        forward(model, prompt(length), cache)[:, -1].sum().backward()
        assert model.model.layers[1].self_attn.v_proj.weight.grad.abs().sum() > 0
    assert not any(tensor.requires_grad for layer in cache._runtime.snapshot.ragged for tensor in layer.tensors())
    cache.check_integrity()


# -- what is refused --------------------------------------------------------------------------------------------------


def configs() -> Iterator[tuple[dict[str, Any] | None, str]]:
    yield None, "ordinary one was given"
    yield {"kind": "something"}, "names no training"
    yield {"channel": 0, "ratio": 2.0}, "names no training"
    yield {"kind": "dmc", "ratio": 2.0}, "'channel' from -8 to 7"
    yield {"kind": "dmc", "channel": 8, "ratio": 2.0}, "'channel' from -8 to 7"
    yield {"kind": "dmc", "channel": True, "ratio": 2.0}, "'channel' from -8 to 7"
    yield {"kind": "dmc", "channel": 0}, "a 'ratio' of at least 1"
    yield {"kind": "dmc", "channel": 0, "ratio": 0.5}, "a 'ratio' of at least 1"
    yield {"kind": "dmc", "channel": 0, "ratio": 2.0, "offset": "5"}, "a number as 'offset'"
    yield {"kind": "dmc", "channel": 0, "ratio": 2.0, "chanel": 1}, "no other entry"
    yield {"kind": "dmc", "channel": 0, "ratio": 2.0, "window": 12}, "window null"


@pytest.mark.parametrize(("says", "message"), configs(), ids=str)
def test_a_checkpoint_that_was_not_trained_for_it_is_refused(says: Any, message: str) -> None:
    model = tiny()
    if says is not None:
        model.config.kvpolicy = says
    with pytest.raises(kv.CheckpointAdmissionError, match=message):
        kv.DMCCache(model)
    assert kv.attached_backend(model) is None, "the model is left as it was"


@pytest.mark.parametrize("policy", ["full", "snapkv", "minicache"])
def test_a_checkpoint_without_its_updater_is_refused(policy: str) -> None:
    options = {"full": {}, "snapkv": {"budget": 8, "window": 3}, "minicache": {"start_layer": 0}}[policy]
    with pytest.raises(kv.CheckpointAdmissionError, match=r"Use the policy ('dmc'|it was trained for)"):
        kv.make_cache(policy, trained(), **options)


@pytest.mark.parametrize("name", ["opt", "gpt2", "gemma2"])
def test_models_whose_keys_cannot_be_averaged_are_refused(name: str) -> None:
    model = declared(_table.tiny(name), "dmc")
    with pytest.raises(kv.UnsupportedModelError, match="before their rotation"):
        kv.DMCCache(model)


def test_angles_that_depend_on_the_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = declared(modeling_llama.LlamaForCausalLM(_table.config_of("llama-llama3", rope_parameters=rope)), "dmc")
    with pytest.raises(kv.UnsupportedModelError, match="depends on the sequence length"):
        kv.DMCCache(model)


@pytest.mark.parametrize("axes", [{"schedule": "end_of_prefill"}, {"storage": "dense"}], ids=str)
def test_a_selection_beside_it_is_refused(axes: dict[str, Any]) -> None:
    rule = TokenSegments(name="merged_segments", replaces_rows=True, channel=0, offset=0.0, ratio=2.0)
    made: dict[str, Any] = {
        "policy": "both",
        "schedule": "never",
        "evidence": Recency(),
        "representation": rule,
        "storage": "ragged",
    }
    Composition(**made)
    with pytest.raises(kv.ManifestError, match="selects nothing"):
        Composition(**{**made, **axes})


@torch.no_grad()
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda layer: layer.map.states_PX[:1].zero_(), "mass is no positive number"),
        (lambda layer: layer.map.states_PX[:1].fill_(float("nan")), "mass is no positive number"),
        (lambda layer: layer.map.tokens_P[:2].fill_(3), "holds a token twice|do not ascend"),
        (lambda layer: layer.trailing.masses_BH.zero_(), "masses of growing segments"),
        (lambda layer: layer.trailing.means_BHX.fill_(float("inf")), "is not finite"),
    ],
)
def test_segments_that_contradict_themselves_are_found(damage: Any, message: str) -> None:
    model = trained()
    ids, mask = left_padded([prompt(30), prompt(20, 1)])
    cache = kv.DMCCache(model)
    greedy_loop(model, ids, cache, 2, mask)
    cache.check_integrity()
    damage(cache._runtime.snapshot.ragged[1])
    with pytest.raises(kv.IntegrityError, match=message):
        cache.check_integrity()
