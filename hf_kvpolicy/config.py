"""Policies by name and from YAML. Unknown keys fail with a suggestion."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cache import PolicyCache
from .errors import ConfigError, did_you_mean
from .policies.base import BudgetLike, ModelOrConfig
from .policies.options import refuse_unused
from .registry import available_policies, policy_class

__all__ = ["PolicySpec", "load_policy", "make_cache", "policy_options", "with_tokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy with its options, not yet bound to a model."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, model_or_config: ModelOrConfig) -> PolicyCache:
        """Make an empty cache of this policy for a model (attaching it) or a config."""
        cache: PolicyCache = policy_class(self.name)(model_or_config, **self.options)
        return cache


def policy_options(name: str) -> tuple[str, ...]:
    """Return the option names of a policy's constructor."""
    parameters = inspect.signature(policy_class(name)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def with_tokenizer(name: str, options: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return options with the tokenizer added where the policy takes one and the options say nothing about it."""
    takes = "tokenizer" in policy_options(name) and "tokenizer" not in options
    return {**options, "tokenizer": tokenizer} if takes else dict(options)


def make_cache(
    name: str, model_or_config: ModelOrConfig, budget: BudgetLike | None = None, **options: Any
) -> PolicyCache:
    """Make an empty cache of a policy by name.

    Raises:
        ConfigError: no such policy, or an option it does not have (the message suggests the closest).
    """
    given = dict(options) if budget is None else {"budget": budget, **options}
    return _spec(name, given).build(model_or_config)


def load_policy(source: str | Path | Mapping[str, Any]) -> PolicySpec:
    """Read a policy from a YAML file or a mapping: `policy: NAME` and its options beside it.

    Raises:
        ConfigError: the file cannot be read (a policy's bare name is not a file), `policy` is missing, or a key is
            unknown.
    """
    data = _read(source)
    if not isinstance(data, Mapping) or not isinstance(data.get("policy"), str):
        raise ConfigError(
            f"A policy file is a mapping with `policy: NAME` and its options, for example `policy: snapkv`, `budget: "
            f"1024`; got {data!r}."
        )
    return _spec(data["policy"], {str(key): value for key, value in data.items() if key != "policy"})


def _spec(name: str, options: dict[str, Any]) -> PolicySpec:
    allowed = policy_options(name)
    for key in options:
        if key not in allowed:
            raise ConfigError(
                f"The policy {name!r} has no option {key!r}; it has {', '.join(allowed) or 'none'}."
                f"{did_you_mean(key, allowed)}"
            )
    parameters = inspect.signature(policy_class(name)).parameters
    missing = [key for key in allowed if parameters[key].default is inspect.Parameter.empty and key not in options]
    if missing:
        raise ConfigError(f"The policy {name!r} needs {', '.join(missing)}; give for example budget=1024.")
    refuse_unused(name, options, allowed)
    return PolicySpec(name=name, options=options)


def _read(source: str | Path | Mapping[str, Any]) -> Any:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(f"A policy is read from a YAML file's path or from a mapping; got {type(source).__name__}.")
    import yaml

    path = Path(source)
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        if str(path) in available_policies():
            raise ConfigError(
                f"{str(path)!r} is the name of a policy, and load_policy reads a YAML file's path or a mapping. Use "
                f"make_cache({str(path)!r}, model, ...), or load_policy({{'policy': {str(path)!r}, ...}})."
            ) from error
        raise ConfigError(f"The policy file {str(path)!r} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"The policy file {str(path)!r} is not valid YAML: {error}") from error
