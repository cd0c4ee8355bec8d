"""Other packages add policies and families through decorators and entry points."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import hf_kvpolicy as kv
from hf_kvpolicy import registry
from hf_kvpolicy.model_patches import LlamaPatch


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    kv.available_policies(), kv.supported_model_types()
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))
    monkeypatch.setattr(registry, "_PATCHES", dict(registry._PATCHES))
    monkeypatch.setattr(registry, "_LOADED", set())


def test_an_entry_point_adds_a_policy(monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> None:
    def load() -> type:
        return kv.register_policy("theirs")(type("TheirsCache", (kv.FullCache,), {}))

    def entry_points(group: str) -> list[Any]:
        return [SimpleNamespace(load=load)] if group == "hf_kvpolicy.policies" else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert "theirs" in kv.available_policies()
    assert registry.policy_class("theirs").__name__ == "TheirsCache"


def test_an_entry_point_adds_a_family(monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> None:
    class TheirPatch(LlamaPatch):
        model_types = ("their_model",)

    def entry_points(group: str) -> list[Any]:
        wanted = group == "hf_kvpolicy.model_patches"
        return [SimpleNamespace(load=lambda: kv.register_model_patch(TheirPatch))] if wanted else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert "their_model" in kv.supported_model_types()
    config = SimpleNamespace(model_type="their_model", is_encoder_decoder=False)
    assert isinstance(registry.model_patch(config), TheirPatch)


def test_a_taken_or_unusable_name_is_refused(clean_registry: None) -> None:
    with pytest.raises(kv.ConfigError, match="already taken"):
        kv.register_policy("snapkv")(type("OtherCache", (kv.FullCache,), {}))
    with pytest.raises(kv.ConfigError, match="snake case"):
        kv.register_policy("Not A Name")
