"""Every refusal is tried with every policy."""

from __future__ import annotations

import pytest
from refusals.started import NAMES


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
