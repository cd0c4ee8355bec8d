"""Every registered policy comes with everything that belongs to it."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
from helpers import TRAINED, declared
from transformers import LlamaConfig

import hf_kvpolicy as kv
from hf_kvpolicy.registry import policy_class

from ._sources import ROOT


def config_for(policy: str) -> LlamaConfig:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return declared(config, policy)


DOCS = ROOT / "docs" / "policies.md"
# Other tests may register policies of their own: only those that live in the package count.
NAMES = [n for n in kv.available_policies() if policy_class(n).__module__.startswith("hf_kvpolicy.policies.")]


def source(policy: str) -> str:
    return sys.modules[policy_class(policy).__module__].__doc__ or ""


def test_policies_are_registered() -> None:
    assert {"full", "random", "sliding_window", "snapkv", "streaming_llm"} <= set(NAMES)


@pytest.mark.parametrize("policy", NAMES)
def test_the_file_opens_with_its_source(policy: str) -> None:
    text = source(policy)
    cites = re.search(r"arXiv \d{4}\.\d{4,5}|section 0x\d\d", text)
    assert cites or "own baseline" in text, "name the paper, or the section of the contract"
    for heading in ("Deviations:", "Not supported:"):
        assert re.search(rf"^{heading} \S", text, re.MULTILINE), f"{heading} is missing or empty"


@pytest.mark.parametrize("policy", NAMES)
def test_the_module_is_named_like_the_policy(policy: str) -> None:
    assert Path(str(sys.modules[policy_class(policy).__module__].__file__)).stem == policy


@pytest.mark.parametrize("policy", NAMES)
def test_neutral_options_make_a_cache(policy: str) -> None:
    cls = policy_class(policy)
    assert "neutral" in vars(cls), "each class declares the options under which it equals DynamicCache"
    if cls.neutral is None:  # type: ignore[attr-defined]
        assert policy in TRAINED, "an ordinary checkpoint can be served as transformers' own cache would"
        return
    for total in (1, 2, 5, 6, 100, 4096):
        options = cls.neutral(total)  # type: ignore[attr-defined]
        cache = cls(config_for(policy), **options)
        budget = cache.composition.budget
        assert budget is None or (budget.kind == "rows" and budget.value >= total)


@pytest.mark.parametrize("policy", NAMES)
def test_all_options_are_keywords(policy: str) -> None:
    tree = ast.parse(Path(str(sys.modules[policy_class(policy).__module__].__file__)).read_text(encoding="utf-8"))
    (init,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    assert [argument.arg for argument in init.args.args] == ["self", "model_or_config"]


@pytest.mark.parametrize("policy", NAMES)
def test_a_config_file_holds_its_defaults(policy: str) -> None:
    path = ROOT / "configs" / "policies" / f"{policy}.yaml"
    assert path.exists(), f"{path.relative_to(ROOT)} is missing"
    spec = kv.load_policy(path)
    assert spec.name == policy
    spec.build(config_for(policy))


def test_every_policy_file_of_configs_loads() -> None:
    for path in sorted((ROOT / "configs" / "policies").glob("*.yaml")):
        assert kv.load_policy(path).name in NAMES, path.name


@pytest.mark.parametrize("policy", NAMES)
def test_a_plain_reference_exists_and_shares_no_code(policy: str) -> None:
    path = ROOT / "tests" / "reference" / f"{policy}.py"
    assert path.exists(), f"{path.relative_to(ROOT)} is missing"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.split(".")[0] == "hf_kvpolicy" for name in names)
    assert importlib.import_module(f"reference.{policy}")


@pytest.mark.parametrize("policy", NAMES)
def test_the_docs_have_a_row(policy: str) -> None:
    if not DOCS.exists():
        pytest.skip("docs/policies.md does not exist yet")
    row = re.search(rf"^\| `{policy}` \| `(\w+)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert row, f"docs/policies.md has no row for {policy}"
    assert row[1] == policy_class(policy).__name__


@pytest.mark.parametrize("policy", NAMES)
def test_the_class_is_public(policy: str) -> None:
    cls = policy_class(policy)
    assert getattr(kv, cls.__name__) is cls
    assert cls.__name__ in kv.__all__


@pytest.mark.parametrize("policy", [n for n in NAMES if n not in ("full", "minicache", "dmc", "layer_condensed")])
def test_a_bounded_policy_takes_the_common_options(policy: str) -> None:
    from hf_kvpolicy.config import policy_options

    common = {"budget", "group", "unit", "on_append", "variant", "chunked_prefill", "fallback", "protect"}
    common |= {"quantize", "block_rows", "merge_layers"}
    assert common <= set(policy_options(policy))
