"""Caches as the harness builds them: a policy that takes a tokenizer gets the model's."""

from __future__ import annotations

from typing import Any

from eval_fakes import tiny_loaded

from hf_kvpolicy.config import policy_options, with_tokenizer
from hf_kvpolicy.eval.cells import Cell
from hf_kvpolicy.eval.engine import EngineBuilder


def built(policy: str, **options: Any) -> Any:
    loaded = tiny_loaded()
    budget = 64 if policy == "snapkv" else None
    cell = Cell(task="needle_single_noise", length_tokens=300, policy=policy, budget=budget, options=options)
    return EngineBuilder(loaded.model, loaded.tokenizer)(cell)


def test_fastgen_knows_the_tokenizers_punctuation_and_special_tokens() -> None:
    tokenizer = tiny_loaded().tokenizer
    kinds = built("fastgen", recovery=0.9).composition.token_kinds
    assert set(kinds.special) == {256, 257}
    assert {tokenizer.convert_tokens_to_ids(mark) for mark in ".,!?"} <= set(kinds.punctuation)
    assert tokenizer.convert_tokens_to_ids("a") not in kinds.punctuation


def test_ids_that_a_sweep_names_are_used_instead() -> None:
    kinds = built("fastgen", punctuation_token_ids=[5], special_token_ids=[7]).composition.token_kinds
    assert (tuple(kinds.punctuation), tuple(kinds.special)) == ((5,), (7,))


def test_other_policies_are_given_nothing() -> None:
    assert "tokenizer" not in policy_options("snapkv")
    assert with_tokenizer("snapkv", {"window": 8}, object()) == {"window": 8}
    assert with_tokenizer("fastgen", {"tokenizer": None}, object()) == {"tokenizer": None}
    assert built("snapkv").composition.policy == "snapkv"
