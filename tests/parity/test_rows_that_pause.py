"""Batch rows that bring nothing for longer than a window: their pads see no row, and leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import case_id, forward, kept_positions, make_cache, policy_units, prompt, quantized_units, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")
CASES = [case for case in (*policy_units(), *quantized_units()) if case[0] not in ("dmc", "layer_condensed")]


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_a_row_that_pauses_goes_on_as_it_does_alone(case: tuple[str, dict[str, Any]], family: str) -> None:
    name, options = case
    model = tiny(family)
    # A window is counted in columns, pads included, as transformers does; blocks of quantized rows lie otherwise alone.
    is_exact = family == "llama" and "quantize" not in options
    together, alone = (make_cache(name, model, **options) for _ in range(2))
    # Pads of one forward each, and of several: more than the window of seven.
    turns = [[1] * 30, [1], [1], *[[0]] * 5, [0] * 4, [0], *[[1]] * 12]
    mask = torch.zeros(2, 0, dtype=torch.int64)
    with torch.no_grad():
        for step, own in enumerate(turns):
            new = torch.tensor([own, [1] * len(own)])
            mask = torch.cat([mask, new], dim=1)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -len(own) :]
            ids = prompt(len(own), seed=step, rows=2)
            # The last position has an output under every policy.
            found = forward(model, ids, together, attention_mask=mask, position_ids=positions)[:, -1]
            assert found[new[:, -1].bool()].isfinite().all()
            if own[0]:
                wanted = forward(model, ids[:1], alone)[:, -1]
                if is_exact:
                    torch.testing.assert_close(found[:1], wanted, atol=2e-5, rtol=1e-4)
    if is_exact:
        assert kept_positions(together, 0) == kept_positions(alone)
    together.check_integrity()
