"""A row of a batch equals the same row alone: ids, kept token positions and stored rows, far below the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    FAMILIES,
    PRUNING,
    WINDOW_TOKENS,
    case_id,
    content,
    drops_tokens,
    forward,
    generate,
    has_budget,
    kept_positions,
    left_padded,
    model_for,
    policy_units,
    prompt,
    small_options,
)
from torch import Tensor

import hf_kvpolicy as kv
from hf_kvpolicy.config import policy_options

CASES = policy_units()
# Longer than every budget; shorter than budget, sinks and window (1 token, 2 tokens); in between.
LENGTHS = (40, 2, 17, 9, 1, 25)

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")


@pytest.fixture(params=CASES, ids=case_id)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    name, options = request.param
    return name, options


def make(case: tuple[str, dict[str, Any]], model: Any, **options: Any) -> Any:
    return kv.make_cache(case[0], model, **{**case[1], **options})


def assert_row_equals(batched: Any, row: int, solo: Any) -> None:
    """Compare one row of a batched cache with the only row of another."""
    assert kept_positions(batched, row) == kept_positions(solo)
    left, right = content(batched), content(solo)
    for key, value in right.items():
        kind, *place = key.split()
        if kind in ("keys", "values"):
            layer, _, head = place
            torch.testing.assert_close(left[f"{kind} {layer} {row} {head}"], value, atol=2e-5, rtol=1e-4)


@pytest.mark.proves("padded")
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(case: tuple[str, dict[str, Any]], family: str) -> None:
    model = model_for(case, family)
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    ids, mask = left_padded(prompts)
    batched = make(case, model)
    out = generate(model, ids, batched, 12, attention_mask=mask)
    batched.check_integrity()
    for row, tokens in enumerate(prompts):
        solo = make(case, model)
        alone = generate(model, tokens, solo, 12)
        assert out[row, ids.shape[1] :].tolist() == alone[0, tokens.shape[1] :].tolist(), f"row {row}"
        assert_row_equals(batched, row, solo)


@pytest.mark.proves("padded", "chunked", "turns", family="llama")
@pytest.mark.parametrize("chunked", [None, "hold", "bounded"])
def test_chunked_prefill_and_turns(case: tuple[str, dict[str, Any]], chunked: str | None) -> None:
    """Pieces of a padded batch; where the solo row has no column in a piece, it is not fed at all."""
    if case[0] in PRUNING and chunked == "hold":
        pytest.skip("a prompt that is pruned while it runs cannot be held; tests/spec/test_pyramidinfer.py")
    if chunked is not None and not has_budget(case[0]):
        pytest.skip("a cache that selects nothing has no chunked_prefill option")
    model = model_for(case, "llama")
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    ids, mask = left_padded(prompts, width=45)
    options = {} if chunked is None else {"chunked_prefill": chunked}
    splits = [10, 10, 10, 15, 1, 1, 8, 1, 1]
    tail = prompt(sum(splits) - 45, seed=3, rows=len(LENGTHS))
    ids = torch.cat([ids, tail], dim=1)
    mask = torch.cat([mask, torch.ones_like(tail)], dim=1)
    batched = make(case, model, **options)
    logits = feed(model, batched, ids, mask, splits)
    batched.check_integrity()
    for row in range(len(LENGTHS)):
        solo = make(case, model, **options)
        first = 45 - LENGTHS[row]
        pieces = [real for real in piece_lengths(splits, first) if real]
        expected = feed(model, solo, ids[row : row + 1, first:], mask[row : row + 1, first:], pieces)
        if not drops_tokens(solo):  # else most positions have no logits; the rows below tell as much
            torch.testing.assert_close(logits[row : row + 1, first:], expected, atol=2e-5, rtol=1e-4)
        assert_row_equals(batched, row, solo)


def piece_lengths(splits: list[int], pads: int) -> list[int]:
    """Return the real tokens of each piece for a row with that many pads in front."""
    found, done = [], 0
    for width in splits:
        found.append(max(0, done + width - max(done, pads)) if done + width > pads else 0)
        done += width
    return found


def feed(model: Any, cache: Any, ids: Tensor, mask: Tensor, splits: list[int]) -> Tensor:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, done = [], 0
    with torch.no_grad():
        for width in splits:
            here = slice(done, done + width)
            done += width
            logits.append(
                forward(model, ids[:, here], cache, attention_mask=mask[:, :done], position_ids=positions[:, here])
            )
    return torch.cat(logits, dim=1)


def test_finished_rows_keep_receiving_pads(case: tuple[str, dict[str, Any]]) -> None:
    """Right-padded rows, rows that stop for a while and rows that go on: pads with mask 0 change nothing."""
    model = model_for(case, "llama")
    steps = 16
    ids = prompt(30 + steps, seed=4, rows=4)
    mask = torch.ones_like(ids)
    mask[1, 21:] = 0  # a shorter, right-padded prompt that never continues
    mask[2, 30:] = 0  # finished at once
    mask[3, 30 + 4 : 30 + 9] = 0  # stops and goes on
    ids[mask == 0] = 0
    batched = make(case, model)
    logits = feed(model, batched, ids, mask, [30] + [1] * steps)
    assert logits.isfinite().all()
    batched.check_integrity()
    for row in range(4):
        real = mask[row].bool()
        solo = make(case, model)
        alone = ids[row : row + 1, real]
        first = int(real[:30].sum())
        expected = feed(model, solo, alone, torch.ones_like(alone), [first] + [1] * (alone.shape[1] - first))
        if not drops_tokens(solo):  # else most positions have no logits; the rows below tell as much
            torch.testing.assert_close(logits[row, real], expected[0], atol=2e-5, rtol=1e-4)
        assert_row_equals(batched, row, solo)


@pytest.mark.proves("padded", "turns", family="llama")
def test_a_turn_after_some_rows_finished(case: tuple[str, dict[str, Any]]) -> None:
    """A second prompt segment over rows with pads in the middle of their history."""
    model = model_for(case, "llama")
    splits = [24, 1, 1, 1, 12, 1, 1]
    ids, mask = prompt(sum(splits), seed=8, rows=3), torch.ones(3, sum(splits), dtype=torch.long)
    mask[1, 25:27] = 0
    mask[2, :5] = 0
    mask[2, 27:33] = 0
    ids[mask == 0] = 0
    batched = make(case, model)
    logits = feed(model, batched, ids, mask, splits)
    for row in range(3):
        real = mask[row].bool()
        pieces = [int(part.sum()) for part in mask[row].split(splits) if part.sum()]
        solo = make(case, model)
        alone = ids[row : row + 1, real]
        expected = feed(model, solo, alone, torch.ones_like(alone), pieces)
        if not drops_tokens(solo):  # else most positions have no logits; the rows below tell as much
            torch.testing.assert_close(logits[row, real], expected[0], atol=2e-5, rtol=1e-4)
        assert_row_equals(batched, row, solo)


CHUNKED = [{}, {"on_append": "append"}, {"chunked_prefill": "hold"}]


@pytest.mark.parametrize("change", CHUNKED, ids=["recompress", "append", "hold"])
def test_a_turn_that_some_rows_sit_out(case: tuple[str, dict[str, Any]], change: dict[str, Any]) -> None:
    """Who brings only pads to another row's prompt keeps what it holds, what it is scored by, and its clocks."""
    model, name = model_for(case, "llama"), case[0]
    try:
        make((name, {**case[1], **change}), model)
    except (kv.ConfigError, kv.ManifestError):
        pytest.skip("the policy has no such option")
    case = (name, {**case[1], **change})
    chunked = change.get("chunked_prefill") == "hold"
    splits = [12, 12, *[1] * 6, 8, 7, *[1] * 8, 9, 1, 1] if chunked else [24, *[1] * 6, 15, *[1] * 8, 9, 1, 1]
    ids, mask = prompt(sum(splits), seed=8, rows=3), torch.ones(3, sum(splits), dtype=torch.long)
    mask[1, 30:45] = 0
    mask[2, :14] = 0
    mask[2, 24:26] = 0
    mask[2, -11:-2] = 0
    ids[mask == 0] = 0
    batched = make(case, model)
    logits = feed(model, batched, ids, mask, splits)
    batched.check_integrity()
    for row in range(3):
        real = mask[row].bool()
        pieces = [int(part.sum()) for part in mask[row].split(splits) if part.sum()]
        solo = make(case, model)
        alone = ids[row : row + 1, real]
        expected = feed(model, solo, alone, torch.ones_like(alone), pieces)
        torch.testing.assert_close(logits[row, -2:], expected[0, -2:], atol=2e-5, rtol=1e-4)
        assert_row_equals(batched, row, solo)


@pytest.mark.parametrize("change", [{}, {"evidence": "h2o"}, {"group": "max"}], ids=str)
def test_a_row_of_pads_alone(case: tuple[str, dict[str, Any]], change: dict[str, Any]) -> None:
    """Another row's prompt finds a row without any token; its own comes later."""
    model, (name, options) = model_for(case, "llama"), case
    if set(change) - set(policy_options(name)):
        pytest.skip("the policy has no such option")
    case, splits = (name, {**options, **change}), [24, 1, 20, 1, 1]
    ids, mask = prompt(sum(splits), seed=9, rows=2), torch.ones(2, sum(splits), dtype=torch.long)
    mask[1, :25] = 0
    ids[mask == 0] = 0
    batched, solo = make(case, model), make(case, model)
    logits = feed(model, batched, ids, mask, splits)
    batched.check_integrity()
    alone = ids[1:, 25:]
    expected = feed(model, solo, alone, torch.ones_like(alone), splits[2:])
    torch.testing.assert_close(logits[1, -2:], expected[0, -2:], atol=2e-5, rtol=1e-4)
    assert_row_equals(batched, 1, solo)


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_ratio_budgets_are_resolved_per_row(case: tuple[str, dict[str, Any]], ratio: float) -> None:
    if not has_budget(case[0]):
        pytest.skip("a cache that selects nothing has no budget")
    model = model_for(case, "llama")
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    ids, mask = left_padded(prompts)
    batched = make(case, model, budget=ratio)
    generate(model, ids, batched, 4, attention_mask=mask)
    batched.check_integrity()
    for row, tokens in enumerate(prompts):
        solo = make(case, model, budget=ratio)
        generate(model, tokens, solo, 4)
        assert_row_equals(batched, row, solo)


@pytest.mark.proves("padded", "beams", family="llama")
def test_beams_of_a_padded_batch(case: tuple[str, dict[str, Any]]) -> None:
    model = model_for(case, "llama")
    prompts = [prompt(n, seed=n) for n in (40, 2, 17)]
    ids, mask = left_padded(prompts)
    out = generate(model, ids, make(case, model), 8, attention_mask=mask, num_beams=3)
    for row, tokens in enumerate(prompts):
        alone = generate(model, tokens, make(case, model), 8, num_beams=3)
        assert out[row, ids.shape[1] :].tolist() == alone[0, tokens.shape[1] :].tolist(), f"row {row}"


def test_batch_of_rows_longer_than_the_model_window() -> None:
    assert max(LENGTHS) > WINDOW_TOKENS


def test_half_precision_agreement_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounding differs between batch shapes in bf16, so agreement is printed, not asserted."""
    shares = []
    for name, options in CASES:
        model = model_for(name, "llama").to(torch.bfloat16)
        prompts = [prompt(n, seed=n) for n in LENGTHS]
        ids, mask = left_padded(prompts)
        batched = kv.make_cache(name, model, **options)
        generate(model, ids, batched, 6, attention_mask=mask)
        same = total = 0
        for row, tokens in enumerate(prompts):
            solo = kv.make_cache(name, model, **options)
            generate(model, tokens, solo, 6)
            for left, right in zip(kept_positions(batched, row), kept_positions(solo), strict=True):
                same += sum(len(set(a) & set(b)) for a, b in zip(left, right, strict=True))
                total += sum(map(len, right))
        shares.append(f"{case_id((name, options))}: {100 * same / total:.1f} %")
    with capsys.disabled():
        print("\nbf16 kept positions, padded = solo:", "; ".join(shares))


def test_small_budgets_are_far_below_the_prompts() -> None:
    assert all(small_options(name)["budget"] <= max(LENGTHS) // 3 for name, _ in CASES if has_budget(name))
