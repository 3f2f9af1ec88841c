"""Regular expressions of the values of ``format`` that grammars enforce, in Rust's syntax.

An expression matches no text that the standard of its format forbids. llguidance's own expressions
are less exact: its ``date`` accepts 2023-02-29, for example.
"""

from __future__ import annotations

from collections.abc import Mapping

# Date and time of RFC 3339. Year 0000 is left out, because datetime types have no such year.
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
# the years of two digits that are multiples of 4 except 00: 04, 08, …, 96
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_LONG_MONTH_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH_DAY = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY_DAY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
_DAY = f"(?:{_LONG_MONTH_DAY}|{_SHORT_MONTH_DAY}|{_FEBRUARY_DAY})"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_OFFSET = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = f"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}"


def _leap_second() -> str:
    """Return the expression of a time with a leap second.

    It matches the time of 23:59:60 UTC in each time zone of whole and half hours.
    """
    options = [f"23:59:60{_FRACTION}[zZ]"]
    for east in range(0, 24 * 60, 30):
        local = (23 * 60 + 59 + east) % (24 * 60)
        west = (24 * 60 - east) % (24 * 60)
        zones = rf"\+{_clock(east)}|-{_clock(west)}"
        options.append(f"{_clock(local)}:60{_FRACTION}(?:{zones})")
    return "|".join(options)


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


_NUMBER = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"  # a number from 0 to 255
_IPV4 = rf"(?:{_NUMBER}\.){{3}}{_NUMBER}"
_GROUP = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Return the expression of an IPv6 address (RFC 4291).

    An address has eight groups. ``::`` may stand for some of them, and an IPv4 address for the last
    two.
    """
    last = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
    options = [f"(?:{_GROUP}:){{6}}{last}", f"::(?:{_GROUP}:){{5}}{last}"]
    for before in range(5):
        start = f"(?:(?:{_GROUP}:){{0,{before}}}{_GROUP})?"
        options.append(f"{start}::(?:{_GROUP}:){{{4 - before}}}{last}")
    options.append(f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}")
    options.append(f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::")
    return f"(?:{'|'.join(options)})"


_IPV6 = _ipv6()
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_MAILBOX = rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@(?:{_DOMAIN}|\[(?:{_IPV4}|IPv6:{_IPV6})\])"

# Durations, as in RFC 3339, appendix A.
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)"

# Parts of URIs, as in RFC 3986.
_HEX = "%[0-9a-fA-F]{2}"
_UNRESERVED = r"a-zA-Z0-9._~!$&'()*+,;=\-"
_PCHAR = f"(?:[{_UNRESERVED}:@]|{_HEX})"
_NAME_CHARACTER = f"(?:[{_UNRESERVED}]|{_HEX})"
_USER = f"(?:[{_UNRESERVED}:]|{_HEX})*@"
_LITERAL_HOST = rf"\[(?:{_IPV6}|[vV][0-9a-fA-F]+\.[{_UNRESERVED}:]+)\]"
_AUTHORITY = f"(?:{_USER})?(?:{_LITERAL_HOST}|{_NAME_CHARACTER}*)(?::[0-9]*)?"
_SEGMENTS = f"(?:/{_PCHAR}*)*"
_ABSOLUTE = f"/(?:{_PCHAR}+{_SEGMENTS})?"
_ROOTLESS = f"{_PCHAR}+{_SEGMENTS}"
_NO_COLON = f"(?:[{_UNRESERVED}@]|{_HEX})+{_SEGMENTS}"
_REST = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:\#(?:{_PCHAR}|[/?])*)?"
_SCHEME = "[a-zA-Z][a-zA-Z0-9+.-]*:"
_HIERARCHY = f"(?://{_AUTHORITY}{_SEGMENTS}|{_ABSOLUTE}|)"
_URI = f"{_SCHEME}(?:{_HIERARCHY}|{_ROOTLESS}){_REST}"
_URI_REFERENCE = f"(?:(?:{_SCHEME})?{_HIERARCHY}|{_SCHEME}{_ROOTLESS}|{_NO_COLON}){_REST}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"  # JSON pointer, as in RFC 6901


def _whole(expression: str) -> str:
    return f"^(?:{expression})$"


# Regular expressions of each supported format. A text must match all expressions of its format.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "date": (_whole(_DATE),),
    "time": (_whole(f"{_TIME}|{_leap_second()}"),),
    # A leap second ends June or December in UTC. In other time zones, its date may be the day
    # before or after, which the expression leaves out.
    "date-time": (
        _whole(f"{_DATE}[tT]{_TIME}|{_YEAR}-(?:12-31|06-30)[tT]23:59:60{_FRACTION}[zZ]"),
    ),
    "duration": (_whole(_DURATION),),
    # the part before the @ has at most 64 characters, or is quoted
    "email": (_whole(_MAILBOX), '^[^@]{1,64}@|^"'),
    "hostname": (_whole(_DOMAIN), "^.{1,253}$"),
    "ipv4": (_whole(_IPV4),),
    "ipv6": (_whole(_IPV6),),
    "uri": (_whole(_URI),),
    "uri-reference": (_whole(_URI_REFERENCE),),
    "uuid": (_whole("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),),
    "json-pointer": (_whole(_POINTER),),
    "relative-json-pointer": (_whole(f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),),
}

# Formats of the standard for which there is no expression. They are reported as not enforced;
# formats that the standard lacks are ignored without a report.
NOT_ENFORCED = frozenset(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-template"}
)
