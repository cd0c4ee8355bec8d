"""FastGen: every head gets the smallest policy that recovers enough of its attention on the prompt.

Ge et al., "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs" (arXiv 2310.01801); sections 0x08H
and 0x08I. A family keeps special tokens, and it may keep punctuation, the newest int(local_ratio n) rows of n tokens,
and the ceil(heavy_ratio n) other rows with the highest mean attention per query that saw them; or everything. A head's
recovery is the mean over the prompt's queries of the attention inside what a family keeps, where a query's newest rows
are its own. Of the families with recovery >= `recovery` the one with the fewest rows is chosen, and it is applied after
the prompt and after every decode token: what the family names stays, of the other rows as many as at the profile, and
the one with the lowest mean leaves.

Deviations: sinks and `protect=` always stay. Rows and choices belong to KV heads; attention of a group's query heads is
reduced per query (`group`) and recovery is its share. `recovery=1` keeps every row, also those whose attention
underflows. A later prompt segment profiles again, by its own queries over the rows held and the new ones
(`on_append="recompress"`), or keeps families and sizes (`on_append="append"`); so does every chunk of a prompt that is
fed without `chunked_prefill="hold"`. `budget` is not the paper's: no head holds more rows after any step. Families
above it are no choice; where none is left, and for a full head that reaches it, open rows go first, then punctuation,
then the oldest of the newest rows, then special tokens. The authors released no code; a reproduction keeps larger parts
in decode than it profiled, which is not followed.
Not supported: `variant="reference"`, `unit="layer"` and `unit="token"` (policies differ by head), `inputs_embeds`
without `input_ids`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...allocation import FAMILIES, FamilyRule
from ...engine.token_kinds import TokenKinds
from ...errors import ConfigError
from ...evidence import MeanAttention
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, check_ratio, compose
from ..token_ids import punctuation_ids, special_ids

__all__ = ["FastGenCache"]


@register_policy("fastgen")
class FastGenCache(PolicyCache):
    """Chooses a policy for each head after a prompt, and applies it after every step."""

    units = ("head",)

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        recovery: float = 0.95,
        budget: BudgetLike | None = None,
        tokenizer: Any = None,
        special_token_ids: Iterable[int] | None = None,
        punctuation_token_ids: Iterable[int] | None = None,
        heavy_ratio: float = 0.3,
        local_ratio: float = 0.3,
        sinks: int = 4,
        group: str = "mean",
        unit: str = "head",
        protect: Iterable[int] | None = None,
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
            recovery: share of a head's attention on the prompt that its policy must keep; 1 keeps every row.
            budget: most rows of any head, as rows, share of the prompt or bytes; None for no limit.
            tokenizer: where special tokens and punctuation are read from; they are kept as ids.
            special_token_ids: ids that count as special, instead of the tokenizer's. With neither: the begin, end and
                pad tokens of the model's config.
            punctuation_token_ids: ids that count as punctuation, instead of the tokenizer's. With neither: none, so
                that families with punctuation keep no more than those without.
            heavy_ratio: share of the tokens that heavy families keep by attention.
            local_ratio: share of the tokens that local families keep as the newest rows, one at least.
            sinks: first tokens that every head keeps.
            group: how attention of the query heads of one KV head is reduced per query: "mean", "max" or "sum".
            unit: "head"; nothing else can have a policy per head.
            protect: token positions that every head keeps.
            on_append: what a later prompt segment does: "recompress" (profile again) or "append" (keep the profile).
            chunked_prefill: "hold" (one profile at the end) or "bounded" for a prompt fed in chunks.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, up to three
                times as many, are not quantized.
            merge_layers: None; heads or layers that hold different numbers of rows share none.

        Raises:
            BudgetError: protected rows leave no row of the budget.
            ConfigError: an option is outside its range, or an id is no whole number.
            ManifestError: unit is not "head".
        """
        for name, share in (("recovery", recovery), ("heavy_ratio", heavy_ratio), ("local_ratio", local_ratio)):
            check_ratio("fastgen", name, share)
        if variant == "reference":
            raise ConfigError("fastgen: the authors released no code, so there is no variant='reference'. Use 'paper'.")
        special = special_ids("fastgen", model_or_config, tokenizer, special_token_ids)
        punctuation = punctuation_ids("fastgen", tokenizer, punctuation_token_ids)
        common = {
            "budget": budget,
            "unit": unit,
            "group": group,
            "protect": protect,
            "on_append": on_append,
            "chunked_prefill": chunked_prefill,
            "variant": variant,
            "fallback": fallback,
            "quantize": quantize,
            "block_rows": block_rows,
            "merge_layers": merge_layers,
        }
        own = {
            "recovery": recovery,
            # Resolved to ids: a manifest and a saved cache name tokens, not an object.
            "tokenizer": None,
            "special_token_ids": list(special),
            "punctuation_token_ids": list(punctuation),
            "heavy_ratio": heavy_ratio,
            "local_ratio": local_ratio,
            "sinks": sinks,
        }
        composition = compose(
            "fastgen",
            common,
            own,
            needs_budget=False,
            model=model_or_config,
            schedule="every_step",
            evidence=MeanAttention(),
            sinks=sinks,
            storage="ragged",
            families=FamilyRule(recovery=recovery, heavy_ratio=heavy_ratio, local_ratio=local_ratio),
            token_kinds=TokenKinds(special=special, punctuation=punctuation),
        )
        super().__init__(model_or_config, composition)

    def families(self, layer: int, batch: int = 0) -> list[str]:
        """Return the name of each KV head's family in one layer, for one batch row; none before the first profile.

        Raises:
            ConfigError: no such layer or batch row.
        """
        number = self._checked(layer, batch)
        chosen, heads = self._runtime.snapshot.families_LO, self.composition.stored_heads(self.geometry)
        mine = chosen[number][batch * heads : (batch + 1) * heads] if chosen else ()
        return [FAMILIES[family].name for family in mine]

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"recovery": 1.0}
