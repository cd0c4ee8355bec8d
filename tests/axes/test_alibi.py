"""ALiBi biases by position, against plain loops and against what transformers builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BloomConfig, FalconConfig, MptConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from hf_kvpolicy.model_patches import BloomPatch, FalconPatch, MptPatch
from hf_kvpolicy.positions import (
    AlibiSpec,
    alibi_bias,
    alibi_bias_of_owners,
    alibi_bias_reference,
    alibi_in,
    local_shift,
)

SLOPES = (0.5, 0.25, 0.0625)


def bias(spec: AlibiSpec, positions: list[int], **options: Any) -> torch.Tensor:
    rows = torch.tensor([[positions]], dtype=torch.int32)
    return alibi_bias(spec, rows, torch.ones_like(rows, dtype=torch.bool), **options)[0, :, 0]


def test_distances_in_any_order() -> None:
    for positions in ([0, 1, 5, 9], [7, 2, 9, 0], [3]):
        wanted = torch.tensor(alibi_bias_reference(list(SLOPES), positions, max(positions)))
        assert torch.equal(bias(AlibiSpec(slopes=SLOPES), positions), wanted)


def test_slots_without_a_row_do_not_count() -> None:
    rows = torch.tensor([[[4, 99999, 6]], [[-7, 3, 1]]], dtype=torch.int32)
    live = torch.tensor([[[True, False, True]], [[False, False, False]]])
    found = alibi_bias(AlibiSpec(slopes=SLOPES), rows, live)[:, :, 0]
    assert found[0, 0].tolist() == [-1.0, 0.0, 0.0]
    assert found.isfinite().all()


def test_no_slot_has_no_bias() -> None:
    none = torch.zeros(2, 1, 0, dtype=torch.int32)
    assert alibi_bias(AlibiSpec(slopes=SLOPES), none, none.bool()).shape == (2, 3, 1, 0)


def test_heads_with_rows_of_their_own() -> None:
    spec = AlibiSpec(slopes=(1.0, 0.5, 0.25, 0.125))
    rows = torch.tensor([[[0, 8], [4, 8]]], dtype=torch.int32)
    found = alibi_bias(spec, rows, torch.ones_like(rows, dtype=torch.bool))[0, :, 0]
    assert found.tolist() == [[-8.0, 0.0], [-4.0, 0.0], [-1.0, 0.0], [-0.5, 0.0]]
    owner = torch.tensor([0, 0, 1, 1])
    flat = alibi_bias_of_owners(spec, rows.flatten().long(), torch.full((4,), 8), owner, heads=2)
    assert flat.tolist() == [[-8.0, 0.0, -1.0, 0.0], [-4.0, 0.0, -0.5, 0.0]]
    assert spec.of_heads(2, 2).slopes == (0.25, 0.125)


@pytest.mark.parametrize("gap", [0, 1, 13])
def test_cache_local_rows_are_numbered_without_gaps(gap: int) -> None:
    tokens = [0, 1, 3, *range(4 + gap, 9 + gap)]
    new = tokens[-1]
    rows = torch.tensor([tokens[:-1]], dtype=torch.int32)
    shift = local_shift(rows, torch.ones_like(rows, dtype=torch.bool), 3, torch.tensor([new]))
    wanted = torch.tensor(alibi_bias_reference(list(SLOPES), list(range(len(tokens))), len(tokens) - 1))
    assert torch.equal(bias(AlibiSpec(slopes=SLOPES), tokens, shift_BP=shift), wanted)


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 16, 71, 112])
def test_what_transformers_builds(heads: int) -> None:
    tokens = 400
    rows, mask = list(range(tokens)), torch.ones((1, tokens), dtype=torch.long)
    mpt = MptPatch().alibi(MptConfig(n_heads=heads, d_model=4 * heads))
    torch.testing.assert_close(bias(mpt, rows), build_mpt_alibi_tensor(heads, tokens)[:, 0], atol=0, rtol=1e-6)
    bloom = BloomPatch().alibi(BloomConfig(n_head=heads, hidden_size=4 * heads))
    falcon = FalconPatch().alibi(FalconConfig(num_attention_heads=heads, hidden_size=16 * heads, alibi=True))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        built = bloom_alibi(mask, heads, dtype)[:, 0].float()
        # fp32 is not rounded to anything: ours is nearer to the product.
        atol = 1e-4 if dtype is torch.float32 else 0
        torch.testing.assert_close(bias(alibi_in(bloom, dtype), rows), built - built[:, -1:], atol=atol, rtol=0)
        built = falcon_alibi(mask, heads, dtype)[:, 0].float() / 4
        assert torch.equal(bias(alibi_in(falcon, dtype), rows), built - built[:, -1:])


def test_keys_with_positions_have_no_bias() -> None:
    assert FalconPatch().alibi(FalconConfig()) is None
    assert alibi_in(None, torch.float32) is None
