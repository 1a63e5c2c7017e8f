"""Listening address of a server, and the API key, required where other machines can reach it."""

from __future__ import annotations

import ipaddress
import os
import socket


def is_loopback(host: str) -> bool:
    """Whether a host is reachable from this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def key_of(variable: str | None, host: str) -> str | None:
    """API key in an environment variable; None for no key.

    Raises:
        ValueError: the variable holds no valid key, or a host that other machines can reach has none.
    """
    if variable is None:
        if is_loopback(host):
            return None
        raise ValueError(f"host {host!r} can be reached from other machines: name a key by --api-key-env too")
    key = os.environ.get(variable, "")
    if not key:
        raise ValueError(f"--api-key-env {variable}: the environment has no such variable, or it is empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"--api-key-env {variable}: the key may have letters, digits and signs of ASCII only")
    return key


def bound(host: str, port: int) -> socket.socket:
    """Binds a socket without listening yet.

    Raises:
        ValueError: the address is in use, or is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"--host {host}: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; name another one") from None
    return sock


def listen(sock: socket.socket) -> None:
    """Listens on a socket of `bound`; raises ValueError if another program bound the address and already listens."""
    try:
        sock.listen()
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; name another one") from None


def url_of(sock: socket.socket) -> str:
    """URL of a server without a path."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
