"""Layer-condensed K/V: most layers read the rows of another layer, and store none.

Wu and Tu, "Layer-Condensed KV Cache for Efficient Inference of Large Language Models" (arXiv 2405.10637);
representation contract, section 0x0DA-0x0DE. The graph is the checkpoint's: its config says, in `kvpolicy`, for every
layer whose rows it reads (`map`), and how often the layers were run in training (`forward_passes`,
`backward_passes`). With the paper's graph the middle layers read the last one, and a few warm-up layers at either end
read their own. Of T tokens |P| of L layers are stored: 2 B T |P| H_kv d b bytes.

A layer that reads a later one does not see a token's own row, which is not made yet; a token that then sees no row at
all (a sequence's first) attends to a dummy row of zeros. One token at a time that is all. Several at once depend on
one another's last layers: they are run one by one, or together in `passes` runs over the layers, each of which reads
the producers' rows of the run before. Token i is exact from run i on, so that a forward of no more tokens than runs is
fed one by one (`encoding="auto"`) and is exact; of a longer one the first tokens are exact, and the others as close as
the checkpoint has learned to come.

Deviations: the dummy row is read by queries that see no other row, and by no others. In the first run the rows of the
tokens before are zeros and are read as such. All layers are run each time, those too that no later layer is read by.
Not supported: an ordinary checkpoint, which attends to rows it was never trained with; gradients (training runs the
layers itself, scripts/train_layer_condensed); a selection of rows together with the graph; quantized rows. What an
ordinary cache, or none, makes of such a checkpoint is not what it was trained for, and nothing in transformers says so.
K/V projections of layers without a store are not used, but a Llama computes them.
"""

from __future__ import annotations

from typing import Any, Literal

from ...attach import model_and_config
from ...engine import Composition
from ...errors import ConfigError
from ...evidence import Recency
from ...geometry import CacheGeometry, text_config
from ...registry import register_policy
from ...representation import CondensedLayers, sandwich_map
from ..base import ModelOrConfig, PolicyCache

__all__ = ["LayerCondensedCache"]


@register_policy("layer_condensed")
class LayerCondensedCache(PolicyCache):
    """Stores the rows of the layers that a layer-condensed checkpoint names, and of no others."""

    # No option makes it equal to a plain cache: layers read rows of others, as they were trained to.
    neutral = None

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        encoding: Literal["auto", "sequential", "iterated"] = "auto",
        passes: int | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            model_or_config: a model (it is attached) or a config, of a checkpoint that was trained for it.
            encoding: how several tokens at once are run: "sequential" one by one, exactly; "iterated" together, in
                `passes` runs; "auto" one by one where there are no more of them than runs.
            passes: runs over the layers; None for as many as in the checkpoint's training.

        Raises:
            ConfigError: an option is outside its range.
            CheckpointAdmissionError: the checkpoint was not trained for this, or its entry is malformed.
            ManifestError: the checkpoint's graph cannot run.
            UnsupportedModelError: the family's layers cannot be run several times.
        """
        if encoding not in ("auto", "sequential", "iterated"):
            raise ConfigError(
                f'layer_condensed: encoding={encoding!r} is unknown; allowed are "auto", "sequential" and "iterated".'
            )
        if passes is not None and passes < 1:
            raise ConfigError(f"layer_condensed: passes={passes} runs over the layers encode nothing; give at least 1.")
        config = model_and_config(model_or_config)[1]
        representation = CondensedLayers.of_checkpoint(
            text_config(config),
            CacheGeometry.from_config(config).total_layers,
            encoding=encoding,
            passes=passes,
        )
        composition = Composition(
            policy="layer_condensed",
            schedule="never",
            evidence=Recency(),
            unit="token",
            representation=representation,
            options={"encoding": encoding, "passes": passes},
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def checkpoint_entry(
        num_layers: int, *, warmup_layers: int = 2, forward_passes: int = 7, backward_passes: int = 2
    ) -> dict[str, Any]:
        """Return `kvpolicy` of the config of a checkpoint with the paper's graph, to be trained with it.

        Args:
            num_layers: of the model.
            warmup_layers: an even number: half of them at either end read their own rows, the others the last layer's.
            forward_passes: runs over the layers without a gradient.
            backward_passes: runs that gradients flow through, after these; two or more train what producers make.

        Raises:
            ConfigError: the warm-up layers are no even number of the model's layers.
        """
        if warmup_layers % 2 or not 0 <= warmup_layers <= num_layers:
            raise ConfigError(
                f"layer_condensed: {warmup_layers} warm-up layers cannot be shared out between the two ends of "
                f"{num_layers} layers. Give an even number between 0 and {num_layers}."
            )
        return {
            "kind": "layer_condensed",
            "map": list(sandwich_map(num_layers, warmup_layers)),
            "forward_passes": forward_passes,
            "backward_passes": backward_passes,
        }

    @classmethod
    def example_training(cls, num_layers: int) -> dict[str, Any]:
        """Return what a config says of such a checkpoint: all layers read the last, prompts of six tokens iterate."""
        return cls.checkpoint_entry(num_layers, warmup_layers=0, forward_passes=3, backward_passes=2)
