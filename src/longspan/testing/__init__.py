"""Tools to test attention code: a float64 oracle, virtual ranks in threads, and real ranks in processes."""

from longspan.testing.oracle import oracle
from longspan.testing.processes import run_processes
from longspan.testing.virtual import VirtualWorld, virtual_world

__all__ = ["VirtualWorld", "oracle", "run_processes", "virtual_world"]
