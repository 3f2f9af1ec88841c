"""Listening sockets of processes, read from Linux's ``/proc``."""

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

__all__ = ["sockets"]


def sockets(processes: Sequence[int]) -> Iterator[tuple[int, IPv4Address | IPv6Address, int]]:
    """Yield the process, address and port of each listening socket."""
    holders = dict[str, int]()
    for process in processes:
        for file in Path(f"/proc/{process}/fd").glob("*"):
            try:
                holders[str(file.readlink())] = process
            except OSError:
                continue
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            holder = holders.get(f"socket:[{fields[9]}]")
            if fields[3] == "0A" and holder is not None:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                packed = b"".join(words)
                found = IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)
                mapped = getattr(found, "ipv4_mapped", None)
                yield holder, mapped or found, int(port, 16)
