"""Families that change frequencies at a length (longrope), and in `generate` drop the cache they were given there.

They would go on with a cache of their own, so a policy would end in silence. The model's
`prepare_inputs_for_generation` is therefore watched while it is attached: an empty cache is kept (a long prompt uses
the long frequencies throughout), one that holds rows of the short ones is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any

from hf_kvpolicy.cache import PolicyCache
from hf_kvpolicy.compat import cache_argument, cache_of_call
from hf_kvpolicy.errors import ConfigError

__all__ = ["watched_methods"]


def watched_methods() -> Mapping[str, Callable[..., Any]]:
    """Return the watched method, for a patch's `methods`."""
    return {"prepare_inputs_for_generation": _watched()}


@lru_cache(maxsize=1)
def _watched() -> Callable[..., Any]:
    from transformers import Phi3ForCausalLM

    # generate reads the signature.
    @wraps(Phi3ForCausalLM.prepare_inputs_for_generation)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = cache_of_call(kwargs)
        inputs = type(self).prepare_inputs_for_generation(self, *args, **kwargs)
        if isinstance(given, PolicyCache) and cache_of_call(inputs) is not given:
            if not given.get_seq_length():
                return {**inputs, cache_argument(): given}
            limit = self.config.original_max_position_embeddings
            raise ConfigError(
                f"The sequence grows past {limit} tokens (original_max_position_embeddings), where transformers "
                "changes this family's rotary frequencies and would go on with a cache of its own, without the policy. "
                f"Feed the whole text to an empty cache as one prompt of more than {limit} tokens, or stay within them."
            )
        return inputs

    return prepare
