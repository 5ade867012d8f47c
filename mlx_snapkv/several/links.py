"""How ranks connect for their watch: all with rank 0, whose address they learn by MLX's own connection."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from typing import Any

from ..errors import SnapKVError

JOINING = 15.0  # seconds to wait for all ranks


def connected(ranks: Any) -> dict[int, socket.socket]:
    """A rank's connections, by rank: of rank 0 to all others, of those to rank 0.

    There are none if some rank can't reach rank 0, which says so.

    Args:
        ranks: who connects; all of them have to call it.
    """
    try:
        return _links(ranks)
    except (OSError, SnapKVError) as error:
        if ranks.rank == 0:
            print(
                f"mlx-snapkv: the ranks can't tell each other of failures ({error}): one that fails may leave others "
                "waiting",
                file=sys.stderr,
            )
        return {}


def _links(ranks: Any) -> dict[int, socket.socket]:
    def listen() -> socket.socket | None:
        return socket.create_server(("", 0)) if ranks.rank == 0 else None

    listener = ranks.agreed(listen)
    where = listener and [_addresses(), listener.getsockname()[1], secrets.token_hex(16)]
    addresses, port, token = ranks.first(where)

    def connect() -> dict[int, socket.socket]:
        if listener is not None:
            return _accepted(listener, token, ranks.size - 1)
        link = _reached(addresses, port)
        link.sendall(f"{token} {ranks.rank}\n".encode())
        return {0: link}

    return ranks.agreed(connect)


def _addresses() -> list[str]:
    """Where rank 0 may be reached: what mlx.launch was given, and the machine's name."""
    found = []
    with (
        contextlib.suppress(OSError, ValueError, LookupError),
        open(os.environ["MLX_HOSTFILE"]) as file,
    ):
        found += [address.rpartition(":")[0] for address in json.load(file)[0]]
    found.append(os.environ.get("MLX_JACCL_COORDINATOR", "").rpartition(":")[0])
    return list(dict.fromkeys([*filter(None, found), socket.gethostname()]))


def _reached(addresses: list[str], port: int) -> socket.socket:
    problem = OSError("rank 0 has no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=JOINING / len(addresses))
        except OSError as error:
            problem = error
    raise problem


def _accepted(listener: socket.socket, token: str, n: int) -> dict[int, socket.socket]:
    """The connections of the `n` others: of those who know the token."""
    links: dict[int, socket.socket] = {}
    until = time.monotonic() + JOINING
    with listener:
        while len(links) < n:
            listener.settimeout(max(0.01, until - time.monotonic()))
            link, _ = listener.accept()
            link.settimeout(JOINING)
            said = link.recv(100).decode(errors="replace").split()
            if len(said) == 2 and secrets.compare_digest(said[0], token):
                links[int(said[1])] = link
            else:
                link.close()
    return links
