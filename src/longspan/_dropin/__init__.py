"""The drop-in: torch's attention functions over a mesh, while a context or a module's forward is active."""
