"""Canonical JSON: one text per meaning."""

from __future__ import annotations

import copy
import pickle

import pytest

from hf_kvpolicy.contract import FrozenMapping, canonical_json, sha256_of
from hf_kvpolicy.errors import ManifestError


def test_keys_are_sorted_at_every_depth() -> None:
    assert canonical_json({"b": {"d": 1, "c": 2}, "a": 3}) == '{"a":3,"b":{"c":2,"d":1}}'


def test_array_order_is_kept_and_tuples_are_arrays() -> None:
    assert canonical_json({"axes": ("token", "head")}) == '{"axes":["token","head"]}'
    assert sha256_of([1, 2]) != sha256_of([2, 1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, {1: "a"}, object(), [{"x": float("-inf")}]])
def test_values_outside_json_are_refused(value: object) -> None:
    with pytest.raises(ManifestError):
        canonical_json(value)


def test_refusal_names_the_place() -> None:
    with pytest.raises(ManifestError, match=r"options\.tau\[1\]"):
        FrozenMapping({"tau": [1.0, float("inf")]})


def test_frozen_mapping_cannot_be_edited_through_its_values() -> None:
    frozen = FrozenMapping({"list": [1], "k": None})
    inner = frozen["list"]
    assert isinstance(inner, list)
    inner.append(2)
    assert frozen == {"list": [1], "k": None}
    assert hash(frozen) == hash(FrozenMapping({"k": None, "list": [1]}))


def test_frozen_mapping_survives_copy_and_pickle() -> None:
    frozen = FrozenMapping({"a": {"b": [1, 2.5, "x"]}})
    assert copy.deepcopy(frozen) == frozen
    assert pickle.loads(pickle.dumps(frozen)) == frozen
