"""Keyformer: rows chosen by accumulated Gumbel-softmax weights, and the newest rows.

Adnan et al., "Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference"
(arXiv 2403.09054), Algorithm 1; visibility contract, sections 0x06G-0x06H: f_t[j] = f_(t-1)[j] +
softmax((x_t + zeta_t) / tau_t)[j] over the rows held, tau_t = tau_init + t (tau_end - tau_init) / expected_steps, t the
decode tokens since the last prompt segment (0 in a prompt). Of `budget` rows, int(recent_ratio * budget) are the
newest.

Deviations: noise is a stateless hash of (seed, layer, query head, query position, key position), not a generator's
stream. Beyond `expected_steps` the temperature is clamped (`after_end="continue"` lets it rise). Sums are fp32, per
batch row and KV head (`group`). `variant="reference"` follows the released masking code: the temperature continues, and
the key set is frozen at the end of the prompt, so that decode keeps frozen keys and a sliding window.
Not supported: `on_append="append"` (the budget holds after every step).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import ConfigError
from ...evidence import GumbelSoftmax
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, bounded_only, check_ratio, compose

__all__ = ["KeyformerCache"]


@register_policy("keyformer")
class KeyformerCache(PolicyCache):
    """Keeps key rows and the newest rows; the model's own attention and sampling are left alone."""

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        recent_ratio: float = 0.3,
        tau_init: float = 1.0,
        tau_end: float = 2.0,
        expected_steps: int = 100,
        after_end: str = "clamp",
        seed: int = 0,
        normalize: bool = False,
        group: str = "sum",
        unit: str = "head",
        protect: Iterable[int] | None = None,
        grace: int = 0,
        on_append: str = "recompress",
        chunked_prefill: str | None = None,
        variant: str = "paper",
        fallback: str | None = None,
        quantize: str | None = None,
        block_rows: int | None = None,
        merge_layers: MergeLayers = None,
    ) -> None:
        """Make an empty cache.

        Args:
            model_or_config: a model (it is attached) or a config.
            budget: rows per KV head, share of the prompt, or bytes; recent and protected rows are inside it.
            recent_ratio: share of the budget for the newest rows.
            tau_init: temperature in a prompt and at the start of decode.
            tau_end: temperature after `expected_steps` decode tokens.
            expected_steps: decode tokens over which the temperature rises.
            after_end: "clamp" or "continue".
            seed: fixes the noise.
            normalize: rows compete by their mean per query that saw them.
            group: how the query heads of one KV head are reduced per query: "mean", "max" or "sum".
            unit: "head", "layer" or "token": who shares one set (scores are averaged); "pair" where layers are merged.
            protect: token positions that always stay (for example range(4), or the system prompt).
            grace: rows younger than this many tokens are never dropped.
            chunked_prefill: "hold" or "bounded" for a prompt fed in chunks.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, and fewer than
                twice as many, are not quantized.
            merge_layers: "minicache", or its options as a mapping: kept rows are merged over pairs of layers.

        Raises:
            BudgetError: recent and protected rows do not fit into the budget.
            ConfigError: an option is outside its range.
        """
        check_ratio("keyformer", "recent_ratio", recent_ratio)
        common = {
            "budget": budget,
            "unit": unit,
            "group": group,
            "protect": protect,
            "on_append": bounded_only(on_append, "keyformer"),
            "chunked_prefill": chunked_prefill,
            "variant": variant,
            "fallback": fallback,
            "quantize": quantize,
            "block_rows": block_rows,
            "merge_layers": merge_layers,
        }
        own = {
            "recent_ratio": recent_ratio,
            "tau_init": tau_init,
            "tau_end": tau_end,
            "expected_steps": expected_steps,
            "after_end": after_end,
            "seed": seed,
            "normalize": normalize,
            "grace": grace,
        }
        composition = compose(
            "keyformer",
            common,
            own,
            model=model_or_config,
            schedule="every_step",
            evidence=_evidence(variant, own),
            recent_ratio=recent_ratio,
            window_rows=grace,
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": max(total_rows, 4)}


def _evidence(variant: str, own: Mapping[str, Any]) -> GumbelSoftmax:
    tau_init, tau_end, steps, after_end = (own[k] for k in ("tau_init", "tau_end", "expected_steps", "after_end"))
    if tau_init <= 0 or tau_end <= 0 or steps < 1:
        raise ConfigError(
            f"keyformer: temperatures must be positive and expected_steps at least 1; got tau_init={tau_init}, "
            f"tau_end={tau_end}, expected_steps={steps}."
        )
    if after_end not in ("clamp", "continue"):
        raise ConfigError(f"keyformer: after_end={after_end!r} is unknown; give 'clamp' or 'continue'.")
    frozen = variant == "reference"
    return GumbelSoftmax(
        seed=own["seed"],
        tau_init=tau_init,
        tau_end=tau_end,
        expected_steps=steps,
        after_end="continue" if frozen else after_end,
        normalize=own["normalize"],
        freezes_keys=frozen,
    )
