"""Tiny models, policies at neutral and at small budgets, and the plain loops that tests compare with."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument
from hf_kvpolicy.config import policy_options
from hf_kvpolicy.registry import example_training, needs_training, policy_class

VOCAB = 97
# On the oldest transformers only what meets its seams is repeated: two families, each policy with its first unit.
BRIEF = os.environ.get("KVPOLICY_TEST_BRIEF") == "1"
# Every policy on every family, where otherwise some policies stand for the others.
FULL = os.environ.get("KVPOLICY_TEST_FULL") == "1"
FAMILIES = ("llama", "mistral_window") if BRIEF else ("llama", "llama_head_dim", "mistral", "mistral_window")
BACKENDS = ("sdpa", "eager")
UNITS = ("head", "layer", "token")
WINDOW_TOKENS = 7
CACHE = cache_argument()
# What the tiny decoders of all families have in common.
TINY_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
}

# Policies that drop tokens while a prompt runs. A prompt then has one output and can be neither recorded nor held; that
# this is refused is tested in tests/spec/test_pyramidinfer.py.
PRUNING = ("pyramidinfer",)

# Options of small budgets: far below the prompts the tests use.
_SMALL: dict[str, dict[str, Any]] = {
    "full": {},
    "random": {"budget": 8, "window": 3},
    "snapkv": {"budget": 8, "window": 3, "kernel_size": 3},
    "sliding_window": {"budget": 6},
    "streaming_llm": {"budget": 7, "sinks": 2},
    "h2o": {"budget": 8},
    "keyformer": {"budget": 8, "recent_ratio": 0.5},
    "pyramidkv": {"budget": 8, "window": 3, "kernel_size": 3, "beta": 4},
    # Every third token of an answer makes a block old enough to be chosen from.
    "pyramidinfer": {
        "budget": 8,
        "decay": 0.6,
        "sinks": 2,
        "min_context": 2,
        "decode_block": 3,
        "decode_ratio": 0.7,
        "decode_decay": 0.3,
    },
    "zigzagkv": {"budget": 8, "window": 3, "kernel_size": 3},
    "adakv": {"budget": 8, "window": 3, "kernel_size": 3, "alpha": 0.8},
    # Importances by layer and KV head: lengths differ as far as 8 rows allow.
    "headkv": {"budget": 8, "window": 3, "kernel_size": 3, "profile": [[1.0, 6.0], [3.0, 0.0]]},
    "fastgen": {
        "budget": 12,
        "recovery": 0.7,
        "sinks": 2,
        "special_token_ids": [5, 11],
        "punctuation_token_ids": range(20, 32),
    },
    "scissorhands": {"budget": 8, "recent": 2, "history": 12},
    # Half of the tests' models has no pair of layers to merge. Few rows are exceptions, and some are.
    "minicache": {"start_layer": 0, "retention": 0.2},
    "dmc": {},
    "layer_condensed": {},
}


# Policies that need a checkpoint trained for them.
TRAINED = tuple(name for name in kv.available_policies() if needs_training(name))
# What training would make of random weights whose layers read what later ones made.
_DAMPED = {"embed_tokens": 3.0, "o_proj": 0.5, "down_proj": 0.5}


def declared(model: Any, policy: str) -> Any:
    """Return the model, or the config, as a checkpoint of this policy, where there must be one: its config says so.

    Random weights decide something too. What layers add comes back to those that read later ones with every token, and
    rounding with it: a trained checkpoint damps both, and so do these weights.
    """
    config = getattr(model, "config", model)
    if policy not in TRAINED or getattr(config, "kvpolicy", None) is not None:
        return model
    config.kvpolicy = example_training(policy, config.num_hidden_layers)
    if policy == "layer_condensed" and model is not config:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(_DAMPED.get(name.split(".")[-2], 1.0))
    return model


def make_cache(policy: str, model: Any, **options: Any) -> Any:
    """Return a cache for a model, which is made one of the policy's checkpoints where there must be one."""
    return kv.make_cache(policy, declared(model, policy), **options)


def small_options(name: str) -> dict[str, Any]:
    """Return options of a policy at a budget far below the tests' prompts (policies of other packages: budget 12)."""
    if name in _SMALL:
        return dict(_SMALL[name])
    options = policy_options(name)
    found: dict[str, Any] = {"budget": 12} if "budget" in options else {}
    return found | ({"window": 3} if "window" in options else {})


def has_budget(name: str) -> bool:
    """Whether a policy chooses rows under a budget."""
    return "budget" in policy_options(name)


def options_for(model: Any, policy: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a policy's options for this model: importances by layer and KV head where it takes them."""
    if policy != "headkv":
        return options
    geometry = kv.FullCache(model).geometry
    table = [
        [float((3 * layer + 2 * head) % 5) for head in range(geometry.num_kv_heads)]
        for layer in range(geometry.num_layers)
    ]
    return options | {"profile": table}


def only_budget(name: str) -> dict[str, Any]:
    """Return options under which a policy drops rows only where a budget makes it, or merges none."""
    return {"fastgen": {"recovery": 1.0}, "minicache": {"retention": 1.0}}.get(name, {})


def can_be_neutral(name: str) -> bool:
    """Whether some options make a policy drop and merge nothing."""
    return getattr(policy_class(name), "neutral", None) is not None


def is_lossy(name: str) -> bool:
    """Whether a policy ever drops or merges rows."""
    return name not in ("full", "layer_condensed")


def drops_tokens(cache: Any) -> bool:
    """Whether a prompt fed to this cache may leave no output at most of its positions."""
    composition = getattr(cache, "composition", None)
    return composition is not None and composition.pruning is not None and composition.pruning.decay < 1


def policies(*, lossy: bool = False) -> list[str]:
    """Return the names of all policies, or of those that ever drop or merge rows."""
    return [name for name in kv.available_policies() if is_lossy(name) or not lossy]


def policy_units() -> list[tuple[str, dict[str, Any]]]:
    """Return every policy but `full` at a small budget with every unit, owner, position scheme and encoding it has."""
    found = []
    for name in policies():
        if name == "full":
            continue
        options = policy_options(name)
        units = policy_class(name).units if "unit" in options else (None,)
        for unit in units[:1] if BRIEF else units:
            found.append((name, small_options(name) | ({} if unit is None else {"unit": unit})))
        if "owner" in options:
            found.append((name, small_options(name) | {"owner": "query_head"}))
        if "positions" in options:
            found.append((name, small_options(name) | {"positions": "original"}))
        if "encoding" in options:
            found.append((name, small_options(name) | {"encoding": "sequential"}))
    return found


# Policies of each schedule, and those whose heads or layers hold different numbers of rows.
QUANTIZING = (
    "full",
    "snapkv",
    "streaming_llm",
    "h2o",
    "scissorhands",
    "sliding_window",
    "adakv",
    "fastgen",
    "pyramidinfer",
)


def quantized_units() -> list[tuple[str, dict[str, Any]]]:
    """Return policies of every schedule with older rows in int8, in blocks so small that a few tokens fill one."""
    return [(name, small_options(name) | {"quantize": "int8", "block_rows": 2}) for name in QUANTIZING]


# Policies of each schedule whose kept rows can be merged, with each unit that both layers of a pair share.
MERGING = (
    ("snapkv", "token"),
    ("snapkv", "pair"),
    ("sliding_window", "token"),
    ("h2o", "pair"),
    ("scissorhands", "token"),
)


def merged_units() -> list[tuple[str, dict[str, Any]]]:
    """Return policies of every schedule whose rows are merged over layer pairs; a few of them are exceptions."""
    rule = {"start_layer": 0, "retention": 0.2}
    return [(name, small_options(name) | {"unit": unit, "merge_layers": rule}) for name, unit in MERGING]


def stored_otherwise() -> list[tuple[str, dict[str, Any]]]:
    """Return policies whose kept rows are not held as they are: in few bits, or merged."""
    return [*quantized_units(), *merged_units()]


def case_id(value: Any) -> str | None:
    """Name a (policy, options) case in pytest's output."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        name, options = value
        shown = [
            str(options[k])
            for k in ("unit", "owner", "positions", "chunked_prefill", "quantize", "encoding")
            if options.get(k)
        ]
        shown += ["merged"] if options.get("merge_layers") else []
        return "-".join([name, *shown])
    return None


@lru_cache(maxsize=32)
def _master(family: str, seed: int, layers: int) -> torch.nn.Module:
    common = {**TINY_DECODER, "num_hidden_layers": layers}
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        if family == "llama":
            model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**common))
        elif family == "llama_head_dim":
            model = LlamaForCausalLM(LlamaConfig(**common, head_dim=12))
        elif family == "mistral":
            model = MistralForCausalLM(MistralConfig(**common, sliding_window=None))
        elif family == "mistral_window":
            model = MistralForCausalLM(MistralConfig(**common, sliding_window=WINDOW_TOKENS))
        else:
            raise ValueError(family)
    finally:
        torch.random.set_rng_state(state)
    return model.eval()


def tiny(family: str = "llama", backend: str = "sdpa", *, seed: int = 0, layers: int = 2) -> Any:
    """Return a fresh, unattached tiny random model with sharp attention and no end-of-sequence token."""
    # The first caller may be in inference mode, and the master outlives it: weights must stay ordinary tensors.
    with torch.inference_mode(False), torch.enable_grad():
        model: Any = copy.deepcopy(_master(family, seed, layers))
    model.set_attn_implementation(backend)
    return model


def prompt(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    """Return random token ids [rows, length] without the pad token."""
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(prompts: Sequence[Tensor], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (ids, mask) of [1, n] prompts, padded on the left."""
    width = width or max(p.shape[1] for p in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, tokens in enumerate(prompts):
        ids[row, width - tokens.shape[1] :] = tokens[0]
        mask[row, width - tokens.shape[1] :] = 1
    return ids, mask


def generate(model: Any, ids: Tensor, cache: Any, new: int = 6, **kwargs: Any) -> Any:
    """Run `model.generate` with a cache under this release's argument name; greedy unless told otherwise."""
    arguments = {"do_sample": False, "max_new_tokens": new, "use_cache": True, **kwargs}
    arguments.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **{CACHE: cache}, **arguments)


def forward(model: Any, ids: Tensor, cache: Any, **kwargs: Any) -> Tensor:
    """Run one forward with a cache and return its logits (of the last position where a policy drops the others)."""
    if drops_tokens(cache):
        kwargs.setdefault("logits_to_keep", 1)
    return model(ids, **{CACHE: cache}, use_cache=True, **kwargs).logits


def greedy_loop(model: Any, ids: Tensor, cache: Any, steps: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Decode greedily without generate; returns (ids [B, steps], logits [B, steps, V])."""
    chosen, seen = [], []
    with torch.no_grad():
        logits = forward(model, ids, cache, **_masked(mask, ids.shape[1], first=True))[:, -1]
        for step in range(steps):
            chosen.append(logits.argmax(-1, keepdim=True))
            seen.append(logits)
            if step + 1 == steps:
                break
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits = forward(model, chosen[-1], cache, **_masked(mask, 1, first=False))[:, -1]
    return torch.cat(chosen, dim=1), torch.stack(seen, dim=1)


def _masked(mask: Tensor | None, new: int, *, first: bool) -> dict[str, Any]:
    if mask is None:
        return {}
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return {"attention_mask": mask, "position_ids": positions[:, -new:]}


def dynamic_cache(model: Any) -> DynamicCache:
    """Return the cache transformers itself would use for this model."""
    return DynamicCache(config=model.config)


def neutral_cache(name: str, model: Any, total_rows: int, **options: Any) -> Any:
    """Return a cache that must equal `DynamicCache` up to `total_rows` columns; skips policies without one."""
    import pytest

    neutral = getattr(policy_class(name), "neutral", None)
    if neutral is None:
        pytest.skip(f"{name} has no neutral options")
    return make_cache(name, model, **{**neutral(total_rows), **options})


def content(cache: Any) -> dict[str, Any]:
    """Return what a cache holds, by meaning: rows sorted by token, so that slot order does not matter."""
    snapshot = cache._runtime.snapshot
    found: dict[str, Any] = {"columns": cache.get_seq_length(), "batch": snapshot.batch_size}
    for layer in range(cache.num_layers):
        for batch in range(snapshot.batch_size):
            for head, row in enumerate(_stored_rows(cache, layer, batch)):
                found[f"tokens {layer} {batch} {head}"] = row[0]
                found[f"keys {layer} {batch} {head}"] = row[1]
                found[f"values {layer} {batch} {head}"] = row[2]
    return found


def _stored_rows(cache: Any, layer: int, batch: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    from hf_kvpolicy.engine.view import published_rows

    snapshot = cache._runtime.snapshot
    if snapshot.ragged:
        yield from _ragged_rows(snapshot, layer, batch)
        return
    table = snapshot.full_map(layer)
    if snapshot.pairs or snapshot.producers:
        keys, values = snapshot.view(layer)
    else:
        keys, values = published_rows(snapshot, layer)
    for head in range(keys.shape[1]):
        mapped = head if table.map_heads > 1 else 0
        live = table.live_BMW[batch, mapped].nonzero()[:, 0]
        order = live[table.tokens_BMW[batch, mapped][live].argsort()]
        yield (table.tokens_BMW[batch, mapped][order].tolist(), keys[batch, head, order], values[batch, head, order])


def _ragged_rows(snapshot: Any, layer: int, batch: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    stored, tail = snapshot.ragged[layer], snapshot.tail
    live = torch.zeros(0, dtype=torch.bool) if tail is None else tail.live_BMW[batch, 0]
    appended = torch.zeros(0, dtype=torch.int32) if tail is None else tail.tokens_BMW[batch, 0][live]
    if stored.trailing is not None:
        yield from _segments(snapshot, layer, batch)
        return
    for owner in range(batch * stored.map.heads, (batch + 1) * stored.map.heads):
        base = stored.map.lengths[owner]
        keys, values = stored.rows.owner(owner, stored.rows.capacities[owner])
        slots = stored.map.slots().split(stored.map.lengths)[owner]
        kept = torch.cat([slots, base + live.nonzero()[:, 0]])
        tokens = stored.map.owners()[owner].tokens_BMW[0, 0].tolist() + appended.tolist()
        assert tokens == sorted(tokens), "an owner's rows ascend"
        yield tokens, keys[kept], values[kept]


def _segments(snapshot: Any, layer: int, batch: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Closed segments, then the one that still grows as it is kept: before its rotation."""
    stored, newest = snapshot.ragged[layer], snapshot.frontier.tokens[batch] - 1
    means = stored.trailing.means_BHX[batch]
    for head in range(stored.map.heads):
        owner = batch * stored.map.heads + head
        keys, values = stored.rows.owner(owner, stored.map.lengths[owner])
        tokens = stored.map.owners()[owner].tokens_BMW[0, 0].tolist()
        grown_key, grown_value = means[head].to(keys.dtype).split([keys.shape[1], values.shape[1]])
        if newest >= 0:
            tokens = [*tokens, newest]
            keys, values = torch.cat([keys, grown_key[None]]), torch.cat([values, grown_value[None]])
        yield tokens, keys, values


def assert_same_content(left: Any, right: Any, *, atol: float = 1e-5) -> None:
    """Check that two caches hold the same rows of the same tokens, whatever their slots; bit for bit with `atol` 0."""
    a, b = content(left), content(right)
    rtol = 1e-4 if atol else 0.0
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, b[key], atol=atol, rtol=rtol, msg=lambda m, key=key: f"{key}: {m}")
        else:
            assert value == b[key], key


def kept_positions(cache: Any, batch: int = 0) -> list[list[list[int]]]:
    """Return token positions per layer and owner of one batch row."""
    return [[owner.tolist() for owner in cache.positions(layer, batch)] for layer in cache.policy_layers]
