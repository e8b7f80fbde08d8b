"""The layout of longspan's kernels for the `kernels` package: a folder per build variant, with metadata and relative imports.

`kernels` loads a variant from any path under a module name of its own, beside other versions and beside an installed longspan. Imports of
the package therefore become relative, and names that torch registers (custom operators) begin with the variant's id.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import shutil
import tokenize
from pathlib import Path

from longspan.cli.app import UsageError

BACKENDS = ("cuda", "cpu")
KERNELS_MINVER = "0.17.0"  # the version whose rules this layout follows
_LEFT_OUT = ("__init__.py", "__main__.py", "cli", "_training", "integrations", "testing", "torch_compat")
_MODULE_NAME = re.compile(r"longspan((\.|::|_)[\w.:]*)?")

_INIT = '''"""longspan {version}: exact attention for any mask and score_mod, on one device."""

from ._dropin.flash import flash_attn_func, flash_attn_varlen_func
from ._engine.attention import attention
from ._engine.signatures import flex_attention, scaled_dot_product_attention
from ._masks.constructors import causal, documents, full, mask_mod, prefix, sliding_window

__version__ = "{version}"
__all__ = [
    "attention", "causal", "documents", "flash_attn_func", "flash_attn_varlen_func", "flex_attention", "full", "mask_mod", "prefix",
    "scaled_dot_product_attention", "sliding_window",
]
'''

_CARD = """---
library_name: kernels
license: mit
tags:
- kernels
---

# longspan {version}

Exact attention for any mask and score_mod, in Triton and Gluon (CUDA) and on CPUs.

```python
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="{repo}")
```

or `kernels.get_kernel("{repo}", version={number}).attention(q, k, v, mask=…)`. Written by `longspan hub`.
"""
# A card of any version, repository and number, as written: one that was edited does not match.
_CARD_PATTERN = re.compile(re.sub(r"\\{\w+\\}", r"\\S+", re.escape(_CARD)).encode())


def write_layout(target: Path, source: Path, *, repo: str, version: str, number: int, backends: tuple[str, ...] = BACKENDS) -> list[Path]:
    """Write the layout and return the folders of its variants.

    Args:
        target: The folder of the repository. `README.md` and `build/` in it are replaced if this function wrote them.
        source: The folder of the package `longspan`.
        repo: The repository's name, for its card.
        version: The version of longspan.
        number: The version of the kernel, which `kernels` asks for.
        backends: For each a variant `build/torch-<backend>`.

    Raises:
        UsageError: `README.md` or something in `build/` is not as this function writes it. Nothing is written.
    """
    _check_replaceable(target)
    files = {path.relative_to(source): path.read_bytes() for path in sorted(source.rglob("*")) if _belongs(path, source)}
    digest = hashlib.sha256(b"".join(name.as_posix().encode() + data for name, data in files.items())).hexdigest()[:10]
    shutil.rmtree(target / "build", ignore_errors=True)
    variants = []
    for backend in backends:
        variant, kernel_id = target / "build" / f"torch-{backend}", f"_longspan_{backend}_{digest}"
        for name, data in files.items():
            path = variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(relative_source(data.decode(), len(name.parts), kernel_id).encode() if name.suffix == ".py" else data)
        (variant / "__init__.py").write_text(_INIT.format(version=version))
        metadata = {
            "id": kernel_id, "name": "longspan", "version": number, "kernels-minver": KERNELS_MINVER, "license": "MIT",
            "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        variants.append(variant)
    (target / "README.md").write_text(_CARD.format(version=version, repo=repo, number=number))
    return variants


def _check_replaceable(target: Path) -> None:
    """Raise UsageError if the folder has a README.md that is not a card of any version, or entries of build/ that are not variants."""
    card, build = target / "README.md", target / "build"
    others = [card] if _exists(card) and not (card.is_file() and _CARD_PATTERN.fullmatch(card.read_bytes())) else []
    if build.is_dir() and not build.is_symlink():
        others += [entry for entry in sorted(build.iterdir()) if not _is_variant(entry)]
    elif _exists(build):
        others.append(build)
    if others:
        raise UsageError(
            f"expected a folder whose README.md and build/ were written by `longspan hub`, got {', '.join(map(str, others))}, which would "
            "be replaced; move it or give another folder"
        )


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _is_variant(path: Path) -> bool:
    """Whether a folder has the metadata of a variant that `write_layout` wrote."""
    try:
        metadata = json.loads((path / "metadata.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(metadata, dict) and metadata.get("name") == "longspan" and str(metadata.get("id")).startswith("_longspan_")


def _belongs(path: Path, source: Path) -> bool:
    name = path.relative_to(source)
    return path.is_file() and name.parts[0] not in _LEFT_OUT and "__pycache__" not in name.parts and path.suffix != ".pyc"


def relative_source(text: str, depth: int, kernel_id: str) -> str:
    """A module's source with relative imports, and names of modules and operators that begin with the variant's id.

    Args:
        text: The source.
        depth: The number of parts of the module's path: 1 for a module of the package itself.
        kernel_id: The variant's id.
    """
    lines = text.splitlines(keepends=True)
    dots = "." * depth
    for node in ast.walk(ast.parse(text)):
        index = getattr(node, "lineno", 1) - 1
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "longspan":
            inner = (node.module or "").partition(".")[2]
            lines[index] = lines[index].replace(f"from {node.module} import", f"from {dots}{inner} import", 1)
        elif isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "longspan" for alias in node.names):
            (alias,) = node.names
            package, _, module = alias.name.removeprefix("longspan.").rpartition(".")
            if alias.asname is not None or alias.name == "longspan":
                raise ValueError(f"longspan hub: cannot make {ast.unparse(node)!r} relative; import names from the module")
            lines[index] = lines[index].replace(f"import {alias.name}", f"from {dots}{package} import {module}", 1)
    return _renamed("".join(lines), kernel_id)


def _renamed(text: str, kernel_id: str) -> str:
    """A source whose strings that are names of modules, operators and the like begin with the variant's id, not with "longspan"."""
    if not re.search("[\"']longspan", text):
        return text
    lines = text.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if token.type == tokenize.STRING and token.string[1:].startswith("longspan") and token.start[0] == token.end[0]:
            value = ast.literal_eval(token.string)
            if _MODULE_NAME.fullmatch(value):
                row, (first, last) = token.start[0] - 1, (token.start[1], token.end[1])
                lines[row] = lines[row][:first] + repr(kernel_id + value[len("longspan") :]) + lines[row][last:]
    return "".join(lines)
