"""What cannot be right fails at once, names the remedy, and leaves the cache as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import (
    CACHE,
    FAMILIES,
    assert_same_content,
    case_id,
    content,
    dynamic_cache,
    forward,
    generate,
    policies,
    prompt,
    small_options,
    tiny,
)
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MptConfig,
    MptForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_kvpolicy as kv
from hf_kvpolicy.config import policy_options
from hf_kvpolicy.registry import policy_class

NAMES = policies()
ATTACH = r"hf_kvpolicy\.attach\(model\)"
BUDGETED = [name for name in NAMES if "budget" in policy_options(name)]


def make(name: str, model: Any, **options: Any) -> Any:
    return kv.make_cache(name, model, **{**small_options(name), **options})


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Started:
    """A cache that has been fed a prompt and two tokens, and an equal one that nobody disturbs."""

    def __init__(self, name: str, model: Any | None = None, rows: int = 2) -> None:
        self.model = model or tiny("llama")
        self.caches = [make(name, self.model) for _ in range(2)]
        self.cache, self.calm = self.caches
        self.ids = prompt(40, rows=rows)
        with torch.no_grad():
            for cache in self.caches:
                for start, stop in ((0, 20), (20, 21), (21, 22)):
                    forward(self.model, self.ids[:, start:stop], cache)

    @contextmanager
    def refuses(self, error: type[Exception], match: str) -> Iterator[None]:
        """The body fails by that error; afterwards the cache is unchanged, consistent and usable."""
        before, state = content(self.cache), self.cache.state
        with pytest.raises(error, match=f"(?s){match}"), torch.no_grad():
            yield
        assert self.cache.state.cache_generation == state.cache_generation
        after = content(self.cache)
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key], key
        self.goes_on()

    def goes_on(self) -> None:
        """The next forwards equal those of the undisturbed cache, bit for bit."""
        self.cache.check_integrity()
        with torch.no_grad():
            for start, stop in ((22, 23), (23, 30), (30, 31)):
                left, right = (forward(self.model, self.ids[:, start:stop], cache) for cache in self.caches)
                assert torch.equal(left, right)
        assert_same_content(self.cache, self.calm, atol=0)
        self.cache.check_integrity()


# -- the wrong model


def test_not_attached(name: str) -> None:
    model = tiny("llama")
    cache = make(name, model.config)
    for call in (lambda: generate(model, prompt(9), cache), lambda: forward(model, prompt(9), cache)):
        with pytest.raises(kv.ConfigError, match=ATTACH):
            call()
    assert cache.get_seq_length() == 0
    kv.attach(model)
    assert torch.equal(generate(model, prompt(20), cache), generate(model, prompt(20), make(name, model)))


def test_detached(name: str) -> None:
    started = Started(name)
    kv.detach(started.model)
    with pytest.raises(kv.ConfigError, match=ATTACH), torch.no_grad():
        forward(started.model, prompt(1, rows=2), started.cache)
    kv.attach(started.model)
    started.goes_on()


class Died(Exception):
    """Raised on purpose inside a forward."""


@pytest.mark.parametrize("place", ["embedding", "first projection", "first mlp", "last mlp"])
@pytest.mark.parametrize("then", ["detached", "another model"])
def test_not_attached_after_a_forward_that_died(name: str, place: str, then: str) -> None:
    """What a dead forward left open must not let the next, unattached one in."""
    started = Started(name)
    model = started.model
    layers = model.model.layers
    module = {
        "embedding": model.model.embed_tokens,
        "first projection": layers[0].self_attn.q_proj,
        "first mlp": layers[0].mlp,
        "last mlp": layers[-1].mlp,
    }[place]
    seen = prompt(1, rows=2)
    published = place == "last mlp"

    def die(*_: Any) -> None:
        raise Died

    handle = module.register_forward_pre_hook(die)
    with pytest.raises(Died), torch.no_grad():
        forward(model, started.ids[:, 22:23], started.cache)
    handle.remove()
    other = tiny("llama", seed=5)
    if then == "detached":
        other = kv.detach(model)
    before = content(started.cache)
    with pytest.raises(kv.KVPolicyError, match=ATTACH + "|no longer the one in flight"), torch.no_grad():
        forward(other, seen, started.cache)
    after = content(started.cache)
    assert all(torch.equal(v, after[k]) if isinstance(v, torch.Tensor) else v == after[k] for k, v in before.items())
    kv.attach(model)
    if published:
        with torch.no_grad():
            forward(model, started.ids[:, 22:23], started.calm)
        for cache in started.caches:
            with torch.no_grad():
                forward(model, started.ids[:, 23:24], cache)
        assert_same_content(started.cache, started.calm, atol=0)
    else:
        started.goes_on()


def test_another_model(name: str) -> None:
    started = Started(name)
    same_shape = kv.attach(tiny("llama", seed=3))
    with started.refuses(kv.ConfigError, "another .*Make a cache for this model"):
        forward(same_shape, prompt(1, rows=2), started.cache)


def test_another_shape(name: str) -> None:
    cache = make(name, tiny("llama").config)
    for model in (tiny("llama", layers=3), tiny("llama_head_dim"), tiny("mistral")):
        kv.attach(model)
        with pytest.raises(kv.ConfigError, match="Make the cache from this model"):
            forward(model, prompt(9), cache)
    model = kv.attach(tiny("llama"))
    assert torch.equal(generate(model, prompt(20), cache), generate(model, prompt(20), make(name, model)))


def _unsupported() -> list[tuple[str, Callable[[], Any], str]]:
    return [
        ("gpt2", lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)), "not supported"),
        (
            "bloom",
            lambda: BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)),
            "not supp",
        ),
        ("mpt", lambda: MptForCausalLM(MptConfig(vocab_size=97, d_model=32, n_layers=2, n_heads=4)), "not supported"),
        (
            "falcon",
            lambda: FalconForCausalLM(
                FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
            ),
            "not supported",
        ),
        (
            "t5",
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
            ),
            "encoder-decoder",
        ),
    ]


@pytest.mark.parametrize(("family", "build", "words"), _unsupported(), ids=[f for f, _, _ in _unsupported()])
def test_unsupported_families(family: str, build: Callable[[], Any], words: str) -> None:
    if family in kv.supported_model_types():
        pytest.skip(f"{family} has a patch now")
    model = build()
    implementation = model.config._attn_implementation
    for given in (model, model.config):
        with pytest.raises(kv.UnsupportedModelError, match=f"{family}.*{words}.*Supported families: .*llama"):
            kv.FullCache(given)
    with pytest.raises(kv.UnsupportedModelError, match=family):
        kv.attach(model)
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_supported_cache_on_an_encoder_decoder_model(name: str) -> None:
    started = Started(name)
    _, build, _ = _unsupported()[-1]
    model = build().eval()
    with started.refuses(Exception, "."):
        model(prompt(4), decoder_input_ids=prompt(1), use_cache=True, **{CACHE: started.cache})


@pytest.mark.parametrize("given", [None, "llama", torch.nn.Linear(2, 2), 3])
def test_neither_model_nor_config(given: Any) -> None:
    with pytest.raises((kv.ConfigError, kv.UnsupportedModelError), match="transformers model"):
        kv.FullCache(given)
    if isinstance(given, torch.nn.Module):
        with pytest.raises(kv.UnsupportedModelError, match="from_pretrained"):
            kv.attach(given)


def test_a_backend_that_cannot_be_wrapped() -> None:
    model = tiny("llama")
    with pytest.raises(kv.BackendAdmissionError, match='backend="sdpa"'):
        kv.attach(model, backend="paged|sdpa")
    assert kv.attached_backend(model) is None


# -- the wrong call


def test_batch_size_changed(name: str) -> None:
    for rows in (1, 3):
        started = Started(name)
        with started.refuses(kv.ConfigError, "2 batch rows.*batch_select_indices"):
            forward(started.model, prompt(1, rows=rows), started.cache)


def test_a_shorter_new_prompt(name: str) -> None:
    started = Started(name)
    with started.refuses(kv.ConfigError, r"reset\(\)"):
        generate(started.model, prompt(9, rows=2), started.cache)
    started = Started(name)
    with started.refuses(kv.ConfigError, r"reset\(\)"):
        generate(started.model, prompt(22, rows=2), started.cache)


def test_no_new_token(name: str) -> None:
    started = Started(name)
    with started.refuses(kv.ConfigError, r"reset\(\)"):
        forward(started.model, prompt(4, rows=2)[:, :0], started.cache)
    cache = make(name, started.model)
    with pytest.raises((kv.ConfigError, ValueError, IndexError)):
        generate(started.model, prompt(4)[:, :0], cache)
    with pytest.raises(kv.ConfigError, match="no new token"):
        forward(started.model, prompt(4)[:, :0], cache)
    assert torch.equal(
        generate(started.model, prompt(20), cache), generate(started.model, prompt(20), make(name, started.model))
    )


def test_tokens_fed_again_in_a_loop(name: str) -> None:
    started = Started(name)
    positions = torch.arange(9)[None].expand(2, -1)
    with started.refuses(kv.ConfigError, r"fed again.*reset\(\)"):
        forward(started.model, prompt(9, rows=2), started.cache, position_ids=positions)
    started = Started(name)
    with started.refuses(kv.ConfigError, "skipped"):
        forward(started.model, prompt(1, rows=2), started.cache, position_ids=torch.full((2, 1), 30))
    started = Started(name)
    with started.refuses(kv.ConfigError, "one position per new token"):
        forward(started.model, prompt(2, rows=2), started.cache, position_ids=torch.full((2, 1), 22))


def test_one_row_of_many_fed_again(name: str) -> None:
    started = Started(name)
    with started.refuses(kv.ConfigError, "row 1 continues at position 21"):
        forward(started.model, prompt(1, rows=2), started.cache, position_ids=torch.tensor([[22], [21]]))


@pytest.mark.allow_deprecated
@pytest.mark.parametrize("kind", ["assistant", "prompt_lookup"])
def test_assisted_decoding_on_a_filled_cache_is_right_or_refused(name: str, kind: str) -> None:
    """Some releases feed the whole sequence again here; running wrong is not an option."""
    model = tiny("llama")
    extra = {"assistant_model": tiny("llama", seed=1, layers=1)} if kind == "assistant" else {}
    extra = extra or {"prompt_lookup_num_tokens": 3}
    neutral = policy_class(name).neutral(64)
    cache, plain = kv.make_cache(name, model, **neutral), dynamic_cache(model)
    talk = generate(model, prompt(12), cache)
    assert torch.equal(generate(model, prompt(12), plain), talk)
    talk = torch.cat([talk, prompt(5, seed=4)], dim=1)
    try:
        found = generate(model, talk, cache, **extra)
    except kv.ConfigError as error:
        refusal = str(error)
    else:
        assert torch.equal(found, generate(model, talk, plain))
        return
    assert re.search(r"fed again|no token again", refusal, re.IGNORECASE)


def test_use_cache_false(name: str) -> None:
    started = Started(name)
    new = prompt(1, rows=2)
    with started.refuses(kv.ConfigError, "use_cache=True"):
        started.model(new, use_cache=False, **{CACHE: started.cache})
    started = Started(name)
    started.model.config.use_cache = False
    with started.refuses(kv.ConfigError, "use_cache=True"):
        started.model(new, **{CACHE: started.cache})
    model = tiny("llama")
    for kwargs in ({"use_cache": False}, {}):
        model.generation_config.use_cache = bool(kwargs)
        cache = make(name, model)
        with pytest.raises(kv.ConfigError, match="use_cache=True"):
            model.generate(prompt(9), max_new_tokens=3, **{CACHE: cache}, **kwargs)
        assert cache.get_seq_length() == 0


def test_output_attentions(name: str) -> None:
    new = prompt(1, rows=2)
    started = Started(name)
    with started.refuses(kv.ConfigError, "output_attentions=True"):
        started.model(new, output_attentions=True, use_cache=True, **{CACHE: started.cache})
    started = Started(name, model=tiny("llama", "eager"))
    with started.refuses(kv.ConfigError, "output_attentions=True"):
        started.model(new, output_attentions=True, use_cache=True, **{CACHE: started.cache})
    cache = make(name, started.model)
    with pytest.raises(kv.ConfigError, match="output_attentions=True"):
        generate(started.model, prompt(9), cache, output_attentions=True, return_dict_in_generate=True)


def test_gradient_checkpointing_in_training(name: str) -> None:
    started = Started(name)
    model = started.model
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    with pytest.raises(kv.ConfigError, match=r"model\.eval\(\)"):
        forward(model, prompt(1, rows=2), started.cache)
    model.eval()
    started.goes_on()


def test_training_mode_without_checkpointing_works(name: str) -> None:
    model = tiny("llama").train()
    cache = make(name, model)
    loss = forward(model, prompt(20), cache).sum()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        forward(model, prompt(1), cache)
    cache.check_integrity()


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 1, 1, 23, dtype=torch.bool),
        torch.zeros(2, 1, 1, 23),
        {"full_attention": torch.ones(2, 1, 1, 23, dtype=torch.bool)},
    ],
    ids=["bool_4d", "float_4d", "dict"],
)
def test_prepared_masks(name: str, mask: Any) -> None:
    started = Started(name)
    with started.refuses(kv.ConfigError, "2-D"):
        forward(started.model, prompt(1, rows=2), started.cache, attention_mask=mask)


def test_prepared_mask_in_the_first_forward(name: str) -> None:
    model = tiny("llama")
    cache = make(name, model)
    with pytest.raises(kv.ConfigError, match="2-D"):
        forward(model, prompt(9), cache, attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool).tril())
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("shape", [(2, 1), (2, 22), (2, 24), (1, 23), (3, 23)])
def test_wrong_mask_width(name: str, shape: tuple[int, int]) -> None:
    started = Started(name)
    with started.refuses(kv.ConfigError, r"must be \(2, 23\)"):
        forward(started.model, prompt(1, rows=2), started.cache, attention_mask=torch.ones(shape, dtype=torch.long))


@pytest.mark.slow  # the compiler traces for half a minute
@pytest.mark.parametrize("name", ["snapkv", "streaming_llm"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_model_is_exact_or_refused(name: str, fullgraph: bool) -> None:
    """Graph breaks run our part eagerly, and then it is exact; one whole graph is refused by us or by the compiler."""
    started = Started(name)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(started.model, backend="eager", fullgraph=fullgraph)
        refusals = (kv.BackendAdmissionError, torch._dynamo.exc.TorchDynamoException)
        try:
            with torch.no_grad():
                found = forward(compiled, started.ids[:, 22:23], started.cache)
        except refusals:
            started.goes_on()
            return
        assert not fullgraph
        with torch.no_grad():
            assert torch.equal(found, forward(started.model, started.ids[:, 22:23], started.calm))
            for column in range(23, 27):
                here = started.ids[:, column : column + 1]
                left, right = forward(compiled, here, started.cache), forward(started.model, here, started.calm)
                assert torch.equal(left, right)
        assert_same_content(started.cache, started.calm, atol=0)
        started.cache.check_integrity()
    finally:
        torch._dynamo.reset()


# -- budgets and options


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize(
    "budget", [0, -3, 0.0, 1.5, -0.5, float("nan"), "", "12", "64 apples", "-1MiB", True, None, [4]]
)
def test_bad_budgets(name: str, budget: Any) -> None:
    with pytest.raises(kv.BudgetError, match=r"Give rows as a positive int.*\(0, 1\].*64MiB"):
        policy_class(name)(tiny("llama").config, **{**small_options(name), "budget": budget})


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("budget", [10**9, 1.0, "1GiB"])
def test_budgets_above_everything_work(name: str, budget: Any) -> None:
    model, twin = tiny("llama"), tiny("llama")
    ids = prompt(30)
    cache = make(name, model, budget=budget)
    out = generate(model, ids, cache)
    cache.check_integrity()
    if budget != 1.0:
        assert torch.equal(out, generate(twin, ids, dynamic_cache(twin)))
        assert (cache.stored_rows(0) == 35).all()
        assert cache.ledger().measured_bytes < 2**20


@pytest.mark.parametrize("name", BUDGETED)
def test_a_byte_budget_too_small_for_the_batch(name: str) -> None:
    model = tiny("llama")
    options = {"window": 3} if "window" in policy_options(name) else {}
    cache = kv.make_cache(name, model, budget="1B", **options)
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
        kv.make_cache(name, tiny("llama").config, budget=budget, window=8)
    model = tiny("llama")
    cache = kv.make_cache(name, model, budget=9, window=8)
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


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda c: kv.make_cache("snapkvv", c, budget=8), "Did you mean 'snapkv'"),
        (lambda c: kv.make_cache("snapkv", c, budget=64, windw=8), "'windw'.*Did you mean 'window'"),
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
    model = tiny("llama")
    before = {key: str(value) for key, value in model.__dict__.items() if not key.startswith("_")}
    for _ in range(2):
        assert kv.attach(model) is model
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == 1
    generate(model, prompt(9), make(name, model))
    for _ in range(2):
        assert kv.detach(model) is model
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert before == {key: str(value) for key, value in model.__dict__.items() if not key.startswith("_")}


def test_cases_are_named() -> None:
    assert case_id(("snapkv", {"unit": "layer"})) == "snapkv-layer"
