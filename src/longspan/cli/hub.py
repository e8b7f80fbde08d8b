"""`longspan hub`: write longspan's kernels in the layout of the Hugging Face kernel hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from longspan.cli import parse
from longspan.cli.app import UsageError


def hub(
    folder: Annotated[
        Path, typer.Argument(help="the folder of the repository; its `README.md` and `build/` are replaced if this command wrote them")
    ],
    repo: Annotated[str, typer.Option(help="the repository, as `org/name`")] = "longspan/longspan",
    number: Annotated[str, typer.Option(help="the version of the kernel; transformers asks for 1")] = "1",
    backends: Annotated[str, typer.Option(help="build variants: cuda, cpu or both, with a comma")] = "cuda,cpu",
) -> None:
    """Write the attention kernels as a repository of the Hugging Face kernel hub.

    `kernels.get_local_kernel(FOLDER)` loads it. `LOCAL_KERNELS=org/name=FOLDER` lets transformers load it as
    attn_implementation="org/name", on one device. Upload the folder to use it from other machines.

    A FOLDER with another or an edited `README.md`, or with other files in `build/`, is an error: nothing is written.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"--repo: expected org/name, got {repo!r}")
    version = parse.count(number, "--number")
    wanted = tuple(backends.split(","))

    from longspan import __version__
    from longspan.cli.hub_layout import BACKENDS, write_layout

    unknown = [name for name in wanted if name not in BACKENDS]
    if unknown:
        raise UsageError(f"--backends: expected some of {', '.join(BACKENDS)}, got {', '.join(unknown)}")
    source = Path(__file__).parents[1]
    for variant in write_layout(folder, source, repo=repo, version=__version__, number=version, backends=wanted):
        files = [path for path in variant.rglob("*") if path.is_file()]
        typer.echo(f"{variant}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
