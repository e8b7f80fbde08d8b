"""What tests of attention need: the oracle."""

from longspan.testing.oracle import oracle

__all__ = ["oracle"]
