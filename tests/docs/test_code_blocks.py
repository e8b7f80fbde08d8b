"""Every code block of the README and the documentation site runs.

- `python` blocks of a page run in order, in one namespace.
- `<!-- scope: NAME -->` before a block adds names that the page does not define (tests/docs/scopes.py).
- `python title="file.py"` blocks are written to files of that name.
- `python title="before"` blocks show other libraries' code and are parsed; `title="after"` blocks run on ranks in tests/dropin.
- `console` blocks: each `$ command` runs in the folder of those files. NOT_RUN lists the exceptions. A block without such files that
  an earlier page has too runs there. `longspan plan`, `longspan generate` and `longspan hub` run in this process,
  `torchrun --nproc-per-node N FILE` on N forked ranks; `longspan --help` and tests/cli start the command and torchrun themselves.
- `bash title="…"` blocks are checked by `bash -n`.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.docs.scopes import scope
from tests.scripts import run_script

from longspan.cli.app import run as cli_run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Needs a network, a scheduler or several hosts; or is run by tests of its own (tests/cli, tests/integrations).
NOT_RUN = ("pip install", "sbatch", "make ", "torchrun --nnodes", "longspan verify", "longspan demo", "longspan train")
_TORCHRUN = re.compile(r"torchrun --nproc-per-node (\d+) (\S+\.py)")
_BLOCK = re.compile(r"(?:^ *<!-- scope: (\w+) -->\n\n?)?^( *)```(\w+)([^\n]*)\n(.*?)^\2```", re.S | re.M)


@dataclass(frozen=True, kw_only=True)
class Block:
    language: str
    title: str | None
    scope: str | None
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in _BLOCK.finditer(text):
        scope, indent, language, info, body = match.groups()
        title = re.search(r'title="([^"]+)"', info)
        lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
        line = text[: match.start()].count("\n") + 1
        blocks.append(Block(language=language, title=title[1] if title else None, scope=scope, text="".join(lines), line=line))
    return blocks


def commands_of(block: Block) -> list[str]:
    return [line[2:] for line in block.text.replace("\\\n", " ").splitlines() if line.startswith("$ ")]


def runs_on_an_earlier_page(block: Block, page: Path) -> bool:
    """Whether an earlier page has the same console block, and neither page's block reads a file that its page writes."""
    for earlier in PAGES[: PAGES.index(page)]:
        if block.text in [other.text for other in blocks_of(earlier) if other.language == "console"]:
            files = [other.title for p in (earlier, page) for other in blocks_of(p) if other.language == "python" and other.title]
            return not any(file in block.text for file in files)
    return False


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}"
        if block.language == "python" and block.title is None:
            with nullcontext({}) if block.scope is None else scope(block.scope, tmp_path) as extra:
                names.update(extra)
                exec(compile(block.text, where, "exec"), names)
        elif block.language == "python" and block.title in ("before", "after"):  # tests/dropin runs the second kind on ranks
            ast.parse(block.text)
        elif block.language == "python":
            assert block.title is not None
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        elif block.language == "console":
            for command in commands_of(block):
                if command.startswith(NOT_RUN) or runs_on_an_earlier_page(block, page):
                    continue
                if command.startswith(("longspan plan ", "longspan generate ", "longspan hub ")):
                    assert cli_run(shlex.split(command)[1:]) == 0
                elif script := _TORCHRUN.fullmatch(command):
                    run_script(tmp_path / script[2], int(script[1]), folder=tmp_path)
                else:
                    run(command, tmp_path, where)
        else:
            assert block.language in ("text", "toml"), f"{where}: no rule for a block of {block.language!r}"


def run(command: str, folder: Path, where: str) -> None:
    tools = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{where}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
