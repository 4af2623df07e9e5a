"""The trusted boundary between a model's tool call and its effect.

A language model proposes a tool call: a name and arguments, nothing else. This module decides whether
that call runs, runs it at most once, and returns a result that anybody with the same trusted context can
rebuild and compare. It holds ten promises; the code that upholds one cites its number, and so does the
test that proves it.

 1. A name outside the registry never runs anything.
 2. Arguments that break the contract never reach a handler, whole or in part.
 3. Identity, tenant, approval, call id and idempotency key never come from the model.
 4. Absent and forbidden are one answer.
 5. A write runs only with a key and an eligible approval of exactly this call in exactly this state.
 6. One idempotency scope, at most one effect: whatever is raised, repeated, raced or re-entered.
 7. An unknown outcome is reported as neither success nor failure, and only downstream evidence settles it.
 8. Only data that passed its contract reaches the model, and nothing of the audit ever does.
 9. Every result can be rebuilt from trusted context; one that cannot is refused before a provider sees it.
10. Every call ends in exactly one package, whatever the model said.

A read, from proposal to provider payload (``demo_dispatcher`` wires a mock downstream with two tools):

>>> dispatcher = demo_dispatcher()
>>> principal = Principal("tenant-a", "user-1", roles=())                       # from the host's session
>>> proposal = ModelProposal("get_order", {"order_ref": "ORDER-7"})             # from the model
>>> context = ExecutionContext(PROFILES["openai"], "resp-1", "call-1", "op-1", idempotency_key=None)
>>> call = bind_tool_call(proposal, context)
>>> package = dispatcher.dispatch(principal, call, now=1_000)
>>> package["model_result"]["data"]
{'order_ref': 'ORDER-7', 'status': 'paid'}
>>> to_openai_responses(dispatcher.resolve(principal, call), package)["call_id"]
'call-1'

What it does not do: choose tools, talk to a provider, survive a crash, or make two processes agree. State
lives in memory; the clock, the identity and the retry policy are the host's. SHA-256 digests without a key
are evidence that parts belong together, never evidence of who made them.

Glossary, in the order the words appear:

    proposal          what a model said: a tool name and arguments, both untrusted
    principal         who asks: tenant, subject and roles, from the host's own session
    contract          a JSON Schema document limited to keywords that this module enforces
    gate              one check that either returns a fact or refuses with a catalog code
    idempotency key   the host's name for one business operation; a retry repeats it, a new intent never does
    scope             tenant, subject, tool and idempotency key: the room in which at most one effect happens
    approval          a human's signed consent to one exact call in one exact resource state
    outcome           what is known of the effect: not_started, committed or unknown
    delivery          the evidence behind a success: fresh, local_replay or receipt_reconciled
    receipt           what a downstream remembers about an effect, found again by its status reference
    projection        one of a result's two views: model_result for the model, protected_audit for the host
    package           the two projections of one call, tied together by three digests

Read on from top to bottom, in the order in which data travels: every name is defined before it is used, but
where two functions call each other.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import hashlib
import hmac
import itertools
import json
import os
import pathlib
import re
import sys
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, NamedTuple, NoReturn, TypeGuard, TypeVar

__version__ = "1.0.0"


# ===== 1. Limits and vocabulary =====================================================================
# Every bound is applied before work is done in proportion to what it bounds.

MAX_LEVELS: Final = 32                  # nesting of any JSON: enough for tools, little enough to recurse
MAX_BUDGET: Final = 131_072             # values plus characters that one untrusted Python value may cost
MAX_SAFE_INTEGER: Final = 2**53 - 1     # the largest integer that every JSON implementation reads alike
MAX_ARGUMENT_BYTES: Final = 16_384      # canonical UTF-8 of a call's arguments
MAX_OUTPUT_BYTES: Final = 65_536        # the most a tool may allow itself: its package still fits the budget
MAX_OUTPUT_LEVELS: Final = MAX_LEVELS - 2   # data stands two levels deep in its package
MAX_FIXTURE_BYTES: Final = 65_536
MAX_NAME_LENGTH: Final = 128            # of a field, where fields are declared or scanned
MAX_PROBLEMS: Final = 1024              # once so many are found, no further array item is looked at
MAX_VIOLATIONS: Final = 16              # in one model-visible error
MAX_ROLES: Final = 32
MAX_APPROVALS: Final = 16               # looked at in one dispatch; each costs one HMAC
MAX_APPROVAL_SECONDS: Final = 60        # consent is for now: an approval may not be stockpiled
MAX_CALLS: Final = 128                  # in one provider response
MAX_INSTANT: Final = 253_402_300_799    # 9999-12-31T23:59:59Z in seconds since the epoch
MAX_PRINTED_PROBLEMS: Final = 20

MODEL_RESULT_VERSION: Final = "tool-model-result-v2"
AUDIT_VERSION: Final = "tool-audit-v2"
FIXTURE_VERSION: Final = "tool-cases-v2"
REPORT_VERSION: Final = "tool-report-v2"
DISPATCHER_LABEL: Final = "offline-dispatcher"          # the source of every error a model sees
DISPATCHER_REVISION: Final = "offline-dispatcher-v2"
UNREGISTERED: Final = "unregistered"                    # stands in every contract field of an unknown tool
MALFORMED_NAME: Final = "(malformed)"                   # no tool can bear it: see _SPEC_CONTRACT

JsonObject = dict[str, Any]             # one decoded JSON object
Package = dict[str, Any]                # {"model_result": ..., "protected_audit": ...}
Purpose = Literal["dispatch", "query_status"]

_IDENTIFIER = re.compile(r"[!-~]{1,255}")
_UTC_SECOND = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)Z", re.ASCII)
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
_EPOCH = datetime(1970, 1, 1)

T = TypeVar("T")


class once(Generic[T]):
    """A property that is computed once for each instance.

    Unlike `functools.cached_property` of Python 3.11 it holds no lock while it computes: a tool's rules run
    inside one, and those of one tenant must not wait for those of another.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        value = self.function(instance)
        instance.__dict__[self.function.__name__] = value  # found there from now on, before this descriptor
        return value


def is_identifier(value: object) -> bool:
    """Tell whether `value` is 1 to 255 printable ASCII characters without a space.

    >>> is_identifier("call-1"), is_identifier("call 1"), is_identifier("call-1\\n"), is_identifier(7)
    (True, False, False, False)
    """
    return type(value) is str and _IDENTIFIER.fullmatch(value) is not None


def is_digest(value: object) -> bool:
    """Tell whether `value` is a SHA-256 in lowercase hex."""
    return type(value) is str and _HEX_DIGEST.fullmatch(value) is not None


def is_instant(value: object) -> bool:
    """Tell whether `value` is whole seconds since the epoch up to the year 9999; `True` is not 1."""
    return type(value) is int and 0 <= value <= MAX_INSTANT


def is_sequence(value: object) -> bool:
    """Tell whether `value` is exactly a list or a tuple."""
    return type(value) is list or type(value) is tuple


def is_utc_second(value: str) -> bool:
    """Tell whether `value` is a real calendar instant like ``2026-02-28T23:59:59Z``, in ASCII digits."""
    match = _UTC_SECOND.fullmatch(value)
    try:
        return match is not None and bool(datetime(*map(int, match.groups())))  # type: ignore[arg-type]
    except ValueError:  # 30 February has the right shape
        return False


def utc_text(now: int) -> str:
    """Write seconds since the epoch as ``YYYY-MM-DDThh:mm:ssZ``.

    >>> utc_text(1_000)
    '1970-01-01T00:16:40Z'
    """
    # Arithmetic, because the clock calls of some platforms end long before the year 9999.
    return (_EPOCH + timedelta(seconds=now)).isoformat() + "Z"


# ===== 2. Strict JSON: in and out ===================================================================
# Two doors lead in, `decode_json` for text and `plain_json` for Python values, and both open onto the same
# portable domain: null, booleans, safe integers, strings without lone surrogates, arrays, and objects whose
# keys stay in the Basic Multilingual Plane. Nothing is ever repaired, trimmed, unwrapped or guessed.


class JsonError(ValueError):
    """An input outside the portable domain. `reason` is one word; no text of the input is repeated."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not portable JSON: {reason}")
        self.reason = reason


def _require_encodable(text: str) -> bytes:
    """Return the UTF-8 form of `text`; a lone surrogate is exactly what UTF-8 cannot encode."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise JsonError("surrogate") from None


def _utf8_text(raw: bytes | str, max_bytes: int) -> str:
    if type(raw) is not str and type(raw) is not bytes:
        raise JsonError("type")
    if len(raw) > max_bytes:  # before encoding: no text has fewer bytes than characters
        raise JsonError("size")
    if type(raw) is str:
        raw = _require_encodable(raw)
    if len(raw) > max_bytes:
        raise JsonError("size")
    try:
        text = raw.decode("utf-8")  # type: ignore[union-attr]
    except UnicodeDecodeError:
        raise JsonError("utf-8") from None
    if text.startswith("\ufeff"):
        raise JsonError("bom")
    return text


_ESCAPE = re.compile(r"\\.", re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def _require_shallow(text: str) -> None:
    """Refuse deep nesting before Python's recursive decoder meets it: one linear scan, whatever the text."""
    # Without escapes every second piece between quotes stands outside of strings, where brackets count.
    outside = "".join(_ESCAPE.sub("", text).split('"')[::2])
    level = 0
    for bracket in _BRACKET.finditer(outside):
        level += 1 if bracket[0] in "[{" else -1
        if level > MAX_LEVELS:
            raise JsonError("depth")


def _require_key(name: str) -> None:
    """Refuse a key beyond the Basic Multilingual Plane, where UTF-16 sorts otherwise than code points."""
    _require_encodable(name)
    if max(name) > "\uffff":
        raise JsonError("key")


def _unique_members(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Build an object from its decoded pairs: two spellings of one key are the same key by now."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise JsonError("duplicate-key")
    if not (names := "".join(members)).isascii():
        _require_key(names)
    return members


def _safe_integer(digits: str) -> int:
    # Digits are counted before conversion: Python's own limit on long integers is never met.
    if len(digits) > 17 or not -MAX_SAFE_INTEGER <= int(digits) <= MAX_SAFE_INTEGER:
        raise JsonError("number")
    return int(digits)


def _refuse_number(_: str) -> NoReturn:
    raise JsonError("number")  # fractions, exponents, NaN and infinities; money is counted in minor units


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_members,
    parse_int=_safe_integer,
    parse_float=_refuse_number,
    parse_constant=_refuse_number,
)

# On the portable domain this is byte for byte RFC 8785 (JSON Canonicalization Scheme): integers have one
# spelling, strings one set of escapes, and keys within one plane sort by code point as they do by UTF-16.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"),
    check_circular=False,  # portable JSON has no cycles
)


def canonical_json(value: Any) -> str:
    """Write portable JSON in its one canonical form (RFC 8785): sorted keys, no spaces, non-ASCII unescaped.

    >>> canonical_json({"b": [1, True], "a": "\\u00e9"})
    '{"a":"é","b":[1,true]}'
    """
    return _ENCODER.encode(value)


def decode_json(raw: bytes | str, *, max_bytes: int) -> Any:
    """Decode one JSON text (RFC 8259) into the portable domain.

    `max_bytes` bounds the text's UTF-8 form. Raises `JsonError` with the reason `type`, `size`, `utf-8`,
    `surrogate`, `bom`, `depth`, `syntax`, `duplicate-key`, `number` or `key`.

    >>> decode_json('{"amount": 900}', max_bytes=100)
    {'amount': 900}
    """
    text = _utf8_text(raw, max_bytes)
    _require_shallow(text)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError:
        raise JsonError("syntax") from None
    if "\\u" in text:  # only an escape can have spelt a lone surrogate
        _require_encodable(canonical_json(value))
    return value


def plain_json(value: object) -> Any:
    """Copy an arbitrary Python value into exact JSON types: the only way in for anything untrusted.

    Types are compared exactly, so no method of the value's own ever runs. Each value and each character
    costs one of `MAX_BUDGET`, so aliased and cyclic structures end quickly. A container is copied from a
    snapshot, a tuple, because whoever kept it may be changing it in another thread. Raises `JsonError` with
    the reason `type`, `number`, `surrogate`, `key`, `depth` or `budget`.

    >>> plain_json({"amount": 900, "lines": [True, None]})
    {'amount': 900, 'lines': [True, None]}
    """
    left = MAX_BUDGET - 1

    def copied(value: Any, levels: int) -> Any:
        nonlocal left
        kind = type(value)
        if kind is str or kind is dict or kind is list:
            left -= len(value)  # texts pay for characters, containers for members, before one is looked at
            if left < 0:
                raise JsonError("budget")
        if kind is str:
            if not value.isascii():
                _require_encodable(value)
        elif kind is dict or kind is list:
            if not levels:
                raise JsonError("depth")
            if kind is dict:
                return members(value, levels - 1)
            return [copied(item, levels - 1) for item in tuple(value)]
        elif kind is int:
            if not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
                raise JsonError("number")
        elif kind is not bool and value is not None:
            raise JsonError("number" if kind is float else "type")
        return value

    def members(value: dict[Any, Any], levels: int) -> JsonObject:
        nonlocal left
        copy = {}
        for name, item in tuple(value.items()):
            if type(name) is not str:
                raise JsonError("key")
            left -= len(name)
            if left < 0:
                raise JsonError("budget")
            if not name.isascii():
                _require_key(name)
            copy[name] = copied(item, levels)
        return copy

    return copied(value, MAX_LEVELS)


_PLAIN_DECODER: Final = json.JSONDecoder()


def _decode_canonical(text: str) -> Any:
    """Decode a text that `canonical_json` wrote: a fresh copy with every call."""
    return _PLAIN_DECODER.raw_decode(text)[0]  # it has no space around it to be skipped


def digest(document: Any) -> str:
    """Return the lowercase hex SHA-256 of the document's canonical form in UTF-8.

    >>> digest({})
    '44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a'
    """
    return hashlib.sha256(canonical_json(document).encode("utf-8")).hexdigest()


def same_json(left: Any, right: Any) -> bool:
    """Compare as JSON does: types first, so that `true` is never `1`, then deeply; nothing is ever hashed.

    `left` must be JSON; `right` may be any Python value.
    """
    kind = type(left)
    if kind is not type(right):
        return False
    if kind is list:
        return len(left) == len(right) and all(map(same_json, left, right))
    if kind is dict:
        return len(left) == len(right) and all(type(name) is str for name in right) and all(
            name in right and same_json(member, right[name]) for name, member in left.items())
    return bool(left == right)


# ===== 3. Contracts: a small JSON Schema checker ====================================================
# A contract is data: a JSON Schema 2020-12 document limited to the keywords below. One predicate per keyword,
# one table by the type it applies to, one walker that adds the path. The same walker judges fixtures, tool
# inputs and outputs, provider envelopes, and the contracts themselves.


class Problem(NamedTuple):
    """One broken rule: a JSON Pointer (RFC 6901), the rule's name, a message made from the contract alone."""

    path: str
    rule: str
    message: str


def readable(path: str) -> str:
    """Return a JSON Pointer as people read it: the root's is empty."""
    return path or "(root)"


class ContractError(ValueError):
    """A contract or a tool that must not be registered."""


_TYPES: Final[dict[str, type]] = {
    "null": type(None), "boolean": bool, "integer": int, "string": str, "array": list, "object": dict,
}
_TYPE_NAMES: Final = {kind: name for name, kind in _TYPES.items()}
_FORMATS: Final[dict[str, Callable[[str], bool]]] = {"identifier": is_identifier, "utc-second": is_utc_second}

Predicate = Callable[[Any, Any], bool]      # (what the keyword says, the value) -> does it hold?


def _is_one_of(options: list[Any], value: Any) -> bool:
    return any(map(same_json, options, itertools.repeat(value)))


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.ASCII)


_ANY: Final[tuple[tuple[str, Predicate], ...]] = (("const", same_json), ("enum", _is_one_of))
# In order of evaluation: what bounds a text comes before its pattern, so that none is tried on a longer text.
_CHECKS: Final[dict[type, tuple[tuple[str, Predicate], ...]]] = {
    str: (
        ("minLength", lambda limit, text: len(text) >= limit),  # lengths count code points
        ("maxLength", lambda limit, text: len(text) <= limit),
        *_ANY,
        ("format", lambda name, text: _FORMATS[name](text)),
        # `fullmatch`, because the `$` of `match` also stands before a trailing line break.
        ("pattern", lambda pattern, text: _compiled(pattern).fullmatch(text) is not None),
    ),
    int: (
        *_ANY,
        ("minimum", lambda limit, number: number >= limit),
        ("maximum", lambda limit, number: number <= limit),
    ),
    list: (
        ("minItems", lambda limit, items: len(items) >= limit),
        ("maxItems", lambda limit, items: len(items) <= limit),
        *_ANY,
    ),
}
_LENGTHS: Final = frozenset({"minLength", "maxLength", "minItems", "maxItems"})

Tokens = tuple[str | int, ...]      # a path on the way: its text is made only where a problem needs it


def pointer(tokens: Tokens) -> str:
    """Write reference tokens as a JSON Pointer (RFC 6901, section 3).

    >>> pointer(("cases", 0, "a/b"))
    '/cases/0/a~1b'
    """
    return "".join("/" + str(token).replace("~", "~0").replace("/", "~1") for token in tokens)


def _problem(path: Tokens, rule: str, limit: object) -> Problem:
    shown = limit[:8] if isinstance(limit, list) else limit  # enough to be understood, cheap to repeat
    return Problem(pointer(path), rule, f"must satisfy {rule} {canonical_json(shown)}")


def _walk_object(schema: Mapping[str, Any], value: JsonObject, path: Tokens, found: list[Problem]) -> None:
    for name in value:
        if type(name) is not str:  # no JSON object; looking a field up could run a stranger's code
            found.append(_problem(path, "type", "object"))
            return
    undeclared = len(value)
    for name, inner in schema.get("properties", {}).items():
        if name in value:
            undeclared -= 1
            _walk(inner, value[name], (*path, name), found)
        elif name in schema.get("required", ()):
            found.append(_problem((*path, name), "required", True))
    if undeclared and "additionalProperties" in schema:
        found.append(_problem(path, "additionalProperties", False))


def _walk(schema: Mapping[str, Any], value: Any, path: Tokens, found: list[Problem]) -> None:
    kind = type(value) if type(type(value)) is type else object  # a metaclass could bring a hash of its own
    name = _TYPE_NAMES.get(kind)  # exact types: `true` is no integer, a tuple no array
    expected = schema.get("type", name)
    if name != expected and (type(expected) is str or name not in expected):
        found.append(_problem(path, "type", expected))
        return
    for keyword, holds in _CHECKS.get(kind, _ANY):
        if keyword in schema and not holds(schema[keyword], value):
            found.append(_problem(path, keyword, schema[keyword]))
            if keyword in _LENGTHS or (kind is str and "maxLength" not in schema):
                return
    if kind is dict:
        _walk_object(schema, value, path, found)
    elif kind is list and "items" in schema:
        for index, item in enumerate(value):
            if len(found) >= MAX_PROBLEMS:
                break
            _walk(schema["items"], item, (*path, index), found)


def validate(schema: Mapping[str, Any], value: object) -> list[Problem]:
    """Check any Python value against a contract (JSON Schema 2020-12, the keywords above); never raises.

    A node whose type or length is wrong is looked at no further, nor is a text that only its format or its
    options would have bounded. A missing field is reported at its own path, an undeclared one at its
    parent's, so that no name of the value's own is ever repeated.

    >>> [(p.path, p.rule) for p in validate({"type": "string", "maxLength": 3}, "four")]
    [('', 'maxLength')]
    """
    found: list[Problem] = []
    _walk(schema, value, (), found)
    return found


def open_object(**properties: JsonObject) -> JsonObject:
    """Write the contract of an object that has these fields and any others: for what strangers send."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def closed_object(**properties: JsonObject) -> JsonObject:
    """Write the contract of an object that has exactly these fields."""
    return {**open_object(**properties), "additionalProperties": False}


def nullable(contract: JsonObject) -> JsonObject:
    """Let a contract with a type accept `null` too."""
    return {**contract, "type": [contract["type"], "null"]}


IDENTIFIER: Final[JsonObject] = {"type": "string", "format": "identifier"}
UTC_SECOND: Final[JsonObject] = {"type": "string", "format": "utc-second"}

# The contract of a contract: the checker checks its own documents first. An unknown keyword is refused as an
# undeclared field, for a misspelt bound is a hole. A pattern holds no alternation, because `^a|b$` is open on
# two sides; write a literal bar as \x7c.
_PROSE: Final[JsonObject] = {"type": "string", "maxLength": 1024}
_COUNT: Final[JsonObject] = {"type": "integer", "minimum": 0}
_SCHEMA_CONTRACT: Final[JsonObject] = {"type": "object", "additionalProperties": False, "properties": {
    "title": _PROSE, "description": _PROSE,
    "minLength": _COUNT, "maxLength": _COUNT, "minItems": _COUNT, "maxItems": _COUNT,
    "minimum": {"type": "integer"}, "maximum": {"type": "integer"},
    "type": {"type": ["string", "array"], "minItems": 1, "items": {"enum": [*_TYPES]}},
    "const": {}, "enum": {"type": "array", "minItems": 1},
    "items": {"type": "object"}, "properties": {"type": "object"},
    "pattern": {"type": "string", "pattern": r"^\^[^|]*\$$"},
    "format": {"enum": [*_FORMATS]},
    "required": {"type": "array", "items": {"type": "string"}},
    "additionalProperties": {"const": False},
}}
_KEYWORDS_OF_ALL: Final = frozenset({"title", "description", "type", "const", "enum"})
_KEYWORDS_OF_TYPE: Final[dict[str, set[str]]] = {
    "array": {"items"}, "object": {"properties", "required", "additionalProperties"},
}

# Names that a contract may not declare, found anywhere in a normalized name: what only the host may say
# (invariant 3) in an input, what would leak or pose as control data (invariant 8) in an output.
_CONTROL_NAMES: Final = "callid|operationid|idempotencykey|statusref|sha256"
_SENSITIVE_NAMES: Final = "authorization|apikey|token|secret|passw|cookie|credential|privatekey"
_FORBIDDEN_NAMES: Final = {
    "input": re.compile(f"tenant|subject|principal|approval|approver|{_CONTROL_NAMES}"),
    "output": re.compile(f"{_SENSITIVE_NAMES}|{_CONTROL_NAMES}"),
}
_INLINE_FLAG = re.compile(r"\(\?[aiLmsux-]")  # would undo the ASCII classes
_NOT_ALPHANUMERIC = re.compile(r"[^a-z0-9]+")


def is_forbidden_name(name: str, role: str) -> bool:
    """Tell whether a field may not bear this name in an `input` or `output`; look-alikes of a name count.

    >>> is_forbidden_name("X-API-Key", "output"), is_forbidden_name("city", "output")
    (True, False)
    """
    if len(name) > MAX_NAME_LENGTH:
        return True  # too long to be judged: normalizing takes quadratic time in the worst case
    plain = _NOT_ALPHANUMERIC.sub("", unicodedata.normalize("NFKC", name).casefold())
    return role in _FORBIDDEN_NAMES and _FORBIDDEN_NAMES[role].search(plain) is not None


def _survey(value: Any, names: set[str]) -> int:
    """Count levels of nesting (a scalar is 0, a flat object 1) and collect every name on the way."""
    if type(value) is dict:
        names.update(value)
        value = value.values()
    elif type(value) is not list:
        return 0
    return 1 + max([_survey(member, names) for member in value], default=0)


def _keywords_of(name: str) -> set[str]:
    """Return the keywords that are enforced for one type."""
    return _KEYWORDS_OF_TYPE.get(name, set()).union(keyword for keyword, _ in _CHECKS.get(_TYPES[name], ()))


def _compiles(pattern: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what only warns today would refuse or match otherwise tomorrow
        try:
            return bool(_compiled(pattern))
        except (re.error, OverflowError, RecursionError, Warning):
            return False


def _array_complaints(schema: JsonObject, path: Tokens, role: str) -> Iterator[tuple[Tokens, str]]:
    if "maxItems" not in schema:
        yield path, "needs maxItems"
    if "items" in schema:
        yield from _complaints(schema["items"], (*path, "items"), role)
    elif role == "input":
        yield path, "must say what its items are"


def _object_complaints(schema: JsonObject, path: Tokens, role: str) -> Iterator[tuple[Tokens, str]]:
    if "properties" not in schema:
        if role == "input" or schema.keys() & {"required", "additionalProperties"}:
            yield path, "must list its properties"
        return
    names = schema["properties"]
    if "additionalProperties" not in schema or sorted(schema.get("required", [])) != sorted(names):
        yield path, "must be closed and require each of its properties"
    for name, inner in names.items():
        where = (*path, "properties", name)
        if is_forbidden_name(name, role):
            yield where, "bears a name that is not this contract's to declare"
        yield from _complaints(inner, where, role)


def _complaints(schema: Any, path: Tokens, role: str) -> Iterator[tuple[Tokens, str]]:
    """Yield what is wrong with a node and all below it; a misshapen node is looked at no further."""
    problems = validate(_SCHEMA_CONTRACT, schema)
    if problems:
        yield from (((*path, *problem.path.split("/")[1:]), problem.message) for problem in problems)
        return
    names = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    if not {*names} <= _TYPES.keys() or not schema.keys() & {"type", "const", "enum"}:
        yield path, "must name known types, a constant or an enumeration"
        return
    if not schema.keys() <= _KEYWORDS_OF_ALL.union(*map(_keywords_of, names)):
        yield path, "has a keyword that is not enforced for its type"
    if "string" in names and not schema.keys() & {"maxLength", "enum", "const", "format"}:
        yield path, "needs maxLength, enum, const or format"
    if "pattern" in schema and (_INLINE_FLAG.search(schema["pattern"]) or not _compiles(schema["pattern"])):
        yield path, "has a pattern that changes its flags or is no regular expression"
    names_of_values: set[str] = set()
    _survey([schema.get("const"), schema.get("enum")], names_of_values)
    if any(is_forbidden_name(name, role) for name in names_of_values):
        yield path, "offers a value with a name that is not this contract's to declare"
    if "array" in names:
        yield from _array_complaints(schema, path, role)
    if "object" in names:
        yield from _object_complaints(schema, path, role)


@functools.lru_cache(maxsize=64)  # the same contract is judged once, however often it is registered
def _require_sound(text: str, role: str) -> None:
    for path, complaint in _complaints(_decode_canonical(text), (), role):
        raise ContractError(f"contract at {readable(pointer(path))}: {complaint}")


def require_schema(schema: object, *, role: Literal["data", "input", "output"] = "data") -> JsonObject:
    """Return a copy of a sound contract: every keyword is enforced, every node bounded and closed.

    An `input` may hold nothing open and no name that only the host may say; an `output` may hold an open
    object (its names are scanned in each result) but declare no sensitive name. Raises `ContractError`.
    """
    try:
        copy: JsonObject = plain_json(schema)
    except JsonError as error:
        raise ContractError(str(error)) from None
    _require_sound(canonical_json(copy), role)
    return copy


# ===== 4. The error catalog =========================================================================
# Every error that a model can see is one row. Nothing of it is free text, so all of it is recomputed when a
# result is validated.


class ErrorPolicy(NamedTuple):
    """One row: how an ending is classified and what may be done about it.

    `outcome` speaks of effects: `not_started` says that this call began none, and nothing of earlier calls.
    `retry_after_ms` is in milliseconds.
    """

    code: str
    category: str
    outcome: str
    recovery: str
    retry_after_ms: int | None
    safe_message: str

    @property
    def status(self) -> str:
        return {"committed": "succeeded", "unknown": "unknown"}.get(self.outcome, "failed")


SUCCESS: Final = ErrorPolicy("OK", "", "committed", "none", None, "")     # no error, so nothing to say
ERROR_CATALOG: Final[Mapping[str, ErrorPolicy]] = MappingProxyType({row[0]: ErrorPolicy(*row) for row in (
    ("UNKNOWN_TOOL", "contract", "not_started", "correct_input", None,
     "No tool of this name is available."),
    ("INVALID_ARGUMENTS", "contract", "not_started", "correct_input", None,
     "The arguments do not satisfy the tool's input contract."),
    ("CALL_ID_CONFLICT", "conflict", "not_started", "human_review", None,
     "This call was already bound to another request; an earlier result of this call stands."),
    ("NOT_FOUND", "authorization", "not_started", "none", None,
     "Nothing is available under this reference."),
    ("IDEMPOTENCY_KEY_REQUIRED", "contract", "not_started", "human_review", None,
     "The host supplied no idempotency key for this write."),
    ("IDEMPOTENCY_CONFLICT", "conflict", "not_started", "human_review", None,
     "The idempotency key already belongs to another request."),
    ("BUSINESS_RULE_VIOLATION", "business", "not_started", "human_review", None,
     "The current business state does not permit this action."),
    ("APPROVAL_REQUIRED", "approval", "not_started", "request_approval", None,
     "This write needs a human approval."),
    ("APPROVAL_INVALID", "approval", "not_started", "request_approval", None,
     "The approval does not cover this exact call."),
    ("TIMEOUT_BEFORE_EXECUTE", "execution", "not_started", "retry_after", 1000,
     "The deadline passed before the action began; it may be tried again later."),
    ("RATE_LIMIT", "dependency", "not_started", "retry_after", 1000,
     "The service is limiting requests; the call may be tried again later."),
    ("TOOL_ERROR", "execution", "not_started", "human_review", None,
     "The tool could not carry out the call."),
    ("OUTCOME_UNKNOWN", "execution", "unknown", "query_status", None,
     "Whether the action took effect is not known; its status must be queried."),
    ("OUTPUT_CONTRACT_VIOLATION", "execution", "unknown", "human_review", None,
     "The tool's answer did not satisfy its output contract."),
    ("STATUS_CONFLICT", "conflict", "unknown", "human_review", None,
     "The status evidence does not belong to this operation."),
)})


def policy_of(code: str) -> ErrorPolicy:
    """Return the row of a catalog code, or that of `OK`."""
    return SUCCESS if code == "OK" else ERROR_CATALOG[code]


class Refused(Exception):
    """A gate's answer: a catalog code, and the status reference that an unknown outcome is queried with."""

    def __init__(self, code: str, status_ref: str | None = None) -> None:
        self.code = ERROR_CATALOG[code].code  # a `KeyError` for a code that nobody classified
        self.status_ref = status_ref
        self.foreign = False  # set where somebody other than a gate raised it


# ===== 5. Who asks and what was proposed ============================================================
# The host's values check themselves when they are made: one that exists is well formed (invariant 3).


class HostContextError(ValueError):
    """Something that only the host can have caused; raised before any state changes."""


def _require_host(holds: bool, what: str) -> None:
    if not holds:
        raise HostContextError(f"{what} is malformed")


@dataclass(frozen=True)
class Principal:
    """Who asks: tenant and subject are identifiers, roles a sorted tuple of at most 32 different ones."""

    tenant_id: str
    subject_id: str
    roles: tuple[str, ...]

    def __post_init__(self) -> None:
        _require_host(is_identifier(self.tenant_id) and is_identifier(self.subject_id), "principal")
        _require_host(type(self.roles) is tuple and len(self.roles) <= MAX_ROLES, "roles")
        _require_host(all(map(is_identifier, self.roles)) and sorted({*self.roles}) == [*self.roles], "roles")

    @once
    def ref(self) -> str:
        """The digest that stands for this principal in an audit: short, but no pseudonym."""
        return "sha256:" + digest(
            {"kind": "principal", "tenant_id": self.tenant_id, "subject_id": self.subject_id}
        )


class ModelProposal(NamedTuple):
    """What a model said. Both fields may be anything at all; `bind_tool_call` judges them."""

    name: object
    arguments: object


@dataclass(frozen=True)
class ProviderProfile:
    """Which provider and wire format a call came by; the registered ones are `PROFILES`."""

    provider: str
    api_family: str
    adapter_revision: str


PROFILES: Final[Mapping[str, ProviderProfile]] = MappingProxyType({profile.provider: profile for profile in (
    ProviderProfile("openai", "responses", "openai-responses-v1"),
    ProviderProfile("anthropic", "messages", "anthropic-messages-v1"),
    ProviderProfile("google", "interactions", "gemini-interactions-v1"),
)})


def is_registered(profile: object) -> bool:
    """Tell whether `profile` is one of `PROFILES`."""
    return type(profile) is ProviderProfile and all(map(is_identifier, vars(profile).values())) and (
        profile in PROFILES.values())


@dataclass(frozen=True)
class ExecutionContext:
    """What the host says about one call.

    `response_id` and `call_id` correlate it with the provider. `operation_id` and `idempotency_key` name the
    business operation: a key survives retries and is never made from a call id (the IETF Idempotency-Key
    draft, section 2). Raises `HostContextError`.
    """

    profile: ProviderProfile
    response_id: str
    call_id: str
    operation_id: str
    idempotency_key: str | None

    def __post_init__(self) -> None:
        _require_host(is_registered(self.profile), "profile")
        _require_host(all(map(is_identifier, (self.response_id, self.call_id, self.operation_id))), "context")
        _require_host(self.idempotency_key is None or is_identifier(self.idempotency_key), "idempotency key")


class Malformed(NamedTuple):
    """Arguments that could not be read: one word why, and the SHA-256 of what was given."""

    reason: str
    sha256: str


def malformed(reason: str, given: object = None) -> Malformed:
    """Describe unreadable arguments by the digest of the provider's text, or of an object's canonical form.

    Where there is neither, the reason is digested.
    """
    text = given if type(given) is str else canonical_json(reason)
    if type(given) is dict:
        with contextlib.suppress(JsonError):
            text = canonical_json(plain_json(given))
    return Malformed(reason, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())


def _fixed_arguments(arguments: object) -> str | Malformed:
    if type(arguments) is Malformed:  # an inbound adapter could not read them
        _require_host(is_identifier(arguments.reason) and is_digest(arguments.sha256), "malformed arguments")
        return arguments
    try:
        text = canonical_json(plain_json(arguments))
    except JsonError as error:
        return malformed(error.reason)
    return text if len(text.encode("utf-8")) <= MAX_ARGUMENT_BYTES else malformed("size", text)


@dataclass(frozen=True)
class ToolCall:
    """A proposal fixed for good under a context; `bind_tool_call` makes it.

    `arguments` is canonical JSON text. Whoever needs a value decodes a copy of their own, so what was
    validated, authorized, approved and executed is one text. The proposal itself is not kept.
    """

    proposal: InitVar[ModelProposal]
    context: ExecutionContext
    name: str = field(init=False)
    arguments: str | Malformed = field(init=False)

    def __post_init__(self, proposal: ModelProposal) -> None:
        _require_host(type(proposal) is ModelProposal, "proposal")
        _require_host(type(self.context) is ExecutionContext, "context")
        name = proposal.name if is_identifier(proposal.name) else MALFORMED_NAME
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "arguments", _fixed_arguments(proposal.arguments))


def bind_tool_call(proposal: ModelProposal, context: ExecutionContext) -> ToolCall:
    """Fix a proposal under the host's context (OWASP LLM01: model output is input, and untrusted).

    Whatever the proposal holds, the answer is a `ToolCall`: unreadable arguments become `Malformed`, a name
    that is no identifier becomes the literal `(malformed)`. Raises `HostContextError` for anything but a
    `ModelProposal` and an `ExecutionContext`.
    """
    return ToolCall(proposal, context)


# ===== 6. Tools =====================================================================================
# What a tool's author writes. The author is trusted to be honest, not to be right: every answer is judged,
# every exception is caught at the call that raised it, and no text of either reaches a package. Answers have
# slots, so that reading a field runs nothing of the author's.


@dataclass(frozen=True)
class Revisions:
    """The labels under which an author publishes the parts of a tool: promises; the digest is evidence."""

    input_schema: str
    output_schema: str
    effect: str
    handler: str
    producer: str
    policy: str


@dataclass(frozen=True, slots=True)
class Resource:
    """What a principal may reach: its current revision, and whether its business state permits the action."""

    revision: str
    permits: bool


class Command(NamedTuple):
    """The one immutable order that a handler gets. `now` and `deadline` are seconds since the epoch.

    `arguments` is a copy of the handler's own. `expected_revision` is the resource revision that was
    authorized: a downstream that compares it as it writes closes the gap between check and use.
    """

    principal: Principal
    tool: str
    arguments: JsonObject
    operation_id: str
    idempotency_key: str | None
    request_sha256: str
    status_ref: str | None
    expected_revision: str
    now: int
    deadline: int | None


@dataclass(frozen=True, slots=True)
class HandlerResult:
    """What a handler answers; judged by `validate_output`. A write carries a receipt id, a read `None`."""

    data: Any
    producer_revision: str
    resource_revision: str
    observed_at: str
    request_id: str
    receipt_id: str | None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a downstream remembers of an effect: which operation, which request, which effect, what result."""

    status_ref: str
    request_sha256: str
    effect_revision: str
    result: HandlerResult


def _fields(value: Any) -> JsonObject:
    """Return the fields of a value with slots; one that was never set is `None`."""
    return {name: getattr(value, name, None) for name in type(value).__slots__}


class NotStarted(Exception):
    """An author's proof that no effect began or will begin. Exactly this type counts, no subclass."""

    CODES: Final = ("RATE_LIMIT", "TIMEOUT_BEFORE_EXECUTE", "BUSINESS_RULE_VIOLATION", "TOOL_ERROR")

    def __init__(self, code: str) -> None:
        if code not in self.CODES:
            raise ValueError("this code is no proof that nothing began")
        super().__init__(code)  # into `args`, also where the code was given by name

    @property
    def code(self) -> str:
        return str(self.args[0])


def _attempt(function: Callable[..., Any], *arguments: object) -> tuple[Any, Exception | None]:
    """Run an author's callable and nothing else inside the `try`; return its answer or its exception."""
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error


def _proven_code(error: Exception | None) -> str | None:
    """Return the code of a genuine `NotStarted`; any other exception, `Refused` included, proves nothing."""
    code = error.args[0] if type(error) is NotStarted and error.args else None
    return code if type(code) is str and code in NotStarted.CODES else None


@dataclass(frozen=True)
class ToolSpec:
    """One tool: its contracts, its limits and its author's callables. Judged when a `Registry` takes it.

    `echoes` maps an output field to the input argument it must equal. `max_output_bytes` bounds the data's
    canonical UTF-8, `max_output_depth` its nesting (a scalar is 0). `find_resource` answers `None` for what
    is absent and for what is forbidden alike (invariant 4). `rules` says what a schema cannot; it is asked
    again when a result is validated, so it must depend on the arguments alone.
    """

    name: str
    description: str
    risk: Literal["read", "write"]
    input_schema: JsonObject
    output_schema: JsonObject
    echoes: Mapping[str, str]
    max_output_bytes: int
    max_output_depth: int
    producer_label: str
    revisions: Revisions
    find_resource: Callable[[Principal, JsonObject], Resource | None]
    handler: Callable[[Command], HandlerResult]
    find_receipt: Callable[[Command], Receipt | None] | None = None
    rules: Callable[[JsonObject], list[Problem]] | None = None

    @property
    def writes(self) -> bool:
        return self.risk == "write"

    @once
    def contract(self) -> JsonObject:
        """The tool contract as an audit shows it; its digest follows the schemas, whatever the labels say."""
        contract_sha256 = digest({
            "kind": "tool-contract", "name": self.name, "risk": self.risk, "echoes": dict(self.echoes),
            "input_schema": self.input_schema, "output_schema": self.output_schema,
            "max_output_bytes": self.max_output_bytes, "max_output_depth": self.max_output_depth,
            "producer_label": self.producer_label,
        })
        return {"name": self.name, **vars(self.revisions), "contract_sha256": contract_sha256}

    @once
    def result_contract(self) -> JsonObject:
        """The contract of a whole `HandlerResult` of this tool."""
        return closed_object(
            data=self.output_schema,
            producer_revision={"const": self.revisions.producer},
            resource_revision=IDENTIFIER,
            observed_at=UTC_SECOND,
            request_id=IDENTIFIER,
            receipt_id=IDENTIFIER if self.writes else {"type": "null"},
        )


_REVISION_NAMES: Final = tuple(Revisions.__dataclass_fields__)
_UNREGISTERED_CONTRACT: Final = dict.fromkeys(("name", *_REVISION_NAMES, "contract_sha256"), UNREGISTERED)
_SPEC_CONTRACT: Final = closed_object(
    name={"type": "string", "maxLength": 64, "pattern": r"^[a-z][a-z0-9_]*$"},
    description={"type": "string", "minLength": 1, "maxLength": 1024},
    risk={"enum": ["read", "write"]},
    max_output_bytes={"type": "integer", "minimum": 1, "maximum": MAX_OUTPUT_BYTES},
    max_output_depth={"type": "integer", "minimum": 0, "maximum": MAX_OUTPUT_LEVELS},
    producer_label=IDENTIFIER,
    revisions=closed_object(**dict.fromkeys(_REVISION_NAMES, IDENTIFIER)),
)


def _require_callables(spec: ToolSpec) -> None:
    given = [spec.find_resource, spec.handler, *(f for f in (spec.find_receipt, spec.rules) if f is not None)]
    if not all(map(callable, given)):
        raise ContractError(f"tool {spec.name}: find_resource, handler, find_receipt and rules are callables")
    if (spec.find_receipt is not None) != spec.writes:
        raise ContractError(f"tool {spec.name}: a write needs find_receipt, a read has none")


def _registered(spec: ToolSpec) -> ToolSpec:
    """Return the registry's own copy of a sound tool."""
    if type(spec) is not ToolSpec or type(spec.revisions) is not Revisions:
        raise ContractError("a registry takes ToolSpec with Revisions")
    if not isinstance(spec.echoes, Mapping):
        raise ContractError("echoes map output fields to arguments")
    described = {name: getattr(spec, name) for name in _SPEC_CONTRACT["properties"]}
    for problem in validate(_SPEC_CONTRACT, {**described, "revisions": vars(spec.revisions)}):
        raise ContractError(f"tool at {problem.path}: {problem.message}")
    try:
        _require_encodable(spec.description)
    except JsonError as error:
        raise ContractError(str(error)) from None
    _require_callables(spec)
    copy = replace(
        spec, echoes=MappingProxyType(dict(spec.echoes)),
        input_schema=require_schema(spec.input_schema, role="input"),
        output_schema=require_schema(spec.output_schema, role="output"),
    )
    if [copy.input_schema.get("type"), copy.output_schema.get("type")] != ["object", "object"]:
        raise ContractError(f"tool {spec.name}: arguments and data are objects")
    for pair in copy.echoes.items():
        declared = copy.output_schema.get("properties", {}), copy.input_schema["properties"]
        if not all(type(name) is str and name in names for name, names in zip(pair, declared, strict=True)):
            raise ContractError(f"tool {spec.name}: an echo names a field that is not declared")
    return copy


class Registry:
    """The exact allow-list of tools (invariant 1): immutable, with a copy of every schema.

    Raises `ContractError` for a tool that is misdescribed, unbounded or named twice.
    """

    def __init__(self, specs: Iterable[ToolSpec]) -> None:
        tools: dict[str, ToolSpec] = {}
        for spec in map(_registered, specs):
            if spec.name in tools:
                raise ContractError("two tools bear one name")
            tools[spec.name] = spec
        self._tools: Final = MappingProxyType(tools)

    def __iter__(self) -> Iterator[ToolSpec]:
        return iter(self._tools.values())

    def find(self, name: str) -> ToolSpec | None:
        """Return the tool of exactly this name; nothing is imported, evaluated or guessed."""
        return self._tools.get(name)


# ===== 7. One invocation and its digests ============================================================
# Each digest document but the result's names its `kind`, so that no two can be confused.

Scope = tuple[str, str, str, str | None]    # tenant, subject, tool, idempotency key
Matter = tuple[str, str, str, str]          # tenant, subject, tool, canonical arguments

_RULE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def _is_declared_path(path: str, schema: JsonObject) -> bool:
    """Tell whether a JSON Pointer leads only through declared fields and array indexes."""
    first, *tokens = path.split("/")
    for token in tokens:
        declared = {pointer((name,))[1:]: inner for name, inner in schema.get("properties", {}).items()}
        if token in declared:
            schema = declared[token]
        elif "items" in schema and re.fullmatch("0|[1-9][0-9]{0,5}", token):
            schema = schema["items"]
        else:
            return False
    return first == ""


def _are_declared_problems(answer: object, schema: JsonObject) -> bool:
    """Tell whether a tool's rules answered with problems that hold no text of the model's own."""
    return type(answer) is list and all(
        type(problem) is Problem and type(problem.path) is str and type(problem.rule) is str
        and _RULE_NAME.fullmatch(problem.rule) is not None and _is_declared_path(problem.path, schema)
        for problem in answer
    )


@dataclass(frozen=True)
class Invocation:
    """The trusted context of one call: who asks, what was proposed, which contract answers.

    `spec` is `None` for an unregistered name. `Dispatcher.resolve` makes it. What it derives is computed
    once: the properties are cached.
    """

    principal: Principal
    call: ToolCall
    spec: ToolSpec | None

    def __post_init__(self) -> None:
        _require_host(type(self.principal) is Principal and type(self.call) is ToolCall, "principal or call")
        _require_host(self.spec is None or type(self.spec) is ToolSpec, "tool")
        _require_host(self.spec is None or self.spec.name == self.call.name, "tool")

    @property
    def tool(self) -> ToolSpec:
        """The registered tool; `Refused` with UNKNOWN_TOOL where there is none (invariant 1)."""
        if self.spec is None:
            raise Refused("UNKNOWN_TOOL")
        return self.spec

    @property
    def contract(self) -> JsonObject:
        return self.spec.contract if self.spec else _UNREGISTERED_CONTRACT

    def arguments(self) -> Any:
        """Decode a fresh copy of the arguments: one for each of the tool author's callables."""
        return _decode_canonical(str(self.call.arguments))

    @once
    def checked_arguments(self) -> Any:
        """The copy that only the dispatcher looks at."""
        return self.arguments()

    @once
    def input_verdict(self) -> tuple[str, tuple[Problem, ...]]:
        """The code with which contract and rules answer these arguments, and why (invariant 2)."""
        if self.spec is None:
            return "UNKNOWN_TOOL", ()
        if isinstance(self.call.arguments, Malformed):
            return "INVALID_ARGUMENTS", (Problem("", self.call.arguments.reason, "could not be read"),)
        problems = validate(self.spec.input_schema, self.checked_arguments)
        if problems or self.spec.rules is None:
            return "INVALID_ARGUMENTS" if problems else "OK", tuple(problems)
        answer, error = _attempt(self.spec.rules, self.arguments())
        if not _are_declared_problems(answer, self.spec.input_schema):  # after an exception it is `None`
            return _proven_code(error) or "TOOL_ERROR", ()
        return "INVALID_ARGUMENTS" if answer else "OK", tuple(answer)

    @property
    def violations(self) -> list[JsonObject]:
        """What a model may know about its bad arguments: declared paths and rules, never its own text."""
        broken = dict.fromkeys((problem.path, problem.rule) for problem in self.input_verdict[1])
        return [{"path": path, "rule": rule} for path, rule in [*broken][:MAX_VIOLATIONS]]

    @once
    def request_sha256(self) -> str:
        """Bind the business intent: who wants which tool to do what. The key only names it: it stays out."""
        arguments, contract = self.call.arguments, self.contract
        return digest({
            "kind": "request", "tenant_id": self.principal.tenant_id, "subject_id": self.principal.subject_id,
            "tool": self.call.name,
            "arguments": arguments._asdict() if isinstance(arguments, Malformed) else arguments,
            **{name: contract[name] for name in ("input_schema", "output_schema", "effect")},
        })

    @property
    def identity_sha256(self) -> str:
        """The provider's call identity: the same ids under another principal are another call."""
        context = self.call.context
        return digest({
            "kind": "call-identity",
            "tenant_id": self.principal.tenant_id, "subject_id": self.principal.subject_id,
            "profile": vars(context.profile), "response_id": context.response_id, "call_id": context.call_id,
        })

    def fingerprint_sha256(self, purpose: Purpose) -> str:
        """What one call identity stands for, for good: one request, one operation, one key, one purpose."""
        context = self.call.context
        return digest({
            "kind": "call-fingerprint", "purpose": purpose, "request_sha256": self.request_sha256,
            "operation_id": context.operation_id, "idempotency_key": context.idempotency_key,
        })

    @property
    def scope(self) -> Scope:
        """The room in which at most one effect happens (invariant 6)."""
        principal = self.principal
        return principal.tenant_id, principal.subject_id, self.call.name, self.call.context.idempotency_key

    @property
    def matter(self) -> Matter:
        """The same wish under any key or revision: an unresolved outcome blocks all of it."""
        return self.principal.tenant_id, self.principal.subject_id, self.call.name, str(self.call.arguments)

    @property
    def intent(self) -> tuple[str, ...]:
        """What a replay must share with the call that took effect."""
        bound = ("output_schema", "effect", "handler", "producer", "contract_sha256")
        profile = vars(self.call.context.profile).values()
        return self.request_sha256, *profile, *(self.contract[name] for name in bound)

    @once
    def idempotency_ref(self) -> str | None:
        """The digest that stands for the idempotency scope in an audit; `None` without a key."""
        tenant_id, subject_id, tool, key = self.scope
        return None if key is None else "sha256:" + digest({
            "kind": "idempotency-scope",
            "tenant_id": tenant_id, "subject_id": subject_id, "tool": tool, "idempotency_key": key,
        })

    @once
    def status_ref(self) -> str | None:
        """Where a write's outcome is found again: a locator, no secret. `None` but for a write with a key."""
        if self.idempotency_ref is None or self.spec is None or not self.spec.writes:
            return None
        return "status_" + digest({
            "kind": "status-reference",
            "idempotency_ref": self.idempotency_ref, "request_sha256": self.request_sha256,
        })[:32]


# ===== 8. Approvals =================================================================================
# Consent is for one exact call in one exact state, and for a minute. It is signed, because it travels through
# hands that are not the approver's; it is judged by signing again, because a signature is no list of fields.

_APPROVAL_FIELDS: Final[JsonObject] = {
    "approval_id": IDENTIFIER,
    "approver_id": IDENTIFIER,
    "expires_at": {"type": "integer", "minimum": 1, "maximum": MAX_INSTANT + MAX_APPROVAL_SECONDS},
}
_APPROVAL_CONTRACT: Final = closed_object(**_APPROVAL_FIELDS)


@dataclass(frozen=True, slots=True)
class Approval:
    """A human's consent, signed by the authority. `expires_at` is in seconds since the epoch, half-open."""

    approval_id: str
    approver_id: str
    expires_at: int
    mac: str = field(repr=False)

    def public(self) -> JsonObject:
        """The part that an audit keeps."""
        return {name: getattr(self, name, None) for name in _APPROVAL_FIELDS}


def is_resource(answer: object) -> TypeGuard[Resource]:
    """Tell whether an author's answer grants access: exactly a `Resource`, whole and well typed."""
    return type(answer) is Resource and is_identifier(getattr(answer, "revision", None)) and (
        type(getattr(answer, "permits", None)) is bool)


class ApprovalAuthority:
    """Issues and judges approvals under one secret key of at least 32 bytes (HMAC-SHA-256, RFC 2104).

    Raises `HostContextError` for a short key or for approvers that are not identifiers. One authority and
    one ledger belong to one downstream.
    """

    def __init__(self, key: bytes, approvers: Iterable[str]) -> None:
        _require_host(not isinstance(approvers, str), "approvers")  # whose letters would each be one
        eligible = (*approvers,)
        _require_host(type(key) is bytes and len(key) >= 32, "approval key")
        _require_host(all(map(is_identifier, eligible)), "approver")
        self._key = key
        self._approvers = {*eligible}
        self._revoked: set[str] = set()

    def issue(
        self, invocation: Invocation, resource: Resource | None, *,
        approver_id: str, expires_at: int, approval_id: str,
    ) -> Approval:
        """Sign consent to one call in one resource state. It signs what it is given: only `verify` judges."""
        public = {"approval_id": approval_id, "approver_id": approver_id, "expires_at": expires_at}
        return Approval(**public, mac=self._mac(public, invocation, resource))  # type: ignore[arg-type]

    def revoke(self, approval_id: str) -> None:
        """Withdraw one approval."""
        self._revoked.add(approval_id)

    def dismiss(self, approver_id: str) -> None:
        """Take an approver off the list; approvals already given by them are worth nothing from now on."""
        self._approvers.discard(approver_id)

    def verify(
        self, approval: object, invocation: Invocation, resource: object, now: int
    ) -> TypeGuard[Approval]:
        """Judge one approval at `now` (seconds since the epoch); anything not entirely right is `False`.

        Verifying means recomputing: the mac binds the call, the key, the request, the tool contract and the
        resource revision that the approver saw (invariant 5).
        """
        if type(approval) is not Approval or type(invocation) is not Invocation:
            return False
        if not is_resource(resource) or not is_instant(now) or not is_digest(getattr(approval, "mac", None)):
            return False
        public = approval.public()
        approval_id, approver_id, expires_at = public.values()
        if not is_identifier(approval_id) or approval_id in self._revoked:
            return False
        if not is_identifier(approver_id) or approver_id not in self._approvers:
            return False
        if approver_id == invocation.principal.subject_id:
            return False
        if type(expires_at) is not int or not now < expires_at <= now + MAX_APPROVAL_SECONDS:
            return False
        return hmac.compare_digest(approval.mac, self._mac(public, invocation, resource))

    def _mac(self, public: JsonObject, invocation: Invocation, resource: object) -> str:
        context = invocation.call.context
        document = {
            "kind": "approval", "approval": public,
            "profile": vars(context.profile), "response_id": context.response_id, "call_id": context.call_id,
            "operation_id": context.operation_id, "idempotency_key": context.idempotency_key,
            "request_sha256": invocation.request_sha256, "tool_contract": invocation.contract,
            "resource_revision": resource.revision if isinstance(resource, Resource) else None,
        }
        return hmac.digest(self._key, canonical_json(document).encode("utf-8"), "sha256").hex()


# ===== 9. Results: the two projections, built and rebuilt ===========================================
# One function builds every package from an invocation and the few facts that it cannot supply. Validation
# takes those facts out of a package, vets them, builds again and compares: the rebuilt package is the schema.


class ResultContractError(ValueError):
    """A package that must not be sent on. `problems` says where it is wrong."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{readable(problem.path)} {problem.rule}" for problem in problems))
        self.problems = problems


class Evidence(NamedTuple):
    """What a downstream answered, after it passed its contract. Immutable: the data is canonical text."""

    data_json: str
    resource_revision: str
    observed_at: str
    request_id: str
    receipt_id: str | None


class Ending(NamedTuple):
    """All that a package tells beyond its invocation. `code` is `OK`, with evidence, or a catalog code.

    `status_ref` counts only for OUTCOME_UNKNOWN, whose unresolved operation another key may own.
    """

    code: str
    recorded_at: str
    delivery: str = "fresh"
    evidence: Evidence | None = None
    approval: JsonObject | None = None
    status_ref: str | None = None


def _model_error(policy: ErrorPolicy, invocation: Invocation) -> JsonObject:
    shown = {name: getattr(policy, name) for name in (
        "code", "category", "safe_message", "recovery", "retry_after_ms")}
    return {**shown, "violations": invocation.violations if policy.code == "INVALID_ARGUMENTS" else []}


def _provenance(invocation: Invocation, evidence: Evidence | None, recorded_at: str) -> JsonObject:
    """Say whose words these are: a producer's, to be distrusted as data, or the dispatcher's own."""
    if evidence is None:
        return {
            "source_label": DISPATCHER_LABEL, "producer_revision": DISPATCHER_REVISION,
            "resource_revision": None, "observed_at": recorded_at, "trust": "trusted_control",
        }
    return {
        "source_label": invocation.tool.producer_label,
        "producer_revision": invocation.contract["producer"],
        "resource_revision": evidence.resource_revision,
        "observed_at": evidence.observed_at,
        "trust": "untrusted_data",
    }


def _model_result(invocation: Invocation, ending: Ending) -> JsonObject:
    policy = policy_of(ending.code)
    evidence = ending.evidence
    return {
        "schema_version": MODEL_RESULT_VERSION,
        "status": policy.status,
        "data": _decode_canonical(evidence.data_json) if evidence else None,
        "error": None if policy is SUCCESS else _model_error(policy, invocation),
        "execution": {
            "outcome": policy.outcome, "delivery": ending.delivery, "complete": True, "truncated": False},
        "provenance": _provenance(invocation, evidence, ending.recorded_at),
    }


def _shown_status_ref(invocation: Invocation, ending: Ending) -> str | None:
    if ending.code == "OUTCOME_UNKNOWN":
        return ending.status_ref
    return invocation.status_ref if ending.code in ("OK", "OUTPUT_CONTRACT_VIOLATION") else None


def _redactions(call: ToolCall) -> list[str]:
    """Name the parts of the proposal whose text was not kept."""
    parts = {"/name": call.name == MALFORMED_NAME, "/arguments": isinstance(call.arguments, Malformed)}
    return [part for part, redacted in parts.items() if redacted]


def _protected_audit(invocation: Invocation, ending: Ending, result_sha256: str) -> JsonObject:
    principal, context, evidence = invocation.principal, invocation.call.context, ending.evidence
    audit: JsonObject = {
        "schema_version": AUDIT_VERSION,
        "visibility": "protected_audit",
        "operation_id": context.operation_id,
        "principal_ref": principal.ref,
        "idempotency_ref": invocation.idempotency_ref,
        "recorded_at": ending.recorded_at,
        "provider_context": {
            **vars(context.profile), "response_id": context.response_id, "call_id": context.call_id},
        "tool_contract": dict(invocation.contract),
        "approval": ending.approval,
        "downstream": {
            "request_id": evidence.request_id if evidence else None,
            "receipt_id": evidence.receipt_id if evidence else None,
            "status_ref": _shown_status_ref(invocation, ending),
        },
        "redactions": _redactions(invocation.call),
        "binding": {"request_sha256": invocation.request_sha256, "result_sha256": result_sha256},
    }
    # The third digest binds the whole audit but itself, and the plain values behind the audit's references.
    audit["binding"]["call_binding_sha256"] = digest({
        "kind": "call-binding", "audit": audit, "idempotency_key": context.idempotency_key,
        "tenant_id": principal.tenant_id, "subject_id": principal.subject_id,
    })
    return audit


def build_package(invocation: Invocation, ending: Ending) -> Package:
    """Build the one package that this invocation with this ending has (invariants 9 and 10)."""
    model_result = _model_result(invocation, ending)
    return {
        "model_result": model_result,
        "protected_audit": _protected_audit(invocation, ending, digest(model_result)),
    }


# --- Output: what a handler or a receipt answered ---


def _evidence(invocation: Invocation, document: JsonObject) -> tuple[Evidence | None, list[Problem]]:
    """Turn a plain result into evidence, or say why it is none."""
    if invocation.input_verdict[0] != "OK":
        return None, [Problem("", "impossible", "a call that never ran has no output")]
    spec = invocation.tool
    problems = validate(spec.result_contract, document)
    if problems:
        return None, problems
    data, arguments = document["data"], invocation.checked_arguments
    problems = [
        _problem(("data", name), "echo", argument) for name, argument in spec.echoes.items()
        if not same_json(arguments[argument], data[name])
    ]
    names: set[str] = set()
    if _survey(data, names) > spec.max_output_depth:
        problems.append(_problem(("data",), "depth", spec.max_output_depth))
    if any(is_forbidden_name(name, "output") for name in names):
        problems.append(Problem("/data", "name", "must hold no sensitive name"))
    text = canonical_json(data)
    if len(text.encode("utf-8")) > spec.max_output_bytes:
        problems.append(_problem(("data",), "bytes", spec.max_output_bytes))
    if problems:
        return None, problems
    return Evidence(text, *(document[name] for name in Evidence._fields[1:])), []


def _examined_output(invocation: Invocation, result: object) -> tuple[Evidence | None, list[Problem]]:
    """Copy and check a result in one go, so that what was checked is what is kept."""
    if type(invocation) is not Invocation:
        return None, [Problem("", "invocation", "must be an Invocation")]
    if type(result) is not HandlerResult:
        return None, [Problem("", "type", "must be a HandlerResult")]
    try:
        document = plain_json(_fields(result))
    except JsonError as error:
        return None, [Problem("", error.reason, str(error))]
    return _evidence(invocation, document)


def validate_output(invocation: Invocation, result: object) -> list[Problem]:
    """Check a handler's result against the tool's contract and limits; never raises (invariant 8)."""
    return _examined_output(invocation, result)[1]


# --- Validation: take the claims, vet them, build again, compare ---

# What trusted context cannot supply, and where a package says it. A claim with an empty contract is judged by
# the tool's own contract, as part of the output it came from.
_DELIVERIES: Final = ("fresh", "local_replay", "receipt_reconciled")
_CLAIMS: Final = open_object(
    model_result=open_object(
        data={},
        error=nullable(open_object(code={"enum": [*ERROR_CATALOG]})),
        execution=open_object(delivery={"enum": [*_DELIVERIES]}),
        provenance=open_object(resource_revision={}, observed_at={}),
    ),
    protected_audit=open_object(
        recorded_at=UTC_SECOND,
        approval=nullable(_APPROVAL_CONTRACT),
        downstream=open_object(request_id={}, receipt_id={}, status_ref=nullable(IDENTIFIER)),
    ),
)

# Codes by how far a call could have come. A conflict of call ids can meet any call.
_ANY_INPUT_CODES: Final = {"CALL_ID_CONFLICT", "NOT_FOUND", "STATUS_CONFLICT", *NotStarted.CODES}
_READ_CODES: Final = {*_ANY_INPUT_CODES, "OK", "OUTPUT_CONTRACT_VIOLATION"}
_KEYLESS_WRITE_CODES: Final = {*_ANY_INPUT_CODES, "IDEMPOTENCY_KEY_REQUIRED"}
_WRITE_CODES: Final = {
    *_READ_CODES, "IDEMPOTENCY_CONFLICT", "APPROVAL_REQUIRED", "APPROVAL_INVALID", "OUTCOME_UNKNOWN",
}


def _copied_package(package: object) -> tuple[Any, list[Problem]]:
    try:
        return plain_json(package), []
    except JsonError as error:
        return None, [Problem("", error.reason, str(error))]


def _unbelievable(claims: JsonObject, package: object) -> list[Problem]:
    return [p._replace(rule="missing") if p.rule == "required" else p for p in validate(claims, package)]


_NO_ENDING: Final = Ending("TOOL_ERROR", "")
_CLAIMED_AT: Final = {
    "data": "/model_result", "resource_revision": "/model_result/provenance",
    "observed_at": "/model_result/provenance", "request_id": "/protected_audit/downstream",
    "receipt_id": "/protected_audit/downstream",
}


def _possible_codes(invocation: Invocation) -> set[str]:
    verdict = invocation.input_verdict[0]
    if verdict != "OK":
        return {verdict, "CALL_ID_CONFLICT"}
    if not invocation.tool.writes:
        return _READ_CODES
    return _KEYLESS_WRITE_CODES if invocation.call.context.idempotency_key is None else _WRITE_CODES


def _implausible(invocation: Invocation, code: str, model: JsonObject, audit: JsonObject) -> list[Problem]:
    """Say which claims this invocation could not have led to, whatever their digests."""
    spec = invocation.spec
    wrong = {
        "/model_result/status": code not in _possible_codes(invocation),
        "/protected_audit/downstream/status_ref":
            code == "OUTCOME_UNKNOWN" and audit["downstream"]["status_ref"] is None,
    }
    if code == "OK" and spec is not None:
        approver, subject = (audit["approval"] or {}).get("approver_id"), invocation.principal.subject_id
        delivery = model["execution"]["delivery"]
        wrong["/protected_audit/approval"] = spec.writes and approver in (None, subject)
        wrong["/model_result/execution/delivery"] = not spec.writes and delivery != "fresh"
    return [Problem(path, "impossible", "must follow from the call") for path, bad in wrong.items() if bad]


def _claimed_ending(invocation: Invocation, package: Any) -> tuple[Ending, list[Problem]]:
    """Take the claims out of a plain package, vet them, and return the ending that they describe."""
    problems = _unbelievable(_CLAIMS, package)
    if problems:
        return _NO_ENDING, problems
    model, audit = package["model_result"], package["protected_audit"]
    code = "OK" if model["error"] is None else model["error"]["code"]
    problems = _implausible(invocation, code, model, audit)
    if problems or code != "OK":  # an error has no evidence, whatever it claims
        return Ending(code, audit["recorded_at"], status_ref=audit["downstream"]["status_ref"]), problems
    evidence, problems = _evidence(invocation, {
        "data": model["data"], "producer_revision": invocation.contract["producer"],
        **{name: model["provenance"][name] for name in ("resource_revision", "observed_at")},
        **{name: audit["downstream"][name] for name in ("request_id", "receipt_id")},
    })
    problems = [p._replace(path=_CLAIMED_AT[p.path.split("/")[1]] + p.path) for p in problems]
    approval = audit["approval"] if invocation.tool.writes else None
    return Ending(code, audit["recorded_at"], model["execution"]["delivery"], evidence, approval), problems


_ABSENT: Final = object()


def _compare(expected: JsonObject, actual: JsonObject, path: Tokens, found: list[Problem]) -> None:
    """Add where a given object differs from the rebuilt one, member by member, by JSON equality."""
    for name, value in expected.items():
        other = actual.get(name, _ABSENT)
        if type(value) is dict and type(other) is dict:
            _compare(value, other, (*path, name), found)
        elif other is _ABSENT:
            found.append(Problem(pointer((*path, name)), "missing", "must be present"))
        elif value is not other and not same_json(value, other):
            found.append(Problem(pointer((*path, name)), "rebuilt", "must be what trusted context leads to"))
    if not actual.keys() <= expected.keys():
        found.append(Problem(pointer(path), "unexpected", "must hold no other field"))


def _rebuild_copy(invocation: Invocation, copy: Any) -> tuple[Package, list[Problem]]:
    ending, problems = _claimed_ending(invocation, copy)
    if problems:
        return {}, problems
    rebuilt = build_package(invocation, ending)
    _compare(rebuilt, copy, (), problems)
    return rebuilt, problems


def _rebuild(invocation: Invocation, package: object) -> tuple[Package, list[Problem]]:
    """Return the package that this invocation and the given claims lead to, and how the given one differs."""
    if type(invocation) is not Invocation:
        return {}, [Problem("", "invocation", "must be an Invocation")]
    copy, problems = _copied_package(package)
    return ({}, problems) if problems else _rebuild_copy(invocation, copy)


def validate_result(invocation: Invocation, package: object) -> list[Problem]:
    """Say where a package differs from the one that its invocation would have produced; never raises.

    Returns an empty list for a sound package. A package whose claims cannot be believed is reported at those
    claims; any other at every pointer where it differs from the rebuilt one, with the rule `missing`,
    `unexpected` (at the parent) or `rebuilt` (invariant 9). Who can also recompute the unkeyed digests can
    still change a claim: a digest is evidence of consistency, not of origin.
    """
    return _rebuild(invocation, package)[1]


# --- One turn: all results of one provider response ---


def _is_turn(invocations: Any) -> bool:
    if not is_sequence(invocations) or not 1 <= len(invocations) <= MAX_CALLS:
        return False
    if not all(type(invocation) is Invocation for invocation in invocations):
        return False
    contexts = [invocation.call.context for invocation in invocations]
    turns = {(invocation.principal, invocation.call.context.profile, invocation.call.context.response_id)
             for invocation in invocations}
    return len(turns) == 1 and len({context.call_id for context in contexts}) == len(contexts)


_CLAIMED_CALL: Final = open_object(
    protected_audit=open_object(provider_context=open_object(call_id=IDENTIFIER)))


def _rebuild_set(invocations: Any, packages: Any) -> tuple[list[Package], list[Problem]]:
    """Return the rebuilt packages in call order, and all problems of the turn."""
    if not _is_turn(invocations) or not is_sequence(packages) or len(packages) > MAX_CALLS:
        return [], [Problem("", "turn", "must be the calls and results of one turn")]
    expected = {invocation.call.context.call_id: invocation for invocation in invocations}
    rebuilt: dict[str, Package] = {}
    problems: list[Problem] = []
    for index, package in enumerate(packages):
        copy, found = _copied_package(package)
        found = found or _unbelievable(_CLAIMED_CALL, copy)
        call_id = "" if found else copy["protected_audit"]["provider_context"]["call_id"]
        if not found and call_id not in expected:
            found = [Problem("", "unknown", "must answer a call of this turn")]
        elif call_id in rebuilt:
            found = [Problem("", "duplicate", "must answer a call that has no result yet")]
        elif not found:
            rebuilt[call_id], found = _rebuild_copy(expected[call_id], copy)
        problems += [problem._replace(path=f"/{index}{problem.path}") for problem in found]
    unanswered = expected.keys() - rebuilt.keys()
    problems += [Problem("", "missing", "must answer every call")] * len(unanswered)
    return [rebuilt[call_id] for call_id in expected if call_id in rebuilt], problems


def validate_result_set(invocations: Sequence[Invocation], packages: Sequence[object]) -> list[Problem]:
    """Check the results of one turn, in any order; paths are led by the package's index; never raises.

    The turn has one principal, profile and response, and every call exactly one result: beyond the rules of
    `validate_result` there are `turn`, `missing` (both at the root), `unknown` and `duplicate`.
    """
    return _rebuild_set(invocations, packages)[1]


# ===== 10. The ledger ===============================================================================
#
#     absent --claim--> in_progress --commit--> committed
#                       in_progress --doubt---> unknown --commit--> committed (evidence from a status query)
#                       in_progress --release-> absent                        (NotStarted from the handler)
#                       unknown -----release--> absent                        (NotStarted from a status query)


class Operation(NamedTuple):
    """One attempt at one effect: an immutable record, replaced whole by each transition.

    The command is the handler's own, its arguments included; what was asked is read from `matter`.
    """

    scope: Scope
    matter: Matter
    intent: tuple[str, ...]
    command: Command
    approval: Approval
    state: Literal["in_progress", "unknown", "committed"] = "in_progress"
    evidence: Evidence | None = None

    @property
    def status_ref(self) -> str:
        return str(self.command.status_ref)


_NO_SCOPE: Final = ("", "", "", None)


class Ledger:
    """Call identities and operations, in memory, under one lock that no callback ever runs under.

    It is the seam for a durable one, which on opening turns every `in_progress` into `unknown`. A transition
    replaces exactly the record it was decided on, else it changes nothing and returns `False` (compare and
    swap): whoever was slower answers as a retry would. It grows with the calls and is never pruned.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[bytes, bytes] = {}
        # One table is the truth: a transition is one store into it, so an interruption finds it done or not
        # begun. The other two only point into it and may point to what has gone or changed since.
        self._operations: dict[Scope, Operation] = {}
        self._attempted: dict[Matter, Scope] = {}
        self._references: dict[str, Scope] = {}

    def bind_call(self, identity: str, fingerprint: str) -> bool:
        """Bind a call identity to a fingerprint for good (both hex); tell whether it is bound to this one."""
        value = bytes.fromhex(fingerprint)  # raw bytes: half the memory of a table that only grows
        with self._lock:
            return self._calls.setdefault(bytes.fromhex(identity), value) == value

    def find(self, scope: Scope) -> Operation | None:
        with self._lock:
            return self._operations.get(scope)

    def find_unresolved(self, matter: Matter) -> Operation | None:
        """Return the operation on these very arguments that is in progress or unknown, under whatever key."""
        with self._lock:
            return self._standing_unresolved(matter)

    def find_reference(self, status_ref: str) -> Operation | None:
        with self._lock:
            operation = self._operations.get(self._references.get(status_ref, _NO_SCOPE))
            return operation if operation and operation.status_ref == status_ref else None

    def claim(self, operation: Operation) -> Operation:
        """Record an attempt where nothing stands in its way; return the operation that stands now.

        That is `operation` itself, or the one that was there first: an unresolved one before a settled one.
        """
        with self._lock:
            standing = self._standing_unresolved(operation.matter) or self._operations.get(operation.scope)
            if standing is None:
                self._references[operation.status_ref] = operation.scope
                self._attempted[operation.matter] = operation.scope
                self._operations[operation.scope] = operation
            return standing or operation

    def commit(self, operation: Operation, evidence: Evidence) -> bool:
        """Settle an operation in progress or unknown: its effect is proven, and so is its result."""
        return self._move(operation, ("in_progress", "unknown"), state="committed", evidence=evidence)

    def doubt(self, operation: Operation) -> bool:
        """Give up an operation in progress whose ending nobody saw."""
        return self._move(operation, ("in_progress",), state="unknown")

    def release(self, operation: Operation) -> bool:
        """Forget an operation in progress or unknown that provably never began."""
        return self._move(operation, ("in_progress", "unknown"), state="absent")

    def _standing_unresolved(self, matter: Matter) -> Operation | None:
        operation = self._operations.get(self._attempted.get(matter, _NO_SCOPE))
        if operation is None or operation.state == "committed" or operation.matter != matter:
            return None
        return operation

    def _move(self, operation: Operation, states: tuple[str, ...], *, state: Any, **changes: Any) -> bool:
        with self._lock:
            if self._operations.get(operation.scope) is not operation or operation.state not in states:
                return False
            if state == "absent":
                del self._operations[operation.scope]
            else:
                self._operations[operation.scope] = operation._replace(state=state, **changes)
            return True


# ===== 11. The dispatcher ===========================================================================
# One page of gates, and their order is the argument: what a call is comes before what it may do, that before
# what it would do, and nothing is claimed until everything else has said yes. A gate returns a fact or
# raises `Refused`; one `except` turns the refusal into a package, so that every way out is the same way.


def _reachable_resource(invocation: Invocation) -> Resource:
    """Ask the tool's author; absent, forbidden and nonsense are one answer (invariant 4)."""
    answer, error = _attempt(invocation.tool.find_resource, invocation.principal, invocation.arguments())
    if error is not None:
        raise Refused(_proven_code(error) or "TOOL_ERROR")
    if not is_resource(answer):
        raise Refused("NOT_FOUND")
    return answer


def _command(invocation: Invocation, resource: Resource, now: int, deadline: int | None) -> Command:
    context = invocation.call.context
    return Command(
        invocation.principal, invocation.call.name, invocation.arguments(),
        context.operation_id, context.idempotency_key,
        invocation.request_sha256, invocation.status_ref, resource.revision, now, deadline,
    )


def _require_replayable(invocation: Invocation, standing: Operation | None) -> Operation | None:
    """Judge what stands in an invocation's way: an open outcome first, then another intent, then a replay."""
    if standing is None:
        return None
    if standing.state != "committed" and standing.matter == invocation.matter:
        raise Refused("OUTCOME_UNKNOWN", standing.status_ref)
    if standing.intent != invocation.intent:
        raise Refused("IDEMPOTENCY_CONFLICT")
    return standing


def _success(
    invocation: Invocation, delivery: str, evidence: Evidence | None, approval: Approval | None, now: int
) -> Package:
    public = approval.public() if approval else None
    return build_package(invocation, Ending("OK", utc_text(now), delivery, evidence, public))


def _is_receipt_of(receipt: object, operation: Operation, invocation: Invocation) -> bool:
    """Tell whether a receipt speaks of this operation's effect; its result is judged afterwards."""
    if type(receipt) is not Receipt:
        return False
    due = operation.status_ref, operation.command.request_sha256, invocation.contract["effect"]
    return same_json([*due], [*_fields(receipt).values()][:len(due)])


class Dispatcher:
    """The boundary. `observe(gate)` is called as each gate is entered; the last one is where a call ended.

    An observer's exceptions pass on unchanged; after the claim they leave the operation `unknown`.
    """

    def __init__(
        self, registry: Registry, authority: ApprovalAuthority, ledger: Ledger, *,
        observe: Callable[[str], object] | None = None,
    ) -> None:
        self.registry = registry
        self.authority = authority
        self.ledger = ledger
        self._observe = observe

    def resolve(self, principal: Principal, call: ToolCall) -> Invocation:
        """Return the trusted context of a call. Raises `HostContextError` for no principal or no call."""
        _require_host(type(call) is ToolCall, "call")
        return Invocation(principal, call, self.registry.find(call.name))

    def find_resource(self, invocation: Invocation) -> Resource | None:
        """Return the resource that an approver should look at; `None` where this call could not reach one."""
        try:
            return _reachable_resource(invocation) if invocation.input_verdict[0] == "OK" else None
        except Refused:
            return None

    def dispatch(
        self, principal: Principal, call: ToolCall, *,
        approvals: Sequence[object] = (), now: int, deadline: int | None = None,
    ) -> Package:
        """Decide one call, run it at most once, return its package, whatever the model said (invariant 10).

        `now` and `deadline` are whole seconds since the epoch by the host's clock; the deadline is half-open.
        Raises `HostContextError` for what only the host can have caused, before any state changes.
        """
        self._enter("host_context")
        invocation = self.resolve(principal, call)
        _require_host(is_sequence(approvals), "approvals")
        _require_host(is_instant(now) and (deadline is None or is_instant(deadline)), "now or deadline")
        try:
            tool = self._require_contract(invocation, "dispatch")
            resource = self._require_authorization(invocation)
            committed = self._require_idempotency(invocation) if tool.writes else None
            if committed:
                return self._replay(invocation, committed, now)
            self._require_business_state(resource)
            approval = self._require_approval(invocation, resource, approvals, now) if tool.writes else None
            self._require_deadline(now, deadline)
            command = _command(invocation, resource, now, deadline)
            if approval:
                return self._write(invocation, command, approval)
            return self._read(invocation, command)
        except Refused as refusal:
            return self._refusal(invocation, refusal, now)

    def query_operation_status(
        self, principal: Principal, call: ToolCall, *,
        status_ref: str, expected_request_sha256: str, now: int,
    ) -> Package:
        """Ask what became of an operation; never runs a handler (invariant 7).

        `call` repeats the write's proposal and key under a call identity of its own. `status_ref` and
        `expected_request_sha256` come from the audit of the package that left the outcome open. Raises
        `HostContextError` as `dispatch` does.
        """
        self._enter("host_context")
        invocation = self.resolve(principal, call)
        _require_host(is_identifier(status_ref), "status reference")
        _require_host(is_digest(expected_request_sha256) and is_instant(now), "expected digest or now")
        try:
            self._require_contract(invocation, "query_status")
            self._require_authorization(invocation)
            package: Package | None = None
            while package is None:  # again only where somebody else settled the operation meanwhile
                operation = self._require_operation(invocation, status_ref, expected_request_sha256)
                package = self._settle(invocation, operation, now)
            return package
        except Refused as refusal:
            return self._refusal(invocation, refusal, now)

    # --- Gates: each is entered, then returns a fact or refuses ---

    def _enter(self, gate: str) -> None:
        if self._observe is None:
            return
        try:
            self._observe(gate)
        except Refused as error:
            error.foreign = True  # an observer is no gate: what it raises is no refusal and passes on
            raise

    def _require_contract(self, invocation: Invocation, purpose: Purpose) -> ToolSpec:
        self._enter("call_identity")
        if not self.ledger.bind_call(invocation.identity_sha256, invocation.fingerprint_sha256(purpose)):
            raise Refused("CALL_ID_CONFLICT")
        self._enter("registry")
        tool = invocation.tool  # invariant 1
        self._enter("input")
        code, _ = invocation.input_verdict  # invariant 2
        if code != "OK":
            raise Refused(code)
        return tool

    def _require_authorization(self, invocation: Invocation) -> Resource:
        self._enter("authorization")
        return _reachable_resource(invocation)

    def _require_idempotency(self, invocation: Invocation) -> Operation | None:
        """Return the committed operation that a retry replays, `None` for a new one."""
        self._enter("idempotency")
        if invocation.call.context.idempotency_key is None:
            raise Refused("IDEMPOTENCY_KEY_REQUIRED")
        unresolved = self.ledger.find_unresolved(invocation.matter)
        return _require_replayable(invocation, unresolved or self.ledger.find(invocation.scope))

    def _require_business_state(self, resource: Resource) -> None:
        self._enter("business_state")
        if not resource.permits:
            raise Refused("BUSINESS_RULE_VIOLATION")

    def _require_approval(
        self, invocation: Invocation, resource: Resource, approvals: Sequence[object], now: int
    ) -> Approval:
        self._enter("approval")
        if not approvals:
            raise Refused("APPROVAL_REQUIRED")
        for approval in approvals[:MAX_APPROVALS]:
            if self.authority.verify(approval, invocation, resource, now):
                return approval
        raise Refused("APPROVAL_INVALID")

    def _require_deadline(self, now: int, deadline: int | None) -> None:
        self._enter("deadline")
        if deadline is not None and now >= deadline:
            raise Refused("TIMEOUT_BEFORE_EXECUTE")

    def _require_output(self, invocation: Invocation, result: object) -> Evidence:
        self._enter("output")
        evidence, _ = _examined_output(invocation, result)
        if evidence is None:
            raise Refused("OUTPUT_CONTRACT_VIOLATION")
        return evidence

    def _require_operation(self, invocation: Invocation, status_ref: str, request_sha256: str) -> Operation:
        self._enter("status_ref")
        operation = self.ledger.find_reference(status_ref)
        if operation is None or operation.scope[:2] != invocation.scope[:2]:
            raise Refused("NOT_FOUND")  # unknown, released, or another principal's: one answer (invariant 4)
        if operation.scope != invocation.scope or operation.intent != invocation.intent:
            raise Refused("STATUS_CONFLICT")
        if request_sha256 != operation.command.request_sha256:
            raise Refused("STATUS_CONFLICT")
        return operation

    # --- Endings ---

    def _read(self, invocation: Invocation, command: Command) -> Package:
        self._enter("handler")
        result, error = _attempt(invocation.tool.handler, command)
        if error is not None:
            raise Refused(_proven_code(error) or "TOOL_ERROR")
        return _success(invocation, "fresh", self._require_output(invocation, result), None, command.now)

    def _write(self, invocation: Invocation, command: Command, approval: Approval) -> Package:
        """Claim, run the handler once, leave the operation committed, released or unknown (invariant 6)."""
        operation = Operation(invocation.scope, invocation.matter, invocation.intent, command, approval)
        try:
            self._enter("claim")
            standing = self.ledger.claim(operation)
            if standing is not operation:
                return self._overtaken(invocation, standing, command.now)
            self._enter("handler")
            result, error = _attempt(invocation.tool.handler, command)
            if error is not None:
                code = _proven_code(error)
                if code is None:
                    raise Refused("OUTCOME_UNKNOWN", operation.status_ref)
                if self.ledger.release(operation):
                    raise Refused(code)
            elif self.ledger.commit(operation, evidence := self._require_output(invocation, result)):
                return _success(invocation, "fresh", evidence, approval, command.now)
            else:
                return self._outrun(invocation, operation)
            return self._overtaken(invocation, self.ledger.find(operation.scope), command.now)
        finally:  # whatever was raised by whom; it changes nothing once the operation is settled
            try:
                self.ledger.doubt(operation)
            except BaseException:  # an interruption fell into it
                self.ledger.doubt(operation)
                raise

    def _overtaken(self, invocation: Invocation, standing: Operation | None, now: int) -> Package:
        """Answer as a retry would: somebody else holds this scope or these very arguments."""
        committed = _require_replayable(invocation, standing)
        if committed is None:
            raise Refused("OUTCOME_UNKNOWN", invocation.status_ref)
        return self._replay(invocation, committed, now)

    def _outrun(self, invocation: Invocation, operation: Operation) -> Package:
        """Answer for an effect that others settled: with their record of it or with doubt (invariant 7)."""
        try:
            return self._overtaken(invocation, self.ledger.find(operation.scope), operation.command.now)
        except Refused:
            raise Refused("OUTCOME_UNKNOWN", operation.status_ref) from None

    def _replay(self, invocation: Invocation, committed: Operation, now: int) -> Package:
        return _success(invocation, "local_replay", committed.evidence, committed.approval, now)

    def _settle(self, invocation: Invocation, operation: Operation, now: int) -> Package | None:
        """Answer a status query from the record or a receipt; `None` where the record changed meanwhile."""
        if operation.state == "committed":
            return self._replay(invocation, operation, now)
        if operation.state == "in_progress":
            raise Refused("OUTCOME_UNKNOWN", operation.status_ref)
        self._enter("receipt")
        command = operation.command._replace(arguments=invocation.arguments(), now=now)  # a fresh copy
        receipt, error = _attempt(invocation.tool.find_receipt, command)  # type: ignore[arg-type]
        code = _proven_code(error)
        if code:
            if self.ledger.release(operation):
                raise Refused(code)
            return None
        if receipt is None:
            raise Refused("OUTCOME_UNKNOWN", operation.status_ref)
        if not _is_receipt_of(receipt, operation, invocation):
            raise Refused("STATUS_CONFLICT")
        evidence = self._require_output(invocation, _fields(receipt)["result"])
        if not self.ledger.commit(operation, evidence):
            return None
        return _success(invocation, "receipt_reconciled", evidence, operation.approval, now)

    def _refusal(self, invocation: Invocation, refusal: Refused, now: int) -> Package:
        if refusal.foreign:
            raise refusal
        return build_package(invocation, Ending(refusal.code, utc_text(now), status_ref=refusal.status_ref))


# ===== 12. Provider edges ===========================================================================
# Inbound, a provider's whole JSON response becomes calls; outbound, a package's model projection becomes the
# provider's result item. Only the fields named here are read: providers add others all the time.


class ProviderError(ValueError):
    """A provider response whose calls cannot be correlated; raised before anything runs."""


class ProviderCall(NamedTuple):
    """What a provider says about one call. `bind` adds what the host says: the two stay visibly apart."""

    proposal: ModelProposal
    profile: ProviderProfile
    response_id: str
    call_id: str

    def bind(self, *, operation_id: str, idempotency_key: str | None = None) -> ToolCall:
        """Return the call under the host's operation and key. Raises `HostContextError`."""
        return bind_tool_call(self.proposal, ExecutionContext(
            self.profile, self.response_id, self.call_id, operation_id, idempotency_key))


class _Envelope(NamedTuple):
    """Where one provider's response keeps its calls, as data."""

    items: str                  # the list that holds the calls among other items
    call_type: str              # the `type` of an item that is a call
    call_id: str                # the field that correlates a result
    arguments: str
    finished: tuple[str, str]   # a field and its value once all calls are complete; absent and null count too
    item_finished: tuple[str, str] | None = None


_ENVELOPES: Final[Mapping[str, _Envelope]] = MappingProxyType({
    "openai": _Envelope(
        "output", "function_call", "call_id", "arguments", ("status", "completed"), ("status", "completed")),
    "anthropic": _Envelope("content", "tool_use", "id", "input", ("stop_reason", "tool_use")),
    "google": _Envelope("steps", "function_call", "id", "arguments", ("status", "requires_action")),
})


def _require_envelope(document: Any, contract: JsonObject) -> Any:
    for problem in validate(contract, document):
        raise ProviderError(f"provider response at {readable(problem.path)}: {problem.message}")
    return document


def _is_finished(document: JsonObject, finished: tuple[str, str] | None) -> bool:
    if finished is None:
        return True
    value = document.get(finished[0])
    return value is None or same_json(finished[1], value)


def _read_calls(provider: str, response: object, read: Callable[[object], Any]) -> list[ProviderCall]:
    envelope = _ENVELOPES[provider]
    document = _require_envelope(response, open_object(id=IDENTIFIER, **{envelope.items: {"type": "array"}}))
    finished = _is_finished(document, envelope.finished)
    calls: dict[str, ProviderCall] = {}
    for item in document[envelope.items]:
        if validate(open_object(type={"const": envelope.call_type}), item):
            continue  # reasoning, text, thoughts: no calls
        call_id = _require_envelope(item, open_object(**{envelope.call_id: IDENTIFIER}))[envelope.call_id]
        if call_id in calls or len(calls) == MAX_CALLS:
            raise ProviderError("a response holds two calls of one id, or too many calls")
        given = item.get(envelope.arguments)
        complete = finished and _is_finished(item, envelope.item_finished)
        arguments = read(given) if complete else malformed("incomplete", given)
        proposal = ModelProposal(item.get("name"), arguments)
        calls[call_id] = ProviderCall(proposal, PROFILES[provider], document["id"], call_id)
    return [*calls.values()]


def _decoded_arguments(given: object) -> Any:
    """Decode a provider's argument text; nothing but a text is read, and nothing is unwrapped."""
    if type(given) is not str:
        return malformed("type", given)
    try:
        return decode_json(given, max_bytes=MAX_ARGUMENT_BYTES)
    except JsonError as error:
        return malformed(error.reason, given)


def from_openai_responses(response: JsonObject) -> list[ProviderCall]:
    """Read the calls of one OpenAI Responses API response, in order.

    `call_id` correlates, never `id`; `arguments` is JSON text. Raises `ProviderError` where calls cannot be
    correlated; arguments that cannot be read become `Malformed`, and so do all of an unfinished response.
    """
    return _read_calls("openai", response, _decoded_arguments)


def _given_arguments(given: object) -> Any:
    return given if type(given) is dict else malformed("type", given)


def from_anthropic_messages(message: JsonObject) -> list[ProviderCall]:
    """Read the calls of one Anthropic Messages API message; `input` is an object. Raises `ProviderError`."""
    return _read_calls("anthropic", message, _given_arguments)


def from_gemini_interactions(interaction: JsonObject) -> list[ProviderCall]:
    """Read the calls of one Gemini Interactions API interaction, in order. Raises `ProviderError`."""
    return _read_calls("google", interaction, _given_arguments)


# --- Outbound: the rebuilt model projection on the wire ---


def _require_result(provider: str, invocation: Invocation, package: object) -> JsonObject:
    rebuilt, problems = _rebuild(invocation, package)
    if not problems and invocation.call.context.profile != PROFILES[provider]:
        problems = [Problem("/protected_audit/provider_context", "profile", "must be this provider's call")]
    if problems:
        raise ResultContractError(problems)
    return rebuilt["model_result"]  # type: ignore[no-any-return]


def _result_item(invocation: Invocation, model_result: JsonObject) -> JsonObject:
    """Write one result in its provider's shape; the text is the one whose digest the audit holds."""
    context, text = invocation.call.context, canonical_json(model_result)
    parts, is_error = [{"type": "text", "text": text}], model_result["status"] != "succeeded"
    if context.profile.provider == "openai":
        return {"type": "function_call_output", "call_id": context.call_id, "output": text}
    if context.profile.provider == "anthropic":
        return {"type": "tool_result", "tool_use_id": context.call_id, "content": parts, "is_error": is_error}
    return {
        "type": "function_result", "name": invocation.call.name, "call_id": context.call_id,
        "is_error": is_error, "result": parts,
    }


def to_openai_responses(invocation: Invocation, package: object) -> JsonObject:
    """Map one result to an OpenAI `function_call_output`; it has no error flag, the text says it.

    Like its siblings it sends the rebuilt projection, never the caller's object (invariants 8 and 9), and
    raises `ResultContractError` for another provider's call or a package that fails `validate_result`.
    """
    return _result_item(invocation, _require_result("openai", invocation, package))


def to_anthropic_messages(invocation: Invocation, package: object) -> JsonObject:
    """Map one result to an Anthropic `tool_result` block. Raises `ResultContractError`."""
    return _result_item(invocation, _require_result("anthropic", invocation, package))


def _continuation(invocation: Invocation, items: list[JsonObject]) -> JsonObject:
    context = invocation.call.context
    if context.profile.provider == "anthropic":
        return {"role": "user", "content": items}  # tool_result blocks stand first, and nothing else follows
    previous = "previous_response_id" if context.profile.provider == "openai" else "previous_interaction_id"
    return {previous: context.response_id, "input": items}


def to_gemini_interactions(invocation: Invocation, package: object) -> JsonObject:
    """Map one result to a Gemini continuation; the host adds `model`. Raises `ResultContractError`."""
    model_result = _require_result("google", invocation, package)
    return _continuation(invocation, [_result_item(invocation, model_result)])


def continue_turn(invocations: Sequence[Invocation], packages: Sequence[object]) -> JsonObject:
    """Answer a whole turn: one result for each call, in call order, whatever order the packages come in.

    Raises `ResultContractError` for anything that `validate_result_set` reports.
    """
    rebuilt, problems = _rebuild_set(invocations, packages)
    if problems:
        raise ResultContractError(problems)
    results = [package["model_result"] for package in rebuilt]
    return _continuation(invocations[0], [*map(_result_item, invocations, results)])


# --- Tool definitions for a provider's request ---

# Strict modes refuse or move other keywords; the host enforces the full contract either way.
_ADVERTISED_KEYWORDS: Final = (
    "type", "title", "description", "enum", "properties", "required", "additionalProperties", "items",
)


def _advertised(schema: JsonObject) -> JsonObject:
    """Keep what every strict mode understands, and say the dropped bounds in words."""
    kept: JsonObject = {keyword: schema[keyword] for keyword in _ADVERTISED_KEYWORDS if keyword in schema}
    dropped = [f"{keyword} {canonical_json(schema[keyword])}" for keyword in schema if keyword not in kept]
    if dropped:
        kept["description"] = f"{schema.get('description', '')} ({'; '.join(dropped)})".lstrip()
    if "items" in schema:
        kept["items"] = _advertised(schema["items"])
    if "properties" in schema:
        kept["properties"] = {name: _advertised(inner) for name, inner in schema["properties"].items()}
    return kept


def _definition(spec: ToolSpec, provider: str) -> JsonObject:
    definition = {"name": spec.name, "description": spec.description}
    schema = _advertised(plain_json(spec.input_schema))
    if provider == "anthropic":
        return {**definition, "input_schema": schema, "strict": True}
    strict = {"strict": True} if provider == "openai" else {}
    return {"type": "function", **definition, "parameters": schema, **strict}


def advertise_tools(registry: Registry, profile: ProviderProfile) -> list[JsonObject]:
    """Write the registry's tools as one provider's definitions, from the contract that is enforced.

    Raises `HostContextError` for a profile that is not registered.
    """
    _require_host(is_registered(profile), "profile")
    return [_definition(spec, profile.provider) for spec in registry]


# ===== 13. The demo: a mock downstream with two tools ===============================================
# Everything above is generic. From here on there are orders and refund drafts, in memory, with faults.

FAULTS: Final = (
    "rate_limit", "tool_error", "timeout_after_commit", "timeout_after_commit_receipt_unavailable",
)


class Order(NamedTuple):
    tenant_id: str
    owner_id: str
    status: str
    revision: str


def _revisions(stem: str) -> Revisions:
    return Revisions(**{name: f"{stem}-{name.replace('_', '-')}-v1" for name in _REVISION_NAMES})


class MockDownstream:
    """Three orders, numbered refund drafts, receipts, and a `fault` that handlers meet until it is `none`.

    It drafts refunds and refunds nothing; `side_effect_count` counts drafts.
    """

    def __init__(self) -> None:
        self.orders = {
            "ORDER-7": Order("tenant-a", "user-1", "paid", "ORDER-7-r1"),
            "ORDER-8": Order("tenant-a", "user-2", "paid", "ORDER-8-r1"),
            "ORDER-9": Order("tenant-b", "user-1", "paid", "ORDER-9-r1"),
        }
        self.fault = "none"
        self.faults_met = 0
        self.side_effect_count = 0
        self._requests = 0
        self._receipts: dict[str, Receipt] = {}
        self._lock = threading.Lock()

    def amend(self, order_ref: str, **changes: str) -> None:
        """Change one order, and with it its revision."""
        with self._lock:
            order = self.orders[order_ref]
            stem, _, number = order.revision.rpartition("-r")
            self.orders[order_ref] = order._replace(**changes, revision=f"{stem}-r{int(number) + 1}")

    def tools(self) -> tuple[ToolSpec, ToolSpec]:
        """Describe the two tools: `get_order`, a read, and `create_refund_draft`, a write."""
        order_ref = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[A-Z0-9-]+$"}
        reason = {"type": "string", "enum": ["duplicate", "damaged", "other"]}
        status = {"type": "string", "enum": ["paid", "pending", "refunded"]}
        get_order = ToolSpec(
            name="get_order",
            description="Read the status of one order.",
            risk="read",
            input_schema=closed_object(order_ref=order_ref),
            output_schema=closed_object(order_ref=order_ref, status=status),
            echoes={"order_ref": "order_ref"},
            max_output_bytes=256,
            max_output_depth=1,
            producer_label="mock-order-service",
            revisions=_revisions("get-order"),
            find_resource=self._find_readable_order,
            handler=self._get_order,
        )
        create_refund_draft = ToolSpec(
            name="create_refund_draft",
            description="Draft a refund of one paid order for a human to complete; it refunds nothing.",
            risk="write",
            input_schema=closed_object(order_ref=order_ref, reason=reason),
            output_schema=closed_object(
                draft_id={"type": "string", "maxLength": 32, "pattern": r"^DRAFT-\d+$"},
                order_ref=order_ref, reason=reason,
            ),
            echoes={"order_ref": "order_ref", "reason": "reason"},
            max_output_bytes=256,
            max_output_depth=1,
            producer_label="mock-refund-service",
            revisions=_revisions("create-refund-draft"),
            find_resource=self._find_own_order,
            handler=self._create_refund_draft,
            find_receipt=self._find_receipt,
        )
        return get_order, create_refund_draft

    def _find_readable_order(self, principal: Principal, arguments: JsonObject) -> Resource | None:
        order = self.orders.get(arguments["order_ref"])
        if order is None or order.tenant_id != principal.tenant_id:
            return None
        if order.owner_id != principal.subject_id and "support_admin" not in principal.roles:
            return None
        return Resource(order.revision, permits=True)

    def _find_own_order(self, principal: Principal, arguments: JsonObject) -> Resource | None:
        order = self.orders.get(arguments["order_ref"])
        if order is None or (order.tenant_id, order.owner_id) != (principal.tenant_id, principal.subject_id):
            return None
        return Resource(order.revision, permits=order.status == "paid")

    def _get_order(self, command: Command) -> HandlerResult:
        with self._lock:
            order = self._current_order(command)
            data = {"order_ref": command.arguments["order_ref"], "status": order.status}
            return self._result(command, data, receipt_id=None)

    def _create_refund_draft(self, command: Command) -> HandlerResult:
        with self._lock:
            self._current_order(command)
            self.side_effect_count += 1
            number = self.side_effect_count
            data = {"draft_id": f"DRAFT-{number}", **command.arguments}
            result = self._result(command, data, receipt_id=f"receipt-{number}")
            if self.fault != "timeout_after_commit_receipt_unavailable":
                status_ref = str(command.status_ref)
                self._receipts[status_ref] = Receipt(
                    status_ref, command.request_sha256, "create-refund-draft-effect-v1", result)
            if self.fault != "none":
                self.faults_met += 1
                raise TimeoutError
            return result

    def _find_receipt(self, command: Command) -> Receipt | None:
        return self._receipts.get(str(command.status_ref))

    def _current_order(self, command: Command) -> Order:
        """Compare and set, under the lock: the order must still be the one that was authorized."""
        if self.fault.upper() in NotStarted.CODES:
            self.faults_met += 1
            raise NotStarted(self.fault.upper())
        order = self.orders[command.arguments["order_ref"]]
        if order.revision != command.expected_revision:
            raise NotStarted("BUSINESS_RULE_VIOLATION")
        return order

    def _result(self, command: Command, data: JsonObject, receipt_id: str | None) -> HandlerResult:
        self._requests += 1
        return HandlerResult(
            data,
            producer_revision=command.tool.replace("_", "-") + "-producer-v1",
            resource_revision=command.expected_revision,
            observed_at=utc_text(command.now),
            request_id=f"request-{self._requests}",
            receipt_id=receipt_id,
        )


def demo_dispatcher(
    downstream: MockDownstream | None = None, *, observe: Callable[[str], object] | None = None
) -> Dispatcher:
    """Wire a downstream (pass your own to hold on to it), registry, authority with a fresh key, ledger."""
    tools = (downstream or MockDownstream()).tools()
    authority = ApprovalAuthority(os.urandom(32), ["human-reviewer-1"])
    return Dispatcher(Registry(tools), authority, Ledger(), observe=observe)


# ===== 14. Fixtures =================================================================================
# A fixture is a file of cases, each a short story of calls with the ending that every step must have.

_SHORT: Final[JsonObject] = {"type": "string", "maxLength": 255}
_CASES: Final[JsonObject] = {"type": "array", "minItems": 1, "maxItems": 256}
_EXPECTED: Final = closed_object(
    code={"enum": ["OK", *ERROR_CATALOG]},
    status={"enum": ["succeeded", "failed", "unknown"]},
    outcome={"enum": ["not_started", "committed", "unknown"]},
    recovery={"enum": list(dict.fromkeys(["none", *(policy.recovery for policy in ERROR_CATALOG.values())]))},
    delivery={"enum": [*_DELIVERIES]},
    data=nullable({"type": "object"}),
    side_effect_count={"type": "integer", "minimum": 0, "maximum": MAX_SAFE_INTEGER},
)
_STEP: Final = closed_object(
    step_id=IDENTIFIER,
    action={"enum": ["dispatch", "query_status"]},
    proposal=closed_object(name=_SHORT, arguments={"type": "object"}),
    execution_context=closed_object(
        provider={"enum": [*PROFILES]}, api_family=IDENTIFIER, response_id=IDENTIFIER, call_id=IDENTIFIER,
        operation_id=IDENTIFIER, idempotency_key=nullable(IDENTIFIER), adapter_revision=IDENTIFIER,
    ),
    approval={"enum": ["none", "valid", "expired", "mismatched"]},
    now={"type": "integer", "minimum": 0, "maximum": MAX_INSTANT - MAX_APPROVAL_SECONDS},
    failure={"enum": ["none", "timeout_before_execute", *FAULTS]},
    status_ref_from=nullable(IDENTIFIER),
    expected=_EXPECTED,
)
FIXTURE_SCHEMA: Final = closed_object(
    schema_version={"const": FIXTURE_VERSION},
    contract=closed_object(
        model_result={"const": MODEL_RESULT_VERSION}, protected_audit={"const": AUDIT_VERSION}),
    cases={**_CASES, "items": closed_object(
        id=IDENTIFIER,
        principal=closed_object(
            tenant_id=IDENTIFIER, subject_id=IDENTIFIER,
            roles={"type": "array", "maxItems": MAX_ROLES, "items": IDENTIFIER},
        ),
        steps={**_CASES, "items": _STEP},
    )},
)


class FixtureError(ValueError):
    """A fixture that cannot be run. `problems` has every fault by JSON Pointer; the text shows up to 20."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        shown = problems[:MAX_PRINTED_PROBLEMS]
        lines = [f"{readable(problem.path)}: {problem.message}" for problem in shown]
        if len(problems) > len(shown):
            lines.append(f"... and {len(problems) - len(shown)} more")
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)


class FixtureIOError(FixtureError):
    """A fixture file that cannot be read; its path is never repeated."""

    def __init__(self) -> None:
        super().__init__([Problem("", "io", "the fixture cannot be read")])


Places = list[tuple[str, JsonObject]]       # well-shaped cases or steps, each with its JSON Pointer


def _well_shaped(path: str, items: list[JsonObject], misshapen: set[str]) -> Places:
    return [(f"{path}/{n}", item) for n, item in enumerate(items) if f"{path}/{n}" not in misshapen]


def _repeated(name: str, places: Places) -> Iterator[Problem]:
    seen: set[str] = set()
    for path, item in places:
        if item[name] in seen:
            yield Problem(f"{path}/{name}", "unique", "must not be repeated")
        seen.add(item[name])


def _profile(step: JsonObject) -> ProviderProfile:
    context = step["execution_context"]
    return ProviderProfile(context["provider"], context["api_family"], context["adapter_revision"])


def _expectation_problems(path: str, expected: JsonObject) -> Iterator[Problem]:
    """Check that an expectation agrees with the catalog row of its code."""
    policy = policy_of(expected["code"])
    for name in ("status", "outcome", "recovery"):
        if expected[name] != getattr(policy, name):
            yield Problem(f"{path}/{name}", "catalog", f"must be {getattr(policy, name)} for this code")
    if policy is not SUCCESS and expected["delivery"] != "fresh":
        yield Problem(path + "/delivery", "catalog", "must be fresh for this code")
    if (policy is SUCCESS) != (expected["data"] is not None):
        yield Problem(path + "/data", "catalog", "must be an object for OK and null for an error")


def _step_problems(path: str, step: JsonObject) -> Iterator[Problem]:
    if not is_registered(_profile(step)):
        yield Problem(path + "/execution_context", "profile", "must be a registered provider profile")
    for name in ("failure", "approval"):
        if step["action"] == "query_status" and step[name] != "none":
            yield Problem(f"{path}/{name}", "query", "must be none for a status query")
    yield from _expectation_problems(path + "/expected", step["expected"])


def _reference_problems(steps: Places) -> Iterator[Problem]:
    dispatched: set[str | None] = set()
    for path, step in steps:
        reference, query = step["status_ref_from"], step["action"] == "query_status"
        if reference not in (dispatched if query else {None}):
            message = "must name an earlier dispatch, and only for a query"
            yield Problem(path + "/status_ref_from", "reference", message)
        if not query:
            dispatched.add(step["step_id"])


def _case_problems(path: str, case: JsonObject, misshapen: set[str]) -> Iterator[Problem]:
    """Check what a schema cannot say about one case."""
    roles = case["principal"]["roles"]
    if sorted({*roles}) != roles:
        yield Problem(path + "/principal/roles", "sorted", "must be sorted and unique")
    steps = _well_shaped(path + "/steps", case["steps"], misshapen)
    yield from _repeated("step_id", steps)
    for where, step in steps:
        yield from _step_problems(where, step)
    if len(steps) == len(case["steps"]):  # else what a reference names may be among the misshapen
        yield from _reference_problems(steps)


def _require_fixture(fixture: Any) -> JsonObject:
    problems = validate(FIXTURE_SCHEMA, fixture)
    # A misshapen case or step is looked at no further, but hides no problem of the others.
    paths = [problem.path for problem in problems]
    misshapen = {"/".join(path.split("/")[:5 if "/steps/" in path else 3]) for path in paths}
    if len(problems) < MAX_PROBLEMS and not misshapen & {"", "/cases"}:  # else some were never looked at
        cases = _well_shaped("/cases", fixture["cases"], misshapen)
        problems += _repeated("id", cases)
        for path, case in cases:
            problems += _case_problems(path, case, misshapen)
    if problems:
        raise FixtureError(problems)
    return fixture  # type: ignore[no-any-return]


def decode_fixture(raw: bytes | str) -> JsonObject:
    """Decode and check a fixture of at most 65,536 bytes. Raises `FixtureError` with all its problems."""
    try:
        return _require_fixture(decode_json(raw, max_bytes=MAX_FIXTURE_BYTES))
    except JsonError as error:
        raise FixtureError([Problem("", error.reason, str(error))]) from None


def load_fixture(path: str | os.PathLike[str]) -> JsonObject:
    """Read and decode a fixture file; no more than 65,537 bytes are read. Raises `FixtureError`."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FIXTURE_BYTES + 1)
    except (OSError, ValueError):  # a NUL byte in the name is a ValueError
        raise FixtureIOError from None
    return decode_fixture(raw)


def _bound_call(step: JsonObject) -> ToolCall:
    names = ("response_id", "call_id", "operation_id", "idempotency_key")
    host = {name: step["execution_context"][name] for name in names}
    return bind_tool_call(ModelProposal(**step["proposal"]), ExecutionContext(_profile(step), **host))


def _mismatch(name: str, expected: object, actual: object) -> JsonObject:
    return {"field": name, "expected": expected, "actual": actual}


def _facts(model_result: JsonObject, side_effect_count: int) -> JsonObject:
    """Return what a step's expectation speaks of."""
    policy = policy_of(model_result["error"]["code"] if model_result["error"] else "OK")
    execution = model_result["execution"]
    return {
        "code": policy.code, "status": model_result["status"], "outcome": execution["outcome"],
        "recovery": policy.recovery, "delivery": execution["delivery"],
        "data": model_result["data"], "side_effect_count": side_effect_count,
    }


def _payload(invocation: Invocation, package: Package) -> tuple[JsonObject | None, list[JsonObject]]:
    """Map a package by its provider's adapter, which validates it first; what that reports are mismatches."""
    to_provider = {
        "openai": to_openai_responses, "anthropic": to_anthropic_messages, "google": to_gemini_interactions,
    }[invocation.call.context.profile.provider]
    try:
        return to_provider(invocation, package), []
    except ResultContractError as error:
        return None, [_mismatch(problem.path, problem.rule, None) for problem in error.problems]


class _NoReference(Exception):
    """A status query refers to a step that left nothing to ask about."""


class _CaseRun:
    """One case on a demo of its own. Audits are kept by step, for a later status query to refer to."""

    def __init__(self, case: JsonObject) -> None:
        self.case = case
        self.principal = Principal(**{**case["principal"], "roles": tuple(case["principal"]["roles"])})
        self.downstream = MockDownstream()
        self.gates: list[str] = []
        self.dispatcher = demo_dispatcher(self.downstream, observe=self.gates.append)
        self.audits: dict[str, JsonObject] = {}

    def report(self, explain: bool) -> JsonObject:
        steps = [self.step(step, explain) for step in self.case["steps"]]
        return {"id": self.case["id"], "passed": all(step["passed"] for step in steps), "steps": steps}

    def step(self, step: JsonObject, explain: bool) -> JsonObject:
        self.gates.clear()
        self.downstream.fault = step["failure"] if step["failure"] in FAULTS else "none"
        self.downstream.faults_met = 0
        invocation = self.dispatcher.resolve(self.principal, _bound_call(step))
        try:
            package = self.perform(step, invocation)
        except _NoReference:
            missing = _mismatch("status_ref_from", step["status_ref_from"], None)
            return {"step_id": step["step_id"], "passed": False, "mismatches": [missing]}
        self.audits[step["step_id"]] = package["protected_audit"]
        facts = _facts(package["model_result"], self.downstream.side_effect_count)
        payload, mismatches = _payload(invocation, package)
        mismatches += [_mismatch(name, expected, facts[name]) for name, expected in step["expected"].items()
                       if not same_json(expected, facts[name])]
        if self.downstream.fault != "none" and not self.downstream.faults_met:
            mismatches.append(_mismatch("failure", step["failure"], "none"))
        report = {"step_id": step["step_id"], "passed": not mismatches, **facts, "mismatches": mismatches}
        if explain:
            report["explanation"] = self.explanation(step, package, payload)
        return report

    def perform(self, step: JsonObject, invocation: Invocation) -> Package:
        """Run one step; `_NoReference` says that the step referred to left no status reference."""
        now, call = step["now"], invocation.call
        if step["action"] == "query_status":
            audit = self.audits[step["status_ref_from"]]
            status_ref, request_sha256 = audit["downstream"]["status_ref"], audit["binding"]["request_sha256"]
            if status_ref is None:
                raise _NoReference
            return self.dispatcher.query_operation_status(
                self.principal, call, status_ref=status_ref, expected_request_sha256=request_sha256, now=now)
        deadline = now if step["failure"] == "timeout_before_execute" else None
        approvals = self.approvals(step, invocation)
        return self.dispatcher.dispatch(self.principal, call, approvals=approvals, now=now, deadline=deadline)

    def approvals(self, step: JsonObject, invocation: Invocation) -> list[Approval]:
        """Obtain what the step asks for; a mismatched approval was issued for another operation id."""
        if step["approval"] == "none":
            return []
        if step["approval"] == "mismatched":
            context = step["execution_context"]
            other = "other" if context["operation_id"] != "other" else "another"
            call = _bound_call({**step, "execution_context": {**context, "operation_id": other}})
            invocation = self.dispatcher.resolve(self.principal, call)
        lifetime = -1 if step["approval"] == "expired" else MAX_APPROVAL_SECONDS
        return [self.dispatcher.authority.issue(
            invocation, self.dispatcher.find_resource(invocation), approver_id="human-reviewer-1",
            expires_at=step["now"] + lifetime, approval_id="approval-1",
        )]

    def explanation(self, step: JsonObject, package: Package, payload: JsonObject | None) -> JsonObject:
        error, audit = package["model_result"]["error"], package["protected_audit"]
        told = ("action", "proposal", "execution_context", "approval", "failure", "now")
        return {
            "principal": self.case["principal"],
            **{name: step[name] for name in told},
            "gates": [*self.gates],
            "stopped_at": self.gates[-1] if error else None,
            "violations": error["violations"] if error else [],
            "status_ref": audit["downstream"]["status_ref"],
            "digests": audit["binding"],
            "payload": payload,
        }


def _run(fixture: JsonObject, explain: bool) -> JsonObject:
    """Run a fixture that has been checked."""
    cases = [_CaseRun(case).report(explain) for case in fixture["cases"]]
    return {
        "schema_version": REPORT_VERSION,
        "passed": all(case["passed"] for case in cases),
        "case_count": len(cases),
        "step_count": sum(len(case["steps"]) for case in cases),
        "cases": cases,
    }


def run_fixture(fixture: object, *, explain: bool = False) -> JsonObject:
    """Replay every case on a fresh demo and compare each step with its expectation.

    Returns the report that the command line prints: `schema_version`, `passed`, `case_count`, `step_count`
    and `cases`. With `explain`, each step also tells what was asked, which gates it entered and what its
    provider gets. Raises `FixtureError` before anything runs.
    """
    try:
        return _run(_require_fixture(plain_json(fixture)), explain)
    except JsonError as error:
        raise FixtureError([Problem("", error.reason, str(error))]) from None


# ===== 15. Command line =============================================================================

PROGRAM: Final = "tool-dispatcher"
WIDTH: Final = 100
_LABEL: Final = 17                      # columns of the labels in an explanation


class _UsageError(Exception):
    """The command line asks for something that does not exist."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError("the options are wrong; --help lists them")  # argparse repeats what was typed


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM, description="Replay a fixture of tool calls against the trusted boundary, offline.",
        add_help=False, allow_abbrev=False,
    )
    add = parser.add_argument
    add("--fixture", metavar="FILE", help="the fixture, - for standard input (default: the bundled one)")
    add("--case", metavar="ID", action="append", help="run only this case; may be repeated")
    add("--format", choices=("auto", "text", "json"), default="auto",
        help="auto is text on a terminal and JSON otherwise")
    add("--explain", action="store_true", help="show for each step what was asked, its gates and its payload")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--print-schema", action="store_true", help="print the JSON Schema of a fixture")
    add("--tools", choices=tuple(PROFILES), help="print the demo's tool definitions for this provider")
    add("--version", action="store_true", help="print the version")
    add("-h", "--help", action="store_true", help="print this help")
    return parser


def _json_text(document: object) -> str:
    return json.dumps(document, indent=2) + "\n"  # ASCII: no console is steered by a character of a fixture


def _given_fixture(source: str | None) -> JsonObject:
    if source == "-":
        try:
            raw = sys.stdin.buffer.read(MAX_FIXTURE_BYTES + 1)
        except (AttributeError, OSError, ValueError):  # standard input is closed, or a directory
            raise FixtureIOError from None
        return decode_fixture(raw)
    return load_fixture(source if source is not None else pathlib.Path(__file__).with_name("tool-cases.json"))


def _selected(fixture: JsonObject, case_ids: list[str] | None) -> JsonObject:
    if case_ids is None:
        return fixture
    if not {*case_ids} <= {case["id"] for case in fixture["cases"]}:
        raise _UsageError("the fixture has no case of this id")
    return {**fixture, "cases": [case for case in fixture["cases"] if case["id"] in case_ids]}


def _is_open(stream: Any) -> bool:
    """Tell whether a stream can be written to; Python has `None` for one that it was started without."""
    return stream is not None and not stream.closed


def _printable(text: str) -> str:
    """Escape what could steer a terminal: control, bidirectional and other invisible characters."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _labelled(label: str, text: str, most: int = 4) -> Iterator[str]:
    """Wrap a text beside its label; what does not fit into `most` lines is cut with two dots."""
    import textwrap  # needed by nothing else: the other commands start sooner without it

    lines = textwrap.wrap(_printable(text), WIDTH - _LABEL, break_on_hyphens=False)
    if len(lines) > most:
        lines[most - 1:] = [lines[most - 1][:WIDTH - _LABEL - 2] + ".."]
    for number, line in enumerate(lines):
        yield f"  {'' if number else label:<{_LABEL - 2}}{line}"


def _carried_text(payload: Any) -> str:
    """Return the canonical result text inside a provider payload, the longest text that it holds."""
    if isinstance(payload, str):
        return payload
    members = payload.values() if isinstance(payload, dict) else payload if isinstance(payload, list) else ()
    texts = map(_carried_text, members)
    return max(texts, key=len, default="")


def _explained(told: JsonObject) -> Iterator[str]:
    """Lay out one step: what came in, how far it got, how it ended, what goes out."""
    said, by, stopped = told["proposal"], told["principal"], told["stopped_at"]
    host = {**told["execution_context"], "key": told["execution_context"]["idempotency_key"] or "none"}
    who = ", ".join([f"{by['subject_id']} of {by['tenant_id']}", *by["roles"]])
    yield from _labelled("model says", f"{said['name']} {canonical_json(said['arguments'])}")
    asked = f"{told['action']} for {who}; now {told['now']} s; approval {told['approval']}"
    yield from _labelled("host says", asked)
    ids = "{provider} {api_family}; {response_id}; {call_id}; {operation_id}; key {key}"
    yield from _labelled("", ids.format_map(host))
    if told["failure"] != "none":
        yield from _labelled("failure", told["failure"])
    yield from _labelled("gates passed", " > ".join(told["gates"][:-1] if stopped else told["gates"]))
    if stopped:
        why = "".join(f"  {readable(problem['path'])} {problem['rule']}" for problem in told["violations"])
        yield from _labelled("ENDED AT", f"[{stopped}]  {told['code']}{why}")
    ends = "{status}; outcome {outcome}; delivery {delivery}; recovery {recovery}; "
    yield from _labelled("ends", (ends + "effects {side_effect_count}").format_map(told))
    digests = told["digests"].items()
    yield from _labelled("digests", "  ".join(f"{name[:-7]} {value[:12]}.." for name, value in digests))
    payload, text = canonical_json(told["payload"]), _carried_text(told["payload"])
    yield from _labelled("provider gets", payload.replace(canonical_json(text), '".."'))
    yield from _labelled("  with text", text, most=2)


def _step_lines(case_id: str, step: JsonObject) -> Iterator[str]:
    verdict, title = "ok" if step["passed"] else "FAIL", f"{case_id} / {step['step_id']}"
    if "explanation" in step:
        yield f"{title:<{WIDTH - 4}.{WIDTH - 5}}{verdict:>4}"
        yield from _explained({**step, **step["explanation"]})
    elif "code" in step:
        ending = "{code}  {outcome}  {delivery}  effects {side_effect_count}".format_map(step)
        yield f"{verdict:<6}{title:<50}{ending}"
    else:
        yield f"{verdict:<6}{title}"
    for mismatch in step["mismatches"]:
        expected, actual = json.dumps(mismatch["expected"]), json.dumps(mismatch["actual"])
        yield f"      {mismatch['field']:<20} expected {expected:<28} actual {actual}"
    if "explanation" in step:
        yield ""


def _lines(lines: Iterable[str]) -> str:
    return "".join(_printable(line) + "\n" for line in lines)


def _report_text(report: JsonObject) -> str:
    lines: list[str] = []
    for case in report["cases"]:
        for step in case["steps"]:
            lines += _step_lines(case["id"], step)
    passed = "true" if report["passed"] else "false"
    lines.append(f"passed={passed} case_count={report['case_count']} step_count={report['step_count']}")
    return _lines(lines)


def _answer(options: argparse.Namespace) -> tuple[str, int]:
    """Return what to print, and the exit status."""
    if options.help:
        return _parser().format_help(), 0
    if options.version:
        return f"{PROGRAM} {__version__}\n", 0
    if options.print_schema:
        return _json_text({"$schema": "https://json-schema.org/draft/2020-12/schema", **FIXTURE_SCHEMA}), 0
    if options.tools:
        return _json_text(advertise_tools(demo_dispatcher().registry, PROFILES[options.tools])), 0
    report = _run(_selected(_given_fixture(options.fixture), options.case), options.explain)
    as_text = options.format == "text" or (
        options.format == "auto" and _is_open(sys.stdout) and sys.stdout.isatty())
    return _report_text(report) if as_text else _json_text(report), 0 if report["passed"] else 1


def _emit(text: str, stream: Any) -> bool:
    """Write UTF-8 with LF on every platform; a closed pipe ends quietly. Tell whether all else went well."""
    if not _is_open(stream):
        return True
    try:
        if hasattr(stream, "buffer"):
            stream.flush()
            stream.buffer.write(text.encode("utf-8", "backslashreplace"))
        else:
            stream.write(text)
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # where Python's last flush may go
        return isinstance(error, BrokenPipeError) or error.errno == errno.EINVAL  # the same on Windows
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 where all passed, 1 where a step did not, 2 for a bad fixture or use."""
    try:
        text, status = _answer(_parser().parse_args(argv))
    except (_UsageError, FixtureError) as error:
        _emit(_lines([f"{PROGRAM}: error:", *str(error).splitlines()]), sys.stderr)
        return 2
    return status if _emit(text, sys.stdout) else 2


if __name__ == "__main__":
    raise SystemExit(main())
