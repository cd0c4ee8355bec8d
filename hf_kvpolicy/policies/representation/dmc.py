"""DMC: consecutive tokens become one row wherever a trained channel says so.

Nawrot et al., "Dynamic Memory Compression: Retrofitting LLMs for Accelerated Inference" (arXiv 2403.09636), equations 8
to 10 and Algorithm 1; section 0x0CB-0x0CC. For every token, layer and KV head one channel decides: alpha = 0 begins a
segment, alpha = 1 adds the token to the last one, whose key and value are the means of its tokens' own weighted by
omega. A query sees closed segments and the last one as its own token leaves it; a prompt in one forward sees what it
would see token by token. A batch row's first token always begins.

The checkpoint was trained for it and says so in its config:

    "kvpolicy": {"kind": "dmc", "channel": 0, "ratio": 2.0, "offset": 5.0, "window": null}

`channel` counts within a head (-1 is the last), `ratio` is the tokens per row it was trained for, and `offset` (0 when
it is left out) is taken from alpha's logit and added to omega's. What a config without this entry computes was not
trained to decide anything: it is refused, as are other policies on a config with it.

Deciding channels are those of keys and queries before their rotation. They are zeroed before it and after it, as in
the published code, and take no part in attention. Segments are averaged before rotation; one that still grows is kept
so, in fp32, and a closed one is rotated at its newest token. Omega is the sigmoid of the mean logit of the KV head's
query heads. What hides a row, a mask or a sliding window, hides it by its newest token.

Per layer and KV head T tokens that began n segments take (n - 1) 2 d b bytes for closed segments, 8 d for the one that
still grows, and 4 n for masses.

Deviations: `offset` is the constant of training, which the published code takes at inference too; with 0 the equations
are as printed. That code uses the last channel; which one is the config's to say. Keys and queries arrive rotated and
are turned back by the model's own angles, in fp32: exact to an ulp of fp32, and to the rounding of the rotated row
where the model runs in two bytes, so that a logit that close to the threshold may be decided otherwise. Weights below
1e-12 count as that.
Not supported: the published code's window (`window` is null or left out): a segment there forgets all but its last 12
tokens. Families whose keys are not rotated, or by angles that depend on the length; models of full and sliding layers.
A budget or a selection. Taking back accepted tokens: a mean does not give up a member.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...attach import family_of, model_and_config, unwrap
from ...contract import SEGMENTS, admit_checkpoint, declared_training
from ...engine import Composition
from ...errors import CheckpointAdmissionError, UnsupportedModelError
from ...evidence import Recency
from ...geometry import CacheGeometry, text_config
from ...registry import model_patch, register_policy
from ...representation.token_segments import TokenSegments
from ..base import ModelOrConfig, PolicyCache

__all__ = ["DMCCache"]


@register_policy("dmc")
class DMCCache(PolicyCache):
    """Merges tokens as the checkpoint was trained to; it has no options, because they are the checkpoint's."""

    # No option makes it equal to a plain cache: the deciding channels are no part of attention.
    neutral = None

    def __init__(self, model_or_config: ModelOrConfig) -> None:
        """Make an empty cache.

        Args:
            model_or_config: a model (it is attached) or a config, of a checkpoint that was trained for DMC.

        Raises:
            CheckpointAdmissionError: the config does not declare it, or declares what cannot be.
            UnsupportedModelError: the family's keys cannot be turned back.
        """
        model, config = model_and_config(model_or_config)
        geometry = CacheGeometry.from_config(config)
        representation = _declared(text_config(config), geometry)
        patch = model_patch(config) if model is None else family_of(unwrap(model))
        if patch.alibi(config) is not None or patch.key_stage != "post_rope" or geometry.foreign_layers:
            raise UnsupportedModelError(
                f"dmc averages keys before their rotation, in every layer, but this {geometry.model_type!r} model has "
                "keys without one, or sliding layers beside full ones. Use a model of full layers with rotary keys."
            )
        composition = Composition(
            policy="dmc", schedule="never", evidence=Recency(), representation=representation, storage="ragged"
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def example_training(num_layers: int) -> dict[str, Any]:
        """Return what a config says of such a checkpoint, for tests; of any number of layers the same."""
        return {"kind": "dmc", "channel": 0, "ratio": 2.0}


def _declared(config: Any, geometry: CacheGeometry) -> TokenSegments:
    """Return what a config says of its training.

    Raises:
        CheckpointAdmissionError: it says nothing, something of another kind, or a number outside its range.
    """
    found = declared_training(config)
    admit_checkpoint(SEGMENTS, None if found is None else found[0])
    assert found is not None, "an ordinary checkpoint was refused"
    given: Mapping[str, Any] = found[1]
    channel: Any = given.get("channel")
    ratio: Any = given.get("ratio")
    offset: Any = given.get("offset", 0.0)
    dim = geometry.key_dim
    sound = (
        isinstance(channel, int)
        and not isinstance(channel, bool)
        and -dim <= channel < dim
        and all(isinstance(number, int | float) and not isinstance(number, bool) for number in (ratio, offset))
    )
    if not sound or ratio < 1 or set(given) - {"kind", "channel", "ratio", "offset", "window"}:
        raise CheckpointAdmissionError(
            f"config.kvpolicy is {dict(given)!r}, but dmc needs a 'channel' from {-dim} to {dim - 1}, a 'ratio' of at "
            "least 1 and, if any, a number as 'offset', and knows no other entry but 'window'. Correct the config."
        )
    if given.get("window") is not None:
        raise CheckpointAdmissionError(
            f"config.kvpolicy asks for a window of {given['window']!r} tokens, after which a segment forgets its first "
            "ones. Segments here are means of all their tokens: use a checkpoint trained with window null."
        )
    return TokenSegments(
        name=SEGMENTS,
        replaces_rows=True,
        training=dict(given),
        channel=channel % dim,
        offset=float(offset),
        ratio=float(ratio),
    )
