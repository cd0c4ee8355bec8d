"""Makes the modules beside the entry points importable, as they are when a script runs."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# The tiny model with a tiny tokenizer is one of tests/eval/.
sys.path[:0] = [str(TESTS.parent / "scripts"), str(TESTS / "eval")]
