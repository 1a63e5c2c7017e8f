"""Where a server listens, and the key that it wants where other machines can reach it."""

from __future__ import annotations

import ipaddress
import os
import socket


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach a host.

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
    """The API key.

    Args:
        variable: of the environment that has it; None for no key.
        host: where the server listens.

    Raises:
        ValueError: there is none where one is wanted.
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
    """A socket at an address, which listens when the server starts.

    Raises:
        ValueError: the address is in use, or is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"--host {host}: {error.strerror}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; name another one") from None
    return made


def listen(made: socket.socket) -> None:
    """Lets a socket of `bound` listen.

    Raises:
        ValueError: another program has bound its address too, and listens by now.
    """
    try:
        made.listen()
    except OSError as error:
        host, port = made.getsockname()[:2]
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; name another one") from None


def url_of(made: socket.socket) -> str:
    """Where a server is found."""
    host, port = made.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
