"""Condensed layers: most layers read rows that another layer makes, and store none (section 0x0DA-0x0DE).

Which layer reads whose rows is the checkpoint's, trained with it. A layer that reads a *later* layer's rows (one above
it) does not see a token's own row, which does not exist yet; a layer that reads its own, or a lower layer's, does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..contract import CONDENSED, ReplacementContract, admit_checkpoint, declared_training
from ..errors import CheckpointAdmissionError
from .rows import RowRepresentation

__all__ = ["CondensedLayers", "Encoding", "sandwich_map"]

Encoding = Literal["auto", "sequential", "iterated"]
_ENTRIES = {"kind", "map", "forward_passes", "backward_passes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CondensedLayers(RowRepresentation):
    """The producer of every layer's rows, and how several tokens at once are encoded.

    Attributes:
        producers: the layer whose rows each layer reads, (0, 5, 5, 5, 5, 5).
        passes: how often the layers are run over several tokens at once.
        encoding: "sequential" runs them token by token instead, which is exact; "auto" does so for so many tokens as
            there are passes, or fewer.
    """

    producers: tuple[int, ...]
    passes: int
    encoding: Encoding = "auto"

    @classmethod
    def of_checkpoint(
        cls, config: Any, num_layers: int, *, encoding: Encoding = "auto", passes: int | None = None
    ) -> CondensedLayers:
        """Return what a checkpoint was trained for.

        Args:
            config: of the text decoder; its `kvpolicy` has `kind`, `map`, `forward_passes` and `backward_passes`.
            passes: instead of the sum of the two.

        Raises:
            CheckpointAdmissionError: an ordinary checkpoint, one trained for something else, or a malformed entry.
            ManifestError: the map is no graph of producers that can run.
        """
        declared = declared_training(config)
        admit_checkpoint(CONDENSED, None if declared is None else declared[0])
        assert declared is not None, "an ordinary checkpoint was refused"
        trained = declared[1]
        read = _producers(trained, num_layers)
        forward, backward = _count(trained, "forward_passes", 0), _count(trained, "backward_passes", 1)
        found = cls(
            name=CONDENSED,
            replaces_rows=True,
            training=dict(trained),
            producers=read,
            passes=forward + backward if passes is None else passes,
            encoding=encoding,
        )
        found.contract()  # the rules of graphs are the contract's
        return found

    @property
    def kind(self) -> str:
        """Which kind of replacement it is."""
        return CONDENSED

    @property
    def leaves_forward(self) -> bool:
        """False: layers attend to rows that the model's own forward would not give them."""
        return False

    @property
    def consumer_schema(self) -> str:
        """What a reader must know to read a row."""
        return "producer_rows_own_row_masked"

    @property
    def stored(self) -> tuple[int, ...]:
        """The layers that make rows, ascending."""
        return tuple(sorted(set(self.producers)))

    @property
    def is_cyclic(self) -> bool:
        """Whether a layer reads rows of a later one."""
        return any(map(self.reads_later, range(len(self.producers))))

    def reads_later(self, layer: int) -> bool:
        """Whether a layer reads rows of a later one, among which a token's own does not exist yet."""
        return self.producers[layer] > layer

    def is_sequential(self, tokens: int) -> bool:
        """Whether so many tokens at once are run one by one."""
        return self.encoding == "sequential" or (self.encoding == "auto" and tokens <= self.passes)

    def contract(self) -> ReplacementContract:
        """Return the record of this graph.

        Raises:
            ManifestError: it is no graph of producers that can run.
        """
        return ReplacementContract(
            representation_kind=CONDENSED,
            producer_layer_map=[(layer,) for layer in self.stored],
            consumer_layer_map=self.producers,
            parameters={"passes": self.passes, "encoding": self.encoding, "own_row": "masked_where_read_from_above"},
        )


def sandwich_map(num_layers: int, warmup_layers: int) -> tuple[int, ...]:
    """Return the paper's graph: half of the warm-up layers at either end as they are, the others read the last layer.

    The authors' later code lets the others read the last of themselves instead, which stores one layer more; a
    checkpoint may say so.
    """
    half = warmup_layers // 2
    last = num_layers - 1
    return tuple(layer if layer < half or layer >= num_layers - half else last for layer in range(num_layers))


def _producers(trained: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    unknown = sorted(set(trained) - _ENTRIES)
    found: Any = trained.get("map")
    listed = isinstance(found, list | tuple) and all(type(layer) is int for layer in found)
    if unknown or not listed or len(found) != num_layers:
        raise CheckpointAdmissionError(
            f"The checkpoint's config says kvpolicy={dict(trained)!r}, but a layer-condensed checkpoint of "
            f"{num_layers} layers has the entries kind, map (for every layer the one whose rows it reads), "
            "forward_passes and backward_passes, and no others. Correct the config, or use a version of hf_kvpolicy "
            "that knows it."
        )
    return tuple(found)


def _count(trained: Mapping[str, Any], name: str, minimum: int) -> int:
    found = trained.get(name)
    if isinstance(found, bool) or not isinstance(found, int) or found < minimum:
        raise CheckpointAdmissionError(
            f"The checkpoint's config says {name}={found!r} in kvpolicy, but it must be a whole number of at least "
            f"{minimum}: how often the layers were run in training. Correct the config."
        )
    return found
