"""What a row that replaces others stands for: the representation record of 0x0CA and its gates (0x0DD, 0x0DE).

Three kinds. A *merged segment* stands for consecutive tokens of one layer and KV head (0x0CB). A *merged depth pair*
stands for one token in two layers (0x0CF). A *condensed layer* stands for itself and for layers that store nothing of
their own (0x0DA). None of them is ever an exact prefix row.

A layer's *store* is named by the first layer that produces it: the pair of layers 4 and 5 is store 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import CheckpointAdmissionError, ManifestError
from ._checks import check_choice, check_int, check_text
from .canonical import FrozenMapping

__all__ = [
    "CONDENSED",
    "DEPTH_PAIRS",
    "REPLACEMENT_KINDS",
    "SEGMENTS",
    "ReplacementContract",
    "admit_checkpoint",
    "admit_policy",
    "declared_training",
    "producers_of_pairs",
]

SEGMENTS, DEPTH_PAIRS, CONDENSED = "merged_segments", "merged_depth_pairs", "condensed_layers"
REPLACEMENT_KINDS = (SEGMENTS, DEPTH_PAIRS, CONDENSED)
OWNERS = {SEGMENTS: "layer_kv_head", DEPTH_PAIRS: "shared_layer_pair", CONDENSED: "layer_kv_head"}
ANCHORS = {SEGMENTS: "latest_of_span", DEPTH_PAIRS: "own_position", CONDENSED: "own_position"}

# What must lie beside the rows for them to be read.
_NEEDED = {SEGMENTS: ("masses",), DEPTH_PAIRS: ("magnitudes", "exception_rows", "exception_indices"), CONDENSED: ()}

# The entry of a config in which a checkpoint says what it was trained for, and what its `kind` stands for.
_DECLARED_IN = "kvpolicy"
_DECLARED_KINDS = {"dmc": SEGMENTS, "layer_condensed": CONDENSED}

# The policies that store them, by name.
_POLICIES = {kind: policy for policy, kind in _DECLARED_KINDS.items()} | {DEPTH_PAIRS: "minicache"}

# What a checkpoint must have been trained for; None for a rule that an ordinary one admits.
_TRAINED_FOR = {
    SEGMENTS: "its control channels decide which rows are accumulated",
    DEPTH_PAIRS: None,
    CONDENSED: "its graph, diagonal mask and projections name the layers that produce keys and values",
}

# What becomes of such a checkpoint where its rows are kept like those of any other.
_READ_AS = {
    SEGMENTS: "without its updater, what was trained to decide would be read as keys",
    CONDENSED: "its layers would read rows of their own, which were never trained to be read",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementContract:
    """Which layers produce a stored row, which may read it, and what it takes to read it.

    Attributes:
        representation_kind: one of `REPLACEMENT_KINDS`.
        graph_revision: the graph the rows belong to: "checkpoint", or the name of a trained one.
        producer_layer_map: the layers behind every store, ascending: (0,), (1,), (2, 3).
        consumer_layer_map: the store each layer reads: (0, 1, 2, 2).
        parameters: of the merge or reconstruction.
        side_metadata: name -> dtype and axes of what lies beside the rows, such as "float32 [B, H, T]".
        quantization_contract_id: None; parts would have to be declared one by one (0x0DD), which no record does yet.

    Checkpoint and policy generation are the manifest's own. Owner and position contract follow from the kind.
    Raises ManifestError for producer graphs that cannot run, mismatched pairs and missing side metadata.
    """

    representation_kind: str
    graph_revision: str = "checkpoint"
    producer_layer_map: Sequence[Sequence[int]]
    consumer_layer_map: Sequence[int]
    parameters: Mapping[str, object] = field(default_factory=dict)
    side_metadata: Mapping[str, object] = field(default_factory=dict)
    quantization_contract_id: str | None = None

    def __post_init__(self) -> None:
        check_choice("representation_kind", self.representation_kind, REPLACEMENT_KINDS, error=ManifestError)
        check_text("graph_revision", self.graph_revision, error=ManifestError)
        object.__setattr__(self, "producer_layer_map", tuple(tuple(group) for group in self.producer_layer_map))
        object.__setattr__(self, "consumer_layer_map", tuple(self.consumer_layer_map))
        for name in ("parameters", "side_metadata"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name), where=name))
        missing = [name for name in _NEEDED[self.representation_kind] if name not in self.side_metadata]
        if missing:
            raise ManifestError(
                f"{self.representation_kind} was declared without {', '.join(missing)}, without which its rows cannot "
                "be read. Declare dtype and axes of each in side_metadata."
            )
        if self.quantization_contract_id is not None:
            raise ManifestError(
                f"quantization_contract_id {self.quantization_contract_id!r} was given, but directions, magnitudes, "
                "exceptions and masses are quantized each in its own way and nothing declares which. Leave it None."
            )
        self._check_graph()

    @property
    def owner(self) -> str:
        """Whose a stored row is: "layer_kv_head" or "shared_layer_pair"."""
        return OWNERS[self.representation_kind]

    @property
    def original_position_contract(self) -> str:
        """Which position a stored row has: "own_position", or "latest_of_span" for a segment."""
        return ANCHORS[self.representation_kind]

    def layers_behind(self, layer: int) -> tuple[int, ...]:
        """Return the layers that produced what a layer reads."""
        store = self.consumer_layer_map[layer]
        return next(tuple(group) for group in self.producer_layer_map if group[0] == store)

    def has_store(self, layer: int) -> bool:
        """Whether a layer produces what it reads; one that does not reads its producer's rows and stores none."""
        return layer in self.layers_behind(layer)

    def _check_graph(self) -> None:
        layers = range(len(self.consumer_layer_map))
        produced = [layer for group in self.producer_layer_map for layer in group]
        for layer in (*produced, *self.consumer_layer_map):
            check_int("a layer of the producer and consumer maps", layer, error=ManifestError)
        if not produced or len(set(produced)) != len(produced) or not set(produced) <= set(layers):
            self._refuse(f"every producing layer is named once and lies in 0..{len(layers) - 1}")
        stores = {group[0] for group in self.producer_layer_map if group}
        if set(self.consumer_layer_map) != stores:
            self._refuse("layers read the stores that are produced, all of them and no others")
        if any(not self.has_store(layer) for layer in produced):
            self._refuse("a layer that produces keys and values reads the store they go into")
        pairs = [tuple(group) for group in self.producer_layer_map if len(group) != 1]
        if self.representation_kind != DEPTH_PAIRS and pairs:
            self._refuse("no store has two producers")
        if any(len(pair) != 2 or pair[1] != pair[0] + 1 for pair in pairs):
            self._refuse("a depth pair is two layers, one directly above the other")
        if self.representation_kind != CONDENSED and set(produced) != set(layers):
            self._refuse("every layer produces rows")

    def _refuse(self, rule: str) -> None:
        raise ManifestError(
            f"{self.representation_kind} with the producers {[list(group) for group in self.producer_layer_map]} and "
            f"the consumer map {list(self.consumer_layer_map)} cannot run: {rule}. Correct the maps."
        )


def producers_of_pairs(num_layers: int, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the producer map of some layer pairs and of the layers left by themselves, in order of depth."""
    paired = {layer for pair in pairs for layer in pair}
    alone = [(layer,) for layer in range(num_layers) if layer not in paired]
    return tuple(sorted([*alone, *pairs]))


def declared_training(config: object) -> tuple[str, Mapping[str, object]] | None:
    """Return the kind of rows a checkpoint was trained for and what its config says of them; None for ordinary ones.

    Raises:
        CheckpointAdmissionError: the config declares something that this library does not know.
    """
    declared = getattr(config, _DECLARED_IN, None)
    if declared is None:
        return None
    kind = declared.get("kind") if isinstance(declared, Mapping) else None
    if not isinstance(kind, str) or kind not in _DECLARED_KINDS:
        raise CheckpointAdmissionError(
            f"config.{_DECLARED_IN} is {declared!r}, which names no training that is known here. Its 'kind' must be "
            f"one of {', '.join(_DECLARED_KINDS)}; load the checkpoint with the version of hf_kvpolicy it was made for."
        )
    return _DECLARED_KINDS[kind], declared


def admit_policy(
    policy: str, representation_kind: str | None, config: object, training: Mapping[str, object] | None = None
) -> None:
    """Refuse a policy whose rows are not those a checkpoint was trained for.

    Args:
        representation_kind: one of `REPLACEMENT_KINDS`; None is original rows.
        training: what the config said that the policy was made from, where it reads that.

    Raises:
        CheckpointAdmissionError: the checkpoint is ordinary and the rows are not, or the other way round; or it was
            trained for such rows, but in another way.
    """
    declared = declared_training(config)
    trained_for = None if declared is None else declared[0]
    if representation_kind is not None:
        admit_checkpoint(representation_kind, trained_for)
    elif declared is not None:
        raise CheckpointAdmissionError(
            f"{policy} keeps rows as they are, but the checkpoint was trained for {_POLICIES[declared[0]]} "
            f"(config.{_DECLARED_IN}): {_READ_AS[declared[0]]}. Use the policy {declared[1]['kind']!r}."
        )
    if training is not None and declared is not None and dict(training) != dict(declared[1]):
        raise CheckpointAdmissionError(
            f"The cache was made for a checkpoint whose config.{_DECLARED_IN} is {dict(training)!r}, but that of the "
            f"model is {dict(declared[1])!r}. Make the cache from this model."
        )


def admit_checkpoint(representation_kind: str, trained_for: str | None = None) -> None:
    """Refuse a checkpoint that was not trained for a representation.

    Args:
        trained_for: the kind a checkpoint was trained with; None for an ordinary one.

    Raises:
        CheckpointAdmissionError: the kind needs training that the checkpoint has not had, or has had of another kind.
    """
    check_choice("representation_kind", representation_kind, REPLACEMENT_KINDS, error=ManifestError)
    needed = _TRAINED_FOR[representation_kind]
    if trained_for not in (None, representation_kind):
        raise CheckpointAdmissionError(
            f"The checkpoint was trained for {_POLICIES.get(trained_for, trained_for)}, whose rows "
            f"{_POLICIES[representation_kind]} would read wrongly. Use the policy it was trained for."
        )
    if needed is not None and trained_for is None:
        raise CheckpointAdmissionError(
            f"{_POLICIES[representation_kind]} needs a checkpoint that was trained for it ({needed}), but an ordinary "
            "one was given. Use such a checkpoint, or minicache, which merges rows without training."
        )
