"""The rules of ARCHITECTURE.md as tests."""
