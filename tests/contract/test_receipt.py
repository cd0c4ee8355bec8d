"""The receipt: a digest that covers identity and every position, computed only when asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_kvpolicy.contract import Generations, PackedKVViewReceipt
from hf_kvpolicy.errors import ConfigError

from ._fixtures import POSITIONS, manifest

PARENT = Generations(request=11, cache=500, policy=7, state=30)
SUCCESSOR = Generations(request=11, cache=501, policy=7, state=31)


def _receipt(**changes: Any) -> PackedKVViewReceipt:
    fields: dict[str, Any] = {
        "request_id": "request-a",
        "parent": PARENT,
        "successor": SUCCESSOR,
        "policy_manifest_sha256": manifest().sha256,
        "frontier": 64,
        "positions_source": lambda: POSITIONS,
    }
    return PackedKVViewReceipt(**{**fields, **changes})


def test_the_digest_is_stable_and_compares_receipts() -> None:
    assert _receipt().digest == _receipt().digest
    assert _receipt() == _receipt()
    assert hash(_receipt()) == hash(_receipt())
    assert _receipt().rows_per_owner == ((4, 4), (4, 4))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("rank", [1, 2])
def test_one_changed_position_changes_the_digest(layer: int, rank: int) -> None:
    changed = [[list(owner) for owner in row] for row in POSITIONS]
    changed[layer][1][rank] += 1
    assert _receipt(positions_source=lambda: changed).digest != _receipt().digest


def test_order_and_owner_are_part_of_the_digest() -> None:
    swapped_heads = [list(reversed(layer)) for layer in POSITIONS]
    reordered = [[list(reversed(owner)) for owner in layer] for layer in POSITIONS]
    digests = {_receipt(positions_source=lambda p=p: p).digest for p in (POSITIONS, swapped_heads, reordered)}
    assert len(digests) == 3


@pytest.mark.parametrize(
    "changes",
    [
        *({"successor": replace(SUCCESSOR, **{n: 99})} for n in ("request", "cache", "policy", "state")),
        {"policy_manifest_sha256": "0" * 64},
    ],
)
def test_every_covered_identity_changes_the_digest(changes: dict[str, Any]) -> None:
    assert _receipt(**changes).digest != _receipt().digest


def test_positions_are_read_only_when_asked() -> None:
    calls: list[int] = []

    def read() -> list[list[list[int]]]:
        calls.append(1)
        return POSITIONS

    receipt = _receipt(positions_source=read)
    assert not calls
    assert receipt.digest == receipt.digest
    assert receipt.selected_original_positions[0][0] == (0, 2, 5, 7)
    assert len(calls) == 1


def test_malformed_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="frontier"):
        _receipt(frontier=-1)
    with pytest.raises(ConfigError, match="request_id"):
        _receipt(request_id="")
