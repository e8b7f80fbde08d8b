"""What tests of attention need: the oracle, and ranks without a cluster."""

from longspan.testing.oracle import oracle
from longspan.testing.processes import run_processes
from longspan.testing.virtual import VirtualWorld, virtual_world

__all__ = ["VirtualWorld", "oracle", "run_processes", "virtual_world"]
