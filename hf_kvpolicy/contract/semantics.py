"""What a kept row is, what happened to the others, and what to do when it goes wrong (0x01A)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ManifestError
from ._checks import check_choice, check_text
from .quantization import QuantizationContract
from .replacement import ReplacementContract

__all__ = [
    "FAILURE_ACTIONS",
    "RECOVERABILITIES",
    "REPRESENTATIONS",
    "SEMANTIC_CLASSES",
    "QualityAndFallback",
    "RecoverabilityContract",
    "RepresentationContract",
]

REPRESENTATIONS = ("original_rows", "quantized_rows", "replacement_rows")
# lossy_quantized: every row stays, some in few bits. A subset may be quantized too, and is a lossy_subset.
SEMANTIC_CLASSES = ("full_cache_exact", "lossy_quantized", "lossy_subset", "lossy_replacement")
RECOVERABILITIES = ("resident_visible", "omitted_irrecoverable", "recallable_nonresident")
FAILURE_ACTIONS = ("raise", "full", "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepresentationContract:
    """Whether rows are original or replaced, and how exact the result is.

    Quantized rows need `quantization`: which of their parts are coded and how. A replacement needs `consumer_schema`,
    the name of what attention must know to read the replaced rows, and `replacement`, which layers stand behind a row
    and who may read it.
    Raises ManifestError when kind, class and records exclude one another.
    """

    rows: str = "original_rows"
    semantic_class: str = "lossy_subset"
    consumer_schema: str | None = None
    replacement: ReplacementContract | None = field(
        default=None, metadata={"record": ReplacementContract, "optional": True}
    )
    quantization: QuantizationContract | None = field(
        default=None, metadata={"record": QuantizationContract, "optional": True}
    )

    def __post_init__(self) -> None:
        check_choice("representation.rows", self.rows, REPRESENTATIONS, error=ManifestError)
        check_choice("representation.semantic_class", self.semantic_class, SEMANTIC_CLASSES, error=ManifestError)
        replaces = self.semantic_class == "lossy_replacement"
        if replaces != (self.rows == "replacement_rows"):
            raise ManifestError(
                f"representation.semantic_class {self.semantic_class!r} cannot hold {self.rows}: a subset "
                "or full cache keeps original_rows and a lossy_replacement keeps replacement_rows. Change "
                "one of the two."
            )
        if (self.rows == "quantized_rows") != (self.quantization is not None):
            raise ManifestError(
                f"representation.quantization {'was given' if self.quantization else 'is missing'} for {self.rows}: "
                "quantized rows name what is coded and how, and others have no such record. Correct one of them."
            )
        if self.rows == "quantized_rows" and self.semantic_class == "full_cache_exact":
            raise ManifestError(
                "full_cache_exact was declared together with quantized_rows, which are not read as they were. Declare "
                "lossy_quantized, or lossy_subset where rows are omitted too."
            )
        if self.rows != "quantized_rows" and self.semantic_class == "lossy_quantized":
            raise ManifestError(
                f"lossy_quantized was declared with {self.rows}, which are not coded in few bits. Declare "
                "quantized_rows, or another class."
            )
        if replaces and self.consumer_schema is None:
            raise ManifestError(
                "A lossy_replacement was declared without consumer_schema, so nothing says how attention "
                "reads the replaced rows. Name the schema that the attention step consumes."
            )
        if not replaces and self.consumer_schema is not None:
            raise ManifestError(
                f"consumer_schema {self.consumer_schema!r} was given for {self.semantic_class}, whose "
                "original rows need none. Leave it None, or declare a lossy_replacement."
            )
        if replaces != (self.replacement is not None):
            raise ManifestError(
                f"representation.replacement {'is missing' if replaces else 'was given'} for {self.semantic_class}: "
                "replaced rows name the layers behind them, and original rows need no such record. Correct one of them."
            )
        if self.consumer_schema is not None:
            check_text("representation.consumer_schema", self.consumer_schema, error=ManifestError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverabilityContract:
    """What became of rows that are not visible.

    `handoff_identity` names who can bring a recallable row back; it is required for recallable_nonresident
    and refused otherwise (ManifestError).
    """

    omitted: str = "omitted_irrecoverable"
    handoff_identity: str | None = None

    def __post_init__(self) -> None:
        check_choice("recoverability.omitted", self.omitted, RECOVERABILITIES, error=ManifestError)
        recallable = self.omitted == "recallable_nonresident"
        if recallable and self.handoff_identity is None:
            raise ManifestError(
                "recallable_nonresident was declared without handoff_identity, so a row called recallable "
                "has no lookup, movement or fallback. Name the hand-off, or declare omitted_irrecoverable."
            )
        if not recallable and self.handoff_identity is not None:
            raise ManifestError(
                f"handoff_identity {self.handoff_identity!r} was given for {self.omitted}, which hands "
                "nothing over. Leave it None, or declare recallable_nonresident."
            )
        if self.handoff_identity is not None:
            check_text("recoverability.handoff_identity", self.handoff_identity, error=ManifestError)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityAndFallback:
    """The evaluation a policy answers to, and what a failure leads to: raise, full cache, or a report."""

    evaluation_profile: str | None = None
    minimum_quality: float | None = None
    invalid_state_action: str = "raise"
    physical_capacity_action: str = "raise"
    quality_regression_action: str = "report"

    def __post_init__(self) -> None:
        for name in ("physical_capacity_action", "quality_regression_action"):
            check_choice(name, getattr(self, name), FAILURE_ACTIONS, error=ManifestError)
        # An invalid state is never merely reported: it must not be read.
        check_choice("invalid_state_action", self.invalid_state_action, ("raise", "full"), error=ManifestError)
        if self.minimum_quality is not None and self.evaluation_profile is None:
            raise ManifestError(
                f"minimum_quality {self.minimum_quality} was given without evaluation_profile, so no "
                "measurement decides it. Name the evaluation profile."
            )
