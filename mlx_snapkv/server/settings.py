"""How the server was started."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from ..errors import SnapKVError
from .volatile import BILLING

LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Settings:
    """Who may ask, and how much at once.

    Attributes:
        host, port: where it listens.
        api_key: what clients must send; None asks for none, which only a local address may.
        origins: web pages of these may ask (CORS).
        body_bytes: of a request, at most.
        timeout: seconds for a request; None is no limit.
        volatile_headers: names of lines that system prompts lose at their start.

    Raises:
        SnapKVError: the address is not local, and there is no key; an origin that no browser sends.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    body_bytes: int = 32 * 1024 * 1024
    timeout: float | None = None
    volatile_headers: tuple[str, ...] = (BILLING,)

    def __post_init__(self):
        if not self.api_key and not is_local(self.host):
            raise SnapKVError(
                f"--host {self.host} lets other machines ask, so it needs --api-key: give one, or keep to 127.0.0.1"
            )
        for origin in self.origins:
            scheme, _, host = origin.partition("://")
            is_page = scheme and host and "/" not in host and origin == origin.lower()
            if not is_page and origin != "null":  # which pages of files send
                raise SnapKVError(
                    "--allow-origin must be a page's scheme, host and port in small letters, such as "
                    f"http://localhost:3000, got {origin!r}"
                )

    @property
    def hosts(self) -> set[str]:
        """What a request's Host header may name; with a key, anything."""
        return {*LOCAL, self.host}


def is_local(host: str) -> bool:
    if host in LOCAL:
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
