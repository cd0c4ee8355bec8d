"""Attention dropout of a model in training mode reaches every path of attention, whatever the policy stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import case_id, dynamic_cache, forward, make_cache, policy_units, prompt, stored_otherwise, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")
CASES = [*policy_units(), *stored_otherwise()]
# Layers read one another's rows: these are checkpoints of their own, whose full cache is another model's.
TRAINED = ("dmc", "layer_condensed")


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("case", [case for case in CASES if case[0] not in TRAINED], ids=case_id)
def test_with_every_weight_dropped_all_caches_agree(case: tuple[str, dict[str, Any]], backend: str) -> None:
    """Nothing of any row is read then: the last token's logits are those of transformers' own cache, at every step."""
    model, name = tiny("llama", backend), case[0]
    plain = tiny("llama", backend)
    for each in (model, plain):
        each.config.attention_dropout = 1.0
        for layer in each.model.layers:
            layer.self_attn.attention_dropout = 1.0
    cache, full = make_cache(name, model, **case[1]), dynamic_cache(plain)
    model.train(), plain.train()
    with torch.no_grad():
        for step, width in enumerate((20, 1, 1, 6, 1)):
            ids = prompt(width, seed=step)
            ours, theirs = (forward(*pair)[:, -1] for pair in ((model, ids, cache), (plain, ids, full)))
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
