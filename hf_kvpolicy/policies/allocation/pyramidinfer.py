"""PyramidInfer: tokens are dropped while the prompt runs, and from the answer, more of them the deeper the layer.

Yang et al., "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference" (arXiv 2405.12532); section
0x08C. In layer l of L the pivotal context are the k_l = int(c_l r_l) rows of its context that the newest 1 + int(n
recent_ratio) queries attend to most, in the mean over heads and weighted by linspace(1, distance_weight) over queries;
r_l = d + (1 - d) (cos(pi l / L) + 1) / 2. Only they and the newest tokens go on to layer l + 1: c_{l+1} = k_l.
In decode the newest 1 + int(n recent_ratio) tokens of n rows are recent. Once `decode_block` tokens of the answer are
older, layer l keeps max(1, int(decode_block decode_ratio r'_l)) of them, r' with `decode_decay`, by the same votes of
the tokens behind them.

Deviations: a layer stores the rows it passes on (the released code stores all that reached it). Sinks and `protect=`
stay by a mask. A `budget` caps the mean over layers: where the schedule keeps more, contexts shrink by one factor, and
the newest tokens are a share of the budget; what stays of an answer comes on top of it. A later prompt segment prunes
itself and what is held together, answers too. The paper says that decode updates the retained context; how is the
released code's, whose rows of a prompt are not chosen from again. There blocks begin with the prompt's last token, here
with the answer's first one. n are the rows of the first layer, as in the code's first version; a later one counts all
tokens seen. Attention is kept as two sums a row, not as a matrix; `group="max"` is taken per query in decode.
Not supported: `variant="reference"`, other units than "layer", `chunked_prefill="hold"`; where tokens of a prompt are
dropped: full logits, labels, output_hidden_states; past recording (assisted decoding, prompt lookup) unless nothing is
dropped and `decode_block=None`; taking back a part of an answer that is chosen from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...allocation import BlockDecay, DepthDecay
from ...errors import ConfigError
from ...evidence import RecentAttention
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, check_ratio, compose

__all__ = ["PyramidInferCache"]


@register_policy("pyramidinfer")
class PyramidInferCache(PolicyCache):
    """Prunes hidden states layer by layer while a prompt runs, and drops rows of the answer in blocks."""

    units = ("layer",)

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike | None = None,
        decay: float = 0.9,
        recent_ratio: float = 0.2,
        sinks: int = 4,
        min_context: int = 64,
        distance_weight: float = 1.2,
        interval: int = 1,
        decode_block: int | None = 16,
        decode_ratio: float = 0.9,
        decode_decay: float = 0.1,
        group: str = "mean",
        unit: str = "layer",
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
            budget: the most rows per KV head that a prompt leaves in the mean over layers, share of the prompt, or
                bytes; sinks and the newest rows are inside it. None: the schedule alone decides.
            decay: share of its context that the last layer keeps; layers before it keep more. 1 keeps everything.
            recent_ratio: share of the segment (or of a smaller budget) that is newest: its queries vote, its rows stay.
            sinks: first tokens, which stay in every layer.
            min_context: the schedule never cuts a context to this many rows or fewer (a budget does).
            distance_weight: weight of the newest query's votes; the oldest one's is 1.
            interval: only every so many layers the schedule drops tokens of a prompt.
            decode_block: tokens of an answer that every layer chooses among once they are older than the recent ones.
                None: an answer's rows are appended and stay until the next prompt.
            decode_ratio: share of such a block that the first layer keeps.
            decode_decay: the factor to which that share falls with depth.
            group: how votes of the query heads of one KV head are reduced: "mean", "max" or "sum".
            unit: "layer"; hidden states are shared by all heads.
            protect: token positions that always stay, inside the budget.
            on_append: what a later prompt segment does: "recompress" prunes it together with what is held, "append"
                keeps it whole.
            chunked_prefill: "bounded" for a prompt fed in chunks, each of which is pruned on its own.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, up to three
                times as many, are not quantized.
            merge_layers: None; heads or layers that hold different numbers of rows share none.

        Raises:
            BudgetError: the budget does not leave a row to choose.
            ConfigError: an option is outside its range.
            ManifestError: unit is not "layer", or chunked_prefill is "hold".
        """
        check_ratio("pyramidinfer", "recent_ratio", recent_ratio)
        if variant == "reference":
            raise ConfigError(
                "pyramidinfer: the released code stores every row that reaches a layer; only variant='paper', which "
                "stores what a layer passes on, is supported."
            )
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
            "decay": decay,
            "recent_ratio": recent_ratio,
            "sinks": sinks,
            "min_context": min_context,
            "distance_weight": distance_weight,
            "interval": interval,
            "decode_block": decode_block,
            "decode_ratio": decode_ratio,
            "decode_decay": decode_decay,
        }
        blocks = BlockDecay(tokens=1 if decode_block is None else decode_block, ratio=decode_ratio, decay=decode_decay)
        composition = compose(
            "pyramidinfer",
            common,
            own,
            needs_budget=False,
            model=model_or_config,
            schedule="in_prefill",
            evidence=RecentAttention(recent_ratio=recent_ratio, distance_weight=distance_weight),
            sinks=sinks,
            window_rows=1,
            pruning=DepthDecay(decay=decay, interval=interval, min_context=min_context),
            decode_blocks=None if decode_block is None else blocks,
            storage="ragged",
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"decay": 1.0, "decode_block": None}
