"""Copies of caches: independent ones, over the same ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NoReturn, Self

from longspan._comm.mesh import Mesh
from longspan._torch_modes import default_modes


class DeepCopied:
    """A base of caches: `copy.deepcopy` copies pages and sequences, and keeps the mesh; `copy.copy` is refused."""

    mesh: Mesh | None

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"copy.copy: expected copy.deepcopy of a {type(self).__name__}, got copy.copy: two caches would write into the same pages"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)], memo[id(self.mesh)] = made, self.mesh
        with default_modes():  # an inference tensor could not be written to in torch.no_grad()
            state = deepcopy(self.__getstate__(), memo)
        made.__setstate__(state)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
