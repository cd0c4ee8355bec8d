"""Packed rows that attention may read, and the plain reference that gathers them (0x01A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CapacityError, IntegrityError, ManifestError
from ._checks import check_choice
from .generations import Generations
from .manifest import KVVisibilityPolicyManifest
from .state import KVPolicyState
from .validation import validate_state

__all__ = [
    "OFFSET_CONVENTIONS",
    "PackedKVView",
    "materialize_subset_view",
    "row_offsets",
    "validate_gather_identity",
]

OFFSET_CONVENTIONS = ("global", "per_layer", "flat")
_INT32_MAX = 2**31 - 1


def row_offsets(row_counts: Sequence[Sequence[int]], *, convention: str = "global") -> Tensor:
    """Return int32 cumulative row offsets of `row_counts` [L][owners] in one of the printed forms.

    "global": [L, owners + 1], every layer goes on counting where the previous one ended (0x01A).
    "per_layer": [L, owners + 1], every layer starts at 0, the form a varlen attention call takes; owners = B
    * H_kv.
    "flat": [L * owners + 1], one list over all owners (0x08F).
    Raises IntegrityError for unequal owner counts, CapacityError beyond int32, ConfigError for another
    convention.
    """
    check_choice("convention", convention, OFFSET_CONVENTIONS)
    if len({len(layer) for layer in row_counts}) > 1:
        raise IntegrityError(
            f"Layers have {[len(layer) for layer in row_counts]} owners, but offsets need the same number "
            "in every layer. Give 0 for an owner without rows."
        )
    ends = torch.tensor([list(layer) for layer in row_counts], dtype=torch.int64).cumsum(-1)
    starts = torch.zeros(len(row_counts), 1, dtype=torch.int64)
    if convention != "per_layer":
        starts[1:] = ends[:-1, -1:].cumsum(0)
    offsets = torch.cat([starts, ends + starts], dim=-1)
    if int(offsets.max()) > _INT32_MAX:
        raise CapacityError(
            f"{int(offsets.max())} packed rows exceed int32 offsets ({_INT32_MAX}). Use the per_layer "
            "convention or fewer rows."
        )
    if convention == "flat":
        offsets = torch.cat([offsets[:1, 0], offsets[:, 1:].flatten()])
    return offsets.to(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedKVView:
    """Packed keys [N, d_k] and values [N, d_v], the original position of every row [N], and its owner.

    `row_offsets` is [L, owners + 1] in the global convention: rows of (layer, owner) are row_offsets[layer,
    owner] : row_offsets[layer, owner + 1]. A packed row's index is a storage coordinate only.
    """

    packed_keys_ND: Tensor
    packed_values_ND: Tensor
    original_position_map: Tensor
    row_offsets: Tensor

    def owner(self, layer: int, owner: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and original positions of one owner's rows (views, not copies)."""
        begin, end = (int(x) for x in self.row_offsets[layer, owner : owner + 2])
        rows = slice(begin, end)
        return self.packed_keys_ND[rows], self.packed_values_ND[rows], self.original_position_map[rows]


def materialize_subset_view(
    manifest: KVVisibilityPolicyManifest,
    state: KVPolicyState,
    source_keys_LHTD: Tensor,
    source_values_LHTD: Tensor,
    *,
    generations: Generations,
    owner_budgets_rows: Sequence[Sequence[int]] | None = None,
    tail_rows: int = 0,
) -> PackedKVView:
    """Gather the selected rows of a source [L, owners, T, d] into one packed view: the plain reference.

    T index 0 is position `source_position_origin`; T is the committed frontier. Nothing is returned unless
    the state is valid (see `validate_state` for its errors) and every packed scalar equals its source
    (IntegrityError).
    Raises ManifestError when the source contradicts the tensor contract or rows are not original rows.
    """
    _check_source(manifest, state, source_keys_LHTD, source_values_LHTD)
    validate_state(
        manifest,
        state,
        frontier=source_keys_LHTD.shape[2],
        generations=generations,
        owner_budgets_rows=owner_budgets_rows,
        tail_rows=tail_rows,
    )
    view = _gather(state, source_keys_LHTD, source_values_LHTD)
    validate_gather_identity(view, state, source_keys_LHTD, source_values_LHTD)
    return view


def _gather(state: KVPolicyState, keys_LHTD: Tensor, values_LHTD: Tensor) -> PackedKVView:
    layers = state.selected_original_positions
    assert layers is not None, "a validated selection has positions"
    keys, values, positions = [], [], []
    for layer, owners in enumerate(layers):
        for owner, selected in enumerate(owners):
            original = torch.tensor(selected, dtype=torch.int64)
            index = (original - state.source_position_origin).to(keys_LHTD.device)
            keys.append(keys_LHTD[layer, owner].index_select(0, index))
            values.append(values_LHTD[layer, owner].index_select(0, index))
            positions.append(original.to(torch.int32))
    return PackedKVView(
        packed_keys_ND=torch.cat(keys),
        packed_values_ND=torch.cat(values),
        original_position_map=torch.cat(positions),
        row_offsets=row_offsets([[len(ps) for ps in layer] for layer in layers]),
    )


def _check_source(
    manifest: KVVisibilityPolicyManifest, state: KVPolicyState, keys_LHTD: Tensor, values_LHTD: Tensor
) -> None:
    tensor = manifest.tensor_contract
    if manifest.representation_contract.rows != "original_rows":
        raise ManifestError(
            "A gather reads original_rows, but the manifest declares replacement_rows. Read them through the "
            "consumer schema of the representation."
        )
    owners = len(state.frontiers) * manifest.owners_per_layer
    tokens = keys_LHTD.shape[2] if keys_LHTD.ndim == 4 else 0
    for name, source, head_dim, dtype in (
        ("keys", keys_LHTD, tensor.head_dim_k, tensor.key_dtype),
        ("values", values_LHTD, tensor.head_dim_v, tensor.value_dtype),
    ):
        expected = (tensor.num_layers, owners, tokens, head_dim)
        if tuple(source.shape) != expected:
            raise ManifestError(
                f"Source {name} have shape {tuple(source.shape)}, but the contract's axes (layer, owner, "
                f"token, channel) mean {expected}. Pass the source in this order, with as many tokens as "
                "the keys."
            )
        if source.dtype != getattr(torch, dtype):
            raise ManifestError(
                f"Source {name} have dtype {source.dtype}, but the contract declares {dtype}. "
                "Pass the tensors the manifest describes."
            )


def validate_gather_identity(
    view: PackedKVView, state: KVPolicyState, source_keys_LHTD: Tensor, source_values_LHTD: Tensor
) -> None:
    """Raise IntegrityError unless offsets, position map and every packed scalar agree with state and source.

    Rows are compared bit for bit, so NaN equals itself and -0.0 differs from 0.0.
    """
    layers = state.selected_original_positions
    if layers is None:
        raise IntegrityError("A view holds original rows, but the state's rows are replacements.")
    expected = row_offsets([[len(ps) for ps in layer] for layer in layers])
    if view.row_offsets.tolist() != expected.tolist():
        raise IntegrityError(
            f"The view's row offsets {view.row_offsets.tolist()} do not follow the selection's row counts, "
            f"which give {expected.tolist()}. Pack the view again."
        )
    flat = [p for layer in layers for owner in layer for p in owner]
    if view.original_position_map.tolist() != flat:
        raise IntegrityError(
            "The view's original position map differs from the selected positions. A packed row index is "
            "not a token position; pack the view again."
        )
    for layer, owners in enumerate(layers):
        for owner, selected in enumerate(owners):
            index = [p - state.source_position_origin for p in selected]
            keys, values, _ = view.owner(layer, owner)
            for name, packed, source in (
                ("keys", keys, source_keys_LHTD),
                ("values", values, source_values_LHTD),
            ):
                if not _same_bits(packed, source[layer, owner, index]):
                    raise IntegrityError(
                        f"Packed {name} of layer {layer}, owner {owner} differ from their source rows "
                        f"{selected}. Gather keys and values with one and the same index."
                    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))
