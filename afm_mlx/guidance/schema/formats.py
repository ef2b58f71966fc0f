"""Formats: what is generated for them, and what may be taken for one.

By the drafts a format may be checked or not. Here it is: strings have it, and alternatives of `oneOf` may
differ by it. Two patterns hold each format: `PATTERNS` for what is generated, of which every checker says
that it has the format; and `LOOSE` for what some checker may say so of. Other formats (`color`,
or a company's own) are ignored.

Narrower than the formats: the year 0000, which Python does not know, and leap seconds are left out,
international names are ASCII, and regular expressions are simple ones.
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
_ATOM = r"(?:[A-Za-z0-9_ ,:;@/-]|\\[dwsDWS.*+?()]|\[\^?[A-Za-z0-9_]+\]|\.)(?:[*+?]|\{[0-9]\})?"
_REGEX = rf"\^?(?:{_ATOM}|\((?:\?:)?(?:{_ATOM})*(?:\|(?:{_ATOM})*)*\)[*+?]?)*\$?"
_FIRST = _PATH.replace(";=:@", ";=@")  # else it would be a scheme
_REFERENCE = f"(?:{_URI}|(?:/(?:{_PATH}+(?:/{_PATH}*)*)?|{_FIRST}+(?:/{_PATH}*)*)?{_TAIL})"

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
    "relative-json-pointer": f"^[1-9]{{0,3}}[0-9](?:#|{_POINTER[:-1]}+)$",
    "regex": f"^{_REGEX}$",
    "uri-template": f"^(?:{_PATH}|[/?]|\\{{[A-Za-z][A-Za-z0-9_]*\\}})*$",
}
_LOOSE = {
    "date-time": "^[0-9]{4}-[0-9]{2}-[0-9]{2}.[0-9]{2}:",
    "date": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
    "time": "^[0-9]{2}:[0-9]{2}:",
    "duration": "^P[0-9T]",
    "email": "@",
    "idn-email": "@",
    "ipv4": "^[0-9]+[.][0-9.]+$",
    "ipv6": "^[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%.*)?$",
    "uri": "^[A-Za-z][A-Za-z0-9+.-]*:",
    "iri": "^[A-Za-z][A-Za-z0-9+.-]*:",
    "uuid": "^[0-9A-Fa-f]{8}-[0-9A-Fa-f-]{27}$",
    "json-pointer": "^(?:/|$)",
    "relative-json-pointer": "^[0-9]",
    "hostname": "^[^:/@ ]*$",
    "idn-hostname": "^[^:/@ ]*$",
}
LOOSE = dict.fromkeys(PATTERNS, "") | _LOOSE
