"""JSON schemas of pydantic's types that allow no text which pydantic refuses.

pydantic's own schemas say less than its types require: a `NaiveDatetime` is any date-time, a key of
`dict[int, ...]` any text. Types that no schema describes (dates with limits, files that exist) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema.strings import PATTERNS

_DATE = PATTERNS["date"].strip("^$")
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?"
_LABEL = "[a-z][a-z0-9]{0,20}"
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{1,4}}"
_PATH = "[A-Za-z0-9._~!$&'()*+,;=:@-]*"
_IPV4 = PATTERNS["ipv4"].strip("^$")
_IPV6 = PATTERNS["ipv6"].strip("^$")
_ASCII = "[A-Za-f][A-HQ-Xg-nw-z0-3][ABEFIJMNQRUVYZcdghklopstwx014589]"  # three bytes, all but six bits of them
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-%s[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
_SCHEMES = ("https", "http", "ftp", "ws", "wss")
_FORMATS = {
    "email": (
        f"^[a-z0-9]{{1,9}}(?:[._-][a-z0-9]{{1,9}}){{0,4}}@{_LABEL}(?:\\.{_LABEL}){{0,4}}"
        "\\.(?:com|org|net|[a-z]{2})$"
    ),
    "ipv4network": f"^{_IPV4}/32$",
    "ipv6network": f"^{_IPV6}/128$",
    "ipv4interface": f"^{_IPV4}/(?:[12]?[0-9]|3[0-2])$",
    "ipv6interface": f"^{_IPV6}/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8])$",
    "ipvanyaddress": f"^(?:{_IPV4}|{_IPV6})$",
    "ipvanyinterface": f"^(?:{_IPV4}|{_IPV6})$",
    "ipvanynetwork": f"^(?:{_IPV4}|{_IPV6})$",
    "base64": f"^(?:{_ASCII}[A-Za-z0-9+/])*$",
    "base64url": f"^(?:{_ASCII}[A-Za-z0-9_-])*$",
    **{f"uuid{n}": _UUID % n for n in range(1, 9)},
}
"""Patterns of formats that only pydantic has, or checks more strictly than JSON Schema."""
_REFUSED = ("file-path", "directory-path", "json-string", "zoneinfo", "name-email")
_CHECKERS = {
    "ByteSize._validate": "ByteSize",
    "PaymentCardNumber.validate": "PaymentCardNumber",
    "import_string": "ImportString",
}
"""Functions by which pydantic's types check a text."""
_KEYS = ("str", "uuid", "date", "literal", "enum", "datetime")
_LIMITS = ("gt", "ge", "lt", "le", "now_op")


class ExactJsonSchema(GenerateJsonSchema):
    """A generator for `TypeAdapter.json_schema`."""

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        found = super().generate_inner(schema)
        name = found.get("format")
        function = schema.get("function")
        called = function.get("function") if isinstance(function, dict) else None
        own = _CHECKERS.get(getattr(called, "__qualname__", ""))
        if own is not None and called.__module__.startswith("pydantic."):
            _refuse(own, "use int or str, and convert it")
        if name in _REFUSED:
            _refuse(f"a {name}", "use str, and convert it")
        if name in _FORMATS and "pattern" not in found:
            found["pattern"] = _FORMATS[name]
        return found

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """Return the schema of a number only; pydantic's own schema also allows any text."""
        if schema.get("max_digits") is not None and schema.get("decimal_places") is None:
            _refuse("a Decimal with max_digits alone", "give decimal_places, too")
        found = super().decimal_schema(schema)["anyOf"][0]
        places = schema.get("decimal_places")
        if places is not None:
            found.setdefault("multipleOf", 10**-places if places else 1)
            if (digits := schema.get("max_digits")) is not None:
                most = 10 ** (digits - places)
                found = {"allOf": [found, {"exclusiveMinimum": -most, "exclusiveMaximum": most}]}
        return found

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        """Return the schema of text as UTF-8; only ASCII where bytes are counted."""
        found = super().bytes_schema(schema)
        is_counted = "minLength" in found or "maxLength" in found
        if self._config.val_json_bytes != "utf8":
            if is_counted:
                _refuse("encoded bytes with a length", "use str, and convert it")
            is_hex = self._config.val_json_bytes == "hex"
            return {
                "type": "string",
                "pattern": "^(?:[0-9a-f]{2})*$" if is_hex else _FORMATS["base64url"],
            }
        return {**found, "pattern": "^[ -~]*$"} if is_counted else found

    def date_schema(self, schema: core_schema.DateSchema) -> JsonSchemaValue:
        return _without_limits(schema, "date") or super().date_schema(schema)

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> JsonSchemaValue:
        naive = _without_limits(schema, "datetime", f"^{_DATE}T{_CLOCK}$")
        return naive or super().datetime_schema(schema)

    def time_schema(self, schema: core_schema.TimeSchema) -> JsonSchemaValue:
        return _without_limits(schema, "time", f"^{_CLOCK}$") or super().time_schema(schema)

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        return _without_limits(schema, "timedelta") or super().timedelta_schema(schema)

    def url_schema(self, schema: core_schema.UrlSchema) -> JsonSchemaValue:
        """Return the schema of URLs with a host of lower-case words."""
        schemes = "|".join(schema.get("allowed_schemes") or _SCHEMES).replace("+", "\\+")
        found = super().url_schema(schema)
        found["pattern"] = f"^(?:{schemes})://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/{_PATH}){{0,9}}$"
        del found["format"]
        return found

    def multi_host_url_schema(self, schema: core_schema.MultiHostUrlSchema) -> JsonSchemaValue:
        return self.url_schema(schema)  # type: ignore[arg-type]  # it has the same keys

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> NoReturn:
        _refuse("a class", "use an enumeration of names, and look them up")

    def complex_schema(self, schema: core_schema.ComplexSchema) -> NoReturn:
        _refuse("complex", "use two numbers, or str, and convert them")

    def json_schema(self, schema: core_schema.JsonSchema) -> NoReturn:
        _refuse("Json", "use the type that is inside")

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        found = super().dict_schema(schema)
        keys = schema.get("keys_schema", {"type": "any"})
        if keys["type"] == "int" and not any(limit in keys for limit in (*_LIMITS, "multiple_of")):
            found["propertyNames"] = {"pattern": "^(?:0|-?[1-9][0-9]{0,17})$"}
        elif keys["type"] in ("date", "datetime", "uuid"):
            found["propertyNames"] = self.generate_inner(keys)
        elif keys["type"] not in (*_KEYS, "any"):
            _refuse(
                f"a dict with keys of type {keys['type']}", "use dict[str, ...], and convert them"
            )
        return found


def _without_limits(
    schema: Mapping[str, object], name: str, naive_pattern: str = ""
) -> JsonSchemaValue:
    """Return a schema with `naive_pattern` for a type without a time zone, else an empty one; refuse limits.

    `name` is the type's name in the error.
    """
    if any(schema.get(limit) is not None for limit in _LIMITS):
        _refuse(f"a {name} with limits", "leave them out, and check the instance")
    is_naive = schema.get("tz_constraint") == "naive" and naive_pattern
    return {"type": "string", "pattern": naive_pattern} if is_naive else {}


def _refuse(what: str, instead: str) -> NoReturn:
    raise ConstraintError(
        f"The type has {what}, which no JSON schema describes exactly; {instead}."
    )
