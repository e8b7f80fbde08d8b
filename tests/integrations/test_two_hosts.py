"""`torchrun --nnodes 2` over two hosts: network namespaces of this machine, joined by a veth pair."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integrations.test_train import SMALL, command, losses

pytest.importorskip("typer")


pytestmark = pytest.mark.processes


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts(pytestconfig: pytest.Config) -> Iterator[list[str]]:
    """Names of two network namespaces, each with an address."""
    if not pytestconfig.getoption("--whole-grid"):
        pytest.skip("four processes in two namespaces: run with --whole-grid")
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid():
        pytest.skip("needs Linux, iproute2 and root")
    names = [f"longspan-{os.getpid()}-{i}" for i in (0, 1)]
    cables = [f"lsp{os.getpid() % 10**6}{i}" for i in "ab"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
            for i, (name, cable) in enumerate(zip(names, cables)):
                _ip("link", "set", cable, "netns", name)
                _ip("-n", name, "link", "set", cable, "name", "cable")
                _ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not available: {error.stderr.decode().strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def test_two_hosts_under_torchrun_give_the_losses_of_one_process(hosts: list[str], tmp_path: Path) -> None:
    out = tmp_path / "two"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    started = []
    for i, name in enumerate(hosts):
        where = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(i), "--master-addr", "10.77.0.1", "--master-port", "29555"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *where, "-m", "longspan.cli", "train", "--out", str(out), *SMALL]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *torchrun, "--cp", "4"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    try:
        outputs = [p.communicate(timeout=250)[0].decode() for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0, 0], "\n".join(outputs)
    one = tmp_path / "one"
    subprocess.run(command(one, "--processes", "1"), check=True, timeout=250, capture_output=True)
    assert max(abs(a - b) for a, b in zip(losses(one), losses(out), strict=True)) < 1e-4
