"""KV-cache policies for Hugging Face transformers: smaller caches that are correct, real and measured.

    cache = hf_kvpolicy.SnapKVCache(model, budget=1024)
    model.generate(**inputs, cache=cache)

Importing registers the attention names `kvpolicy*` with transformers' public registries and does nothing else.
"""

from .attach import attach, attached_backend, detach
from .attention import register as _register
from .cache import PolicyCache
from .config import PolicySpec, load_policy, make_cache
from .contract import StateDescription, describe_state
from .engine import RunStatistics
from .errors import (
    BackendAdmissionError,
    BudgetError,
    CapacityError,
    CheckpointAdmissionError,
    ConfigError,
    IntegrityError,
    KVPolicyError,
    ManifestError,
    NotComparableError,
    SelectionError,
    StaleGenerationError,
    UnsupportedModelError,
)
from .ledger import Ledger
from .persistence import load_cache
from .policies import (
    AdaKVCache,
    DMCCache,
    FastGenCache,
    FullCache,
    H2OCache,
    HeadKVCache,
    KeyformerCache,
    LayerCondensedCache,
    MiniCache,
    PyramidInferCache,
    PyramidKVCache,
    RandomCache,
    ScissorhandsCache,
    SlidingWindowCache,
    SnapKVCache,
    StreamingLLMCache,
    ZigZagKVCache,
)
from .registry import (
    available_policies,
    register_model_patch,
    register_policy,
    supported_model_types,
)

__version__ = "0.1.0"

__all__ = [
    "AdaKVCache",
    "BackendAdmissionError",
    "BudgetError",
    "CapacityError",
    "CheckpointAdmissionError",
    "ConfigError",
    "DMCCache",
    "FastGenCache",
    "FullCache",
    "H2OCache",
    "HeadKVCache",
    "IntegrityError",
    "KVPolicyError",
    "KeyformerCache",
    "LayerCondensedCache",
    "Ledger",
    "ManifestError",
    "MiniCache",
    "NotComparableError",
    "PolicyCache",
    "PolicySpec",
    "PyramidInferCache",
    "PyramidKVCache",
    "RandomCache",
    "RunStatistics",
    "ScissorhandsCache",
    "SelectionError",
    "SlidingWindowCache",
    "SnapKVCache",
    "StaleGenerationError",
    "StateDescription",
    "StreamingLLMCache",
    "UnsupportedModelError",
    "ZigZagKVCache",
    "attach",
    "attached_backend",
    "available_policies",
    "describe_state",
    "detach",
    "load_cache",
    "load_policy",
    "make_cache",
    "register_model_patch",
    "register_policy",
    "supported_model_types",
]

_register()
