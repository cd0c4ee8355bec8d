"""Tasks: deterministic generators of examples. `registry.make_task` finds them by name."""
