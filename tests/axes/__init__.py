"""Each axis alone, on tensors small enough to check by eye, against plain references over grids."""
