"""Two hosts: network namespaces of this machine, joined by a veth pair whose ends are both called `cable`. Needs root and iproute2."""

from __future__ import annotations

import ctypes
import os
import subprocess

CABLE = "cable"
_CLONE_NEWNET = 0x40000000


def available() -> str | None:
    """Why two hosts cannot be made here, None if they can."""
    try:
        name = f"lsf{os.getpid()}"
        make(name)
        remove(name)
    except (OSError, subprocess.CalledProcessError) as error:
        stderr = getattr(error, "stderr", None)
        return stderr.decode().strip() if stderr else str(error)
    return None


def make(name: str) -> None:
    """Two namespaces `name`0 and `name`1 with a cable between them."""
    for i in (0, 1):
        _ip("netns", "add", f"{name}{i}")
    _ip("link", "add", "dev", CABLE, "netns", f"{name}0", "type", "veth", "peer", "name", CABLE, "netns", f"{name}1")
    for i in (0, 1):
        _ip("-n", f"{name}{i}", "addr", "add", f"10.77.0.{i + 1}/24", "dev", CABLE)
        for link in (CABLE, "lo"):
            _ip("-n", f"{name}{i}", "link", "set", link, "up")


def remove(name: str) -> None:
    for i in (0, 1):
        subprocess.run(["ip", "netns", "del", f"{name}{i}"], capture_output=True, timeout=20)


def enter(name: str, host: int) -> None:
    """Move this process to a host. Gloo then talks over the cable, also between ranks of one host."""
    descriptor = os.open(f"/var/run/netns/{name}{host}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns of {name}{host} failed")
    finally:
        os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = CABLE


def cut() -> None:
    """Unplug the cable of the host that this process is on: packets are lost, connections stay open."""
    _ip("link", "set", CABLE, "down")


def plug_in() -> None:
    _ip("link", "set", CABLE, "up")


def slow_down() -> None:
    """Limit what this host sends to 4 Mbit/s."""
    subprocess.run(["tc", "qdisc", "add", "dev", CABLE, "root", "tbf", "rate", "4mbit", "burst", "16kb", "latency", "2s"], check=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
