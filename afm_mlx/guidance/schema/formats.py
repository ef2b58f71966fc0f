"""Formats: patterns that give valid values only.

By the drafts a format is an annotation, and `jsonschema` does not check it unless told to. What is generated
has the format all the same, where one of these patterns gives it; other formats (`regex`, `color`, those of a
company) say nothing. Where a schema needs a string that does *not* conform (in `not`, beside another
alternative of `oneOf`), a format rules nothing out, as in `jsonschema`.

Narrower than the formats: the year 0000, which Python does not know, and leap seconds are left out, and
international names are ASCII.
"""

from __future__ import annotations

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{0,5}}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]{1,4}"
_PATH = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_TAIL = f"(?:\\?(?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,4}})?(?:/{_PATH}*)*|{_PATH}+(?:/{_PATH}*)*){_TAIL}"
_IPV6 = "|".join(
    [f"(?:{_HEX}:){{7}}{_HEX}", f"::(?:{_HEX}:){{0,5}}{_HEX}", f"(?:{_HEX}:){{1,6}}:{_HEX}", "::"]
)
_DURATION = (
    "P(?:[0-9]{1,4}W|(?:[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,4}D)?)?|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,4}D)"
    "(?:T(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S))?"
    "|T(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S))"
)
_EMAIL = f"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+(?:\\.[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+)*@{_HOST}"
_POINTER = "(?:/(?:[^/~\\x00-\\x1f]|~[01])*)*"
_REFERENCE = f"(?:{_URI}|/?(?:{_PATH}+(?:/{_PATH}*)*)?{_TAIL})"

PATTERNS = {
    "date-time": f"^{_DATE}T{_TIME}$",
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "duration": f"^{_DURATION}$",
    "email": f"^{_EMAIL}$",
    "idn-email": f"^{_EMAIL}$",
    "hostname": f"^{_HOST}$",
    "idn-hostname": f"^{_HOST}$",
    "ipv4": f"^(?:{_BYTE}\\.){{3}}{_BYTE}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uri": f"^{_URI}$",
    "iri": f"^{_URI}$",
    "uri-reference": f"^(?:{_REFERENCE})$",
    "iri-reference": f"^(?:{_REFERENCE})$",
    "uuid": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]{{0,3}})(?:#|{_POINTER})$",
}
