"""Which parts of stored rows are coded in few bits, and how (0x0DD: every part is declared by itself)."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ManifestError
from ._checks import check_choice, check_int
from .tensor_contract import SCALAR_BYTES

__all__ = ["CODES", "KEY_GROUPS", "VALUE_GROUPS", "QuantizationContract"]

CODES = ("int8", "int4")
# Which numbers share a scale and a zero.
KEY_GROUPS = ("channel_of_block",)
VALUE_GROUPS = ("row",)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationContract:
    """How keys and values are coded; what is named neither coded nor shared is held in the rows' own dtype.

    Attributes:
        code: of keys and of values, a signed integer. A number is read as zero + scale * code.
        block_rows: consecutive slots of one layer and KV head that are coded together, once; a block is never changed.
        key_groups: what shares a scale and a zero among keys: a channel of a block.
        value_groups: the same among values: a row.
        parameter_dtype: of scales and zeros.
        full_precision_rows: fewest of the newest rows that are held as they are; fewer than a block more are, or fewer
            than two where heads hold different numbers of rows.
        full_precision_sinks: whether rows that attention re-rotates are held as they are, too.

    Raises ManifestError for a scheme that no store of this library has.
    """

    code: str
    block_rows: int
    key_groups: str = KEY_GROUPS[0]
    value_groups: str = VALUE_GROUPS[0]
    parameter_dtype: str
    full_precision_rows: int
    full_precision_sinks: bool

    def __post_init__(self) -> None:
        check_choice("quantization.code", self.code, CODES, error=ManifestError)
        check_int("quantization.block_rows", self.block_rows, minimum=1, error=ManifestError)
        check_int("quantization.full_precision_rows", self.full_precision_rows, error=ManifestError)
        check_choice("quantization.key_groups", self.key_groups, KEY_GROUPS, error=ManifestError)
        check_choice("quantization.value_groups", self.value_groups, VALUE_GROUPS, error=ManifestError)
        check_choice("quantization.parameter_dtype", self.parameter_dtype, tuple(SCALAR_BYTES), error=ManifestError)
