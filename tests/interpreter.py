"""A faster Triton interpreter: the same results in less than half of the time.

Triton 3.6 patches its language module at every call of a device function, and computes overflow checks of integer operations whose
results it ignores (`InterpreterOptions.debug` is False).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from triton.runtime import interpreter


def speed_up() -> None:
    """Patch the language once per launch and skip the ignored overflow checks. No effect on unknown versions of Triton."""
    options = interpreter.interpreter_builder.options
    if not options.debug and options.sanitize_overflow:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)


class _PatchOnce:
    """`_patch_lang(fn)`, without effect while the language modules of `fn` are patched."""

    def __init__(self, patch: Any) -> None:
        self.patch, self.active = patch, set()

    def __call__(self, fn: Any) -> Any:
        tl = interpreter.tl
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules and modules <= self.active:
            return interpreter._LangPatchScope()  # nothing to restore
        outermost, scope = not self.active, self.patch(fn)
        self.active |= modules
        if outermost:
            scope.restore = self._restoring(scope.restore)
        return scope

    def _restoring(self, restore: Any) -> Any:
        def run() -> None:
            self.active = set()
            restore()

        return run
