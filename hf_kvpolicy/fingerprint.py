"""Cheap identities of a checkpoint from samples of its weights; never a hash of all of them.

`checkpoint_fingerprint` names what stored rows depend on: config, revision, and weights in the dtype they run in.
`weights_fingerprint` names what was trained, whatever it runs in: a measurement of heads holds for all of these.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from .contract import sha256_of
from .weights import computing_device, named_weights

__all__ = ["checkpoint_fingerprint", "config_digest", "weights_fingerprint"]

_SAMPLED_TENSORS = 8
_SAMPLED_ELEMENTS = 256
_SAMPLED_PER_TENSOR = 32
# Entries of a config that describe how it is run, where it came from or what wraps the decoder, not what was trained.
# Saving a model fills in `architectures`.
_RUNTIME_KEYS = (
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


def checkpoint_fingerprint(decoder: torch.nn.Module | None) -> str:
    """Return a hex digest of a decoder's config and sampled weights, or "unbound" without a decoder."""
    if decoder is None:
        return "unbound"
    config: Any = decoder.config
    digest = hashlib.sha256(config_digest(config).encode())
    digest.update(str(getattr(config, "_commit_hash", None)).encode())
    step = max(1, sum(1 for _ in decoder.parameters()) // _SAMPLED_TENSORS)
    for name, weight in named_weights(decoder, every=step):
        sample = weight.detach().reshape(-1)[:_SAMPLED_ELEMENTS].float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def config_digest(config: Any) -> str:
    """Return a hex digest of what a config says about the model, not about how it is run."""
    described = {key: value for key, value in config.to_dict().items() if key not in _RUNTIME_KEYS}
    return sha256_of(_plain(described))


def weights_fingerprint(decoder: torch.nn.Module) -> str:
    """Return a hex digest of every tensor's name, shape and first elements, rounded to bfloat16.

    Loading a checkpoint in float32 or bfloat16, or with another version of transformers, gives the same digest.
    """
    names = [f"{name} {tuple(weight.shape)}" for name, weight in sorted(decoder.named_parameters())]
    digest, device = hashlib.sha256(sha256_of(names).encode()), computing_device(decoder)
    weights = (weight for _, weight in named_weights(decoder))
    samples = [weight.detach().reshape(-1)[:_SAMPLED_PER_TENSOR].bfloat16().to(device) for weight in weights]
    # One copy to the host instead of one a tensor.
    digest.update(torch.cat(samples).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # A limit that is none may be an infinite number, which JSON does not have.
    told = isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if value is None or told else str(value)
