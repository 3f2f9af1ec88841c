"""Check of the origins of web pages (``--allow-origin``), which must be written as browsers do."""

from __future__ import annotations

import re
from contextlib import suppress
from ipaddress import AddressValueError, IPv6Address
from socket import inet_aton, inet_ntoa
from urllib.parse import urlsplit

from pronk import OptionError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65535


def check_origin(origin: str) -> None:
    """Raise ``OptionError`` unless browsers send exactly this text in the header ``Origin``.

    Browsers write scheme and host in small letters, and leave out the path and the default port.
    ``null``, the origin of any page in a sandbox, and ``*``, every page, are refused.
    """
    browsers_form = _browsers_form(origin)
    if browsers_form == origin:
        return
    if browsers_form is None:
        expected = "an exact origin such as https://example.org or http://localhost:3000"
        msg = (
            f"allow-origin: expected {expected}, found {origin!r:.60}; name each origin, "
            "without a path"
        )
    else:
        expected = "an exact origin as browsers send it"
        msg = f"allow-origin: expected {expected}, found {origin!r:.60}; write {browsers_form}"
    raise OptionError(msg)


def _browsers_form(origin: str) -> str | None:
    """Return the origin of a URL as browsers write it, or ``None`` if a text has no origin."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:  # a port beyond the range, or a bracket without its counterpart
        return None
    scheme = parts.scheme.lower()
    host = _host(parts.hostname or "")
    if _SCHEME.fullmatch(scheme) is None or host is None or port == 0:
        return None
    if port is None or port == _DEFAULT_PORTS.get(scheme):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{port}"


def _host(name: str) -> str | None:
    """Return a host as browsers write it: IP addresses in short form, names in ASCII letters.

    Returns ``None`` if the text is no host.
    """
    if ":" in name:
        with suppress(AddressValueError):
            return f"[{IPv6Address(name).compressed}]"
        return None
    with suppress(UnicodeError):
        name = name.encode("idna").decode("ascii")
    if _NAME.fullmatch(name) is None:
        return None
    last_label = name.rstrip(".").rpartition(".")[2]
    if not last_label.isdigit() and not last_label.startswith("0x"):
        return name
    with suppress(OSError):  # browsers read 127.1 and 0x7f000001 as 127.0.0.1
        return inet_ntoa(inet_aton(name.rstrip(".")))
    return None
