"""Which of the given labels a prediction names, as LongBench (Bai et al. 2023, arXiv:2308.14508) measures it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["classification", "classification_fixed"]


def classification(prediction: str, gold: str, classes: Sequence[str]) -> float:
    """One over the number of labels found in the prediction if the gold label is among them, else 0.

    A label inside the gold label ("group" in "group of people") is found with it and does not count against it. The
    published code removes such labels from the list that it walks over, so the label behind a removed one is not
    looked at: two of them in a row leave one, and a right answer scores 0.5. That is kept here, for scores that
    compare with published ones; `classification_fixed` is without it.
    """
    found = [label for label in classes if label in prediction]
    index = 0
    while index < len(found):
        if _is_part(found[index], gold):
            found.remove(found[index])
        index += 1
    return _share(found, gold)


def classification_fixed(prediction: str, gold: str, classes: Sequence[str]) -> float:
    """The same with every label inside the gold label left out."""
    return _share([label for label in classes if label in prediction and not _is_part(label, gold)], gold)


def _is_part(label: str, gold: str) -> bool:
    return label in gold and label != gold


def _share(found: Sequence[str], gold: str) -> float:
    return 1.0 / len(found) if gold in found else 0.0
