"""The specification's worked examples, and every policy against its oracle, on the real engine."""
