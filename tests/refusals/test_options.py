"""Budgets and options: refused with the remedy, or they work."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    FAMILIES,
    PRUNING,
    case_id,
    declared,
    dynamic_cache,
    forward,
    generate,
    only_budget,
    prompt,
    small_options,
    tiny,
)
from refusals.started import BUDGETED, NAMES, Started, make

import hf_kvpolicy as kv
from hf_kvpolicy.config import policy_options
from hf_kvpolicy.registry import policy_class

# -- budgets and options


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize(
    "budget", [0, -3, 0.0, 1.5, -0.5, float("nan"), "", "12", "64 apples", "-1MiB", True, None, [4]]
)
def test_bad_budgets(name: str, budget: Any) -> None:
    if budget is None and (name in PRUNING or name == "fastgen"):
        assert policy_class(name)(tiny("llama").config, **{**small_options(name), "budget": None}), "None is no limit"
        return
    with pytest.raises(kv.BudgetError, match=r"Give rows as a positive int.*\(0, 1\].*64MiB"):
        policy_class(name)(tiny("llama").config, **{**small_options(name), "budget": budget})


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("budget", [10**9, 10**30, 1.0, "1GiB"])
def test_budgets_above_everything_work(name: str, budget: Any) -> None:
    model, twin = tiny("llama"), tiny("llama")
    ids = prompt(30)
    cache = make(name, model, budget=budget, **only_budget(name))
    out = generate(model, ids, cache)
    cache.check_integrity()
    if budget != 1.0:
        assert torch.equal(out, generate(twin, ids, dynamic_cache(twin)))
        assert (cache.stored_rows(0) == 35).all()
        assert cache.ledger().measured_bytes < 2**20


@pytest.mark.parametrize("name", BUDGETED)
def test_a_byte_budget_too_small_for_the_batch(name: str) -> None:
    model = tiny("llama")
    cache = make(name, model, budget="1B")
    with pytest.raises(kv.BudgetError, match=r"Give at least \d+ bytes"):
        generate(model, prompt(30), cache)
    assert cache.get_seq_length() == 0
    kv.attach(model)
    with torch.no_grad():
        model(prompt(9))


@pytest.mark.parametrize("name", [n for n in BUDGETED if "window" in policy_options(n)])
@pytest.mark.parametrize("budget", [1, 7, 8])
def test_a_window_that_fills_the_budget(name: str, budget: int) -> None:
    with pytest.raises(kv.BudgetError, match="at least 9 rows"):
        make(name, tiny("llama").config, budget=budget, window=8)
    model = tiny("llama")
    cache = make(name, model, budget=9, window=8)
    generate(model, prompt(30), cache)
    cache.check_integrity()


@pytest.mark.parametrize("name", [n for n in BUDGETED if "protect" in policy_options(n)])
def test_protection(name: str) -> None:
    config = tiny("llama").config
    with pytest.raises(kv.BudgetError, match="protect fewer"):
        make(name, config, protect=range(40))
    for wrong in ([-1], [1.5], ["a"], [True]):
        with pytest.raises(kv.ConfigError, match="protect must list token positions"):
            make(name, config, protect=wrong)


@pytest.mark.parametrize("name", BUDGETED)
def test_a_ratio_with_bounded_chunks(name: str) -> None:
    if "chunked_prefill" not in policy_options(name):
        pytest.skip("no chunked_prefill option")
    with pytest.raises(kv.BudgetError, match="chunked_prefill='hold'"):
        make(name, tiny("llama").config, budget=0.5, chunked_prefill="bounded")


OPTIONS = ("unit", "owner", "group", "positions", "on_append", "chunked_prefill", "variant", "fallback")


@pytest.mark.parametrize(
    "case", [(n, {o: "nonsense"}) for n in NAMES for o in OPTIONS if o in policy_options(n)], ids=str
)
def test_unknown_values(case: tuple[str, dict[str, Any]]) -> None:
    name, options = case
    with pytest.raises(kv.ConfigError, match=f"{next(iter(options))}='nonsense' is unknown; allowed are"):
        make(name, tiny("llama").config, **options)


@pytest.mark.parametrize("name", [n for n in NAMES if "block_rows" in policy_options(n)])
def test_blocks_of_rows_that_are_not_quantized(name: str) -> None:
    config = tiny("llama").config
    for asked in ({"block_rows": 16}, {"block_rows": 32}, {"block_rows": -4}, {"block_rows": 16, "quantize": None}):
        with pytest.raises(kv.ConfigError, match=r"but no row is\. Give quantize too, or leave block_rows out"):
            make(name, config, **asked)
        with pytest.raises(kv.ConfigError, match=f"^{name}: block_rows="):
            policy_class(name)(config, **{**small_options(name), **asked})
    assert make(name, config).composition.options["block_rows"] is None
    for spelled in ({}, {"block_rows": 32}, {"block_rows": None}):
        assert make(name, config, quantize="int8", **spelled).composition.options["block_rows"] == 32


@pytest.mark.parametrize("name", [n for n in NAMES if "on_append" in policy_options(n)])
def test_a_later_prompt_is_kept_whole_or_that_is_refused(name: str) -> None:
    if name == "fastgen":
        pytest.skip("append keeps what was chosen for each head, and its limits")
    model = tiny("llama")
    try:
        cache = make(name, model, on_append="append")
    except kv.ManifestError as error:
        assert "the budget holds after every step" in str(error)  # noqa: PT017
        return
    forward(model, prompt(40), cache)
    before = [cache.stored_rows(layer) for layer in range(cache.num_layers)]
    forward(model, prompt(5), cache)
    assert all((cache.stored_rows(layer) == rows + 5).all() for layer, rows in enumerate(before))


WRONG_TYPES: dict[str, list[Any]] = {
    "int": ["8", 8.0, float("nan"), None, True, [8]],
    "float": ["0.5", float("nan"), float("inf"), None, True, [0.5]],
    "bool": ["yes", 1, None],
    "str": [1, True, None, ["head"]],
    "Iterable[int] | None": [3, True, 0.5, "0-3"],
}


def _declared() -> list[tuple[str, str, str]]:
    """Return (policy, option, annotation) of every option with a plain type."""
    found = []
    for name in kv.available_policies():
        for parameter in inspect.signature(policy_class(name)).parameters.values():
            plain = parameter.annotation.removesuffix(" | None") if parameter.annotation not in WRONG_TYPES else None
            known = parameter.annotation if plain is None else plain
            if known in WRONG_TYPES:
                found.append((name, parameter.name, parameter.annotation))
    return found


@pytest.mark.parametrize("case", _declared(), ids="-".join)
def test_options_of_a_wrong_type(case: tuple[str, str, str]) -> None:
    """A YAML file may hold 16.0 for 16: nothing is computed with it, neither here nor in the middle of a forward."""
    name, option, annotation = case
    wrong = WRONG_TYPES.get(annotation) or WRONG_TYPES[annotation.removesuffix(" | None")]
    for value in wrong:
        if value is None and annotation.endswith("| None"):
            continue
        options = {**({} if name == "full" else small_options(name)), option: value}
        with pytest.raises(kv.ConfigError, match=rf"{option}=.*must be .*, but is a {type(value).__name__}\.$"):
            policy_class(name)(tiny("llama").config, **options)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda c: kv.make_cache("snapkvv", c, budget=8), "Did you mean 'snapkv'"),
        (lambda c: kv.make_cache("snapkv", c, budget=64, windw=8), "'windw'.*Did you mean 'window'"),
        (lambda c: kv.make_cache(None, c), "named by a word, one of adakv.*got None"),
        (lambda c: kv.make_cache(["snapkv"], c), "named by a word"),
        (lambda c: kv.load_policy({"policy": "snapkv", "budgett": 64}), "'budgett'.*Did you mean 'budget'"),
        (lambda c: kv.load_policy({"policy": "streaming-llm", "budget": 64}), "Did you mean 'streaming_llm'"),
        (lambda c: kv.load_policy({"budget": 64}), "policy: NAME"),
        (lambda c: kv.load_policy("/nowhere/policy.yaml"), "cannot be read"),
        (lambda c: kv.make_cache("snapkv", c), "needs budget"),
        (lambda c: kv.make_cache("full", c, budget=8), "no option 'budget'"),
        (lambda c: kv.make_cache("snapkv", c, budget=64, window=0), "at least 1"),
        (lambda c: kv.make_cache("snapkv", c, budget=64, window=-1), "at least 1|negative"),
        (lambda c: kv.make_cache("snapkv", c, budget=64, kernel_size=4), "odd"),
        (lambda c: kv.make_cache("snapkv", c, budget=64, pooling="median"), "'max' or 'avg'"),
        (lambda c: kv.make_cache("streaming_llm", c, budget=64, sinks=-1), "negative"),
    ],
)
def test_unknown_names_and_options(call: Callable[[Any], Any], match: str) -> None:
    with pytest.raises(kv.ConfigError, match=match):
        call(tiny("llama").config)


def test_owner_and_unit_exclude_one_another() -> None:
    with pytest.raises(kv.ManifestError, match="unit='head'"):
        kv.SnapKVCache(tiny("llama").config, budget=64, owner="query_head", unit="layer")


def test_layers_and_rows_that_do_not_exist(name: str) -> None:
    cache = Started(name).cache
    for layer, row in ((2, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(kv.ConfigError, match=r"layers 0\.\.1 and batch rows 0\.\.1"):
            cache.positions(layer, row)


# -- what looks unusual and works


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_works(name: str, family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    cache = make(name, model)
    out = generate(model, prompt(30, rows=2), cache, 8, output_logits=True, return_dict_in_generate=True)
    assert all(step.isfinite().all() for step in out.logits)
    assert cache.layers[0].keys.dtype == dtype
    cache.check_integrity()


def test_dtype_changed_midway(name: str) -> None:
    started = Started(name)
    started.model.to(torch.bfloat16)
    with pytest.raises(kv.ConfigError, match=r"reset\(\)"):
        forward(started.model, prompt(1, rows=2), started.cache)
    started.model.to(torch.float32)
    started.goes_on()


def test_attach_twice_and_detach_twice(name: str) -> None:
    model = declared(tiny("llama"), name)
    before = {key: str(value) for key, value in model.__dict__.items() if not key.startswith("_")}
    for _ in range(2):
        assert kv.attach(model) is model
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == 2, "one on the model, one on its decoder"
    generate(model, prompt(9), make(name, model))
    for _ in range(2):
        assert kv.detach(model) is model
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert before == {key: str(value) for key, value in model.__dict__.items() if not key.startswith("_")}


def test_cases_are_named() -> None:
    assert case_id(("snapkv", {"unit": "layer"})) == "snapkv-layer"


@pytest.mark.parametrize("name", NAMES)
def test_names_of_options_are_checked_by_the_class_as_well(name: str) -> None:
    cls = policy_class(name)
    with pytest.raises(kv.ConfigError, match=f"{cls.__name__} has no option 'windw'"):
        cls(tiny().config, windw=16)


def test_a_missing_budget_is_a_sentence_and_a_close_name_is_suggested() -> None:
    with pytest.raises(kv.ConfigError, match="SnapKVCache needs budget by keyword; give for example budget=1024"):
        kv.SnapKVCache(tiny().config)
    with pytest.raises(kv.ConfigError, match="Did you mean 'window'"):
        kv.AdaKVCache(tiny().config, budget=64, windw=16)
