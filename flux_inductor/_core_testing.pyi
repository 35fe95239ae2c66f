"""`_core.testing`: what only tests use (csrc/bindings_testing.cpp)."""

def reached(seen: int, expected: int) -> bool:
    """Whether a signal that shows one epoch says that the call of another one has got there."""
