"""The trusted boundary between a model's tool call and its effect.

A language model proposes a tool call: a name and arguments, nothing else. This module decides
whether that call runs, runs it at most once, and returns a result that anybody with the same
trusted context can rebuild and compare. It holds ten promises; the code that upholds one cites its
number, and so does the test that proves it.

 1. A name outside the registry never runs anything.
 2. Arguments that break the contract never reach a handler, whole or in part.
 3. Identity, tenant, approval, call id and idempotency key never come from the model.
 4. Absent and forbidden are one answer.
 5. A write runs only with a key and the consent that its contract demands, given to exactly this
    call in exactly this state.
 6. One idempotency scope, at most one effect: whatever is raised, repeated, raced or re-entered.
 7. An unknown outcome is reported as neither success nor failure, and only downstream evidence
    settles it, also after a crash.
 8. Only data that passed its contract reaches the model, and nothing of the audit ever does.
 9. Every result can be rebuilt from trusted context; one that cannot is refused before a provider
    sees it.
10. Every call ends in exactly one package, whatever the model said; no call of a response is lost
    on the way in.

What it does not do: choose tools, talk to a provider, or promise what a downstream does with a
command. The clock, the identity and the retry policy are the host's. SHA-256 digests without a key
are evidence that parts belong together, never evidence of who made them.

Glossary, in the order the words appear:

    proposal          what a model said: a tool name and arguments, both untrusted
    principal         who asks: tenant, subject and roles, from the host's own session
    contract          a JSON Schema document limited to keywords that this module enforces
    gate              one check that either returns a fact or refuses with a catalog code
    operation id      the host's name for the task that a call belongs to; the key protects, not
                      this
    idempotency key   the host's name for one business operation; a retry repeats it, a new intent
                      never does
    revision          the version of one part of a tool or of a resource, a label
    fence             what a downstream does so that one attempt is refused if it arrives late
    scope             tenant, subject, tool and idempotency key: at most one effect happens in it
    matter            tenant, subject, tool and arguments: one wish, under whatever key
    intent            request, profile and tool contract: what a replay must share with its original
    approval          a human's signed consent to one exact call in one exact resource state
    consent           whose approval a write needs: another's, the subject's own, or none
    operation         one attempt at one effect as the ledger records it
    claim             the ledger's record, made before the handler runs, that an attempt has begun
    attempt           the random name of one claim; only the attempt that stands can be settled
    lease             how long a claim is presumed alive; after it a status query may ask
    outcome           what is known of the effect: not_started, committed or unknown
    evidence          what a downstream answered, once it has passed its contract
    delivery          the evidence behind a success: fresh, local_replay or receipt_reconciled
    receipt           what a downstream remembers about an effect, found by its status reference
    fault             what a package must not tell: an author's exception, or why an answer was
                      refused
    projection        one of a result's two views: model_result for the model, protected_audit for
                      the host
    package           the two projections of one call, tied together by three digests
    assertion         what a package says of itself that trusted context cannot supply

Read on from top to bottom, in the order in which data travels: every name is defined before it is
used, but where two things need each other.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import gc
import hashlib
import hmac
import inspect
import itertools
import json
import math
import os
import pathlib
import re
import sys
import threading
import unicodedata
import warnings
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any, BinaryIO, Final, Literal, NamedTuple, NoReturn, Protocol, TypeGuard, TypeVar
from urllib.parse import unquote

__version__ = "2.0.0"


# ===== 1. Limits and vocabulary ===================================================================
# Every bound is applied before work is done in proportion to what it bounds.

MAX_LEVELS: Final = 32                  # nesting of any JSON: enough for tools, little to recurse
MAX_COST: Final = 131_072             # values plus characters that one untrusted value may cost
MAX_SAFE_INTEGER: Final = 2**53 - 1     # the largest integer that every JSON reader reads alike
MAX_ARGUMENT_BYTES: Final = 65_536      # canonical UTF-8 of a call's arguments
MAX_FIXTURE_BYTES: Final = 65_536
MAX_NAME_LENGTH: Final = 128            # of a field, where fields are declared or scanned
MAX_PROSE: Final = 1024                 # code points of a title or a description
MAX_PROBLEMS: Final = 1024              # once so many are found, no further array item is judged
MAX_VIOLATIONS: Final = 16              # in one model-visible error
MAX_ROLES: Final = 32
MAX_APPROVALS: Final = 16               # looked at in one dispatch; each costs one HMAC
MAX_APPROVAL_SECONDS: Final = 86_400    # consent is for now: an approval may not be stockpiled
MAX_RETRY_AFTER_MS: Final = 86_400_000
MAX_TRIES: Final = 8                    # of one transition whose row comes and goes
MAX_CALLS: Final = 128                  # in one provider response
MAX_INSTANT: Final = 253_402_300_799    # 9999-12-31T23:59:59Z in seconds since the epoch
MAX_PRINTED_PROBLEMS: Final = 20

MODEL_RESULT_VERSION: Final = "tool-model-result-v2"
AUDIT_VERSION: Final = "tool-audit-v2"
MALFORMED_NAME: Final = "(malformed)"                   # no tool can bear it: see _SPEC_CONTRACT

JsonObject = dict[str, Any]             # one decoded JSON object
Package = dict[str, Any]                # {"model_result": ..., "protected_audit": ...}

_EPOCH = datetime(1970, 1, 1)
_IDENTIFIER = re.compile(r"[!-~]{1,255}")
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
# RFC 3339 in ASCII digits, leap seconds and 24:00 left out: `fromisoformat` alone would accept week
# dates, spaces, missing offsets, and what not.
_DATE_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[Tt]([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?"
    r"([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII)

T = TypeVar("T")


def is_identifier(value: object) -> bool:
    """Tell whether `value` is 1 to 255 printable ASCII characters without a space.

    >>> [is_identifier(value) for value in ("call-1", "call 1", "call-1\\n", 7)]
    [True, False, False, False]
    """
    return type(value) is str and _IDENTIFIER.fullmatch(value) is not None


def is_digest(value: object) -> bool:
    """Tell whether `value` is a SHA-256 in lowercase hex."""
    return type(value) is str and _HEX_DIGEST.fullmatch(value) is not None


def is_within(value: object, least: int, most: int) -> bool:
    """Tell whether `value` is exactly an int from `least` to `most`; `True` is not 1."""
    return type(value) is int and least <= value <= most


def is_instant(value: object) -> bool:
    """Tell whether `value` is whole seconds since the epoch, up to the year 9999."""
    return is_within(value, 0, MAX_INSTANT)


def is_sequence(value: object) -> bool:
    """Tell whether `value` is exactly a list or a tuple."""
    return type(value) is list or type(value) is tuple


def is_date_time(text: str) -> bool:
    """Tell whether `text` is an RFC 3339 date-time: a real instant with its offset.

    A fraction of a second has at most nine digits.

    >>> is_date_time("2026-02-28T23:59:59.5+01:00"), is_date_time("2026-02-30T00:00:00Z")
    (True, False)
    """
    try:
        return _DATE_TIME.fullmatch(text) is not None and bool(datetime.fromisoformat(text.upper()))
    except ValueError:  # 30 February has the right shape
        return False


def is_utc_second(text: str) -> bool:
    """Tell whether `text` is a real instant exactly like ``2026-02-28T23:59:59Z``."""
    return len(text) == 20 and text[10] + text[-1] == "TZ" and is_date_time(text)


def is_date(text: str) -> bool:
    """Tell whether `text` is a real day like ``2026-02-28`` (RFC 3339, full-date)."""
    return is_date_time(text + "T00:00:00Z")


@functools.lru_cache(maxsize=256)  # many calls share a second
def utc_text(now: int) -> str:
    """Write seconds since the epoch as ``YYYY-MM-DDThh:mm:ssZ``.

    >>> utc_text(1_000)
    '1970-01-01T00:16:40Z'
    """
    # Arithmetic, because the clock calls of some platforms end long before the year 9999.
    return (_EPOCH + timedelta(seconds=now)).isoformat() + "Z"


# ===== 2. Strict JSON: in and out =================================================================
# Two doors lead in, `decode_json` for text and `plain_json` for Python values, and both open onto
# the same portable domain: null, booleans, numbers that are IEEE 754 doubles, strings without lone
# surrogates, arrays, and objects whose keys stay in the Basic Multilingual Plane. Nothing is ever
# repaired, trimmed, unwrapped or guessed.


class JsonError(ValueError):
    """An input outside the portable domain; no text of the input is repeated.

    `reason` is one word. A syntax error says where (`line` and `column`, both from 1), a passed
    bound says how much is allowed (`limit`): positions and limits repeat nothing.
    """

    def __init__(
        self, reason: str, *,
        line: int | None = None, column: int | None = None, limit: int | None = None,
    ) -> None:
        where = "" if line is None else f" at line {line}, column {column}"
        bound = "" if limit is None else f", at most {limit} are allowed"
        super().__init__(f"not portable JSON: {reason}{where}{bound}")
        self.reason, self.line, self.column, self.limit = reason, line, column, limit


def _require_encodable(text: str) -> bytes:
    """Return the UTF-8 form of `text`; a lone surrogate is exactly what UTF-8 cannot encode."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise JsonError("surrogate") from None


def _utf8_text(raw: bytes | str, max_bytes: int) -> str:
    if type(raw) is not str and type(raw) is not bytes:
        raise JsonError("type")
    # No text has fewer bytes than characters: so much of it is enough to be too much.
    encoded = raw[:max_bytes + 1].encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    if len(encoded) > max_bytes:
        raise JsonError("size", limit=max_bytes)

    try:
        text = encoded.decode("utf-8")
    except UnicodeDecodeError:
        raise JsonError("surrogate" if type(raw) is str else "utf-8") from None
    if text.startswith("\ufeff"):
        raise JsonError("bom")
    return text


def _require_shallow(text: str) -> None:
    """Refuse deep nesting before Python's recursive decoder meets it: one linear scan."""
    # Without escapes every second piece between quotes stands outside of strings.
    outside = "".join(re.sub(r"\\.", "", text, flags=re.DOTALL).split('"')[::2])
    level = 0
    for bracket in re.finditer(r"[\[\]{}]", outside):
        level += 1 if bracket[0] in "[{" else -1
        if level > MAX_LEVELS:
            raise JsonError("depth", limit=MAX_LEVELS)


def _unique_members(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Build an object from its decoded pairs: two spellings of one key are one key by now."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise JsonError("duplicate-key")
    return members


def _safe_integer(digits: str) -> int:
    # Digits are counted before conversion: Python's own limit on long integers is never met.
    if len(digits) > 17 or not -MAX_SAFE_INTEGER <= int(digits) <= MAX_SAFE_INTEGER:
        raise JsonError("number")
    return int(digits)


def _portable_number(value: float) -> int | float:
    """Return a double as the domain has it: a whole one is an int, so that it has one spelling."""
    # Beyond the bound no double has a fraction; infinity is beyond it, and NaN is not within it.
    if not abs(value) <= MAX_SAFE_INTEGER:
        raise JsonError("number")
    return int(value) if value.is_integer() else value


def _double(text: str) -> int | float:
    """Read a fraction, an exponent, or one of the words that are no JSON, NaN and Infinity."""
    value = float(text)
    # 1e-400 is not zero, but no double is nearer to it than zero.
    if not value and text.lower().partition("e")[0].strip("-0."):
        raise JsonError("number")
    return _portable_number(value)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_members,
    parse_int=_safe_integer,
    parse_float=_double,
    parse_constant=_double,
)
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"),
    check_circular=False,  # portable JSON has no cycles
)


def _made_once() -> Callable[[Any], str]:
    """Return what `_ENCODER.encode` does, without the encoder in C that it makes for every call.

    That is half of what a short text costs. Where Python has none, the documented way serves.
    """
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return _ENCODER.encode
    encoder = make(
        None, _ENCODER.default, json.encoder.encode_basestring, None,
        _ENCODER.key_separator, _ENCODER.item_separator, True, False, False)
    return lambda value: "".join(encoder(value, 0))


_encode: Final = _made_once()
# Python writes fractions nearer to zero than 0.0001 with a padded exponent. A text inside quotes
# is matched whole, so that nothing in it is taken for a number.
_PADDED = re.compile(r"e-\d\d(?<=\de-\d\d)")     # from `e-` on, which is rare; digits are not
_PADDED_OR_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|(\d)(?:\.(\d+))?e-(\d+)')


def _respelt(match: re.Match[str]) -> str:
    first, rest, exponent = match.groups(default="")
    if not first:
        return match[0]
    if int(exponent) < 7:  # ECMAScript writes an exponent only from 1e-7 on
        return "0." + "0" * (int(exponent) - 1) + first + rest
    return first + ("." + rest if rest else "") + "e-" + str(int(exponent))


def canonical_json(value: Any) -> str:
    """Write portable JSON in its one canonical form (RFC 8785): sorted keys, no spaces.

    It takes for granted that the value is portable, as everything is that came in by the two doors
    above. On that domain the text, in UTF-8, is byte for byte RFC 8785: strings have one set of
    escapes, keys within one plane sort by code point as they do by UTF-16, and doubles have the
    shortest digits in ECMAScript's spelling. What cannot be written at all is `JsonError`.

    >>> canonical_json({"b": [1, True, 1e-7], "a": "\\u00e9"})
    '{"a":"é","b":[1,true,1e-7]}'
    """
    try:
        text = _encode(value)
    except (TypeError, RecursionError):
        raise JsonError("type") from None
    except ValueError:
        raise JsonError("number") from None
    return _PADDED_OR_TEXT.sub(_respelt, text) if _PADDED.search(text) else text


def _copied_object(value: dict[Any, Any], levels: int, purse: list[int]) -> JsonObject:
    copy: JsonObject = {}
    cost = 0
    for name, item in tuple(value.items()):
        if type(name) is not str:
            raise JsonError("key")
        if type(item) is str and item.isascii():  # as most are: they cost no call
            cost += len(item)
            copy[name] = item
        else:
            copy[name] = None if item is None else _copied(item, levels, purse)

    names = "".join(copy)
    purse[0] -= cost + len(names)
    if purse[0] < 0:
        raise JsonError("budget", limit=MAX_COST)
    if not names.isascii() and _require_encodable(names) and max(names) > "\uffff":
        raise JsonError("key")  # beyond the Basic Multilingual Plane UTF-16 sorts otherwise
    return copy


def _copied(value: Any, levels: int, purse: list[int]) -> Any:
    """Copy one value; `purse` holds what may still be spent, `levels` how deep it may still go."""
    kind = type(value)
    if kind is str or kind is dict or kind is list:
        # Texts pay for characters, containers for members, before one of them is looked at.
        purse[0] -= len(value)
        if purse[0] < 0:
            raise JsonError("budget", limit=MAX_COST)
        if kind is str:
            if not value.isascii():
                _require_encodable(value)
            return value
        if not levels:
            raise JsonError("depth", limit=MAX_LEVELS)
        if kind is dict:
            return _copied_object(value, levels - 1, purse)
        return [_copied(item, levels - 1, purse) for item in tuple(value)]

    if kind is float:
        return _portable_number(value)
    if kind is int and not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
        raise JsonError("number")
    if kind is not int and kind is not bool and value is not None:
        raise JsonError("type")
    return value


def plain_json(value: object) -> Any:
    """Copy an arbitrary Python value into exact JSON types: the only way in for the untrusted.

    Types are compared exactly, so no method of the value's own ever runs. Each value and each
    character costs one of `MAX_COST`, so aliased and cyclic structures end quickly. A container
    is copied from a snapshot, a tuple, because whoever kept it may be changing it in another
    thread. Raises `JsonError` with the reason `type`, `number`, `surrogate`, `key`, `depth` or
    `budget`.

    >>> plain_json({"amount": 900.0, "lines": [True, None]})
    {'amount': 900, 'lines': [True, None]}
    """
    return _copied(value, MAX_LEVELS, [MAX_COST - 1])  # the value itself costs one


def decode_json(raw: bytes | str, *, max_bytes: int) -> Any:
    """Decode one JSON text (RFC 8259) into the portable domain.

    `max_bytes` bounds the text's UTF-8 form. `5`, `5.0` and `0.5e1` are one number, the int 5.
    Raises `JsonError` with the reason `type`, `size`, `utf-8`, `surrogate`, `bom`, `depth`,
    `syntax`, `duplicate-key`, `number`, `key` or `budget`.

    >>> decode_json('{"amount": 9e2}', max_bytes=100)
    {'amount': 900}
    """
    text = _utf8_text(raw, max_bytes)
    _require_shallow(text)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise JsonError("syntax", line=error.lineno, column=error.colno) from None
    # Only so can a lone surrogate have come in, or a key beyond the Basic Multilingual Plane.
    return value if text.isascii() and "\\u" not in text else plain_json(value)


_PLAIN_DECODER: Final = json.JSONDecoder()


def _decode_canonical(text: str) -> Any:
    """Decode a text that `canonical_json` wrote: a fresh copy with every call."""
    return _PLAIN_DECODER.raw_decode(text)[0]  # it has no space around it to be skipped


def _sha256(text: str) -> str:
    return hashlib.sha256(_require_encodable(text)).hexdigest()


def digest(document: Any) -> str:
    """Return the lowercase hex SHA-256 of the document's canonical form in UTF-8.

    It takes the same for granted as `canonical_json`.

    >>> digest({})
    '44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a'
    """
    return _sha256(canonical_json(document))


def same_json(left: Any, right: Any) -> bool:
    """Compare as JSON does: types first, so that `true` is never `1`, then deeply.

    `left` must be JSON; `right` may be any Python value, of which nothing is ever hashed.
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


# ===== 3. Contracts: a small JSON Schema checker ==================================================
# A contract is data: a JSON Schema 2020-12 document limited to the keywords below. It is compiled
# once, from a private copy, into nested functions, one for each node: each returns what is wrong
# with a value, at paths relative to its own, so that a sound value costs no path at all. The same
# compiler judges fixtures, tool inputs and outputs, packages, provider envelopes, and contracts.


class Problem(NamedTuple):
    """One broken rule: a JSON Pointer (RFC 6901), the rule's name, and a message for the author."""

    path: str
    rule: str
    message: str


class ContractError(ValueError):
    """A contract or a tool that must not be registered; the text is for its author."""


def pointer(tokens: Iterable[str | int]) -> str:
    """Write reference tokens as a JSON Pointer (RFC 6901, section 3).

    >>> pointer(("cases", 0, "a/b"))
    '/cases/0/a~1b'
    """
    return "".join("/" + str(token).replace("~", "~0").replace("/", "~1") for token in tokens)


def tokens_of(path: str) -> tuple[str, ...]:
    """Read a JSON Pointer back into its tokens, the inverse of `pointer` (RFC 6901, section 4).

    >>> tokens_of("/cases/0/a~1b")
    ('cases', '0', 'a/b')
    """
    # ~1 before ~0: "~01" is a tilde and a 1.
    return tuple(
        token.replace("~1", "/").replace("~0", "~") for token in path.split("/")[1:])


def readable(path: str) -> str:
    """Return a JSON Pointer as people read it: the root's is empty."""
    return path or "(root)"


Tokens = tuple[str | int, ...]                          # a path before it is written as a pointer
Finding = tuple[Tokens, str, object]                    # relative path, rule, what the keyword says
Check = Callable[[Any], Sequence[Finding]]              # judges one node and all below it
Forbids = Callable[[str], bool] | None                  # judges the names that no contract declares

# Exact types: `true` is no integer, a tuple no array. A whole float is an int in this domain.
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "null": (type(None),), "boolean": (bool,), "integer": (int,), "number": (int, float),
    "string": (str,), "array": (list,), "object": (dict,),
}
_FORMATS: Final[dict[str, Callable[[str], bool]]] = {
    "identifier": is_identifier, "utc-second": is_utc_second,
    "date": is_date, "date-time": is_date_time,
}


def _is_one_of(options: list[Any], kind: type) -> Callable[[Any], object]:
    """Look a scalar up in a set, once its type is known; compare anything else deeply.

    Nothing of a stranger is ever hashed: a set is only asked for values of its options' own type.
    """
    if kind in (str, int, float, bool, type(None)):
        return frozenset(option for option in options if type(option) is kind).__contains__
    return lambda value: any(same_json(option, value) for option in options)


# What in a pattern stands for a character or a class of them, so that the rest is bare syntax.
_OPAQUE: Final = r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]"


def _compiled(pattern: str) -> re.Pattern[str]:
    # A `$` within it, as in `(?=a+$)`, would also stand before a trailing line break: no `\Z` does.
    return re.compile(re.sub(
        _OPAQUE + r"|(\$)(?=.)", lambda found: r"\Z" if found[1] else found[0], pattern,
        flags=re.DOTALL), re.ASCII)


# One small predicate a keyword, made from what the keyword says, grouped by the type it applies to
# and in order of evaluation: what bounds a text comes before its pattern, so that none is tried on
# a longer text.
_Maker = Callable[[Any, type], Callable[[Any], object]]
_OPTIONS: Final[dict[str, _Maker]] = {
    "const": lambda constant, kind: _is_one_of([constant], kind),
    "enum": _is_one_of,
}
_BOUNDS: Final[dict[str, _Maker]] = {
    **_OPTIONS,
    "minimum": lambda limit, _: lambda number: number >= limit,
    "maximum": lambda limit, _: lambda number: number <= limit,
    "exclusiveMinimum": lambda limit, _: lambda number: number > limit,
    "exclusiveMaximum": lambda limit, _: lambda number: number < limit,
}
_KEYWORDS: Final[dict[type, dict[str, _Maker]]] = {
    str: {
        "minLength": lambda limit, _: lambda text: len(text) >= limit,  # in code points
        "maxLength": lambda limit, _: lambda text: len(text) <= limit,
        **_OPTIONS,
        "format": lambda name, _: _FORMATS[name],
        "pattern": lambda pattern, _: _compiled(pattern).fullmatch,     # so the last `$` is the end
    },
    int: _BOUNDS,
    float: _BOUNDS,
    list: {
        "minItems": lambda limit, _: lambda items: len(items) >= limit,
        "maxItems": lambda limit, _: lambda items: len(items) <= limit,
        **_OPTIONS,
    },
}


def _compile_items(item: Check) -> Check:
    """Judge one item after the other, until there are problems enough."""
    return lambda items: [*itertools.islice((
        ((index, *path), rule, limit)
        for index, value in enumerate(items) for path, rule, limit in item(value)
    ), MAX_PROBLEMS)] if items else ()


def _compile_members(schema: JsonObject, is_forbidden: Forbids) -> Check:
    members = [(name, _compile(inner, is_forbidden), name in schema.get("required", ()))
               for name, inner in schema["properties"].items()]
    declared = frozenset(schema["properties"]) if "additionalProperties" in schema else None

    def judge(value: JsonObject) -> Sequence[Finding]:
        for name in value:
            if type(name) is not str:  # looking a field up could run a stranger's code
                return (((), "type", "object"),)

        found: list[Finding] = []
        for name, check, is_required in members:
            if name in value:
                if problems := check(value[name]):
                    found += [((name, *path), rule, limit) for path, rule, limit in problems]
            elif is_required:
                found.append(((name,), "required", True))
        if declared is not None and not declared.issuperset(value):
            # At the parent, so that no name of the value's own is ever repeated.
            found.append(((), "additionalProperties", False))
        return found

    return judge


def _children(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def names_in(value: Any) -> set[str]:
    """Collect every name of plain JSON, at any depth."""
    return {*(value if type(value) is dict else ())}.union(*map(names_in, _children(value)))


def levels_of(value: Any) -> int:
    """Count the levels of plain JSON: a scalar is 0, a flat object 1."""
    if type(value) is not dict and type(value) is not list:
        return 0
    return 1 + max(map(levels_of, _children(value)), default=0)


def _compile_inside(schema: JsonObject, kind: type, is_forbidden: Forbids) -> Check | None:
    """Compile what is below a node of one type; `None` where there is nothing to judge."""
    if kind is dict and "properties" in schema:
        return _compile_members(schema, is_forbidden)
    if kind is list and "items" in schema:
        return _compile_items(_compile(schema["items"], is_forbidden))
    # Only where no contract declares names can one stand that nobody has read.
    if is_forbidden is None or kind not in (dict, list):
        return None
    return lambda value: (
        (((), "name", False),) if any(map(is_forbidden, names_in(value))) else ())


def _compile_kind(schema: JsonObject, kind: type, is_forbidden: Forbids, otherwise: Check) -> Check:
    """Compile a node for values of one type; `otherwise` judges those of any other."""
    inside = _compile_inside(schema, kind, is_forbidden)
    # Nothing is tried on what is too long, nor on a text that nothing else would have bounded.
    unbounded = kind is str and "maxLength" not in schema
    rules = [(make(schema[keyword], kind), ((), keyword, schema[keyword]),
              unbounded or keyword.endswith(("Length", "Items")))
             for keyword, make in _KEYWORDS.get(kind, _OPTIONS).items() if keyword in schema]

    # Types by identity: a metaclass could bring an equality of its own.
    if inside is None and len(rules) == 1:  # most nodes have just one thing to judge
        (only_holds, only_finding, _), = rules
        return lambda value: otherwise(value) if type(value) is not kind else (
            () if only_holds(value) else (only_finding,))

    def judge(value: Any) -> Sequence[Finding]:
        if type(value) is not kind:
            return otherwise(value)
        found: tuple[Finding, ...] = ()
        for holds, finding, is_last in rules:
            if not holds(value):
                found += (finding,)
                if is_last:
                    return found
        if inside is None:
            return found
        return (*found, *inside(value)) if found else inside(value)

    return judge


def type_name(value: object) -> str:
    """Return the first type name that a value of the portable domain answers to."""
    return next(name for name, kinds in _TYPES.items() if type(value) in kinds)


def _type_names(schema: JsonObject) -> list[str]:
    """Return the types that a node names; none where it leaves them to its constants."""
    return [named] if isinstance(named := schema.get("type", []), str) else named


def _compile(schema: JsonObject, is_forbidden: Forbids) -> Check:
    """Compile one node and all below it: a chain of its types, and what is none of them."""
    names, options = _type_names(schema), [*schema.get("enum", ()), schema.get("const")]
    # Without a type, the options say which types there are; without options, all is sound.
    mismatch: Sequence[Finding] = [
        ((), keyword, schema[keyword])
        for keyword in (["type"] if names else _OPTIONS) if keyword in schema]

    # Each type hands on what is none of its own.
    return functools.reduce(
        lambda otherwise, kind: _compile_kind(schema, kind, is_forbidden, otherwise),
        dict.fromkeys(
            [kind for name in names for kind in _TYPES[name]] if names
            else map(type, options) if mismatch else ()),
        lambda value: mismatch)


def _declared_levels(schema: JsonObject) -> float:
    """Return how deep a value of this contract can be; infinity where something is left open."""
    if schema.keys() & _OPTIONS.keys():
        return max(map(levels_of, [schema.get("const"), *schema.get("enum", [])]))
    names = _type_names(schema) or [*_TYPES]
    inner = [*([schema.get("items")] if "array" in names else []),
             *(schema.get("properties", {"": None}).values() if "object" in names else [])]
    return 1 + max(
        [math.inf if part is None else _declared_levels(part) for part in inner], default=0,
    ) if {"array", "object"} & {*names} else 0


def _problem(path: Tokens, rule: str, limit: Any) -> Problem:
    # Eight options are enough to be understood, and cheap to repeat.
    shown = canonical_json(limit[:8])[:-1] + ",..." if (
        isinstance(limit, list) and len(limit) > 8) else canonical_json(limit)
    return Problem(pointer(path), rule, f"must satisfy {rule} {shown}")


class Contract:
    """A contract over a private copy of its schema: changing the schema later changes nothing.

    It is compiled once, when it is first asked.
    """

    def __init__(self, schema: Mapping[str, Any], is_forbidden: Forbids = None) -> None:
        self._text: Final = json.dumps(plain_json({**schema}))
        self._schema: Final[JsonObject] = _decode_canonical(self._text)
        self._is_forbidden: Final = is_forbidden
        # How deep a value of it can be; infinity where something is left open.
        self.levels: Final = _declared_levels(self._schema)

    @cached_property
    def _judge(self) -> Check:
        return _compile(self._schema, self._is_forbidden)

    @property
    def schema(self) -> JsonObject:
        """A fresh copy of what is enforced."""
        return _decode_canonical(self._text)  # type: ignore[no-any-return]

    def problems(self, value: object) -> list[Problem]:
        """Say what is wrong with a value, as `validate` does."""
        return [_problem(*finding) for finding in self._judge(value)]

    def declares(self, path: str) -> bool:
        """Tell whether a JSON Pointer leads only through declared fields and array indexes."""
        schema: Any = self._schema
        for token in tokens_of(path):
            is_index = re.fullmatch("0|[1-9][0-9]{0,5}", token)
            schema = schema.get("properties", {}).get(
                token, schema.get("items") if is_index else None)
            if schema is None:
                return False
        return path == pointer(tokens_of(path))


def validate(schema: Mapping[str, Any], value: object) -> list[Problem]:
    """Check any Python value against a contract (JSON Schema 2020-12, the keywords above).

    No value makes it raise. A node whose type or length is wrong is looked at no further, nor is a
    text that only its format or its options would have bounded. A missing field is reported at its
    own path, an undeclared one at its parent's. Who judges many values compiles a `Contract` once.

    >>> [(p.path, p.rule) for p in validate({"type": "string", "maxLength": 3}, "four")]
    [('', 'maxLength')]
    """
    return Contract(schema).problems(value)


def open_object(**properties: JsonObject) -> JsonObject:
    """Write the contract of an object that has these fields and any others: for strangers' data."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def closed_object(**properties: JsonObject) -> JsonObject:
    """Write the contract of an object that has exactly these fields."""
    return {**open_object(**properties), "additionalProperties": False}


def _options_of(contract: JsonObject) -> list[Any]:
    """Return the values to which a contract is limited; none where it enumerates none."""
    return [contract["const"]] if "const" in contract else contract.get(
        "enum", [None] if _type_names(contract) == ["null"] else [])


def _passing_options_of(contract: JsonObject) -> list[Any]:
    """Return those that pass the rest of their own contract."""
    # An enum is not asked for its own members: compared deeply, each with each, many take minutes.
    # So may a pattern on a long text: it stands beside them still, or nobody unites them.
    judge = _compile({keyword: said for keyword, said in contract.items() if (
        keyword != "pattern" and (keyword != "enum" or "const" in contract))}, None)
    return [option for option in _options_of(contract) if not judge(option)]


def nullable(contract: JsonObject) -> JsonObject:
    """Let a contract accept `null` too, whatever bounds it: its type, its options, its constant.

    >>> nullable({"type": "string", "enum": ["a", "b"]})
    {'type': ['string', 'null'], 'enum': ['a', 'b', None]}
    """
    names, wide = _type_names(contract), {
        keyword: said for keyword, said in contract.items() if keyword != "const"}
    if names and "null" not in names:
        wide["type"] = [*names, "null"]
    if contract.keys() & _OPTIONS.keys():   # a constant counts only where an enum beside it has it
        wide["enum"] = options if None in (options := _passing_options_of(contract)) else [
            *options, None]
    return wide


IDENTIFIER: Final[JsonObject] = {"type": "string", "format": "identifier"}
UTC_SECOND: Final[JsonObject] = {"type": "string", "format": "utc-second"}


# --- Names and patterns ---

# Names that a contract may not declare: what only the host may say (invariant 3) in an input, what
# would leak or pose as control data (invariant 8) in an output. Whole words, because `secretary`
# holds no secret and `lieutenant` no tenant; neighbours joined, because `apiKey` and `X-API-Key`
# are one name.
_CONTROL_NAMES: Final = {"callid", "operationid", "idempotencykey", "statusref"}
_FORBIDDEN_NAMES: Final[dict[str, set[str]]] = {
    "input": _CONTROL_NAMES | {
        "tenant", "tenantid", "subjectid", "principal", "principalid",
        "approval", "approvalid", "approver", "approverid"},
    "output": _CONTROL_NAMES | {
        "authorization", "apikey", "token", "accesstoken", "idtoken", "refreshtoken", "authtoken",
        "secret", "clientsecret", "password", "passwd", "passphrase", "passcode", "pwd", "cookie",
        "credential", "privatekey", "accesskey", "sessionid", "jwt", "bearer", "otp"},
}


def _words_of(name: str) -> list[list[str]]:
    """Split a name at separators, digits and humps, in both ways to read a hump.

    >>> _words_of("userAPIKey2")[0], _words_of("se\\u200bcr\\u00e9t_IDs")[0]
    (['user', 'api', 'key'], ['secret', 'i', 'ds'])
    """
    seen = name if name.isascii() else "".join(
        character for character in unicodedata.normalize("NFKD", name)
        if unicodedata.category(character) not in ("Mn", "Mc", "Me", "Cf")
        and character not in "\u115f\u1160")       # fillers: letters to Unicode, nothing to the eye
    # Case folds last: before, it would have levelled the humps.
    # The last of several capitals belongs to what follows (`APIKey`), or to them (`TOKENvalue`).
    return [[word.casefold() for word in re.split(
        r"[\W\d_]+|(?<=[a-z])(?=[A-Z])|" + hump, seen) if word]
        for hump in (r"(?<=[A-Z])(?=[A-Z][a-z])", r"(?<=[A-Z][A-Z])(?=[a-z])")]


@functools.lru_cache(maxsize=1024)
def _spells_forbidden(name: str, role: str) -> bool:
    # Up to three neighbours, and the whole, as in `t.o.k.e.n`.
    spelt = {"".join(words[at:many and at + many])
             for words in _words_of(name) for at in range(len(words)) for many in (1, 2, 3, None)
             if many or not at}
    # `tokens` is a count where it stands alone (`total_tokens`), not in `access_tokens`.
    spelt.update([word.removesuffix("s") for word in spelt if word != "tokens"])
    return not spelt.isdisjoint(_FORBIDDEN_NAMES[role])


def is_forbidden_name(name: str, role: str, exempt_names: tuple[str, ...] = ()) -> bool:
    """Tell whether a field may not bear this name; only an `input` and an `output` forbid names.

    A name of more than `MAX_NAME_LENGTH` characters is forbidden, for it is too long to be judged.
    What `exempt_names` spells exactly so is free. This finds spellings of a name: no values, and no
    look-alike letters of another script.

    >>> is_forbidden_name("X-API-Key", "output"), is_forbidden_name("secretary", "output")
    (True, False)
    >>> is_forbidden_name("next_page_token", "output", exempt_names=("next_page_token",))
    False
    """
    return role in _FORBIDDEN_NAMES and name not in exempt_names and (
        len(name) > MAX_NAME_LENGTH or _spells_forbidden(name, role))


_INNERMOST = re.compile(r"\([^()]*\)")    # a group that holds no other
_REPETITION: Final = r"(?:[*+]|\{(?:[0-9]+|[0-9]*,[0-9]*)\})"


def _compiles(pattern: str) -> bool:
    # What only warns today would refuse or match otherwise tomorrow.
    with warnings.catch_warnings(action="error"):
        try:
            return bool(re.compile(pattern, re.ASCII))
        except (re.error, OverflowError, RecursionError, Warning):
            return False


def _repeats_a_repetition(syntax: str) -> bool:
    """Tell whether a repeated group holds a repetition, so that it may take exponential time.

    So it may where the group holds something optional, as in `(\\d\\d?)*`. Groups are folded from
    the inside out: to a bar where they hold either, for the syntax has no other bar, else to a dot.

    >>> _repeats_a_repetition("^((a+)?b)*$")    # which becomes ^(|?b)*$ and then ^|*$
    True
    """
    while _INNERMOST.search(syntax):
        syntax = _INNERMOST.sub(
            lambda group: "|" if re.search(rf"\||{_REPETITION}|[^(]\?", group[0]) else ".", syntax)
        if re.search(rf"\|{_REPETITION}", syntax):
            return True
    return False


def is_sound_pattern(pattern: str) -> bool:
    """Tell whether a contract may hold this pattern: `^...$`, at most 4,096 characters.

    It holds no alternation, because `^a|b$` is open on two sides (a literal bar is `[|]`), no
    inline flag, no repeated group (`*`, `+`, `{n}`; `?` repeats nothing) that holds a repetition or
    something optional, and at most 16 of `*`, `+`, `?` and `{m,n}`, since each may double the time.
    What takes polynomial time passes: keep `maxLength` small.

    >>> [is_sound_pattern(pattern) for pattern in ("^([a-z]+-)?[0-9]+$", "^(a+)+$", "^a|b$")]
    [True, False, False]
    """
    # Compiling takes some ten microseconds a character, a class beyond ASCII a millisecond.
    if len(pattern) > 4096 or not _compiles(pattern):
        return False

    # Only what compiles is scanned, so that every class has an end. What is left is bare syntax:
    # a `$`, `|` or `(` in it means what it says.
    syntax = re.sub(_OPAQUE, ".", pattern, flags=re.DOTALL)
    # An inline flag would undo the ASCII classes, and `(?#` hides a comment.
    return (syntax.startswith("^") and syntax.endswith("$")) and "|" not in syntax and not (
        re.search(r"\(\?[aiLmsux#-]", syntax) or _repeats_a_repetition(syntax)
        or len(re.findall(r"[*+]|(?<!\()\?|\{[0-9]*,[0-9]*\}", syntax)) > 16)


# --- What a contract may say ---

# The contract of a contract: the checker checks its own documents first.
_SCHEMA_KEYWORDS: Final[dict[str, JsonObject]] = {
    **{keyword: {"type": "string", "maxLength": MAX_PROSE} for keyword in ("title", "description")},
    "type": {"type": ["string", "array"], "pattern": "|".join(_TYPES),
             "minItems": 1, "items": {"enum": [*_TYPES]}},
    "const": {}, "enum": {"type": "array", "minItems": 1},
    **{keyword: {"type": "integer", "minimum": 0} for keyword in (
        "minLength", "maxLength", "minItems", "maxItems")},
    **{keyword: {"type": "number"} for keyword in (
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    "pattern": {"type": "string"}, "format": {"enum": [*_FORMATS]},
    "items": {"type": "object"}, "properties": {"type": "object"},
    "required": {"type": "array", "items": {"type": "string"}},
    "additionalProperties": {"const": False},
}
_SCHEMA_CONTRACT: Final = Contract({"type": "object", "properties": _SCHEMA_KEYWORDS})
_OF_CONTAINERS: Final = {
    "array": {"items"}, "object": {"properties", "required", "additionalProperties"}}
_BOUNDED_TEXT: Final = frozenset({"maxLength", "enum", "const", "format"})


def _complaints_of(schema: JsonObject, role: str, exempt: tuple[str, ...]) -> Iterator[str]:
    """Yield what is wrong with one node by itself, a row a rule."""
    types, said, is_input = {*_type_names(schema)}, schema.keys(), role == "input"
    properties, required = schema.get("properties", {}), schema.get("required", [])
    borne = names_in([schema.get("const"), schema.get("enum")]).union(properties)
    enforced = {"title", "description", "type", "const", "enum"}.union(
        *(_OF_CONTAINERS.get(name, ()) for name in types),
        *(_KEYWORDS.get(kind, ()) for name in types for kind in _TYPES[name]))

    yield from (complaint for is_broken, complaint in (
        *((True, f"{keyword} is not enforced here; adapt_schema rewrites a foreign schema")
          for keyword in sorted(said - enforced)),
        (not types and not said & _OPTIONS.keys(), "needs a type, a const or an enum"),
        ("string" in types and not said & _BOUNDED_TEXT,
         "a string needs maxLength, enum, const or format"),
        (not is_sound_pattern(schema.get("pattern", "^$")),
         "pattern must be one ^...$ without | (in a class it is a letter: [|]), inline flags,"
         " a repeated group that holds a repetition, and more than 16 of * + ? {m,n}"),
        (is_input and schema.get("maxLength", 0) > MAX_ARGUMENT_BYTES,
         f"maxLength exceeds the {MAX_ARGUMENT_BYTES} bytes that all arguments may have"),
        ("array" in types and "maxItems" not in said, "an array needs maxItems"),
        ("object" in types and "properties" not in said and (
            is_input or not said.isdisjoint(_OF_CONTAINERS["object"])),
         "an object needs properties; {} for none"),
        ("properties" in said and "additionalProperties" not in said,
         "an object with properties needs additionalProperties: false"),
        *((True, f"required names {name!r}, which is no property")
          for name in sorted({*required} - {*properties})),
        (len({*required}) < len(required), "required names a property twice"),
        (len(types) < len(_type_names(schema)), "type names a type twice"),
        *((True, f"no {role} may declare the name {name!r}; exempt_names=({name!r},) frees it")
          for name in sorted(borne) if is_forbidden_name(name, role, exempt)),
    ) if is_broken)


def _complain(
    schema: Any, path: Tokens, role: str, exempt: tuple[str, ...]
) -> Iterator[tuple[Tokens, str]]:
    """Yield what is wrong with a node and all below it; a misshapen one is looked at no further."""
    if misshapen := _SCHEMA_CONTRACT.problems(schema):
        yield from (((*path, *tokens_of(problem.path)), problem.message) for problem in misshapen)
        return

    yield from ((path, complaint) for complaint in _complaints_of(schema, role, exempt))
    for name, inner in schema.get("properties", {}).items():
        yield from _complain(inner, (*path, "properties", name), role, exempt)
    if "items" in schema:
        yield from _complain(schema["items"], (*path, "items"), role, exempt)


@functools.lru_cache(maxsize=64)  # the same contract is judged once, however often it is registered
def _sound_contract(text: str, role: str, exempt: tuple[str, ...]) -> Contract:
    schema = _decode_canonical(text)
    for path, complaint in _complain(schema, (), role, exempt):
        raise ContractError(f"contract at {readable(pointer(path))}: {complaint}")
    return Contract(schema, (
        lambda name: is_forbidden_name(name, role, exempt)) if role != "data" else None)


def _require_plain(given: object) -> JsonObject:
    try:
        return plain_json(given)  # type: ignore[no-any-return]
    except JsonError as error:
        raise ContractError(f"contract is {error}") from None


def require_contract(
    schema: object, *,
    role: Literal["data", "input", "output"] = "data", exempt_names: tuple[str, ...] = (),
) -> Contract:
    """Compile a sound contract; raises `ContractError` as `require_schema` does."""
    # Unsorted: the order of properties is how a model gets to see them.
    return _sound_contract(json.dumps(_require_plain(schema)), role, exempt_names)


def require_schema(
    schema: object, *,
    role: Literal["data", "input", "output"] = "data", exempt_names: tuple[str, ...] = (),
) -> JsonObject:
    """Return a copy of a sound contract: every keyword is enforced, every node bounded and closed.

    An `input` declares no name that only the host may say, and no open object; an `output` declares
    no sensitive name. Where something is open all the same, an object of an output or an array
    without items, the names in each value are judged. `exempt_names` frees exactly spelt names.
    Raises `ContractError`, which says what to write.
    """
    return require_contract(schema, role=role, exempt_names=exempt_names).schema


# --- Foreign schemas: an MCP tool's, Pydantic's, OpenAPI's ---
# What a contract can say is rewritten, what would be unbounded is narrowed, what says nothing about
# values is dropped, and what cannot be enforced is loosened, and said so, or refused.

_ANNOTATIONS: Final = frozenset({
    "$schema", "$id", "$comment", "$defs", "definitions",  # `$ref` brings in what these define
    "default", "examples", "deprecated", "readOnly", "writeOnly",
})
_TITLES: Final = ("title", "description")


# A pattern that ECMA 262, which JSON Schema speaks of, and `re` read alike. The trap is `\B`: in an
# empty text it holds for the one, for the other only from Python 3.14 on.
_READ_ALIKE: Final = r"""(?x: (?:
      [^][\\{}()*+?]                                    # a letter, or one of ^ $ . |
    | \((?!\?) | \(\?(?:[:=!]|<[=!]) | \)              # a group without a name or flags
    | (?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??(?!\+)        # a repetition that gives back
    | ESCAPE | \[(?!\^?\])(?:[^]\\]|ESCAPE)+\]         # a class that is empty to neither
    )* )""".replace("ESCAPE", r"""\\(?:
        \W | [bdDfnrsStvwW] | 0(?![0-9]) | x[0-9A-Fa-f]{2} | u(?![Dd][89A-Fa-f])[0-9A-Fa-f]{4}
    )""")


class _Place(NamedTuple):
    """Where in the given schema an adapter stands: at a node, or at a keyword of one."""

    path: Tokens
    levels: int         # of nesting, where each `$ref` is one more
    is_root: bool       # does it stand for the whole schema?
    inlining: tuple[Tokens, ...] = ()       # what each `$ref` on the way names
    base: Tokens = ()   # the nearest schema with an `$id`, whose `#` means itself

    def below(self, token: str | int, is_root: bool = False) -> _Place:
        return self._replace(
            path=(*self.path, token), levels=self.levels + 1, is_root=is_root)

    def refuse(self, complaint: str) -> NoReturn:
        raise ContractError(f"schema at {readable(pointer(self.path))}: {complaint}")


def _types_of(contract: JsonObject) -> list[str]:
    """Return the types that a contract declares, else those of its options."""
    return _type_names(contract) or sorted({*map(type_name, _options_of(contract))})


# What a keyword may say, before it is rewritten.
_SHAPES: Final = {name: Contract(schema) for name, schema in {
    "anything": {}, "boolean": {"type": "boolean"}, "text": {"type": "string"},
    "reference": {"type": "string", "pattern": "#(/.*)?"},
    "types": _SCHEMA_KEYWORDS["type"], "options": _SCHEMA_KEYWORDS["enum"],
    "names": _SCHEMA_KEYWORDS["required"], "count": _SCHEMA_KEYWORDS["minLength"],
    "number": _SCHEMA_KEYWORDS["minimum"], "openness": {"enum": [True, False, {}]},
}.items()}


class _Adapter:
    """One run of `adapt_schema`: the rewritings of the table below, and what they share.

    A rewriting takes a keyword, what it says, its place, and the contract of the node so far; it
    returns what the contract gains. Nothing given is taken for JSON before `plain` has copied it.
    """

    def __init__(self, document: object, **caps: int) -> None:
        self.document, self.caps = document, caps
        self.purse = [MAX_COST - 1]           # as `plain_json` charges: what is made will pass it
        self.changes: dict[Problem, str] = {}   # in order, each once

    def plain(self, value: object, at: _Place, shape: str) -> Any:
        """Copy JSON of one shape, on the budget of the whole run."""
        try:
            copy = _copied(value, MAX_LEVELS, self.purse)
        except JsonError as error:
            at.refuse(str(error))
        for problem in _SHAPES[shape].problems(copy):
            at.refuse("a free-form map: list its properties" if shape == "openness" else
                      problem.message)
        return copy

    def members(self, given: object, at: _Place) -> JsonObject:
        """Copy one level of an object: its names are judged and paid for, its members are not."""
        if type(given) is not dict or at.levels > MAX_LEVELS:
            at.refuse(f"must be an object, at most {MAX_LEVELS} levels deep, every $ref inlined")
        self.plain([*given], at, "names")
        return dict(given)

    def note(self, at: _Place, rule: str, message: str) -> JsonObject:
        """List a change once; return what the contract gains by saying so: nothing."""
        change = Problem(pointer(at.path), rule, message)
        if change not in self.changes:  # a long name is paid for again with every change below it
            self.changes[change] = self.plain(change.path, at, "text")
        return {}

    def node(self, given: object, at: _Place) -> JsonObject:
        """Return the contract of one node and all below it; annotations go before anything else."""
        said = self.members(given, at)
        if type(said.get("$id")) is str and not said["$id"].startswith("#"):
            at = at._replace(base=at.path)
        for keyword in [*said]:
            if keyword in _ANNOTATIONS or keyword.startswith("x-") or (
                    keyword in _TITLES and type(said[keyword]) is not str):
                self.note(at.below(keyword), "dropped", "it says nothing about values")
                del said[keyword]
            elif keyword not in _REWRITINGS:
                at.below(keyword).refuse("this cannot be enforced; check it in the tool's rules")

        contract: JsonObject = {}
        for keyword, (speaks_of, shape, rewrite) in _REWRITINGS.items():
            if keyword in said:
                place = at.below(keyword, at.is_root)
                value = self.plain(said[keyword], place, shape) if shape else said[keyword]
                if self.applies(speaks_of, said, contract, place):
                    contract.update(rewrite(self, keyword, value, place, contract))
        self.bound(contract, at)
        return contract

    def applies(self, speaks_of: str, said: JsonObject, contract: JsonObject, at: _Place) -> bool:
        """Tell whether a keyword counts beside the others: most speak of some types only."""
        types, counts = _types_of(contract), speaks_of in ("", "alone")
        if speaks_of == "alone" and len(said.keys() - _TITLES) > 1:
            at.refuse("only annotations may stand beside it")
        if types and not counts and not {*types} & {*speaks_of.split()}:
            self.note(at, "dropped", "it speaks of a type that the node has not")
            return False
        return counts or "type" in contract or at.refuse("needs type beside it")

    def bound(self, contract: JsonObject, at: _Place) -> None:
        """Add the bounds without which no contract is sound."""
        types = _type_names(contract)
        for name, least, most, enough in (
            ("string", "minLength", "maxLength", _BOUNDED_TEXT),
            ("array", "minItems", "maxItems", {"maxItems"}),
        ):
            if name in types and not contract.keys() & enough:
                contract[most] = self.caps[most]
                self.note(at, "narrowed", f"{most} {contract[most]} added")
            if contract.get(least, 0) > contract.get(most, MAX_SAFE_INTEGER):
                at.below(least).refuse(f"exceeds {most} {contract[most]}; nothing could pass")

        if "object" in types:
            self.close(contract, at)
        if not _types_of(contract):
            at.refuse("says nothing; needs type, enum or const")

    def close(self, contract: JsonObject, at: _Place) -> None:
        """Close an object; where it lists no properties it is a map, but at the root."""
        extra = contract.get("additionalProperties")    # where nothing is said, any field may be
        if extra is not False:
            if not at.is_root and not contract.get("properties"):
                at.refuse("a free-form map; list its properties, or make it an array of pairs")
            self.note(at if extra is None else at.below("additionalProperties"),
                      "narrowed", "additionalProperties is false")
        elif "properties" not in contract:
            self.note(at, "rewritten", "properties {} added")

        contract.update(properties=contract.get("properties", {}), additionalProperties=False)
        if not {*contract.get("required", ())} <= contract["properties"].keys():
            at.below("required").refuse("names what is not among properties")

    def inline(self, keyword: str, value: str, at: _Place, contract: JsonObject) -> JsonObject:
        # RFC 6901, section 6: percent signs first, then ~
        tokens = (*map(str, at.base), *tokens_of(unquote(value[1:])))
        found = self.document
        for token in tokens:
            size = len(found) if type(found) is dict or type(found) is list else 0
            # Looking costs a sixteenth of a name.
            self.plain([""] * min(size // 16, MAX_COST), at, "anything")
            # Compared, not looked up: a stranger's name could bring a hash of its own.
            members = found.items() if type(found) is dict else zip(
                map(str, range(size)), found if type(found) is list else (), strict=False)
            found = next((inner for name, inner in members
                          if type(name) is str and name == token), None)

        if found is None or tokens in at.inlining:
            at.refuse("leads nowhere" if found is None else
                      "is recursive; write out as many levels as the tool needs")
        self.note(at, "rewritten", "what it names is inlined")
        return self.node(found, at._replace(path=tokens, inlining=(*at.inlining, tokens)))

    def unite(self, keyword: str, value: Any, at: _Place, contract: JsonObject) -> JsonObject:
        if type(value) is not list or not value or (keyword == "allOf" and len(value) > 1):
            at.refuse("must be a list of schemas, allOf of one; write one schema")
        self.note(at, "rewritten", "its schemas are one node")
        branches = [self.node(branch, at.below(index, at.is_root))
                    for index, branch in enumerate(value)]
        return branches[0] if len(branches) == 1 else self.union(branches, at)

    def union(self, branches: list[JsonObject], at: _Place) -> JsonObject:
        """Write a union as one node: options, or types that do not overlap, each with its null."""
        pairs = [(branch, _passing_options_of(branch)) for branch in branches]
        others = [branch for branch, own in pairs if own != [None]]
        for index, branch in enumerate(branches):
            if branch.keys() & _TITLES and others != [branch]:
                self.note(at.below(index), "dropped", "one node has one title and description")

        # Each keyword speaks of one type, so nodes of different types can stand in one.
        united = {keyword: said for branch in others for keyword, said in branch.items()
                  if len(others) == 1 or keyword not in _TITLES}
        if all(map(_options_of, branches)):
            united = {**{keyword: united[keyword] for keyword in _TITLES if keyword in united},
                      "enum": self.plain([one for _, own in pairs for one in own], at, "options")}
            parts = [*map(canonical_json, united["enum"])]
        else:
            # A branch of options has the types of those: null among them may come with others.
            united["type"] = [name for branch, own in pairs for name in (
                sorted({*map(type_name, own)}) if own else _types_of(branch))]
            parts = [name.replace("integer", "number") for name in united["type"]]
        # Options beside a pattern are not tried on it: a stranger's may take minutes.
        if len({*parts}) < len(parts) or any(
                "type" in united or "pattern" in branch for branch in filter(_options_of, others)):
            at.refuse("its schemas overlap: give each types of its own, or only options")
        return united

    def keep(self, keyword: str, value: Any, at: _Place, contract: JsonObject) -> JsonObject:
        return {keyword: value}

    def keep_sound(self, keyword: str, value: str, at: _Place, contract: JsonObject) -> JsonObject:
        # To compile a range beyond ASCII may take 2 ms, as long as to copy a thousand names, and a
        # class of single letters there a twentieth of that.
        self.plain([""] * min(MAX_COST, sum(
            1024 if found[0] == "-" else 64
            for found in re.findall(r"-?(?:\\[uUN]|[^\0-\x7f])", value))), at, "anything")
        return (self.keep if is_sound_pattern(value) and re.fullmatch(_READ_ALIKE, value)
                else self.loosen)(keyword, value, at, contract)

    def loosen(self, keyword: str, value: Any, at: _Place, contract: JsonObject) -> JsonObject:
        if value is False or same_json(0, value):
            return self.note(at, "rewritten", "every value passes it")
        return self.note(at, "loosened", f"{keyword} is not enforced; check it in the tool's rules")

    def keep_most(self, keyword: str, value: Any, at: _Place, contract: JsonObject) -> JsonObject:
        most = self.caps[keyword]
        if not _SHAPES["number"].problems(value) and value > most:
            return {**self.note(at, "narrowed", f"{most} is the most"), keyword: most}
        return {keyword: self.plain(value, at, "count")}

    def keep_limit(self, keyword: str, value: Any, at: _Place, contract: JsonObject) -> JsonObject:
        # Generators write the ends of their own number types, which this domain cannot spell.
        if not _SHAPES["number"].problems(value) and all(map(
                _BOUNDS[keyword](value, int), (-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER))):
            return self.note(at, "rewritten", "every number passes it")
        return {keyword: self.plain(value, at, "number")}

    def keep_items(self, keyword: str, value: Any, at: _Place, contract: JsonObject) -> JsonObject:
        return self.note(at, "rewritten", "items that say nothing need not be said") if same_json(
            {}, value) else {keyword: self.node(value, at._replace(is_root=False))}

    def keep_prose(self, keyword: str, value: str, at: _Place, contract: JsonObject) -> JsonObject:
        if len(value) > MAX_PROSE:
            self.note(at, "dropped", f"what is beyond {MAX_PROSE} characters")
        return {keyword: value[:MAX_PROSE]}

    def add_null(self, keyword: str, value: bool, at: _Place, contract: JsonObject) -> JsonObject:
        # As OpenAPI 3.0 reads it: an enum beside it accepts null only where it lists null.
        self.note(at, "rewritten", "type says whether null is accepted")
        return {"type": [*_type_names(contract), "null"]} if (
            value and "null" not in _type_names(contract)) else {}


# What becomes of each keyword, in the order of rewriting: the types it speaks of (none: of every
# type), the shape of what it says (none: the rewriting sees to that), and what rewrites it.
# Annotations are dropped; any other keyword is refused.
_Rewriting = Callable[[_Adapter, str, Any, _Place, JsonObject], JsonObject]
_REWRITINGS: Final[dict[str, tuple[str, str, _Rewriting]]] = {
    "$ref": ("alone", "reference", _Adapter.inline),        # the node that it names
    "allOf": ("alone", "", _Adapter.unite),                 # its one schema
    "anyOf": ("alone", "", _Adapter.unite),                 # one node: options, or several types
    "oneOf": ("alone", "", _Adapter.unite),
    "type": ("", "types", lambda run, keyword, value, at, _: {  # itself; of a list of one, its name
        keyword: value} if len(value) > 1 else {
        keyword: value[0], **run.note(at, "rewritten", "one type needs no list")}),
    "const": ("", "anything", _Adapter.keep),
    "enum": ("", "options", _Adapter.keep),
    "nullable": (" ".join(_TYPES), "boolean", _Adapter.add_null),
    "minLength": ("string", "count", _Adapter.keep),
    "maxLength": ("string", "", _Adapter.keep_most),        # itself, or the cap
    "pattern": ("string", "text", _Adapter.keep_sound),     # itself, or loosened
    "format": ("string integer number", "text", lambda run, keyword, value, at, contract: (
        run.keep if value in _FORMATS and "string" in _type_names(contract) else run.loosen
    )(keyword, value, at, contract)),                       # numbers have theirs, such as `int32`
    "minimum": ("integer number", "", _Adapter.keep_limit),     # itself, or nothing
    "maximum": ("integer number", "", _Adapter.keep_limit),
    "exclusiveMinimum": ("integer number", "", _Adapter.keep_limit),
    "exclusiveMaximum": ("integer number", "", _Adapter.keep_limit),
    "multipleOf": ("integer number", "", _Adapter.loosen),
    "minItems": ("array", "count", _Adapter.keep),
    "maxItems": ("array", "", _Adapter.keep_most),
    "uniqueItems": ("array", "", _Adapter.loosen),
    "items": ("array", "", _Adapter.keep_items),
    "properties": ("object", "", lambda run, keyword, value, at, _: {keyword: {
        name: run.node(inner, at.below(name)) for name, inner in run.members(value, at).items()}}),
    "required": ("object", "names", _Adapter.keep),
    "minProperties": ("object", "", _Adapter.loosen),
    "additionalProperties": ("object", "openness", _Adapter.keep),      # false in the end
    "title": ("", "text", _Adapter.keep_prose),             # last, so that they override what is
    "description": ("", "text", _Adapter.keep_prose),       # inlined
}


def adapt_schema(
    schema: object, *, max_length: int = 8192, max_items: int = 100
) -> tuple[JsonObject, list[Problem]]:
    """Turn a foreign JSON Schema (2020-12) into a contract, and list every change once.

    A change is a `Problem` whose path is a JSON Pointer (RFC 6901) into the given schema and whose
    rule is `narrowed` (the contract refuses what the schema accepts), `rewritten` (it accepts the
    same), `dropped` (what says nothing about values) or `loosened` (it accepts what the schema
    refuses: check that elsewhere). Read those that are narrowed and loosened. `max_length` counts
    code points, `max_items` items: both bound what is given unbounded or larger. Names are not
    judged here but when a tool is registered. A pattern is kept only where ECMA 262 and `re`, with
    ASCII classes, read it alike, but that `\\s`, `\\S` and `.` mean slightly more or less there. It
    may take polynomial time, which a small `max_length` bounds.

    Raises `ContractError`, with keyword and pointer, for what can be turned into no contract:
    unions that overlap, free-form maps, recursive or remote `$ref`, and every keyword that is not
    in the table above.

    >>> contract, changes = adapt_schema({"type": "object", "properties": {
    ...     "q": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}], "default": 7}}})
    >>> contract["properties"]["q"]
    {'type': ['string', 'null'], 'maxLength': 9}
    >>> [(change.path, change.rule) for change in changes]     # doctest: +NORMALIZE_WHITESPACE
    [('/properties/q/default', 'dropped'), ('/properties/q/anyOf', 'rewritten'), ('', 'narrowed')]
    """
    if not is_within(max_length, 0, MAX_SAFE_INTEGER) or not (
            is_within(max_items, 0, MAX_SAFE_INTEGER)):
        raise ContractError("max_length and max_items must be integers of at least 0")
    run = _Adapter(schema, maxLength=max_length, maxItems=max_items)
    return require_schema(run.node(schema, _Place((), 1, is_root=True))), [*run.changes]


# ===== 4. The error catalog =======================================================================
# Every error that a model can see is one row. Nothing of it is free text, so all of it is
# recomputed when a result is validated.


class ErrorPolicy(NamedTuple):
    """One row: how an ending is classified and what may be done about it.

    `outcome` speaks of effects: `not_started` says that this call began none, and nothing of
    earlier calls. `retry_after_ms` is in milliseconds. `met_by` names the kinds of call that can
    end so: `unknown` tool, `unread` (its arguments were not accepted), `read`, `keyless` (a write
    without key), `write`, `consented` (a write that needs consent).
    """

    code: str
    category: str
    outcome: str
    recovery: str
    retry_after_ms: int | None
    met_by: tuple[str, ...]
    safe_message: str

    @property
    def status(self) -> str:
        return {"committed": "succeeded", "unknown": "unknown"}.get(self.outcome, "failed")


_ANY_CALL: Final = ("unknown", "unread", "read", "keyless", "write")
_ANY_READABLE: Final = ("read", "keyless", "write")
_ANY_RUNNABLE: Final = ("read", "write")

SUCCESS: Final = ErrorPolicy("OK", "", "committed", "none", None, _ANY_RUNNABLE, "")
_ROWS: Final = (
    ("UNKNOWN_TOOL", "contract", "not_started", "correct_input", None, ("unknown",),
     "No tool of this name is available."),
    ("INVALID_ARGUMENTS", "contract", "not_started", "correct_input", None, ("unread",),
     "The arguments do not satisfy the tool's input contract, or the call was cut off."),
    ("CALL_ID_CONFLICT", "conflict", "not_started", "human_review", None, _ANY_CALL,
     "This call was already bound to another request; an earlier result of this call stands."),
    ("BUDGET_EXHAUSTED", "budget", "not_started", "stop", None, _ANY_CALL,
     "This run has used up what it was allowed; it ends here."),
    ("NOT_FOUND", "authorization", "not_started", "none", None, _ANY_READABLE,
     "Nothing is available under this reference."),
    ("IDEMPOTENCY_KEY_REQUIRED", "contract", "not_started", "human_review", None, ("keyless",),
     "The host supplied no idempotency key for this write."),
    ("IDEMPOTENCY_CONFLICT", "conflict", "not_started", "human_review", None, ("write",),
     "The idempotency key already belongs to another request."),
    ("BUSINESS_RULE_VIOLATION", "business", "not_started", "human_review", None, _ANY_RUNNABLE,
     "The current business state does not permit this action."),
    ("APPROVAL_REQUIRED", "approval", "not_started", "request_approval", None, ("consented",),
     "This write needs a human approval."),
    ("APPROVAL_INVALID", "approval", "not_started", "request_approval", None, ("consented",),
     "The approval does not cover this exact call."),
    ("APPROVAL_REJECTED", "approval", "not_started", "none", None, _ANY_RUNNABLE,
     "A person declined this action."),
    ("CALL_CANCELLED", "execution", "not_started", "none", None, _ANY_RUNNABLE,
     "This call was cancelled before it began."),
    ("TIMEOUT_BEFORE_EXECUTE", "execution", "not_started", "retry_after", 1000, _ANY_RUNNABLE,
     "The deadline passed before the action began; it may be tried again later."),
    ("RATE_LIMIT", "dependency", "not_started", "retry_after", 1000, _ANY_RUNNABLE,
     "The service is limiting requests; the call may be tried again later."),
    ("TOOL_ERROR", "execution", "not_started", "human_review", None, _ANY_READABLE,
     "The tool could not carry out the call."),
    ("OUTCOME_UNKNOWN", "execution", "unknown", "query_status", None, ("write",),
     "Whether the action took effect is not known; its status must be queried."),
    ("NOT_EXECUTED", "execution", "not_started", "retry_after", 1000, ("write",),
     "The action did not take effect and no longer will; it may be tried again later."),
    ("OUTPUT_CONTRACT_VIOLATION", "execution", "unknown", "human_review", None, _ANY_RUNNABLE,
     "The tool's answer did not satisfy its output contract."),
    ("STATUS_CONFLICT", "conflict", "unknown", "human_review", None, _ANY_READABLE,
     "The status evidence does not belong to this operation."),
)
ERROR_CATALOG: Final[Mapping[str, ErrorPolicy]] = MappingProxyType(
    {row[0]: ErrorPolicy(*row) for row in _ROWS})


def policy_of(code: str) -> ErrorPolicy:
    """Return the row of a catalog code, or that of `OK`."""
    return SUCCESS if code == "OK" else ERROR_CATALOG[code]


class Refused(Exception):
    """A gate's answer: a catalog code, and the status reference that an open outcome is found by.

    `gate` is set where an author's callable led to it, with the exception in `error` or what was
    wrong with its answer in `problems`: what the host's `on_fault` is told and no package tells.
    """

    def __init__(
        self, code: str, status_ref: str | None = None, *,
        retry_after_ms: int | None = None, gate: str = "", problems: Iterable[Problem] = (),
    ) -> None:
        self.code = ERROR_CATALOG[code].code  # a `KeyError` for a code that nobody classified
        self.status_ref, self.retry_after_ms = status_ref, retry_after_ms
        self.gate, self.problems = gate, tuple(problems)
        self.error: Exception | None = None


class _Stop(Refused):
    """What gates raise, and nobody else: a `Refused` of an observer or a ledger is no refusal."""


# ===== 5. Who asks and what was proposed ==========================================================
# The host's values check themselves when they are made: one that exists is well formed
# (invariant 3).


class HostContextError(ValueError):
    """Something that only the host can have caused; raised before any state changes.

    The text names the field and the rule, never the value.
    """


def _require_host(holds: bool, field: str, rule: str) -> None:
    if not holds:
        raise HostContextError(f"{field} must be {rule}")


def _require_identifiers(**fields: object) -> None:
    for name, value in fields.items():
        if not is_identifier(value):
            _require_host(False, name, "1 to 255 printable ASCII characters without space")


def _require_instants(**fields: object) -> None:
    for name, value in fields.items():
        _require_host(is_instant(value), name, f"whole seconds since the epoch, 0 to {MAX_INSTANT}")


def _require_count(field: str, value: object, least: int, most: int = MAX_SAFE_INTEGER) -> None:
    _require_host(is_within(value, least, most), field, f"an integer from {least} to {most}")


@dataclass(frozen=True)
class Principal:
    """Who asks: tenant and subject are identifiers, roles a sorted tuple of at most 32 of them."""

    tenant_id: str
    subject_id: str
    roles: tuple[str, ...]

    def __post_init__(self) -> None:
        _require_identifiers(tenant_id=self.tenant_id, subject_id=self.subject_id)
        _require_host(
            type(self.roles) is tuple and len(self.roles) <= MAX_ROLES
            and all(map(is_identifier, self.roles)) and sorted({*self.roles}) == [*self.roles],
            "roles", f"a sorted tuple of at most {MAX_ROLES} identifiers")

    @cached_property
    def ref(self) -> str:
        """The digest that stands for this principal in an audit: short, but no pseudonym."""
        return "sha256:" + digest(
            {"kind": "principal", "tenant_id": self.tenant_id, "subject_id": self.subject_id})


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


PROFILES: Final[Mapping[str, ProviderProfile]] = MappingProxyType({
    profile.provider: profile for profile in (
        ProviderProfile("openai", "responses", "openai-responses-v1"),
        ProviderProfile("anthropic", "messages", "anthropic-messages-v1"),
        ProviderProfile("google", "interactions", "gemini-interactions-v1"),
        ProviderProfile("openai-chat", "chat-completions", "openai-chat-v1"),
    )
})


def is_registered(profile: object) -> bool:
    """Tell whether `profile` is one of `PROFILES`."""
    return any(profile is known for known in PROFILES.values()) or (
        type(profile) is ProviderProfile and all(map(is_identifier, vars(profile).values()))
        and profile in PROFILES.values())


@dataclass(frozen=True)
class ExecutionContext:
    """What the host says about one call.

    `response_id` and `call_id` correlate it with the provider. `operation_id` and
    `idempotency_key` name the business operation: a key survives retries and is never made from a
    call id (the IETF Idempotency-Key draft, section 2). Raises `HostContextError`.
    """

    profile: ProviderProfile
    response_id: str
    call_id: str
    operation_id: str
    idempotency_key: str | None

    def __post_init__(self) -> None:
        _require_host(is_registered(self.profile), "profile", "one of PROFILES")
        _require_identifiers(
            response_id=self.response_id, call_id=self.call_id, operation_id=self.operation_id)
        if self.idempotency_key is not None:
            _require_identifiers(idempotency_key=self.idempotency_key)


class Malformed(NamedTuple):
    """Arguments that could not be read: one word why, and the SHA-256 of what was given."""

    reason: str
    sha256: str


def malformed(reason: str, given: object = None) -> Malformed:
    """Describe unreadable arguments by the digest of the provider's text, or of an object's
    canonical form. Where there is neither, the reason is digested.
    """
    text = given if type(given) is str else canonical_json(reason)
    if type(given) is dict:
        with contextlib.suppress(JsonError):
            text = canonical_json(plain_json(given))
    return Malformed(reason, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())


def _fixed_arguments(arguments: object) -> str | Malformed:
    if type(arguments) is Malformed:  # an inbound adapter could not read them
        _require_host(
            is_identifier(arguments.reason) and is_digest(arguments.sha256),
            "malformed arguments", "a word and a SHA-256 in lowercase hex")
        return arguments
    try:
        text = canonical_json(plain_json(arguments))
    except JsonError as error:
        return malformed(error.reason)
    return text if len(text.encode("utf-8")) <= MAX_ARGUMENT_BYTES else malformed("size", text)


@dataclass(frozen=True)
class ToolCall:
    """A proposal fixed for good under a context; `bind_tool_call` makes it.

    `arguments` is canonical JSON text. Whoever needs a value decodes a copy of their own, so what
    was validated, authorized, approved and executed is one text. The proposal itself is not kept.
    """

    proposal: InitVar[ModelProposal]
    context: ExecutionContext
    name: str = field(init=False)
    arguments: str | Malformed = field(init=False)

    def __post_init__(self, proposal: ModelProposal) -> None:
        _require_host(type(proposal) is ModelProposal, "proposal", "a ModelProposal")
        _require_host(type(self.context) is ExecutionContext, "context", "an ExecutionContext")
        object.__setattr__(
            self, "name", proposal.name if is_identifier(proposal.name) else MALFORMED_NAME)
        object.__setattr__(self, "arguments", _fixed_arguments(proposal.arguments))


def bind_tool_call(proposal: ModelProposal, context: ExecutionContext) -> ToolCall:
    """Fix a proposal under the host's context (OWASP LLM01: model output is untrusted input).

    Whatever the proposal holds, the answer is a `ToolCall`: unreadable arguments become
    `Malformed`, a name that is no identifier becomes the literal `(malformed)`. Raises
    `HostContextError` for anything but a `ModelProposal` and an `ExecutionContext`.
    """
    return ToolCall(proposal, context)


# ===== 6. Tools ===================================================================================
# What a tool's author writes. The author is trusted to be honest, not to be right: every answer is
# judged, every exception is caught at the call that raised it, and no text of either reaches a
# package. Answers are NamedTuples: complete by construction.


@dataclass(frozen=True)
class Revisions:
    """The labels under which an author publishes a tool's parts: promises; digests are evidence."""

    input_schema: str
    output_schema: str
    effect: str
    handler: str
    producer: str
    policy: str


class Resource(NamedTuple):
    """What a principal may reach: its revision, and whether its state permits the action."""

    revision: str
    permits: bool


def is_resource(answer: object) -> TypeGuard[Resource]:
    """Tell whether an author's answer grants access: exactly a `Resource`, well typed."""
    return type(answer) is Resource and (
        is_identifier(answer.revision) and type(answer.permits) is bool)


class Command(NamedTuple):
    """The one immutable order that a handler gets.

    `now` and `deadline` are seconds since the epoch. `arguments` is a copy of the handler's own.
    `expected_revision` is the resource revision that was authorized: a downstream that compares it
    as it writes closes the gap between check and use. `attempt` names this very attempt, so that a
    downstream can refuse it for good; `None` for a read.
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
    attempt: str | None


class HandlerResult(NamedTuple):
    """What a handler answers; judged by `validate_output`.

    A write carries all fields. A read has no receipt id and may have neither a request id nor a
    resource revision.
    """

    data: Any
    producer_revision: str
    resource_revision: str | None
    observed_at: str
    request_id: str | None
    receipt_id: str | None


class Receipt(NamedTuple):
    """What a downstream remembers of an effect: which operation, request, effect, and result."""

    status_ref: str
    request_sha256: str
    effect_revision: str
    result: HandlerResult


class NoEffect(NamedTuple):
    """A downstream's guarantee from `find_receipt`: this attempt had no effect and never will.

    It has been fenced: if it arrived late, it would be refused. "I know of none yet" is `None`.
    """


class NotStarted(Exception):
    """A handler's proof that no effect began or will begin. Exactly this type counts, no subclass.

    `retry_after_ms`, 1 to 86,400,000 milliseconds, reaches the host where the code is RATE_LIMIT
    or TIMEOUT_BEFORE_EXECUTE. Raises `ValueError` for a code that is no such proof.
    """

    CODES: Final = ("RATE_LIMIT", "TIMEOUT_BEFORE_EXECUTE", "BUSINESS_RULE_VIOLATION", "TOOL_ERROR")

    def __init__(self, code: str, retry_after_ms: int | None = None) -> None:
        if code not in self.CODES:
            raise ValueError(f"the code of NotStarted must be one of {', '.join(self.CODES)}")
        super().__init__(code, retry_after_ms)  # into `args`, also where they were given by name

    @property
    def code(self) -> str:
        return str(self.args[0])


def takes_retry_after(code: str) -> bool:
    """Tell whether an author may say when to try again."""
    return code in NotStarted.CODES and policy_of(code).recovery == "retry_after"


def ask_author(refusal: Callable[[], Refused], function: Callable[..., T], *arguments: object) -> T:
    """Run an author's callable, and nothing else inside the `try`; where it raises, `refusal()` is.

    The exception goes along with the refusal, for the host's eyes. An answer that is still to be
    awaited or iterated is closed or cancelled, and counts as raised.
    """
    try:
        answer = function(*arguments)
        if hasattr(answer, "__await__") or hasattr(answer, "__next__") or hasattr(
                answer, "__anext__"):
            getattr(answer, "close", getattr(answer, "cancel", bool))()
            raise TypeError("the answer is a coroutine or a generator")
        return answer
    except Exception as error:
        raised = refusal()  # made only where it is needed, which is seldom
        raised.error = error
    raise raised  # out here, so that the author's exception does not travel on as its context


def _proof_in(error: Exception | None) -> Refused | None:
    """Return what a genuine `NotStarted` proves; any other exception, `Refused` too, is none."""
    if type(error) is not NotStarted:
        return None
    # `args` may have been changed or emptied since: padded, then judged.
    code, retry_after_ms = (*error.args, None, None)[:2]
    if type(code) is not str or code not in NotStarted.CODES:
        return None
    if not (takes_retry_after(code) and is_within(retry_after_ms, 1, MAX_RETRY_AFTER_MS)):
        retry_after_ms = None
    return _Stop(code, retry_after_ms=retry_after_ms)


@functools.lru_cache(maxsize=64)
def result_contract(writes: bool, producer: str) -> Contract:
    """Return the contract of all that stands around the data in a tool's `HandlerResult`."""
    reference = IDENTIFIER if writes else nullable(IDENTIFIER)
    return Contract(open_object(
        producer_revision={"const": producer}, observed_at=UTC_SECOND,
        resource_revision=reference, request_id=reference,
        receipt_id=IDENTIFIER if writes else {"type": "null"}))


@dataclass(frozen=True)
class ToolSpec:
    """One tool: its contracts, its limits and its author's callables. A `Registry` judges it.

    `echoes` maps an output field to the input argument it must equal. `max_output_bytes` bounds
    the data's canonical UTF-8, `max_output_depth` its nesting (a scalar is 0). `find_resource`
    answers `None` for what is absent and for what is forbidden alike (invariant 4). `rules` says
    what a schema cannot; it is asked again when a result is validated, so it must depend on the
    arguments alone. `consent` says whose approval a write needs: `another` person's, the subject's
    `own` or another's, or `none` for what is cheap to undo.
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
    find_receipt: Callable[[Command], Receipt | NoEffect | None] | None = None
    rules: Callable[[JsonObject], list[Problem]] | None = None
    consent: Literal["another", "own", "none"] = "another"
    exempt_names: tuple[str, ...] = ()

    @property
    def writes(self) -> bool:
        return self.risk == "write"

    # Computed once, by the registry, from the copies that it made.

    @cached_property
    def input_contract(self) -> Contract:
        return self._compile("input", self.input_schema)

    @cached_property
    def output_contract(self) -> Contract:
        return self._compile("output", self.output_schema)

    def _compile(self, role: Literal["input", "output"], schema: JsonObject) -> Contract:
        try:
            return require_contract(schema, role=role, exempt_names=self.exempt_names)
        except ContractError as error:
            raise ContractError(f"tool {self.name}, {role}: {error}") from None

    @cached_property
    def labels(self) -> JsonObject:
        """What an audit shows of the tool: labels, and a digest that follows what is enforced."""
        return {"name": self.name, **vars(self.revisions), "contract_sha256": digest({
            "kind": "tool-contract", "name": self.name, "risk": self.risk, "consent": self.consent,
            "exempt_names": [*self.exempt_names], "echoes": dict(self.echoes),
            "input_schema": self.input_schema, "output_schema": self.output_schema,
            "max_output_bytes": self.max_output_bytes, "max_output_depth": self.max_output_depth,
            "producer_label": self.producer_label,
        })}


_REVISION_NAMES: Final = tuple(Revisions.__dataclass_fields__)
_DESCRIPTION: Final[dict[str, JsonObject]] = {
    "name": {"type": "string", "maxLength": 64, "pattern": r"^[A-Za-z][A-Za-z0-9_-]*$"},
    "description": {"type": "string", "minLength": 1, "maxLength": MAX_PROSE},
    "risk": {"enum": ["read", "write"]},
    "consent": {"enum": ["another", "own", "none"]},
    "exempt_names": {"type": "array", "items": {"type": "string", "maxLength": MAX_NAME_LENGTH}},
    "max_output_bytes": {"type": "integer", "minimum": 1, "maximum": 65_536},  # a package fits
    # Data stands two levels deep in its package.
    "max_output_depth": {"type": "integer", "minimum": 0, "maximum": MAX_LEVELS - 2},
    "producer_label": IDENTIFIER,
    "revisions": closed_object(**dict.fromkeys(_REVISION_NAMES, IDENTIFIER)),
}
_DESCRIPTION_CONTRACT: Final = Contract(closed_object(**_DESCRIPTION))


def _require_author(tool: str, *rules: tuple[bool, str]) -> None:
    """Raise `ContractError` with the first rule that does not hold."""
    for holds, rule in rules:
        if not holds:
            raise ContractError(f"tool {tool}: {rule}")


def _is_plain_function(function: Any) -> bool:
    """Tell whether calling this does something, and does not only begin it."""
    while isinstance(function, functools.partial):
        function = function.func
    # A function and a method have code; any other object is called by its type's `__call__`.
    called = function if hasattr(function, "__code__") else type(function).__call__
    flags = getattr(getattr(called, "__code__", None), "co_flags", 0)
    return callable(function) and not flags & (
        inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR)


def _require_sound_tool(spec: ToolSpec) -> None:
    """Judge everything of a tool but its schemas."""
    if type(spec) is not ToolSpec or type(spec.revisions) is not Revisions:
        raise ContractError("a registry takes ToolSpec with Revisions")
    exempt = [*spec.exempt_names] if type(spec.exempt_names) is tuple else None
    described = {**{name: getattr(spec, name) for name in _DESCRIPTION},
                 "revisions": vars(spec.revisions), "exempt_names": exempt}
    for problem in _DESCRIPTION_CONTRACT.problems(described):
        raise ContractError(f"tool {spec.name!r} at {problem.path}: {problem.message}")
    _require_plain([spec.description, exempt])  # no lone surrogates

    optional = {"find_receipt": spec.find_receipt, "rules": spec.rules}
    callables = {"find_resource": spec.find_resource, "handler": spec.handler, **{
        name: given for name, given in optional.items() if given is not None}}
    _require_author(
        spec.name,
        (spec.writes or spec.consent == "another", "consent is for writes"),
        (isinstance(spec.echoes, Mapping), "echoes must map output fields to arguments"),
        ((spec.find_receipt is not None) == spec.writes, "a write has find_receipt, a read none"),
        *((_is_plain_function(function),
           f"{name} must be a plain function (callable, not async, no generator); an asynchronous"
           " host calls asyncio.to_thread(dispatcher.dispatch, ...)")
          for name, function in callables.items()),
    )


def _registered(spec: ToolSpec) -> ToolSpec:
    """Return the registry's own copy of a sound tool."""
    _require_sound_tool(spec)
    contracts = {
        "input_contract": spec._compile("input", spec.input_schema),
        "output_contract": spec._compile("output", spec.output_schema),
    }
    input_schema, output_schema = (contract.schema for contract in contracts.values())

    # What is compared must always be there.
    given, told = input_schema.get("required", ()), output_schema.get("required", ())
    _require_author(
        spec.name,
        (input_schema.get("type") == output_schema.get("type") == "object",
         "arguments and data are objects"),
        *((type(name) is type(argument) is str and name in told and argument in given,
           f"echo {name!r}: {argument!r} must map a required output field to a required argument")
          for name, argument in spec.echoes.items()),
    )
    copy = replace(spec, echoes=MappingProxyType(dict(spec.echoes)),
                   input_schema=input_schema, output_schema=output_schema)
    vars(copy).update(contracts)  # where `cached_property` keeps what it would compute again
    return copy


class Registry:
    """The exact allow-list of tools (invariant 1): immutable, with a copy of every schema.

    Raises `ContractError` for a tool that is misdescribed, unbounded or named twice. Names that
    differ only in case, `-` or `_` are one: a model would mistake one for the other.
    """

    def __init__(self, specs: Iterable[ToolSpec]) -> None:
        tools: dict[str, ToolSpec] = {}     # by the name as a model reads it
        for spec in map(_registered, specs):
            plain = re.sub("[-_]", "", spec.name).lower()
            _require_author(
                spec.name, (plain not in tools, "another has this name, but for case, - and _"))
            tools[plain] = spec
        # The labels are computed here, with their digest, while nobody else can hold the copies.
        self._tools: Final = {spec.labels["name"]: spec for spec in tools.values()}

    def __iter__(self) -> Iterator[ToolSpec]:
        """Yield copies: what is done to their schemas changes nothing that is enforced or shown."""
        for spec in self._tools.values():
            yield replace(
                spec, input_schema=spec.input_contract.schema,
                output_schema=spec.output_contract.schema)

    def find(self, name: object) -> ToolSpec | None:
        """Return the tool of exactly this name; nothing is imported, evaluated or guessed."""
        return self._tools.get(name) if type(name) is str else None


# ===== 7. One invocation and its digests ==========================================================
# Each digest document but the result's names its `kind`, so that no two can be confused. What only
# the ledger reads holds nothing but identifiers and digests, which have no space in them: joined
# by spaces it is as unambiguous as JSON, and faster.

Scope = tuple[str, str, str, str | None]    # tenant, subject, tool, idempotency key
Matter = tuple[str, str, str, str]          # tenant, subject, tool, canonical arguments


# What a replay must share with the call that took effect: its request, its wire, its contract.
Intent = namedtuple("Intent", (
    "request_sha256", "provider", "api_family", "adapter_revision",
    "output_schema", "effect", "handler", "producer", "contract_sha256"))


class Verdict(NamedTuple):
    """How contract and rules answer some arguments: `OK` or a catalog code, and why."""

    code: str
    problems: tuple[Problem, ...] = ()
    error: Exception | None = None


_GOOD: Final = Verdict("OK")


def _ask_rules(spec: ToolSpec, arguments: JsonObject) -> Verdict:
    """Ask a tool's rules for what a schema cannot say; nonsense is no verdict on the arguments."""
    if spec.rules is None:
        return _GOOD
    try:
        answer = ask_author(lambda: _Stop("TOOL_ERROR"), spec.rules, arguments)
    except _Stop as refusal:
        return Verdict(refusal.code, error=refusal.error)

    # Declared paths and plain words: so no problem holds text of the model's own.
    if type(answer) is not list or not all(
            type(problem) is Problem and type(problem.path) is str and type(problem.rule) is str
            and re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", problem.rule)
            and spec.input_contract.declares(problem.path) for problem in answer):
        return Verdict("TOOL_ERROR", (Problem(
            "", "rules", "must answer a list of Problem, each with the pointer of a declared field"
            " and a rule of letters, digits, - and _"),))
    return Verdict("INVALID_ARGUMENTS" if answer else "OK", tuple(answer))


@dataclass(frozen=True)
class Invocation:
    """The trusted context of one call: who asks, what was proposed, which contract answers.

    `spec` is `None` for an unregistered name. `Dispatcher.resolve` makes it. What it derives is
    computed once.
    """

    principal: Principal
    call: ToolCall
    spec: ToolSpec | None

    def __post_init__(self) -> None:
        _require_host(type(self.principal) is Principal, "principal", "a Principal")
        _require_host(type(self.call) is ToolCall, "call", "a ToolCall")
        spec = self.spec
        _require_host(
            spec is None or (type(spec) is ToolSpec and spec.name == self.call.name),
            "spec", "None or the ToolSpec of the call's name")

    @property
    def tool(self) -> ToolSpec:
        """The registered tool; `Refused` with UNKNOWN_TOOL where there is none (invariant 1)."""
        if self.spec is None:
            raise Refused("UNKNOWN_TOOL")   # no `_Stop`: anybody may ask
        return self.spec

    @property
    def labels(self) -> JsonObject:
        """The tool's labels and its contract's digest, all `unregistered` for an unknown tool."""
        return self.spec.labels if self.spec else dict.fromkeys(
            ("name", *_REVISION_NAMES, "contract_sha256"), "unregistered")

    def arguments(self) -> Any:
        """Decode a fresh copy of the arguments: one for each of the tool author's callables."""
        return _decode_canonical(str(self.call.arguments))

    @property
    def verdict(self) -> Verdict:
        """How contract and rules answer these arguments (invariant 2), asked once.

        No `cached_property`: in Python 3.11 that holds one lock for all instances while it
        computes, and the rules of one tenant must not wait for those of another.
        """
        known: Verdict | None = self.__dict__.get("_verdict")
        if known is None:
            known = self.__dict__["_verdict"] = self._judge_arguments()
        return known

    def _judge_arguments(self) -> Verdict:
        if self.spec is None:
            return Verdict("UNKNOWN_TOOL")
        if isinstance(self.call.arguments, Malformed):
            return Verdict("INVALID_ARGUMENTS", (
                Problem("", self.call.arguments.reason, "could not be read"),))
        problems = self.spec.input_contract.problems(self.arguments())
        if problems:
            return Verdict("INVALID_ARGUMENTS", tuple(problems))
        return _ask_rules(self.spec, self.arguments())

    @property
    def violations(self) -> list[JsonObject]:
        """What a model may know about its bad arguments: declared paths and rules, no own text."""
        broken = dict.fromkeys((problem.path, problem.rule) for problem in self.verdict.problems)
        return [{"path": path, "rule": rule} for path, rule in [*broken][:MAX_VIOLATIONS]]

    @cached_property
    def request_sha256(self) -> str:
        """Bind the business intent: who wants which tool to do what. The key only names it."""
        arguments, labels = self.call.arguments, self.labels
        return digest({
            "kind": "request",
            "tenant_id": self.principal.tenant_id, "subject_id": self.principal.subject_id,
            "tool": self.call.name,
            "arguments": arguments._asdict() if isinstance(arguments, Malformed) else arguments,
            "input_schema": labels["input_schema"], "output_schema": labels["output_schema"],
            "effect": labels["effect"],
        })

    @property
    def identity(self) -> str:
        """The provider's call identity: the same ids under another principal are another call."""
        context = self.call.context
        return " ".join((
            "call-identity", self.principal.tenant_id, self.principal.subject_id,
            context.profile.provider, context.profile.api_family,
            context.response_id, context.call_id))

    def fingerprint(self, purpose: str) -> str:
        """What one call identity stands for, for good: one request, operation, key, purpose."""
        context = self.call.context
        return " ".join((
            "call-fingerprint", context.operation_id, context.idempotency_key or "", purpose,
            self.request_sha256, context.profile.adapter_revision))

    @property
    def scope(self) -> Scope:
        """The room in which at most one effect happens (invariant 6)."""
        principal, call = self.principal, self.call
        return principal.tenant_id, principal.subject_id, call.name, call.context.idempotency_key

    @property
    def matter(self) -> Matter:
        """The same wish under any key or revision: an unresolved outcome blocks all of it."""
        return *self.scope[:3], str(self.call.arguments)

    @property
    def intent(self) -> Intent:
        """What a replay must share with the call that took effect."""
        return Intent(
            self.request_sha256, *vars(self.call.context.profile).values(),
            *(self.labels[name] for name in Intent._fields[4:]))

    @cached_property
    def idempotency_ref(self) -> str | None:
        """The digest that stands for the idempotency scope in an audit; `None` without a key."""
        tenant_id, subject_id, tool, key = self.scope
        return None if key is None else "sha256:" + digest({
            "kind": "idempotency-scope",
            "tenant_id": tenant_id, "subject_id": subject_id, "tool": tool, "idempotency_key": key,
        })

    @cached_property
    def status_ref(self) -> str | None:
        """Where a write's outcome is found again: a locator, no secret. `None` but for a write
        with a key.
        """
        if self.idempotency_ref is None or self.spec is None or not self.spec.writes:
            return None
        return "status_" + digest({
            "kind": "status-reference",
            "idempotency_ref": self.idempotency_ref, "request_sha256": self.request_sha256,
        })[:32]


# ===== 8. Approvals ===============================================================================
# Consent is for one exact call in one exact state, and for a short time. It is signed, because it
# travels through hands that are not the approver's; it is judged by signing again, because a
# signature is no list of fields.


_APPROVAL_FIELDS: Final[JsonObject] = {
    "approval_id": IDENTIFIER,
    "approver_id": IDENTIFIER,
    "expires_at": {"type": "integer", "minimum": 1, "maximum": MAX_INSTANT + MAX_APPROVAL_SECONDS},
}


@dataclass(frozen=True)
class Approval:
    """A human's consent, signed by the authority; `expires_at` is in seconds, half-open."""

    approval_id: str
    approver_id: str
    expires_at: int
    mac: str = field(repr=False)

    def public(self) -> JsonObject:
        """The part that an audit keeps."""
        return {name: getattr(self, name) for name in _APPROVAL_FIELDS}


def is_eligible(approver_id: str, subject_id: str, consent: str) -> bool:
    """Tell whether a subject's call may be approved by this person, if by anybody.

    Directories often ignore the case of letters, so another spelling of the subject is nobody else;
    under consent `own` exactly the subject is eligible, still in no other spelling.
    """
    return approver_id.casefold() != subject_id.casefold() or (
        consent == "own" and approver_id == subject_id)


def _require_approvers(approvers: Any) -> dict[str, set[str]]:
    """Copy a mapping from tenant to approvers. A text is no list: each letter would be one."""
    sound = isinstance(approvers, Mapping) and all(
        isinstance(names, Iterable) and not isinstance(names, str) for names in approvers.values())
    listed = {tenant_id: (*names,) for tenant_id, names in approvers.items()} if sound else {}
    sound = sound and all(map(is_identifier, itertools.chain(listed, *listed.values())))
    _require_host(sound, "approvers", "a mapping from tenants to lists of identifiers")
    return {tenant_id: {*names} for tenant_id, names in listed.items()}


class ApprovalAuthority:
    """Issues and judges approvals under one secret key (HMAC-SHA-256, RFC 2104).

    The key has at least 32 bytes. `approvers` maps a tenant to those who may approve in it.
    `max_seconds`, 1 to 86,400, bounds how long an approval lives. Raises `HostContextError`. One
    authority and one ledger belong to one downstream.
    """

    def __init__(
        self, key: bytes, approvers: Mapping[str, Iterable[str]], *, max_seconds: int = 60
    ) -> None:
        _require_host(type(key) is bytes and len(key) >= 32, "key", "bytes, at least 32")
        _require_count("max_seconds", max_seconds, 1, MAX_APPROVAL_SECONDS)
        self._key, self._max_seconds = key, max_seconds
        self._approvers = _require_approvers(approvers)
        self._revoked: set[str] = set()

    def issue(
        self, invocation: Invocation, resource: Resource | None, *,
        approver_id: str, approval_id: str, now: int, seconds: int,
    ) -> Approval:
        """Sign consent to one call in one resource state, for `seconds` from `now`.

        `resource` is what `Dispatcher.find_resource` answers. It signs what it is given: only
        `verify` judges. Raises `HostContextError` for a lifetime that `verify` would refuse.
        """
        _require_instants(now=now)
        _require_count("seconds", seconds, 1, self._max_seconds)
        unsigned = Approval(approval_id, approver_id, now + seconds, mac="")
        return replace(unsigned, mac=self._mac(unsigned, invocation, resource))

    def revoke(self, approval_id: str) -> None:
        """Withdraw one approval."""
        self._revoked.add(approval_id)

    def dismiss(self, tenant_id: str, approver_id: str) -> None:
        """Take an approver off a tenant's list; what they have approved is worth nothing now."""
        self._approvers.get(tenant_id, set()).discard(approver_id)

    def verify(
        self, approval: object, invocation: Invocation, resource: object, now: int
    ) -> TypeGuard[Approval]:
        """Judge one approval at `now` (seconds since the epoch); what is not all right is `False`.

        Verifying means recomputing: the mac binds the call, the key, the request, the tool contract
        and the resource revision that the approver saw (invariant 5).
        """
        return (
            type(approval) is Approval and type(invocation) is Invocation
            and is_resource(resource) and is_instant(now) and is_digest(approval.mac)
            and is_identifier(approval.approval_id) and approval.approval_id not in self._revoked
            and is_identifier(approval.approver_id)
            and self._may_approve(approval.approver_id, invocation)
            and is_within(approval.expires_at, now + 1, now + self._max_seconds)
            # In constant time: how long a comparison takes would tell how much of a guess is right.
            and hmac.compare_digest(approval.mac, self._mac(approval, invocation, resource))
        )

    def _may_approve(self, approver_id: str, invocation: Invocation) -> bool:
        principal = invocation.principal
        consent = invocation.spec.consent if invocation.spec else "another"
        # The subject's own consent needs no place on the list, and `dismiss` does not stop it.
        return is_eligible(approver_id, principal.subject_id, consent) and (
            approver_id == principal.subject_id
            or approver_id in self._approvers.get(principal.tenant_id, ()))

    def _mac(self, approval: Approval, invocation: Invocation, resource: object) -> str:
        """Sign what was seen: the call, its purpose, the contract, the resource, and the consent.

        `verify` has seen that no part holds a space, so joined by spaces they are unambiguous.
        """
        signed = " ".join(map(str, (
            "approval", invocation.identity, invocation.fingerprint("dispatch"),
            *invocation.labels.values(),
            resource.revision if isinstance(resource, Resource) else "",
            *approval.public().values())))
        return hmac.digest(self._key, signed.encode("utf-8", "surrogatepass"), "sha256").hex()


# ===== 9. Results: the two projections, built and rebuilt =========================================
# One function builds every package, from an invocation and the few facts that it cannot supply.
# Validation takes those few facts out of a given package, vets them, builds again, and compares.
# So the rebuilt package is the schema: no second description of a package exists that could
# disagree with the first, and a field that is added, missing, swapped or forged fails wherever it
# stands (invariant 9).


class ResultContractError(ValueError):
    """A package that must not be sent on. `problems` says where it is wrong."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(
            f"{readable(each.path)} {each.rule}: {each.message}" for each in problems))
        self.problems = problems


class Evidence(NamedTuple):
    """What a downstream answered, after it passed its contract.

    The data is canonical text: a ledger keeps it, and nobody can change a text.
    """

    data_json: str
    resource_revision: str | None
    observed_at: str
    request_id: str | None
    receipt_id: str | None


class Ending(NamedTuple):
    """All that a package tells beyond its invocation. `code` is `OK`, with evidence, or a row's.

    `status_ref` counts only for OUTCOME_UNKNOWN, whose unresolved operation another key may own;
    `retry_after_ms` only where an author may give one.
    """

    code: str
    recorded_at: str
    delivery: str = "fresh"
    evidence: Evidence | None = None
    approval: JsonObject | None = None
    status_ref: str | None = None
    retry_after_ms: int | None = None


def _model_error(policy: ErrorPolicy, invocation: Invocation, ending: Ending) -> JsonObject:
    """Show one row. Nothing of it is free text, so a model reads no stranger's words as ours."""
    return {
        "code": policy.code,
        "category": policy.category,
        "safe_message": policy.safe_message,
        "recovery": policy.recovery,
        "retry_after_ms": ending.retry_after_ms or policy.retry_after_ms,
        "violations": invocation.violations if policy.code == "INVALID_ARGUMENTS" else [],
    }


def _provenance(invocation: Invocation, evidence: Evidence | None, recorded_at: str) -> JsonObject:
    """Say whose words these are: a producer's, untrusted as data, or the dispatcher's own."""
    if evidence is None:
        return {
            "source_label": "offline-dispatcher", "producer_revision": "offline-dispatcher-v2",
            "resource_revision": None, "observed_at": recorded_at, "trust": "trusted_control",
        }

    return {
        "source_label": invocation.tool.producer_label,
        "producer_revision": invocation.labels["producer"],
        "resource_revision": evidence.resource_revision,
        "observed_at": evidence.observed_at,
        "trust": "untrusted_data",
    }


def _model_result(invocation: Invocation, ending: Ending) -> JsonObject:
    """Write the model's projection; its canonical text is what a provider payload carries.

    It holds no identity, no key and no reference: whatever a model is made to repeat, it has none
    of them to give away (invariant 8).
    """
    policy = policy_of(ending.code)
    evidence = ending.evidence

    return {
        "schema_version": MODEL_RESULT_VERSION,
        "status": policy.status,
        # Decoded anew for each package: what one caller does to it, no other sees.
        "data": _decode_canonical(evidence.data_json) if evidence else None,
        "error": None if policy is SUCCESS else _model_error(policy, invocation, ending),
        "execution": {
            "outcome": policy.outcome, "delivery": ending.delivery,
            "complete": True, "truncated": False,
        },
        "provenance": _provenance(invocation, evidence, ending.recorded_at),
    }


def _unbound_audit(invocation: Invocation, ending: Ending) -> JsonObject:
    """Write the host's projection, all but its digests."""
    call, evidence = invocation.call, ending.evidence
    # Shown only where an operation can be found by it; an unknown one may be another key's.
    found_by = ending.status_ref if ending.code == "OUTCOME_UNKNOWN" else (
        invocation.status_ref if ending.code in ("OK", "OUTPUT_CONTRACT_VIOLATION") else None)

    return {
        "schema_version": AUDIT_VERSION,
        "visibility": "protected_audit",
        "operation_id": call.context.operation_id,
        "principal_ref": invocation.principal.ref,
        "idempotency_ref": invocation.idempotency_ref,
        "recorded_at": ending.recorded_at,
        "provider_context": {
            **vars(call.context.profile),
            "response_id": call.context.response_id, "call_id": call.context.call_id,
        },
        "tool_contract": dict(invocation.labels),
        "approval": dict(ending.approval) if ending.approval else None,
        "downstream": {
            "request_id": evidence.request_id if evidence else None,
            "receipt_id": evidence.receipt_id if evidence else None,
            "status_ref": found_by,
        },
        # The parts of the proposal whose text was not kept.
        "redactions": [part for part, is_gone in (
            ("/name", call.name == MALFORMED_NAME),
            ("/arguments", isinstance(call.arguments, Malformed)),
        ) if is_gone],
    }


def build_package(invocation: Invocation, ending: Ending) -> Package:
    """Build the one package that this invocation with this ending has (invariants 9 and 10).

    Everything that is not in the ending comes from the invocation, so whoever has both, a host a
    year later or a reviewer elsewhere, builds the same package to the byte.
    """
    principal = invocation.principal
    model_result = _model_result(invocation, ending)
    audit = _unbound_audit(invocation, ending)
    # Three digests tie the halves together: what was asked, what the model gets, and one over the
    # whole audit with the plain values behind its references, so that no half fits another call.
    audit["binding"] = {
        "request_sha256": invocation.request_sha256, "result_sha256": digest(model_result)}
    audit["binding"]["call_binding_sha256"] = digest({
        "kind": "call-binding", "audit": audit,
        "idempotency_key": invocation.call.context.idempotency_key,
        "tenant_id": principal.tenant_id, "subject_id": principal.subject_id,
    })
    return {"model_result": model_result, "protected_audit": audit}


# --- Output: what a handler or a receipt answered ---


def _data_problems(invocation: Invocation, data: JsonObject) -> Iterator[Problem]:
    """Say what a contract alone cannot: echoes of the arguments, and the depth."""
    spec, arguments = invocation.tool, invocation.arguments()
    for name, argument in spec.echoes.items():
        if not same_json(arguments[argument], data[name]):
            yield Problem(pointer(("data", name)), "echo", "must equal the argument that it echoes")

    # Where nothing is left open the contract itself says how deep its values are.
    if spec.output_contract.levels > spec.max_output_depth and (
            levels_of(data) > spec.max_output_depth):
        yield _problem(("data",), "depth", spec.max_output_depth)


def _evidence(
    invocation: Invocation, document: JsonObject
) -> tuple[Evidence | None, list[Problem]]:
    """Turn the plain fields of a result into evidence, or say why they are none (invariant 8)."""
    if invocation.verdict.code != "OK":
        return None, [Problem("", "impossible", "a call that never ran has no output")]
    spec, data = invocation.tool, document["data"]
    problems = result_contract(spec.writes, spec.revisions.producer).problems(document)

    text = canonical_json(data)
    if len(text.encode("utf-8")) > spec.max_output_bytes:
        problems.append(_problem(("data",), "bytes", spec.max_output_bytes))
    else:  # no work is done on what is too large, nor on a shape that is not sound
        problems += [problem._replace(path="/data" + problem.path)
                     for problem in spec.output_contract.problems(data)]
        problems += () if problems else _data_problems(invocation, data)
    if problems:
        return None, problems
    return Evidence(
        text, document["resource_revision"], document["observed_at"], document["request_id"],
        document["receipt_id"]), []


def _examined_output(
    invocation: Invocation, result: object
) -> tuple[Evidence | None, list[Problem]]:
    """Copy and check a result in one go, so that what was checked is what is kept.

    A handler may keep its own data and change it later, in another thread.
    """
    if type(invocation) is not Invocation:
        return None, [Problem("", "invocation", "must be an Invocation")]
    if type(result) is not HandlerResult:
        return None, [Problem("", "type", "must be a HandlerResult")]
    try:
        data = plain_json(result.data)  # the rest is texts, which nobody can change
    except JsonError as error:
        return None, [Problem(
            "/data", error.reason,
            f"{error}; convert what is no dict, list, str, int, float, bool or None")]
    return _evidence(invocation, {**result._asdict(), "data": data})


def validate_output(invocation: Invocation, result: object) -> list[Problem]:
    """Check a handler's result against the tool's contract and limits; never raises."""
    return _examined_output(invocation, result)[1]


# --- Validation: take the assertions, vet them, build again, compare ---

# What trusted context cannot supply, and where a package says it. An assertion with an empty
# contract is judged by the tool's own contract, as part of the output that it came from.
_DELIVERIES: Final = ("fresh", "local_replay", "receipt_reconciled")
_ASSERTIONS: Final = Contract(open_object(
    model_result=open_object(
        data={},
        error=nullable(open_object(
            code={"enum": [*ERROR_CATALOG]},
            retry_after_ms=nullable(
                {"type": "integer", "minimum": 1, "maximum": MAX_RETRY_AFTER_MS}),
        )),
        execution=open_object(delivery={"enum": [*_DELIVERIES]}),
        provenance=open_object(resource_revision={}, observed_at={}),
    ),
    protected_audit=open_object(
        recorded_at=UTC_SECOND,
        approval=nullable(closed_object(**_APPROVAL_FIELDS)),
        downstream=open_object(request_id={}, receipt_id={}, status_ref={
            "type": ["string", "null"], "maxLength": 39, "pattern": "^status_[0-9a-f]{32}$"}),
    ),
))
_ASSERTED_AT: Final = {
    "data": "/model_result", "resource_revision": "/model_result/provenance",
    "observed_at": "/model_result/provenance", "request_id": "/protected_audit/downstream",
    "receipt_id": "/protected_audit/downstream",
}


def _unbelievable(assertions: Contract, package: object) -> list[Problem]:
    """Judge what a package asserts by its shape alone; what it should have is `missing`."""
    return [problem._replace(rule="missing") if problem.rule == "required" else problem
            for problem in assertions.problems(package)]


def _is_possible_code(invocation: Invocation, code: str) -> bool:
    """Tell whether this call could have come to the gate that ends with this code.

    A read never meets the gates of a write, a write without key no gate behind `idempotency`, and
    arguments that were not accepted nothing behind `input`.
    """
    verdict, met_by = invocation.verdict.code, policy_of(code).met_by
    if verdict != "OK":  # it ended at the verdict, or at a gate that stands before it
        return code == verdict or met_by == _ANY_CALL
    if not invocation.tool.writes:
        return "read" in met_by
    if invocation.call.context.idempotency_key is None:
        return "keyless" in met_by
    return "write" in met_by or ("consented" in met_by and invocation.tool.consent != "none")


def _is_possible_approval(
    invocation: Invocation, approval: JsonObject | None, fresh_at: str | None
) -> bool:
    """Tell whether a successful write could carry this approval; `fresh_at` where it ran just now.

    A replay shows the approval of its original, which may have ended long ago.
    """
    consent = invocation.tool.consent
    if approval is None or consent == "none":
        return approval is None and consent == "none"

    ran = datetime.fromisoformat(fresh_at[:-1]) - _EPOCH if fresh_at else None
    return is_eligible(
        approval["approver_id"], invocation.principal.subject_id, consent
    ) and (ran is None or is_within(
        approval["expires_at"] - int(ran.total_seconds()), 1, MAX_APPROVAL_SECONDS))


def _implausible(
    invocation: Invocation, code: str, model: JsonObject, audit: JsonObject
) -> list[Problem]:
    """Say which assertions this invocation could not have led to, whatever their digests.

    Digests without a key can be recomputed by anybody. What a call cannot lead to is refused even
    where they all agree.
    """
    error, delivery = model["error"], model["execution"]["delivery"]
    possible = {
        "/model_result/status": _is_possible_code(invocation, code),
        "/protected_audit/recorded_at": audit["recorded_at"] >= "1970",  # years have four digits
        "/protected_audit/downstream/status_ref":
            code != "OUTCOME_UNKNOWN" or audit["downstream"]["status_ref"] is not None,
    }
    if takes_retry_after(code):
        possible["/model_result/error/retry_after_ms"] = error["retry_after_ms"] is not None

    if code == "OK" and all(possible.values()):
        fresh_at = audit["recorded_at"] if delivery == "fresh" else None
        possible["/model_result/execution/delivery"] = invocation.tool.writes or delivery == "fresh"
        possible["/protected_audit/approval"] = not invocation.tool.writes or (
            _is_possible_approval(invocation, audit["approval"], fresh_at))
    return [Problem(path, "impossible", "must follow from the call")
            for path, is_possible in possible.items() if not is_possible]


def _asserted_evidence(
    invocation: Invocation, model: JsonObject, audit: JsonObject
) -> tuple[Evidence | None, list[Problem]]:
    """Judge a success as the output that it says it came from.

    So data in a package has no contract of its own that could be weaker than the tool's.
    """
    provenance, downstream = model["provenance"], audit["downstream"]
    evidence, problems = _evidence(invocation, {
        "data": model["data"],
        "producer_revision": invocation.labels["producer"],
        "resource_revision": provenance["resource_revision"],
        "observed_at": provenance["observed_at"],
        "request_id": downstream["request_id"],
        "receipt_id": downstream["receipt_id"],
    })
    return evidence, [
        problem._replace(path=_ASSERTED_AT[tokens_of(problem.path)[0]] + problem.path)
        for problem in problems]


def _asserted_ending(invocation: Invocation, package: Any) -> tuple[Ending, list[Problem]]:
    """Take the assertions out of a plain package, vet them, return the ending they describe."""
    problems = _unbelievable(_ASSERTIONS, package)
    if problems:
        return Ending("TOOL_ERROR", ""), problems
    model, audit = package["model_result"], package["protected_audit"]
    code = model["error"]["code"] if model["error"] else "OK"
    problems = _implausible(invocation, code, model, audit)
    if problems:
        return Ending("TOOL_ERROR", ""), problems

    if code != "OK":  # an error has no evidence, whatever it asserts
        return Ending(
            code, audit["recorded_at"], status_ref=audit["downstream"]["status_ref"],
            retry_after_ms=(
                model["error"]["retry_after_ms"] if takes_retry_after(code) else None)), []
    evidence, problems = _asserted_evidence(invocation, model, audit)
    return Ending(
        code, audit["recorded_at"], model["execution"]["delivery"], evidence,
        audit["approval"] if invocation.tool.writes else None), problems


_ABSENT: Final = object()


def _compare(
    expected: JsonObject, actual: JsonObject, path: tuple[str, ...], found: list[Problem]
) -> None:
    """Add where a given object differs from the rebuilt one, member by member.

    JSON equality, for Python's own takes `true` for 1, and a digest would not. Names that only the
    given one has are counted, never repeated.
    """
    for name, value in expected.items():
        other = actual.get(name, _ABSENT)
        if value is other:  # as most texts are: the same object is equal
            continue
        if type(value) is dict and type(other) is dict:
            _compare(value, other, (*path, name), found)
        elif other is _ABSENT:
            found.append(Problem(pointer((*path, name)), "missing", "must be present"))
        elif not same_json(value, other):
            found.append(Problem(
                pointer((*path, name)), "rebuilt", "must be what trusted context leads to"))

    if len(actual) > len(expected) or not actual.keys() <= expected.keys():
        found.append(Problem(pointer(path), "unexpected", "must hold no other field"))


def _rebuild(invocation: Invocation, package: object) -> tuple[Package, list[Problem]]:
    """Return the package that invocation and assertions lead to, and how the given one differs."""
    if type(invocation) is not Invocation:
        return {}, [Problem("", "invocation", "must be an Invocation")]
    try:
        copy = plain_json(package)
    except JsonError as error:
        return {}, [Problem("", error.reason, str(error))]

    ending, problems = _asserted_ending(invocation, copy)
    if problems:
        return {}, problems
    rebuilt = build_package(invocation, ending)
    _compare(rebuilt, copy, (), problems)
    return rebuilt, problems


def validate_result(invocation: Invocation, package: object) -> list[Problem]:
    """Say where a package differs from the one that its invocation would have produced.

    Never raises; returns an empty list for a sound package. A package whose assertions cannot be
    believed is reported at those; any other at every pointer where it differs from the rebuilt
    one, with the rule `missing`, `unexpected` (at the parent) or `rebuilt` (invariant 9). Who can
    also recompute the unkeyed digests can still change an assertion: a digest is evidence of
    consistency, not of origin.
    """
    return _rebuild(invocation, package)[1]


# --- One turn: all results of one provider response ---


def _is_turn(invocations: Any) -> bool:
    if not is_sequence(invocations) or not 1 <= len(invocations) <= MAX_CALLS or not all(
            type(invocation) is Invocation for invocation in invocations):
        return False
    contexts = [invocation.call.context for invocation in invocations]
    return len({context.call_id for context in contexts}) == len(contexts) and len({
        (invocation.principal, context.profile, context.response_id)
        for invocation, context in zip(invocations, contexts, strict=True)}) == 1


_ASSERTED_CALL: Final = Contract(open_object(
    protected_audit=open_object(provider_context=open_object(call_id=IDENTIFIER))))


def _rebuild_set(invocations: Any, packages: Any) -> tuple[list[Package], list[Problem]]:
    """Return the rebuilt packages in call order, and all problems of the turn.

    Which call a package answers is its own assertion, and only finds the invocation: the package is
    then rebuilt for that one, so two results with exchanged ids both fail.
    """
    if not _is_turn(invocations) or not is_sequence(packages) or len(packages) > MAX_CALLS:
        return [], [Problem("", "turn", "must be the calls and results of one turn")]
    expected = {invocation.call.context.call_id: invocation for invocation in invocations}
    rebuilt: dict[str, Package] = {}
    problems: list[Problem] = []

    for index, package in enumerate(packages):
        found = _unbelievable(_ASSERTED_CALL, package)
        call_id = "" if found else package["protected_audit"]["provider_context"]["call_id"]
        if not found and call_id not in expected:
            found = [Problem("", "unknown", "must answer a call of this turn")]
        elif call_id in rebuilt:
            found = [Problem("", "duplicate", "must answer a call that has no result yet")]
        elif not found:
            rebuilt[call_id], found = _rebuild(expected[call_id], package)
        problems += [problem._replace(path=f"/{index}{problem.path}") for problem in found]

    problems += [Problem("", "missing", "must answer every call")] * len(
        expected.keys() - rebuilt.keys())
    return [rebuilt[call_id] for call_id in expected if call_id in rebuilt], problems


def validate_result_set(
    invocations: Sequence[Invocation], packages: Sequence[object]
) -> list[Problem]:
    """Check the results of one turn, in any order; paths are led by the package's index.

    Never raises. The turn has one principal, profile and response, and every call exactly one
    result: beyond the rules of `validate_result` there are `turn`, `missing` (both at the root),
    `unknown` and `duplicate`.
    """
    return _rebuild_set(invocations, packages)[1]


# ===== 10. The ledger =============================================================================
#
#   absent --claim--> in_progress --commit--> committed
#                     in_progress --doubt---> unknown --commit--> committed   (evidence, by a query)
#                     in_progress --release-> absent                          (NotStarted)
#                     unknown -----release--> absent                          (NoEffect, by a query)
#
# What happened at most once is whatever one store says happened. So every transition is one store,
# decided on an attempt: it happens only while that very attempt stands in a state that it may
# leave. Whoever comes too late changes nothing and answers as a retry would.


class LedgerError(RuntimeError):
    """A transition that others were always quicker to undo; a claim that raises it ran nothing."""


class Operation(NamedTuple):
    """One attempt at one effect: an immutable record, replaced whole by each transition.

    `attempt` is 128 random bits in hex, made for each claim. `command` is a copy that no handler
    has seen. `approval` is the public part of the consent, never its mac.
    """

    scope: Scope
    matter: Matter
    intent: Intent
    command: Command
    approval: JsonObject | None
    attempt: str
    state: Literal["in_progress", "unknown", "committed"] = "in_progress"
    evidence: Evidence | None = None

    @property
    def status_ref(self) -> str:
        return str(self.command.status_ref)

    def is_open_to_query(self, now: int, lease_seconds: int) -> bool:
        """Tell whether a status query may ask the downstream: the outcome is unknown, or the claim
        is presumed abandoned, for its lease and its deadline have ended (half-open, in seconds).
        """
        return self.state == "unknown" or (self.state == "in_progress" and now >= max(
            self.command.now + lease_seconds, self.command.deadline or 0))


class Ledger(Protocol):
    """What the dispatcher needs to remember. Whatever a method raises passes on unchanged.

    A transition names the operation that it was decided on and compares its `attempt`.
    """

    def bind_call(self, identity: str, fingerprint: str, now: int) -> bool:
        """Bind a call identity to a fingerprint, both hex, for good; tell whether to this one."""

    def find_standing(self, scope: Scope, matter: Matter) -> Operation | None:
        """Return the unresolved operation on this matter under whatever key, else the scope's."""

    def find_reference(self, status_ref: str) -> Operation | None:
        """Return the operation of this status reference."""

    def claim(self, operation: Operation) -> Operation:
        """Record an attempt where nothing stands in its way; return what `find_standing` then does.

        The claim is won where that has the operation's own attempt.
        """

    def commit(self, operation: Operation, evidence: Evidence, now: int) -> Operation:
        """Record that an effect is proved; return the operation that then stands in the scope.

        It has `evidence` itself, the same object, where this call stored it. An attempt that is
        gone is stored again if its scope is free: an effect is proved, whatever was said before.
        """

    def doubt(self, operation: Operation) -> bool:
        """Give up an attempt in progress whose ending nobody saw; tell whether it did."""

    def release(self, operation: Operation) -> bool:
        """Forget an attempt, in progress or unknown, that provably had no effect."""

    def unresolved(self) -> list[Operation]:
        """Return all operations in progress or unknown: what a restarted host must ask about."""


_NO_SCOPE: Final = ("", "", "", None)


class MemoryLedger:
    """A ledger of dicts under one lock that no callback ever runs under: a page for the learner.

    It is gone with its process, knows nothing of another, and grows with the calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[bytes, bytes] = {}
        # One table is the truth, so that an interruption finds a transition done or not begun. The
        # other two only point into it, and may point to what has gone or changed since.
        self._operations: dict[Scope, Operation] = {}
        self._attempted: dict[Matter, Scope] = {}
        self._references: dict[str, Scope] = {}

    def bind_call(self, identity: str, fingerprint: str, now: int) -> bool:
        value = bytes.fromhex(fingerprint)  # half the memory, in a table that only grows
        with self._lock:
            return self._calls.setdefault(bytes.fromhex(identity), value) == value

    def find_standing(self, scope: Scope, matter: Matter) -> Operation | None:
        with self._lock:
            return self._standing(scope, matter)

    def find_reference(self, status_ref: str) -> Operation | None:
        with self._lock:
            operation = self._operations.get(self._references.get(status_ref, _NO_SCOPE))
            return operation if operation and operation.status_ref == status_ref else None

    def claim(self, operation: Operation) -> Operation:
        with self._lock:
            standing = self._standing(operation.scope, operation.matter)
            if standing is None:
                self._references[operation.status_ref] = operation.scope
                self._attempted[operation.matter] = operation.scope
                self._operations[operation.scope] = standing = operation
            return standing

    def commit(self, operation: Operation, evidence: Evidence, now: int) -> Operation:
        with self._lock:
            # Where the scope is free, NoEffect was not true: the proved effect is stored again.
            standing = self._operations.get(operation.scope, operation)
            if standing.attempt != operation.attempt or standing.state == "committed":
                return standing
            settled = operation._replace(state="committed", evidence=evidence)
            self._operations[operation.scope] = settled
            return settled

    def doubt(self, operation: Operation) -> bool:
        return self._move(operation, "unknown", "in_progress")

    def release(self, operation: Operation) -> bool:
        return self._move(operation, "absent", "in_progress", "unknown")

    def unresolved(self) -> list[Operation]:
        with self._lock:
            return sorted(
                (each for each in self._operations.values() if each.state != "committed"),
                key=lambda each: each.command.now)

    def _move(self, operation: Operation, to: Any, *states: str) -> bool:
        """Move the very attempt from one of these states to another; tell whether it was there."""
        with self._lock:
            standing = self._operations.get(operation.scope)
            is_there = standing is not None and (
                standing.attempt == operation.attempt and standing.state in states)
            if is_there and to == "absent":
                del self._operations[operation.scope]
            elif is_there:
                self._operations[operation.scope] = operation._replace(state=to)
            return is_there

    def _standing(self, scope: Scope, matter: Matter) -> Operation | None:
        attempted = self._operations.get(self._attempted.get(matter, _NO_SCOPE))
        if attempted and attempted.matter == matter and attempted.state != "committed":
            return attempted
        return self._operations.get(scope)


# --- The same in SQL: it survives a crash, and processes share it ---

# Plain types and clauses that SQLite and PostgreSQL both know. Scope and matter stand as digests,
# for no index holds 64 kB of arguments.
_CREATE: Final = (
    """CREATE TABLE IF NOT EXISTS tool_calls_v1 (
        identity    TEXT PRIMARY KEY,   -- one call identity means one thing, for good
        fingerprint TEXT NOT NULL,
        bound_at    BIGINT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS tool_operations_v1 (
        scope       TEXT PRIMARY KEY,   -- invariant 6: one scope, one operation
        matter      TEXT NOT NULL,
        status_ref  TEXT NOT NULL,
        attempt     TEXT NOT NULL,
        state       TEXT NOT NULL,
        settled_at  BIGINT,
        record      TEXT NOT NULL,
        evidence    TEXT)""",
    # Invariant 6 again: one matter has one open outcome, whatever keys it is tried under.
    """CREATE UNIQUE INDEX IF NOT EXISTS tool_operations_v1_open
        ON tool_operations_v1 (matter) WHERE state <> 'committed'""",
    """CREATE INDEX IF NOT EXISTS tool_operations_v1_reference
        ON tool_operations_v1 (status_ref)""",
)
_SELECT: Final = "SELECT record, state, evidence FROM tool_operations_v1"


def _record_of(operation: Operation) -> str:
    """Write what never changes of an operation: all but its state and its evidence."""
    principal, *order = operation.command
    return canonical_json([
        operation.scope, operation.matter, operation.intent,
        [[principal.tenant_id, principal.subject_id, principal.roles], *order],
        operation.approval, operation.attempt])


def _operation_of(record: str, state: Any, evidence: str | None) -> Operation:
    """Read an operation back; the constructors of its parts judge what they get."""
    scope, matter, intent, (principal, *order), approval, attempt = _decode_canonical(record)
    tenant_id, subject_id, roles = principal
    return Operation(
        tuple(scope), tuple(matter), Intent(*intent),
        Command(Principal(tenant_id, subject_id, tuple(roles)), *order),
        approval, attempt, state, Evidence(*_decode_canonical(evidence)) if evidence else None)


class SqlLedger(contextlib.AbstractContextManager["SqlLedger"]):
    """A ledger in two tables of one PEP 249 connection, whose use it serializes.

    Each statement is its own transaction, so the connection's mode does not matter; on an exception
    it is rolled back, and the exception passes on. It wants a connection of its own, with plain
    rows. `placeholder` is how the driver writes a parameter: `?` for sqlite3, `%s` for PostgreSQL's
    psycopg. Tables are created where they are missing. Records hold arguments and results in plain
    text: protecting them is the host's. A lost connection means a new ledger object.
    """

    def __init__(self, connection: Any, *, placeholder: str = "?") -> None:
        self._connection = connection
        self._placeholder = placeholder
        self._lock = threading.Lock()
        for statement in _CREATE:
            try:
                self._run(statement)
            except Exception:  # another process was quicker; a true fault says so again
                self._run(statement)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SqlLedger:
        """Open an SQLite file, shared by threads and by processes of one machine.

        Not across a fork, and not on a network file system: there its locks do not hold.
        """
        import sqlite3  # only here: the other ledgers start without it

        connection = sqlite3.connect(path, timeout=30, check_same_thread=False)
        try:
            # A writer does not block readers; whoever else is switching at this moment does it too.
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("PRAGMA journal_mode=WAL").close()
            # A commit that was answered survives a loss of power.
            connection.execute("PRAGMA synchronous=FULL").close()
            return cls(connection)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close the connection; leaving a `with` block does it too."""
        self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def bind_call(self, identity: str, fingerprint: str, now: int) -> bool:
        insert = "INSERT INTO tool_calls_v1 VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
        select = "SELECT fingerprint FROM tool_calls_v1 WHERE identity = ?"
        # No row at all: it was there, and `prune` was quicker than the second statement.
        return self._run(insert, identity, fingerprint, now)[0] == 1 or (
            self._run(select, identity)[1] in ([], [(fingerprint,)]))

    def find_standing(self, scope: Scope, matter: Matter) -> Operation | None:
        # A row of another scope can only be the open one on the matter, and comes first.
        return self._find(
            _SELECT + " WHERE scope = ? OR (matter = ? AND state <> 'committed')"
            " ORDER BY CASE WHEN scope = ? THEN 1 ELSE 0 END",
            digest(scope), digest(matter), digest(scope))

    def find_reference(self, status_ref: str) -> Operation | None:
        return self._find(_SELECT + " WHERE status_ref = ?", status_ref)

    def claim(self, operation: Operation) -> Operation:
        for _ in range(MAX_TRIES):
            self._insert(operation, None)
            standing = self.find_standing(operation.scope, operation.matter)
            if standing:
                return standing
            # What was in the way is gone: between two statements everything may change.
        raise LedgerError("what was in the way was gone, time and again, before it could be read")

    def commit(self, operation: Operation, evidence: Evidence, now: int) -> Operation:
        settled = operation._replace(state="committed", evidence=evidence)
        update = (
            "UPDATE tool_operations_v1 SET state = 'committed', settled_at = ?, evidence = ?"
            " WHERE scope = ? AND attempt = ? AND state <> 'committed'")
        stored = now, canonical_json(evidence), digest(operation.scope), operation.attempt

        for _ in range(MAX_TRIES):
            # Where there is nothing to update, NoEffect was not true: stored again, as above.
            if self._run(update, *stored)[0] == 1 or self._insert(settled, now) == 1:
                return settled
            standing = self._find(_SELECT + " WHERE scope = ?", digest(operation.scope))
            if standing:
                return standing
        raise LedgerError("what was in the way was gone, time and again, before it could be read")

    def doubt(self, operation: Operation) -> bool:
        return self._run(
            "UPDATE tool_operations_v1 SET state = 'unknown'"
            " WHERE scope = ? AND attempt = ? AND state = 'in_progress'",
            digest(operation.scope), operation.attempt)[0] == 1

    def release(self, operation: Operation) -> bool:
        return self._run(
            "DELETE FROM tool_operations_v1"
            " WHERE scope = ? AND attempt = ? AND state <> 'committed'",
            digest(operation.scope), operation.attempt)[0] == 1

    def unresolved(self) -> list[Operation]:
        rows = self._run(_SELECT + " WHERE state <> 'committed'")[1]
        return sorted((_operation_of(*row) for row in rows), key=lambda each: each.command.now)

    def prune(self, now: int, *, keep_seconds: int) -> None:
        """Delete call identities bound and operations committed more than `keep_seconds` ago.

        At least 86,400. It must outlive every retry: a key that was forgotten acts once more. An
        unresolved operation is never deleted. Raises `HostContextError`.
        """
        _require_instants(now=now)
        _require_count("keep_seconds", keep_seconds, 86_400)
        for statement in (
            "DELETE FROM tool_calls_v1 WHERE bound_at < ?",
            # What is not committed has not settled at any time: NULL, which is less than nothing.
            "DELETE FROM tool_operations_v1 WHERE settled_at < ?",
        ):
            self._run(statement, now - keep_seconds)

    def _insert(self, operation: Operation, settled_at: int | None) -> int:
        return self._run(
            "INSERT INTO tool_operations_v1 VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            digest(operation.scope), digest(operation.matter), operation.status_ref,
            operation.attempt, operation.state, settled_at, _record_of(operation),
            operation.evidence and canonical_json(operation.evidence))[0]

    def _find(self, statement: str, *values: object) -> Operation | None:
        rows = self._run(statement, *values)[1]
        return _operation_of(*rows[0]) if rows else None

    def _run(self, statement: str, *values: object) -> tuple[int, list[tuple[Any, ...]]]:
        """Run one statement in a transaction of its own; return its row count and its rows."""
        with self._lock:
            try:
                with contextlib.closing(self._connection.cursor()) as cursor:
                    # Every `?` is a parameter: no statement above holds one in a text.
                    cursor.execute(statement.replace("?", self._placeholder), values)
                    # PEP 249: only a statement that answers rows has a description.
                    rows = iter(cursor.fetchone, None) if cursor.description else ()
                    answer = int(cursor.rowcount), [tuple(row) for row in rows]
                self._connection.commit()
                return answer

            except BaseException:
                with contextlib.suppress(Exception):  # a lost connection cannot roll back either
                    self._connection.rollback()
                raise


# ===== 11. The dispatcher =========================================================================
# One page of gates, and their order is the argument: what a call is comes before what it may do,
# that before what it would do, and nothing is claimed until everything else has said yes. A gate
# returns a fact or raises `Refused`; one `except` turns the refusal into a package, so that every
# way out is the same way (invariant 10).


class Fault(NamedTuple):
    """What the host is told of an ending, and nobody else, for it may hold anybody's text.

    `error` is the exception of an author's callable, with its traceback; `problems` say why an
    answer was refused. `gate` names where.
    """

    gate: str
    invocation: Invocation
    error: Exception | None
    problems: tuple[Problem, ...]


class RunBudget:
    """What one run, a user's request with all its turns, may use; shared by threads.

    A call identity that was not seen before costs one call, and more than `max_repeats` identities
    with one request are a loop. The same identity again costs nothing: a call that waited for an
    approval is no new one. It lives in its process. Raises `HostContextError` for bounds that are
    no integers of at least 1 (`max_effects`: 0).
    """

    def __init__(self, *, max_calls: int, max_repeats: int, max_effects: int) -> None:
        _require_count("max_calls", max_calls, 1)
        _require_count("max_repeats", max_repeats, 1)
        _require_count("max_effects", max_effects, 0)
        self._max_calls, self._max_repeats, self._max_effects = max_calls, max_repeats, max_effects
        self._effects: Counter[Scope] = Counter()       # attempts at each, of which one may act
        self._requests: dict[str, str] = {}     # by call identity
        self._lock = threading.Lock()

    def take_call(self, identity: str, request: str) -> bool:
        """Count a call identity with its request digest; tell whether the run may make it."""
        with self._lock:
            if identity in self._requests:
                return True
            if len(self._requests) >= self._max_calls or self._max_repeats <= sum(
                    other == request for other in self._requests.values()):
                return False
            self._requests[identity] = request
            return True

    def take_effect(self, scope: Scope) -> bool:
        """Take an effect for a scope, which has at most one; tell whether there was one left."""
        with self._lock:
            # `+` leaves those above zero.
            if len(+self._effects) >= self._max_effects and not self._effects[scope]:
                return False
            self._effects[scope] += 1
            return True

    def give_back_effect(self, scope: Scope) -> None:
        """Return what an attempt has taken that did not act."""
        with self._lock:
            self._effects[scope] -= 1


_DECLINED: Final = {"rejected": "APPROVAL_REJECTED", "cancelled": "CALL_CANCELLED"}


def _reach_resource(invocation: Invocation) -> Resource:
    """Ask the tool's author; absent, forbidden and nonsense are one answer (invariant 4)."""
    answer = ask_author(
        lambda: _Stop("TOOL_ERROR", gate="authorization"),
        invocation.tool.find_resource, invocation.principal, invocation.arguments())
    if answer is None:
        raise _Stop("NOT_FOUND")
    if not is_resource(answer):
        raise _Stop("NOT_FOUND", gate="authorization", problems=[
            Problem("", "resource", "must be a Resource (identifier, bool) or None")])
    return answer


def _obstacle_in(standing: Operation, invocation: Invocation) -> Refused | None:
    """Judge what stands in the way: an open outcome, another intent, or nothing but a replay.

    The order is a promise: were the intent judged first, another key or revision would hide that
    nobody knows yet what these very arguments have done.
    """
    # A new key, another provider or a new revision is no way around an open outcome (invariant 7).
    if standing.state != "committed" and standing.matter == invocation.matter:
        return _Stop("OUTCOME_UNKNOWN", standing.status_ref)
    return _Stop("IDEMPOTENCY_CONFLICT") if standing.intent != invocation.intent else None


class Dispatcher:
    """The boundary between proposals and effects.

    `observe(gate)` is called as each gate is entered; the last is where a call ended. `on_fault`
    gets a `Fault` once, after the ledger is settled, for every ending that an author's exception or
    malformed answer led to. `lease_seconds` is how long a claim is presumed alive. What observer,
    `on_fault` or ledger raise passes on unchanged: dispatching the same call again tells what
    stands then. Raises `HostContextError` for a lease below one second.
    """

    def __init__(
        self, registry: Registry, authority: ApprovalAuthority, ledger: Ledger, *,
        observe: Callable[[str], object] | None = None,
        on_fault: Callable[[Fault], object] | None = None,
        lease_seconds: int = 300,
    ) -> None:
        _require_count("lease_seconds", lease_seconds, 1)

        self.registry, self.authority, self.ledger = registry, authority, ledger
        self._observe, self._on_fault, self._lease_seconds = observe, on_fault, lease_seconds

    def resolve(self, principal: Principal, call: ToolCall) -> Invocation:
        """Return the trusted context of a call. Raises `HostContextError` for anything else."""
        return Invocation(
            principal, call, self.registry.find(call.name) if type(call) is ToolCall else None)

    def find_resource(self, invocation: Invocation) -> Resource | None:
        """Return what an approver should look at; `None` where this call could reach nothing."""
        try:
            return _reach_resource(invocation) if invocation.verdict.code == "OK" else None
        except _Stop:
            return None

    # --- The page ---

    def dispatch(
        self, principal: Principal, call: ToolCall, *,
        approvals: Sequence[object] = (), now: int, deadline: int | None = None,
        budget: RunBudget | None = None,
    ) -> Package:
        """Decide one call, run it at most once, and return its package, whatever the model said.

        `now` and `deadline` are whole seconds since the epoch by the host's clock; the deadline is
        half-open. Raises `HostContextError` for what only the host can have caused, before any
        state changes.
        """
        self._enter("host_context")
        invocation = self.resolve(principal, call)
        _require_host(is_sequence(approvals), "approvals", "a list or a tuple")
        _require_instants(now=now, deadline=now if deadline is None else deadline)
        _require_host(budget is None or type(budget) is RunBudget, "budget", "a RunBudget")

        try:
            resource = self._admit(invocation, "dispatch", now, budget)

            committed = self._require_idempotency(invocation)
            if committed:
                return self._replay(invocation, committed, now)

            self._require("business_state", resource.permits, "BUSINESS_RULE_VIOLATION")
            approval = self._require_approval(invocation, resource, approvals, now)
            self._require("deadline", deadline is None or now < deadline, "TIMEOUT_BEFORE_EXECUTE")

            command = self._command(invocation, resource, now, deadline)
            if invocation.tool.writes:
                return self._write(invocation, command, approval, budget)
            return self._read(invocation, command)
        except _Stop as refusal:
            return self._answer_refusal(invocation, refusal, now)

    def decline(self, principal: Principal, call: ToolCall, *, reason: str, now: int) -> Package:
        """Return the last result of a call that a person refused or a host stopped.

        `reason` is exactly `rejected` or `cancelled`. Bad arguments, an open outcome or a committed
        effect answer as they would have. It tells what stood when it was asked and records only the
        call identity: whoever could dispatch the same call must be stopped by the host, with
        `ApprovalAuthority.revoke`. Raises `HostContextError` as `dispatch` does.
        """
        self._enter("host_context")
        invocation = self.resolve(principal, call)
        _require_host(
            type(reason) is str and reason in _DECLINED, "reason", "rejected or cancelled")
        _require_instants(now=now)

        try:
            self._admit(invocation, "dispatch", now)

            committed = self._require_idempotency(invocation)
            if committed:
                return self._replay(invocation, committed, now)

            self._enter("decline")
            raise _Stop(_DECLINED[reason])
        except _Stop as refusal:
            return self._answer_refusal(invocation, refusal, now)

    def query_operation_status(
        self, principal: Principal, call: ToolCall, *,
        status_ref: str, expected_request_sha256: str, now: int,
    ) -> Package:
        """Ask what became of an operation; never runs a handler (invariant 7).

        `call` repeats the write's proposal and key under a call identity of its own. `status_ref`
        and `expected_request_sha256` come from the audit of the package that left the outcome open,
        or from `Ledger.unresolved`. Raises `HostContextError` as `dispatch` does.
        """
        self._enter("host_context")
        invocation = self.resolve(principal, call)
        _require_identifiers(status_ref=status_ref)
        _require_host(
            is_digest(expected_request_sha256),
            "expected_request_sha256", "a SHA-256 in lowercase hex")
        _require_instants(now=now)

        try:
            self._admit(invocation, "query_status", now)

            return self._settle(invocation, self._require_operation(
                invocation, status_ref, expected_request_sha256, now), now)
        except _Stop as refusal:
            return self._answer_refusal(invocation, refusal, now)

    def _admit(
        self, invocation: Invocation, purpose: str, now: int, budget: RunBudget | None = None
    ) -> Resource:
        """Pass the gates that stand before every call: what it is, then what it may reach."""
        self._require_identity(invocation, purpose, now)
        self._require_budget(invocation, budget)
        self._require("registry", invocation.spec is not None, "UNKNOWN_TOOL")      # invariant 1
        self._require_input(invocation)
        self._enter("authorization")
        return _reach_resource(invocation)

    # --- Gates: each is entered, then returns a fact or refuses ---

    def _enter(self, gate: str) -> None:
        if self._observe is not None:
            self._observe(gate)

    def _require(self, gate: str, holds: bool, code: str) -> None:
        """Pass a gate that needs nothing but one fact.

        The fact is a value and no question, so that a gate is entered before anything is asked.
        """
        self._enter(gate)
        if not holds:
            raise _Stop(code)

    def _require_identity(self, invocation: Invocation, purpose: str, now: int) -> None:
        """One provider call identity means one request and one purpose, for good (invariant 3)."""
        self._enter("call_identity")
        identity, fingerprint = _sha256(invocation.identity), invocation.fingerprint(purpose)
        if not self.ledger.bind_call(identity, _sha256(fingerprint), now):
            raise _Stop("CALL_ID_CONFLICT")

    def _require_budget(self, invocation: Invocation, budget: RunBudget | None) -> None:
        """A run that loops is stopped before it asks anything of anybody."""
        if budget is None:
            return
        self._enter("budget")
        if not budget.take_call(invocation.identity, invocation.request_sha256):
            raise _Stop("BUDGET_EXHAUSTED")

    def _require_input(self, invocation: Invocation) -> None:
        """Only arguments that keep contract and rules go any further (invariant 2)."""
        self._enter("input")
        code, problems, error = invocation.verdict
        if code == "OK":
            return
        # The model's own mistake is nobody's fault; rules that raised or answered nonsense are.
        refusal = _Stop(
            code, gate="" if code == "INVALID_ARGUMENTS" else "input", problems=problems)
        refusal.error = error
        raise refusal

    def _require_idempotency(self, invocation: Invocation) -> Operation | None:
        """Return the committed operation that a retry replays, if there is one (invariant 6)."""
        if not invocation.tool.writes:
            return None
        self._enter("idempotency")
        if invocation.call.context.idempotency_key is None:
            raise _Stop("IDEMPOTENCY_KEY_REQUIRED")
        standing = self.ledger.find_standing(invocation.scope, invocation.matter)
        if standing and (obstacle := _obstacle_in(standing, invocation)):
            raise obstacle
        return standing

    def _require_approval(
        self, invocation: Invocation, resource: Resource, approvals: Sequence[object], now: int
    ) -> Approval | None:
        """Demand the consent of a write's contract, given to exactly this call in exactly this
        state (invariant 5); `None` where none is needed.
        """
        tool = invocation.tool
        if not tool.writes or tool.consent == "none":
            return None

        self._enter("approval")
        if not approvals:
            raise _Stop("APPROVAL_REQUIRED")
        for approval in approvals[:MAX_APPROVALS]:
            if self.authority.verify(approval, invocation, resource, now):
                return approval
        raise _Stop("APPROVAL_INVALID")

    def _require_output(self, invocation: Invocation, result: object) -> Evidence:
        """Only data that keeps its contract becomes evidence (invariant 8)."""
        self._enter("output")
        evidence, problems = _examined_output(invocation, result)
        if evidence is None:
            raise _Stop("OUTPUT_CONTRACT_VIOLATION", gate="output", problems=problems)
        return evidence

    def _require_operation(
        self, invocation: Invocation, status_ref: str, request_sha256: str, now: int
    ) -> Operation:
        """Find the operation that a query asks about, and demand that it asks about that one."""
        self._enter("status_ref")
        operation = self.ledger.find_reference(status_ref)
        if operation is None or operation.scope[:2] != invocation.scope[:2]:
            raise _Stop("NOT_FOUND")  # unknown, released, or another principal's (invariant 4)

        asked = invocation.scope, invocation.matter, request_sha256, invocation.intent[1:4]
        if asked != (operation.scope, operation.matter, operation.command.request_sha256,
                  operation.intent[1:4]) or not invocation.tool.writes:
            raise _Stop("STATUS_CONFLICT")
        # After a deployment the contract differs; whether nothing happened can still be asked.
        if operation.intent != invocation.intent and (
                not operation.is_open_to_query(now, self._lease_seconds)):
            raise _Stop("STATUS_CONFLICT")
        return operation

    def _require_receipt(
        self, invocation: Invocation, operation: Operation, answer: object
    ) -> Evidence:
        """Only a receipt of this very effect, under this contract, settles it (invariant 7)."""
        due = [operation.status_ref, operation.command.request_sha256, operation.intent.effect]
        if type(answer) is not Receipt or not same_json(due, [*answer[:len(due)]]):
            raise _Stop("STATUS_CONFLICT", gate="receipt", problems=[
                Problem("", "receipt", "must be this operation's Receipt, NoEffect or None")])
        if operation.intent != invocation.intent:
            raise _Stop("STATUS_CONFLICT")
        return self._require_output(invocation, answer.result)

    # --- Endings ---

    def _command(
        self, invocation: Invocation, resource: Resource, now: int, deadline: int | None
    ) -> Command:
        context = invocation.call.context
        return Command(
            invocation.principal, invocation.call.name, invocation.arguments(),
            context.operation_id, context.idempotency_key,
            invocation.request_sha256, invocation.status_ref, resource.revision, now, deadline,
            attempt=os.urandom(16).hex() if invocation.tool.writes else None,
        )

    def _run_handler(self, invocation: Invocation, command: Command, code: str) -> object:
        """Run the handler; `code` answers an exception that proves nothing."""
        try:
            return ask_author(
                lambda: _Stop(code, command.status_ref, gate="handler"),
                invocation.tool.handler, command)
        except _Stop as refusal:
            raise _proof_in(refusal.error) or refusal from None

    def _read(self, invocation: Invocation, command: Command) -> Package:
        self._enter("handler")
        evidence = self._require_output(
            invocation, self._run_handler(invocation, command, "TOOL_ERROR"))
        return self._succeed(invocation, "fresh", evidence, None, command.now)

    def _write(
        self, invocation: Invocation, command: Command, approval: Approval | None,
        budget: RunBudget | None,
    ) -> Package:
        """Act at most once (invariant 6), and give up what was interrupted (invariant 7)."""
        # Before the `try`, for nothing is claimed yet. From then on an effect counts as used.
        self._enter("claim")
        if budget is not None and not budget.take_effect(invocation.scope):
            raise _Stop("BUDGET_EXHAUSTED")
        # The record keeps a command of its own: the handler may do to its copy what it likes.
        operation = Operation(
            invocation.scope, invocation.matter, invocation.intent,
            command._replace(arguments=invocation.arguments()),
            approval.public() if approval else None, str(command.attempt))

        try:
            ended = self._run_once(invocation, operation, command, budget)
        except BaseException:
            # Whatever was raised by whom, an interruption too, nobody saw how the attempt ended.
            # Should this fail as well, the lease heals it, and the first cause must be seen.
            with contextlib.suppress(Exception):
                self.ledger.doubt(operation)
            raise

        if isinstance(ended, Refused):
            raise ended
        return ended

    def _run_once(
        self, invocation: Invocation, operation: Operation, command: Command,
        budget: RunBudget | None,
    ) -> Package | Refused:
        """Claim, run, settle: a straight line.

        A refusal that is raised leaves the ending open, and `_write` gives the attempt up. One that
        is returned is settled: the trap is to raise that one. Whoever finds another in its place
        answers as a retry would.
        """
        standing = self.ledger.claim(operation)
        if standing.attempt != operation.attempt:
            if budget:
                budget.give_back_effect(operation.scope)
            return _obstacle_in(standing, invocation) or self._replay(
                invocation, standing, command.now)

        self._enter("handler")
        try:
            result = self._run_handler(invocation, command, "OUTCOME_UNKNOWN")
        except _Stop as refusal:
            if refusal.code == "OUTCOME_UNKNOWN":
                raise
            # It proved that nothing began. Where its own attempt stands all the same, a receipt has
            # settled that meanwhile: then the record is right, and the effect was used.
            other = None if self.ledger.release(operation) else (
                self.ledger.find_standing(*operation[:2]))
            if budget and (other is None or other.attempt != operation.attempt):
                budget.give_back_effect(operation.scope)
            return refusal if other is None else (
                _obstacle_in(other, invocation) or self._replay(invocation, other, command.now))

        evidence = self._require_output(invocation, result)
        standing = self.ledger.commit(operation, evidence, command.now)
        return self._answer_commit(invocation, operation, standing, evidence, "fresh", command.now)

    def _answer_commit(
        self, invocation: Invocation, operation: Operation, standing: Operation,
        evidence: Evidence, delivery: str, now: int,
    ) -> Package | Refused:
        """Answer for a proved effect by what the ledger says stands."""
        if standing.attempt != operation.attempt:
            # A replay of the other attempt would hide that there were two effects: the host hears.
            wrong = Problem("", "attempt", "has acted after NoEffect said that it never would")
            return _Stop("OUTCOME_UNKNOWN", operation.status_ref, problems=[wrong],
                         gate="handler" if delivery == "fresh" else "receipt")
        if standing.evidence is not evidence:  # `commit` returns the same object where it stored it
            # Somebody was quicker; what they recorded is what every later replay will say.
            return self._replay(invocation, standing, now)
        return self._succeed(invocation, delivery, evidence, operation.approval, now)

    def _settle(self, invocation: Invocation, operation: Operation, now: int) -> Package:
        """Answer a status query from the record or the downstream (invariant 7)."""
        if operation.state == "committed":
            return self._replay(invocation, operation, now)
        if not operation.is_open_to_query(now, self._lease_seconds):
            raise _Stop("OUTCOME_UNKNOWN", operation.status_ref)

        answer = self._ask_downstream(invocation, operation, now)
        if type(answer) is NoEffect:
            return self._forget(invocation, operation, now)

        evidence = self._require_receipt(invocation, operation, answer)
        ended = self._answer_commit(
            invocation, operation, self.ledger.commit(operation, evidence, now), evidence,
            "receipt_reconciled", now)
        if isinstance(ended, Refused):
            raise ended
        return ended

    def _ask_downstream(self, invocation: Invocation, operation: Operation, now: int) -> object:
        """Ask for a receipt; None, "I do not know", settles nothing, and nor does an exception."""
        self._enter("receipt")
        answer: object = ask_author(
            lambda: _Stop("OUTCOME_UNKNOWN", operation.status_ref, gate="receipt"),
            invocation.tool.find_receipt or bool,  # a write has it: see part 6
            operation.command._replace(arguments=invocation.arguments(), now=now))
        if answer is None:
            raise _Stop("OUTCOME_UNKNOWN", operation.status_ref)
        return answer

    def _forget(self, invocation: Invocation, operation: Operation, now: int) -> Package:
        """Release what had no effect; where somebody else was quicker, tell what stands now."""
        if self.ledger.release(operation):
            raise _Stop("NOT_EXECUTED")
        operation = self._require_operation(
            invocation, operation.status_ref, operation.command.request_sha256, now)
        if operation.state != "committed":
            raise _Stop("OUTCOME_UNKNOWN", operation.status_ref)
        return self._replay(invocation, operation, now)

    def _replay(self, invocation: Invocation, committed: Operation, now: int) -> Package:
        return self._succeed(
            invocation, "local_replay", committed.evidence, committed.approval, now)

    def _succeed(
        self, invocation: Invocation, delivery: str, evidence: Evidence | None,
        approval: JsonObject | None, now: int,
    ) -> Package:
        return build_package(invocation, Ending("OK", utc_text(now), delivery, evidence, approval))

    def _answer_refusal(self, invocation: Invocation, refusal: Refused, now: int) -> Package:
        """Turn a refusal into its package, then tell the host what no package may say."""
        package = build_package(invocation, Ending(
            refusal.code, utc_text(now),
            status_ref=refusal.status_ref, retry_after_ms=refusal.retry_after_ms))
        if refusal.gate and self._on_fault is not None:
            self._on_fault(Fault(refusal.gate, invocation, refusal.error, refusal.problems))
        return package


# ===== 12. Provider edges =========================================================================
# Inbound, a provider's whole JSON response becomes calls; outbound, a package's model projection
# becomes what that provider takes. Two promises meet here: no call of a response is lost on the way
# in (invariant 10), and nothing but the rebuilt projection goes out (invariants 8 and 9). What one
# provider does otherwise than the next is one row of `_WIRES`; the code below asks the row, never
# the provider's name. Only the fields named here are read: providers add others all the time.


class ProviderError(ValueError):
    """A response whose calls cannot be correlated or would be lost; raised before anything runs.

    Its text names fields and types from this part's own tables, never anything that was received.
    """


class ProviderCall(NamedTuple):
    """What a provider says about one call. `bind` adds what the host says: the two stay apart."""

    proposal: ModelProposal
    profile: ProviderProfile
    response_id: str
    call_id: str

    def bind(self, *, operation_id: str, idempotency_key: str | None = None) -> ToolCall:
        """Return the call under the host's operation and key. Raises `HostContextError`."""
        return bind_tool_call(self.proposal, ExecutionContext(
            self.profile, self.response_id, self.call_id, operation_id, idempotency_key))


# --- What is particular to one provider ---

Path = tuple[str | int, ...]        # names and indexes that lead down into a response


class _Wire(NamedTuple):
    """One provider's wire format as data: a fifth provider is a fifth row.

    A response that satisfies `envelope` has `items` among which the calls stand, and a `mark` that
    is in `finished` once none of them is cut off. `result`, `continuation`, `definition` and
    `continues_alone` are for the way out.
    """

    envelope: JsonObject            # the contract of a response, before anything of it is read
    items: Path
    mark: Path
    finished: tuple[str, ...]
    call_types: tuple[str | None, ...]      # None: an item that leaves its type out is a call too
    call_id: str                    # the member of a call that correlates its result
    name: Path
    arguments: Path
    written_as: type                # arguments are JSON text (str) or an object (dict)
    result: Callable[[ToolCall, str, bool], JsonObject]         # call, text, is it an error?
    continuation: Callable[[str, list[JsonObject]], JsonObject]     # response id, all results
    definition: Callable[[JsonObject, JsonObject, bool], JsonObject]    # names, schema, strict?
    # Types that wait for the host and are not read, each with the members that say it does not.
    waits: Mapping[str | None, tuple[tuple[str, str], ...]] = MappingProxyType({})
    answer_id: str = "call_id"      # the member by which an output in the response names its call
    namespace: str | None = None    # the member of a call that says whose tool its name means
    item_finished: Callable[[JsonObject], bool] = lambda item: True
    continues_alone: bool = False   # one result is sent as a continuation, not as a bare item


# Contracts compare types exactly, so an SDK's object, a subclass of dict and an enumeration that is
# a str fail here. Skipped without a word, as something that is no call, they would be lost calls.
_ITEMS: Final[JsonObject] = {"type": "array", "items": open_object(type={"type": "string"})}

# Chat Completions: every item of the list is a call, whether or not it says its type. More than one
# choice would be several answers of which the host means one, and a call in the old member
# `function_call` has no id that a result could name.
_CHOICES: Final[JsonObject] = {
    "type": "array", "minItems": 1, "maxItems": 1, "items": open_object(message={
        "type": "object", "properties": {
            "tool_calls": nullable({"type": "array", "items": {"type": "object", "properties": {
                "type": nullable({"type": "string"}), "function": nullable({"type": "object"}),
            }}}),
            "function_call": nullable({"type": "object", "properties": {
                "name": {"enum": ["", None]},
            }}),
        },
    }),
}

_WIRES: Final[Mapping[str, _Wire]] = MappingProxyType({
    "openai": _Wire(
        envelope=open_object(id=IDENTIFIER, output=_ITEMS),
        items=("output",),
        mark=("status",), finished=("completed",),
        call_types=("function_call",), call_id="call_id",
        name=("name",), arguments=("arguments",), written_as=str,
        # The format has no error flag: the text says how the call ended.
        result=lambda call, text, failed: {
            "type": "function_call_output", "call_id": call.context.call_id, "output": text,
        },
        continuation=lambda response_id, results: {
            "previous_response_id": response_id, "input": results,
        },
        definition=lambda names, schema, strict: {
            "type": "function", **names, "parameters": schema, "strict": strict,
        },
        waits=MappingProxyType({
            "custom_tool_call": (), "computer_call": (), "local_shell_call": (), "shell_call": (),
            "apply_patch_call": (), "mcp_approval_request": (),
            "tool_search_call": (("execution", "server"),),
        }),
        namespace="namespace",
        # One call may be cut off in a response that is complete. A program's call stays
        # `in_progress` until it is answered: who waited for `completed` there would answer none.
        item_finished=lambda item: any(same_json(mark, item.get("status")) for mark in (
            None, "completed", "in_progress" if type(item.get("caller")) is dict else None)),
    ),
    "anthropic": _Wire(
        envelope=open_object(id=IDENTIFIER, content=_ITEMS),
        items=("content",),
        # A complete call may also end a turn. Every other reason, null included, cuts it off.
        mark=("stop_reason",), finished=("tool_use", "end_turn"),
        call_types=("tool_use",), call_id="id", answer_id="tool_use_id",
        name=("name",), arguments=("input",), written_as=dict,
        result=lambda call, text, failed: {
            "type": "tool_result", "tool_use_id": call.context.call_id,
            "content": [{"type": "text", "text": text}], "is_error": failed,
        },
        # These blocks must stand first in their message; text of the host's own may follow them.
        continuation=lambda response_id, results: {"role": "user", "content": results},
        definition=lambda names, schema, strict: {
            **names, "input_schema": schema, **({"strict": True} if strict else {}),
        },
        namespace="toolset_name",
    ),
    "google": _Wire(
        envelope=open_object(id=IDENTIFIER, steps=_ITEMS),
        items=("steps",),
        mark=("status",), finished=("requires_action", "completed"),
        call_types=("function_call",), call_id="id",
        name=("name",), arguments=("arguments",), written_as=dict,
        result=lambda call, text, failed: {
            "type": "function_result", "name": call.name, "call_id": call.context.call_id,
            "is_error": failed, "result": [{"type": "text", "text": text}],
        },
        continuation=lambda response_id, results: {
            "previous_interaction_id": response_id, "input": results,
        },
        definition=lambda names, schema, strict: {
            "type": "function", **names, "parameters": schema,
        },
        continues_alone=True,
    ),
    "openai-chat": _Wire(
        envelope=open_object(id=IDENTIFIER, choices=_CHOICES),
        items=("choices", 0, "message", "tool_calls"),
        mark=("choices", 0, "finish_reason"), finished=("tool_calls", "stop"),
        call_types=("function", None), call_id="id",
        name=("function", "name"), arguments=("function", "arguments"), written_as=str,
        result=lambda call, text, failed: {
            "role": "tool", "tool_call_id": call.context.call_id, "content": text,
        },
        continuation=lambda response_id, results: {"messages": results},
        definition=lambda names, schema, strict: {
            "type": "function", "function": {**names, "parameters": schema, "strict": strict},
        },
        waits=MappingProxyType({"custom": ()}),
    ),
})


# --- Inbound ---


@functools.cache  # compiled when a response comes: who replays a fixture needs none of them
def _envelope_of(provider: str) -> Contract:
    return Contract(_WIRES[provider].envelope)


def _reach(value: Any, path: Path) -> Any:
    """Return what stands at a path of a response, None where nothing does.

    Only exact objects with names of exact texts are entered: a key of another type could answer a
    lookup with code of its own. An index is safe, for the envelope admits exactly one choice.
    """
    for step in path:
        if type(step) is str and (
                type(value) is not dict or any(type(name) is not str for name in value)):
            return None
        value = value[step] if type(step) is int else value.get(step)
    return value


def _is_spent(wire: _Wire, item: JsonObject, answered: set[object]) -> bool:
    """Tell whether nobody waits for this call any more: it or its program has its result below.

    Providers run programs that call the host's tools, and name the program in the call's `caller`.
    """
    return not answered.isdisjoint(filter(is_identifier, (
        item.get(wire.call_id), _reach(item, ("caller", "caller_id")),
        _reach(item, ("caller", "tool_id")))))


def _select_calls(wire: _Wire, items: list[JsonObject]) -> list[JsonObject]:
    """Return the calls that are still to be answered, last first. Raises `ProviderError`.

    Read from the end, for an output answers only what stands above it. The trap is a call that the
    response answers already: dispatched again, its effect would happen again.
    """
    answered, seen, calls = set[object](), set[object](), list[JsonObject]()
    for item in reversed(items):
        kind, call_id, answer_id = map(item.get, ("type", wire.call_id, wire.answer_id))
        if kind and kind.endswith(("_output", "_result")) and is_identifier(answer_id):
            answered.add(answer_id)

        is_spent = _is_spent(wire, item, answered)
        is_waiting = kind in wire.waits and not any(
            same_json(value, item.get(name)) for name, value in wire.waits[kind])
        if is_waiting and not is_spent:
            raise ProviderError(f"type {kind} waits for the host, and no function here reads it")
        if not is_waiting and kind not in wire.call_types:
            continue  # text, reasoning, what the provider runs by itself, types not known yet

        # Tested before anything is left out: under one id, the output of one call hides another.
        if not is_identifier(call_id) or call_id in seen or (
                len(calls) == MAX_CALLS and not is_spent):
            raise ProviderError(
                f"each of at most {MAX_CALLS} calls needs an identifier of its own: {wire.call_id}")
        seen.add(call_id)
        if not is_spent:
            calls.append(item)
    return calls


def _read_name(wire: _Wire, item: JsonObject) -> object:
    """Return the name under which a call is bound.

    A namespace says whose tool is meant: `remove` of drafts and `remove` of accounts are two tools.
    A registry has no namespaces, so another than the tool's own name makes a name that no tool can
    bear, and what is no text a malformed one.
    """
    name = _reach(item, wire.name)
    namespace = item.get(wire.namespace) if wire.namespace else None
    if namespace is None or (type(name) is str and same_json(name, namespace)):
        return name
    return f"{namespace}/{name}" if type(namespace) is type(name) is str else None


def _read_arguments(wire: _Wire, item: JsonObject, is_whole: bool) -> Any:
    """Return the arguments of a call: decoded text, an object as it is, or `Malformed`.

    Nothing is unwrapped or completed, and `bind_tool_call` judges what an object holds. What was
    cut off may parse all the same, and say something else than was meant: it is not even read.
    """
    given = _reach(item, wire.arguments)
    if not is_whole:
        return malformed("incomplete", given)
    if type(given) is not wire.written_as:
        return malformed("type", given)

    try:
        return decode_json(given, max_bytes=MAX_ARGUMENT_BYTES) if type(given) is str else given
    except JsonError as error:
        return malformed(error.reason, given)


def _read_calls(provider: str, response: Any) -> list[ProviderCall]:
    """Read the unanswered calls of a whole response, in order; raises only `ProviderError`.

    What is wrong with one call becomes `Malformed` arguments and is answered (invariant 10). Only
    what would leave a call without an answer is raised: an id that correlates nothing, an item that
    cannot be looked into, one that waits for somebody else.
    """
    wire = _WIRES[provider]
    for problem in _envelope_of(provider).problems(response):
        raise ProviderError(
            f"response at {readable(problem.path)}: {problem.message}"
            "; give the whole response, and dump an SDK object to JSON first")

    # A mark that is null or missing is no mark: in a stream it stands where nothing has ended yet.
    is_finished = any(same_json(one, _reach(response, wire.mark)) for one in wire.finished)
    return [ProviderCall(
        ModelProposal(
            _read_name(wire, item),
            _read_arguments(wire, item, is_finished and wire.item_finished(item))),
        PROFILES[provider], response["id"], item[wire.call_id],
    ) for item in reversed(_select_calls(wire, _reach(response, wire.items) or []))]


def from_openai_responses(response: JsonObject) -> list[ProviderCall]:
    """Read the calls of one response of the OpenAI Responses API, in order.

    `call_id` correlates, never `id`; `arguments` is JSON text. Arguments that cannot be read become
    `Malformed`, and so do all of a response, or of a call, that is not finished. Calls that the
    response answers itself are left out, so an empty list says only that nobody waits for a result:
    the response's own `status` says why. Raises `ProviderError` where a call cannot be correlated
    or would be lost, before anything runs. The other three differ only in their provider's format.
    """
    return _read_calls("openai", response)


def from_anthropic_messages(message: JsonObject) -> list[ProviderCall]:
    """Read the calls of one message of the Anthropic Messages API; `input` is an object.

    An empty list with the `stop_reason` `pause_turn` means that the provider is not done: send the
    message back as it is. Raises `ProviderError`.
    """
    return _read_calls("anthropic", message)


def from_gemini_interactions(interaction: JsonObject) -> list[ProviderCall]:
    """Read the calls of one interaction of the Gemini Interactions API; `arguments` is an object.

    Raises `ProviderError`.
    """
    return _read_calls("google", interaction)


def from_openai_chat(completion: JsonObject) -> list[ProviderCall]:
    """Read the calls of one Chat Completions object, which many servers speak; JSON text again.

    It has exactly one choice. Raises `ProviderError`.
    """
    return _read_calls("openai-chat", completion)


# --- Outbound: the rebuilt model projection on the wire ---


def _write_payload(
    invocations: Sequence[Invocation], packages: Sequence[Package], problems: list[Problem],
    *, is_turn: bool,
) -> JsonObject:
    """Write rebuilt packages as their provider takes them: a continuation, or one bare item.

    The text of a result is the one whose digest the audit holds. It comes from the rebuilt
    projection, never from the caller's object (invariants 8 and 9).
    """
    if problems:
        raise ResultContractError(problems)

    context = invocations[0].call.context
    wire = _WIRES[context.profile.provider]
    results = [
        wire.result(
            invocation.call, canonical_json(package["model_result"]),
            package["model_result"]["status"] != "succeeded")
        for invocation, package in zip(invocations, packages, strict=True)]

    return (wire.continuation(context.response_id, results)
            if is_turn or wire.continues_alone else results[0])


def to_provider(invocation: Invocation, package: object) -> JsonObject:
    """Map one result to what the provider of its call takes, whichever of `PROFILES` that is.

    Raises `ResultContractError` for a package that `validate_result` reports.
    """
    rebuilt, problems = _rebuild(invocation, package)
    return _write_payload([invocation], [rebuilt], problems, is_turn=False)


def _to(provider: str, invocation: Invocation, package: object) -> JsonObject:
    """Map one result as `to_provider` does, but of this provider's calls alone."""
    payload = to_provider(invocation, package)
    if invocation.call.context.profile != PROFILES[provider]:
        raise ResultContractError([Problem(
            "/protected_audit/provider_context", "profile", "must be this provider's call")])
    return payload


def to_openai_responses(invocation: Invocation, package: object) -> JsonObject:
    """Map one result to a `function_call_output` of the OpenAI Responses API.

    Like the other three it raises `ResultContractError` for a package that `validate_result`
    reports and for the call of another provider.
    """
    return _to("openai", invocation, package)


def to_anthropic_messages(invocation: Invocation, package: object) -> JsonObject:
    """Map one result to a `tool_result` block (Anthropic). Raises `ResultContractError`."""
    return _to("anthropic", invocation, package)


def to_gemini_interactions(invocation: Invocation, package: object) -> JsonObject:
    """Map one result to a Gemini continuation; the host adds `model`. Raises as its siblings do."""
    return _to("google", invocation, package)


def to_openai_chat(invocation: Invocation, package: object) -> JsonObject:
    """Map one result to a `tool` message (Chat Completions). Raises `ResultContractError`."""
    return _to("openai-chat", invocation, package)


def continue_turn(invocations: Sequence[Invocation], packages: Sequence[object]) -> JsonObject:
    """Answer a whole turn: one result for each call, in call order, however the packages come.

    Goes out as the provider's next request wants it: under `input` for OpenAI and Gemini, as one
    user message for Anthropic, under `messages` for Chat Completions. Raises `ResultContractError`
    for anything that `validate_result_set` reports (invariant 10).
    """
    return _write_payload(invocations, *_rebuild_set(invocations, packages), is_turn=True)


# --- Tool definitions for a provider's request ---

# What every strict mode understands of JSON Schema 2020-12, and how it is written. A bound that it
# refuses is said in words: a model can obey a sentence before it meets any error of ours.
_ADVERTISED: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({
    **dict.fromkeys(
        ("type", "title", "description", "required", "additionalProperties"),
        lambda said: said),
    "items": lambda schema: _advertise_node(schema),
    "properties": lambda properties: {
        name: _advertise_node(schema) for name, schema in properties.items()},
})


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_PHRASES: Final[Mapping[str, Callable[[Any], str]]] = MappingProxyType({
    "format": {
        "identifier": "1 to 255 printable ASCII characters without spaces",
        "utc-second": "an instant as YYYY-MM-DDThh:mm:ssZ",
        "date": "a day as YYYY-MM-DD",
        "date-time": "an instant with its offset, as YYYY-MM-DDThh:mm:ssZ"
                     " or YYYY-MM-DDThh:mm:ss+hh:mm",
    }.__getitem__,
    "minLength": lambda limit: f"at least {_count(limit, 'character')}",
    "maxLength": lambda limit: f"at most {_count(limit, 'character')}",
    "pattern": lambda pattern: f"the whole text matches the regular expression {pattern}",
    "minimum": lambda limit: f"at least {canonical_json(limit)}",
    "exclusiveMinimum": lambda limit: f"more than {canonical_json(limit)}",
    "maximum": lambda limit: f"at most {canonical_json(limit)}",
    "exclusiveMaximum": lambda limit: f"less than {canonical_json(limit)}",
    "minItems": lambda limit: f"at least {_count(limit, 'item')}",
    "maxItems": lambda limit: f"at most {_count(limit, 'item')}",
})


def _advertise_node(schema: JsonObject) -> JsonObject:
    """Rewrite one node of a contract, and all below it, for a model to read.

    Strict modes want a type everywhere and know no `const`: a constant becomes an enumeration of
    one, and where the contract names no type, the options do.
    """
    options = [schema["const"]] if "const" in schema else schema.get("enum", [])
    kinds = [*dict.fromkeys(map(type_name, options))]
    node: JsonObject = {
        "type": kinds[0] if len(kinds) == 1 else kinds,
        **({"enum": options} if options else {}),
        **{keyword: write(schema[keyword])
           for keyword, write in _ADVERTISED.items() if keyword in schema},
    }

    bounds = "; ".join(
        phrase(schema[keyword]) for keyword, phrase in _PHRASES.items() if keyword in schema)
    if bounds:
        node["description"] = (
            f"{node['description']} ({bounds})" if "description" in node else bounds)
    return node


def _requires_all(schema: JsonObject) -> bool:
    """Tell whether no property is optional at any level, as strict modes demand."""
    inner = schema.get("properties", {})
    return {*inner} <= {*schema.get("required", ())} and all(map(_requires_all, [
        *inner.values(), *([schema["items"]] if "items" in schema else [])]))


def advertise_tools(
    registry: Registry, profile: ProviderProfile, *, strict: bool = True,
) -> list[JsonObject]:
    """Write the registry's tools as one provider's definitions, from the contract that is enforced.

    A definition only informs the model; the host enforces the whole contract either way. `strict`
    asks for the provider's strict mode, where it has one and every property is required. Providers
    limit how many strict tools one request may hold: `strict=False` is for hosts that have more.
    Raises `HostContextError` for a profile that is not registered.
    """
    _require_host(is_registered(profile), "profile", "one of PROFILES")
    return [_WIRES[profile.provider].definition(
        {"name": spec.name, "description": spec.description},
        _advertise_node(spec.input_contract.schema),
        strict and _requires_all(spec.input_contract.schema),
    ) for spec in registry]


# ===== 13. The demo: a mock downstream with two tools =============================================
# Everything above is generic. From here on there are orders and refund drafts, in memory, with
# faults on demand. This is the part to copy for tools of your own. Its handlers have three habits:
#
#   compare and set       they act only while the state that was authorized still stands;
#   receipt with effect   what proves an effect is stored in the same step as the effect;
#   NotStarted            they raise it before anything began, for it promises that nothing will.

DEMO_APPROVER: Final = "human-reviewer-1"
FAULTS: Final = (
    "rate_limit", "tool_error",                             # met before anything began
    "timeout_after_commit", "timeout_after_commit_receipt_unavailable",     # met after the effect
)

_ORDER_REF: Final[JsonObject] = {
    "type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[A-Z0-9-]+$",
}
_REASON: Final[JsonObject] = {"type": "string", "enum": ["duplicate", "damaged", "other"]}


class Order(NamedTuple):
    """One order as the mock downstream keeps it; every change gives it another revision."""

    tenant_id: str
    owner_id: str
    status: str
    revision: str


def _label_revisions(stem: str) -> Revisions:
    """Name the six parts of a tool, all in their first version."""
    return Revisions(*(f"{stem}-{part}-v1" for part in (
        "input-schema", "output-schema", "effect", "handler", "producer", "policy")))


class MockDownstream:
    """Three orders, numbered refund drafts, receipts, and a `fault` that handlers meet.

    It drafts refunds and refunds nothing; `side_effect_count` counts the drafts. `fault` is one of
    `FAULTS`, or `none`; `faults_met` counts how often a handler ran into it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()                       # stands for a database's transaction
        self.reset()

    def reset(self) -> None:
        """Go back to the beginning: three orders, no draft, no receipt, no fault."""
        self.orders = {
            "ORDER-7": Order("tenant-a", "user-1", "paid", "ORDER-7-r1"),
            "ORDER-8": Order("tenant-a", "user-2", "paid", "ORDER-8-r1"),
            "ORDER-9": Order("tenant-b", "user-1", "paid", "ORDER-9-r1"),
        }
        self.fault, self.faults_met, self.side_effect_count = "none", 0, 0
        self._requests = itertools.count(1)
        self._receipts: dict[str | None, Receipt] = {}      # by status reference

    def amend(self, order_ref: str, **changes: str) -> None:
        """Change one order, and with it its revision. Raises `KeyError` where there is none."""
        with self._lock:
            order = self.orders[order_ref]
            number = int(order.revision.rpartition("-r")[2]) + 1
            self.orders[order_ref] = order._replace(**changes, revision=f"{order_ref}-r{number}")

    def tools(self) -> tuple[ToolSpec, ToolSpec]:
        """Return the two tools on this downstream: `get_order` and `create_refund_draft`."""
        return self._describe_read(), self._describe_write()

    def _describe_read(self) -> ToolSpec:
        return ToolSpec(
            name="get_order",
            description="Read the status of one order.",
            risk="read",

            input_schema=closed_object(order_ref=_ORDER_REF),
            output_schema=closed_object(
                order_ref=_ORDER_REF,
                status={"type": "string", "enum": ["paid", "pending", "refunded"]},
            ),
            echoes={"order_ref": "order_ref"},      # an answer about another order is refused
            max_output_bytes=256,
            max_output_depth=1,
            producer_label="mock-order-service",
            revisions=_label_revisions("get-order"),

            find_resource=self._find_readable_order,
            handler=self._get_order,
        )

    def _describe_write(self) -> ToolSpec:
        return ToolSpec(
            name="create_refund_draft",
            description=(
                "Draft a refund of one paid order for a human to complete; it refunds nothing."),
            risk="write",

            input_schema=closed_object(order_ref=_ORDER_REF, reason=_REASON),
            output_schema=closed_object(
                draft_id={"type": "string", "maxLength": 32, "pattern": r"^DRAFT-\d+$"},
                order_ref=_ORDER_REF, reason=_REASON,
            ),
            echoes={"order_ref": "order_ref", "reason": "reason"},
            max_output_bytes=256,
            max_output_depth=1,
            producer_label="mock-refund-service",
            revisions=_label_revisions("create-refund-draft"),

            find_resource=self._find_own_order,
            handler=self._create_refund_draft,
            find_receipt=self._find_receipt,
        )

    # Who may reach an order. None says "absent" and "not yours" alike, so nobody learns which
    # (invariant 4).

    def _find_readable_order(self, principal: Principal, arguments: JsonObject) -> Resource | None:
        order = self.orders.get(arguments["order_ref"])
        if order is None or order.tenant_id != principal.tenant_id or (
                order.owner_id != principal.subject_id and "support_admin" not in principal.roles):
            return None
        return Resource(order.revision, permits=True)

    def _find_own_order(self, principal: Principal, arguments: JsonObject) -> Resource | None:
        order = self.orders.get(arguments["order_ref"])
        if order is None or order[:2] != (principal.tenant_id, principal.subject_id):
            return None
        return Resource(order.revision, permits=order.status == "paid")

    # What the tools do.

    def _get_order(self, command: Command) -> HandlerResult:
        with self._lock:
            data = {**command.arguments, "status": self._require_unchanged(command).status}
            return self._answer(command, data, receipt_id=None)

    def _create_refund_draft(self, command: Command) -> HandlerResult:
        # Comparing, acting and keeping the receipt are one transaction. Outside of one, the order
        # could change after it was compared, or a crash could leave a draft without its receipt.
        with self._lock:
            self._require_unchanged(command)
            self.side_effect_count += 1
            data = {"draft_id": f"DRAFT-{self.side_effect_count}", **command.arguments}
            result = self._answer(command, data, receipt_id=f"receipt-{self.side_effect_count}")

            # A status query finds the effect by this receipt when the answer is lost on its way.
            if self.fault != "timeout_after_commit_receipt_unavailable":
                self._receipts[command.status_ref] = Receipt(
                    str(command.status_ref), command.request_sha256,
                    "create-refund-draft-effect-v1", result,
                )

            # The answer is lost after the effect. `NotStarted` would be a lie here, and cost a
            # second draft; any other exception says that the outcome is unknown.
            if self.fault.startswith("timeout_after_commit"):
                self.faults_met += 1
                raise TimeoutError
            return result

    def _find_receipt(self, command: Command) -> Receipt | None:
        """Return the receipt of an effect, else None: "I do not know".

        To have found nothing is no proof that nothing happened: the command may still be on its
        way. Only a downstream that from now on refuses this very `command.attempt` may answer
        `NoEffect()`.
        """
        return self._receipts.get(command.status_ref)

    def _require_unchanged(self, command: Command) -> Order:
        """Compare, under the lock: return the order as it was authorized, or raise `NotStarted`."""
        if self.fault in ("rate_limit", "tool_error"):
            self.faults_met += 1
            raise NotStarted(self.fault.upper())

        order = self.orders[command.arguments["order_ref"]]
        if order.revision != command.expected_revision:
            raise NotStarted("BUSINESS_RULE_VIOLATION")
        return order

    def _answer(self, command: Command, data: JsonObject, receipt_id: str | None) -> HandlerResult:
        return HandlerResult(
            data,
            producer_revision=command.tool.replace("_", "-") + "-producer-v1",
            resource_revision=command.expected_revision,
            observed_at=utc_text(command.now),
            request_id=f"request-{next(self._requests)}",
            receipt_id=receipt_id,
        )


def demo_dispatcher(
    downstream: MockDownstream | None = None, *, observe: Callable[[str], object] | None = None
) -> Dispatcher:
    """Return a dispatcher on a mock downstream; pass one of your own to hold on to it.

    Its registry, its authority (with a fresh key) and its ledger (in memory) are attributes.
    `observe` is called with the name of each gate that a call enters.

    A read, from proposal to provider payload:

    >>> dispatcher = demo_dispatcher()
    >>> principal = Principal("tenant-a", "user-1", roles=())   # from the host's session
    >>> proposal = ModelProposal("get_order", {"order_ref": "ORDER-7"})   # from the model
    >>> context = ExecutionContext(
    ...     PROFILES["openai"], "resp-1", "call-1", "op-1", idempotency_key=None)
    >>> call = bind_tool_call(proposal, context)
    >>> package = dispatcher.dispatch(principal, call, now=1_000)
    >>> package["model_result"]["data"]
    {'order_ref': 'ORDER-7', 'status': 'paid'}
    >>> to_openai_responses(dispatcher.resolve(principal, call), package)["call_id"]
    'call-1'
    """
    registry = Registry((downstream or MockDownstream()).tools())
    authority = ApprovalAuthority(
        os.urandom(32), {"tenant-a": [DEMO_APPROVER], "tenant-b": [DEMO_APPROVER]})
    return Dispatcher(registry, authority, MemoryLedger(), observe=observe)


# ===== 14. Fixtures ===============================================================================
# A fixture is a file of cases. Each case is a short story of calls, with the ending that every step
# must have. A contract judges its shape; the `_find_` functions yield what a contract cannot say.
# Learners edit this file by hand: whatever is wrong with it is told at once, with its place. A run
# takes nothing on trust that a host would not: every package is rebuilt and mapped for its
# provider, and an expected value that holds by chance, for its fault was never met, fails.

APPROVAL_SECONDS: Final = 60            # from a step's `now` to the expiry of its approval

_MANY: Final[JsonObject] = {"type": "array", "minItems": 1, "maxItems": 256}
_STEP: Final = closed_object(
    # A step's name, and which of the dispatcher's two doors it knocks at.
    step_id=IDENTIFIER,
    action={"enum": ["dispatch", "query_status"]},

    # What the model says, and what the host says of it.
    proposal=closed_object(
        name={"type": "string", "maxLength": 255}, arguments={"type": "object"}),
    execution_context=closed_object(
        provider={"enum": [*PROFILES]}, api_family=IDENTIFIER, response_id=IDENTIFIER,
        call_id=IDENTIFIER, operation_id=IDENTIFIER, idempotency_key=nullable(IDENTIFIER),
        adapter_revision=IDENTIFIER,
    ),

    # What the test sets: consent, the clock, a fault, and which step a status query asks about.
    approval={"enum": ["none", "valid", "expired", "mismatched"]},
    now={"type": "integer", "minimum": 0, "maximum": MAX_INSTANT - APPROVAL_SECONDS},
    failure={"enum": ["none", "timeout_before_execute", *FAULTS]},
    status_ref_from=nullable(IDENTIFIER),

    # How the step must end.
    expected=closed_object(
        code={"enum": ["OK", *ERROR_CATALOG]},
        status={"enum": ["succeeded", "failed", "unknown"]},
        outcome={"enum": ["not_started", "committed", "unknown"]},
        recovery={"enum": sorted({row.recovery for row in (SUCCESS, *ERROR_CATALOG.values())})},
        delivery={"enum": [*_DELIVERIES]},
        data=nullable({"type": "object"}),
        side_effect_count={"type": "integer", "minimum": 0, "maximum": MAX_SAFE_INTEGER},
    ),
)
FIXTURE_SCHEMA: Final = closed_object(
    schema_version={"const": "tool-cases-v2"},
    contract=closed_object(
        model_result={"const": MODEL_RESULT_VERSION}, protected_audit={"const": AUDIT_VERSION}),
    cases={**_MANY, "items": closed_object(
        id=IDENTIFIER,
        principal=closed_object(
            tenant_id=IDENTIFIER, subject_id=IDENTIFIER,
            roles={"type": "array", "maxItems": MAX_ROLES, "items": IDENTIFIER},
        ),
        steps={**_MANY, "items": _STEP},
    )},
)


@functools.cache  # compiled where a fixture is read: who came for the tools above reads none
def _fixture_contract() -> Contract:
    return Contract(FIXTURE_SCHEMA)


class FixtureError(ValueError):
    """A fixture that cannot be run.

    `problems` has each fault with its JSON Pointer, the text a line for each of the first twenty.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [f"{readable(problem.path)}: {problem.message}" for problem in problems]
        if len(lines) > MAX_PRINTED_PROBLEMS:
            lines[MAX_PRINTED_PROBLEMS:] = [f"... and {len(lines) - MAX_PRINTED_PROBLEMS} more"]
        super().__init__("\n".join(lines))


class FixtureIOError(FixtureError):
    """A fixture file that cannot be read; its path is never repeated."""


def _keep_well_shaped(
    path: str, items: list[JsonObject], misshapen: set[str]
) -> list[tuple[str, JsonObject]]:
    """Return what the contract found sound, each with its pointer: only that can be read."""
    return [(where, item) for number, item in enumerate(items)
            if (where := f"{path}/{number}") not in misshapen]


def _find_repeated(name: str, places: list[tuple[str, JsonObject]]) -> list[Problem]:
    """Report each place whose field `name` says what an earlier place's said."""
    said = [item[name] for _, item in places]
    return [Problem(f"{path}/{name}", "unique", "must not be repeated")
            for number, (path, item) in enumerate(places) if item[name] in said[:number]]


def _find_step_faults(path: str, step: JsonObject) -> Iterator[Problem]:
    """Yield what is wrong with a step by itself, whatever its neighbours are: a row a rule."""
    host, expected = step["execution_context"], step["expected"]
    profile = ProviderProfile(host["provider"], host["api_family"], host["adapter_revision"])
    row = policy_of(expected["code"])
    agreed: JsonObject = {name: getattr(row, name) for name in ("status", "outcome", "recovery")}
    # An error reuses no evidence and carries no data.
    agreed |= {} if row is SUCCESS else {"delivery": "fresh", "data": None}

    rules = (
        (is_registered(profile), "execution_context", "profile", "a registered profile"),
        *((step["action"] == "dispatch" or step[name] == "none", name, "query",
           "none for a status query") for name in ("failure", "approval")),
        # An expired approval is issued one second before.
        (step["approval"] != "expired" or step["now"] > 0, "now", "expired",
         "at least 1 with an expired approval"),
        (row is not SUCCESS or expected["data"] is not None, "expected/data", "catalog",
         "an object for OK"),
    )
    yield from (Problem(f"{path}/{name}", rule, f"must be {wanted}")
                for holds, name, rule, wanted in rules if not holds)
    yield from (
        Problem(f"{path}/expected/{name}", "catalog", f"must be {json.dumps(value)} for {row.code}")
        for name, value in agreed.items() if expected[name] != value)


def _find_case_faults(path: str, case: JsonObject, misshapen: set[str]) -> Iterator[Problem]:
    """Yield what is wrong with one case: its roles, and the steps that can be read."""
    roles = case["principal"]["roles"]
    if sorted({*roles}) != roles:
        yield Problem(path + "/principal/roles", "sorted", "must be sorted and unique")

    steps = _keep_well_shaped(path + "/steps", case["steps"], misshapen)
    yield from _find_repeated("step_id", steps)
    for number, (where, step) in enumerate(steps):
        yield from _find_step_faults(where, step)

        # Only an earlier dispatch has left a reference by the time a status query runs.
        referable = {None} if step["action"] == "dispatch" else {
            earlier["step_id"] for _, earlier in steps[:number] if earlier["action"] == "dispatch"}
        if (len(steps) == len(case["steps"])) and step["status_ref_from"] not in referable:
            yield Problem(where + "/status_ref_from", "reference",
                          "must name an earlier dispatch, and only for a status query")


def _require_fixture(read: Callable[[], Any]) -> JsonObject:
    """Return what `read` answers, if it is a fixture.

    Raises `FixtureIOError` where it could not be read, else `FixtureError` with all its problems:
    a misshapen case or step hides none of the others.
    """
    try:
        fixture = read()
    except JsonError as error:  # a `ValueError` as well, so it comes first
        raise FixtureError([Problem("", error.reason, str(error))]) from None
    except (AttributeError, OSError, TypeError, ValueError):  # no standard input, no file, no path
        raise FixtureIOError([Problem("", "io", "the fixture cannot be read")]) from None

    problems = _fixture_contract().problems(fixture)
    # The case or the step in which a problem stands: /cases/0 or /cases/0/steps/0.
    misshapen = {pointer(tokens_of(problem.path)[:4 if "/steps/" in problem.path else 2])
                 for problem in problems}
    # Where there is no list of cases, or the contract gave up counting, some were never judged.
    if len(problems) < MAX_PROBLEMS and not misshapen & {"", "/cases"}:
        cases = _keep_well_shaped("/cases", fixture["cases"], misshapen)
        problems += _find_repeated("id", cases)
        problems += [found for path, case in cases
                     for found in _find_case_faults(path, case, misshapen)]

    if problems:
        raise FixtureError(problems)
    return fixture  # type: ignore[no-any-return]


def decode_fixture(raw: bytes | str) -> JsonObject:
    """Decode and check a fixture of at most 65,536 bytes; return it.

    Raises `FixtureError` with all its problems; for a syntax error it says the line and the column.
    """
    return _require_fixture(lambda: decode_json(raw, max_bytes=MAX_FIXTURE_BYTES))


def _decode_file(file: BinaryIO) -> Any:
    # One byte more than allowed shows that there is too much, also in a file without end.
    return decode_json(file.read(MAX_FIXTURE_BYTES + 1), max_bytes=MAX_FIXTURE_BYTES)


def load_fixture(path: str | os.PathLike[str]) -> JsonObject:
    """Read and decode a fixture file; no more than 65,537 bytes are read.

    Raises `FixtureIOError` for a file that cannot be read, else what `decode_fixture` raises.
    """
    # Opened inside, so that whatever a path can do wrong is told as one error without the path.
    def read() -> Any:
        with open(path, "rb") as file:
            return _decode_file(file)

    return _require_fixture(read)


def _bind_step(step: JsonObject, **changes: str) -> ToolCall:
    """Bind a step's proposal under its own context, but for the changes."""
    host = step["execution_context"] | changes
    return bind_tool_call(ModelProposal(**step["proposal"]), ExecutionContext(
        PROFILES[host["provider"]], host["response_id"], host["call_id"],
        host["operation_id"], host["idempotency_key"]))


def _mismatch(name: str, expected: object, actual: object) -> JsonObject:
    """Write one difference as the report shows it; `actual` is null where nothing came about."""
    return {"field": name, "expected": expected, "actual": actual}


def _state_facts(model_result: JsonObject, side_effect_count: int) -> JsonObject:
    """Return the facts that a step's expectation speaks of."""
    error = model_result["error"] or {"code": "OK", "recovery": SUCCESS.recovery}
    execution = model_result["execution"]
    return {
        "code": error["code"], "status": model_result["status"], "outcome": execution["outcome"],
        "recovery": error["recovery"], "delivery": execution["delivery"],
        "data": model_result["data"], "side_effect_count": side_effect_count,
    }


def _map_package(invocation: Invocation, package: Package) -> tuple[Any, list[JsonObject]]:
    """Return the provider's payload, and a mismatch for each problem that its adapter reports.

    An adapter sends nothing that `validate_result` would refuse: so each package is validated here.
    """
    try:
        return to_provider(invocation, package), []
    except ResultContractError as error:
        return None, [_mismatch(found.path, found.rule, None) for found in error.problems]


class _CaseRun:
    """One case on a fresh demo: the downstream as in the beginning, and a ledger of its own.

    Each step's audit is kept, for a status query may refer to it.
    """

    def __init__(self, case: JsonObject, downstream: MockDownstream, demo: Dispatcher) -> None:
        self.case = case
        # As in a host, who asks is fixed before any model speaks (invariant 3).
        self.principal = Principal(**{**case["principal"], "roles": (*case["principal"]["roles"],)})
        self.downstream = downstream
        self.downstream.reset()
        self.gates: list[str] = []
        self.dispatcher = Dispatcher(
            demo.registry, demo.authority, MemoryLedger(), observe=self.gates.append)
        self.audits: dict[str, JsonObject] = {}

    def report(self, explain: bool) -> JsonObject:
        """Run the steps in order and return what the report says of this case."""
        steps = [self._report_step(step, explain) for step in self.case["steps"]]
        return {"id": self.case["id"], "passed": all(step["passed"] for step in steps),
                "steps": steps}

    def _report_step(self, step: JsonObject, explain: bool) -> JsonObject:
        """Run one step and compare its ending, field by field, with what it expects."""
        self.gates.clear()
        self.downstream.faults_met = 0
        self.downstream.fault = step["failure"] if step["failure"] in FAULTS else "none"
        invocation = self.dispatcher.resolve(self.principal, _bind_step(step))
        package = self._perform(step, invocation)
        if package is None:
            return {"step_id": step["step_id"], "passed": False, "mismatches": [
                _mismatch("status_ref_from", step["status_ref_from"], None)]}

        self.audits[step["step_id"]] = package["protected_audit"]
        facts = _state_facts(package["model_result"], self.downstream.side_effect_count)
        payload, mismatches = _map_package(invocation, package)
        mismatches += [
            _mismatch(name, expected, facts[name])
            for name, expected in step["expected"].items() if not same_json(expected, facts[name])]
        # A fault that no handler met proves nothing: the step ended before it, or never writes.
        if self.downstream.fault != "none" and not self.downstream.faults_met:
            mismatches.append(_mismatch("failure", step["failure"], "none"))

        told = {"explanation": self._explain(step, package, payload)} if explain else {}
        return {"step_id": step["step_id"], "passed": not mismatches, **facts,
                "mismatches": mismatches, **told}

    def _perform(self, step: JsonObject, invocation: Invocation) -> Package | None:
        """Run one step; None where the step that a query refers to left no status reference."""
        now, call = step["now"], invocation.call
        if step["action"] == "dispatch":
            return self.dispatcher.dispatch(
                self.principal, call, approvals=self._obtain_approvals(step, invocation), now=now,
                deadline=now if step["failure"] == "timeout_before_execute" else None,
            )

        audit = self.audits[step["status_ref_from"]]
        status_ref = audit["downstream"]["status_ref"]
        return status_ref and self.dispatcher.query_operation_status(
            self.principal, call, status_ref=status_ref,
            expected_request_sha256=audit["binding"]["request_sha256"], now=now,
        )

    def _obtain_approvals(self, step: JsonObject, invocation: Invocation) -> list[Approval]:
        """Obtain what the step asks for; a bad approval differs from a valid one in one thing."""
        if step["approval"] == "none":
            return []
        if step["approval"] == "mismatched":  # given to another operation
            own = step["execution_context"]["operation_id"]
            invocation = self.dispatcher.resolve(self.principal, _bind_step(
                step, operation_id="another" if own == "other" else "other"))

        # One that ends at `now` itself is expired: an approval is half-open, like a deadline.
        now, seconds = (
            (step["now"] - 1, 1) if step["approval"] == "expired"
            else (step["now"], APPROVAL_SECONDS))
        return [self.dispatcher.authority.issue(
            invocation, self.dispatcher.find_resource(invocation), approver_id=DEMO_APPROVER,
            approval_id="approval-1", now=now, seconds=seconds,
        )]

    def _explain(self, step: JsonObject, package: Package, payload: object) -> JsonObject:
        """Return what `--explain` shows: what was asked, how far it got, what goes out.

        The gates are told by the dispatcher itself, so a refusal shows the gate that made it.
        """
        return {
            "principal": self.case["principal"],
            **{name: step[name] for name in (
                "action", "proposal", "execution_context", "approval", "failure", "now")},
            "gates": [*self.gates],
            "stopped_at": self.gates[-1] if package["model_result"]["error"] else None,
            "status_ref": package["protected_audit"]["downstream"]["status_ref"],
            "digests": package["protected_audit"]["binding"],
            "model_result": package["model_result"],
            "payload": payload,
        }


def _run_cases(fixture: JsonObject, explain: bool) -> JsonObject:
    """Run a fixture that has been checked."""
    downstream = MockDownstream()
    demo = demo_dispatcher(downstream)  # whose tools, registered once, serve all cases
    cases = [_CaseRun(case, downstream, demo).report(explain) for case in fixture["cases"]]
    return {
        "schema_version": "tool-report-v2",
        "passed": all(case["passed"] for case in cases),
        "case_count": len(cases),
        "step_count": sum(len(case["steps"]) for case in cases),
        "cases": cases,
    }


def run_fixture(fixture: object, *, explain: bool = False) -> JsonObject:
    """Replay every case on a fresh demo and compare each step with its expectation.

    Returns the report that the command line prints: `schema_version`, `passed`, `case_count`,
    `step_count` and `cases`. With `explain`, each step also tells what was asked, which gates it
    entered, its result and what its provider gets. Raises `FixtureError` before anything runs.
    """
    return _run_cases(_require_fixture(lambda: plain_json(fixture)), explain)


# ===== 15. Command line ===========================================================================
# Whatever goes wrong is one message and an exit status, never a traceback, and no message repeats a
# path or what was typed.

PROGRAM: Final = "tool-dispatcher"
WIDTH: Final = 100                      # columns where no terminal says how many it has


class _UsageError(Exception):
    """The command line asks for something that does not exist."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Not argparse's own message: it repeats what was typed.
        raise _UsageError("the options are wrong; --help lists them")


def _find_width() -> int | None:
    """Return the columns of the terminal that standard output is, None where that is not known.

    `shutil.get_terminal_size` does the same, COLUMNS first, but it asks the stream that Python was
    started with, in whose place another may stand; and it takes long to import.
    """
    given = os.environ.get("COLUMNS", "")
    columns = int(given) if given.isdecimal() and len(given) < 6 else 0
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or no terminal
        columns = columns or os.get_terminal_size(sys.stdout.fileno()).columns
    return max(columns, 60) if columns else None  # a narrower terminal breaks lines itself


# Options of a `run`, and those `instead` of one, of which at most one may be given.
_OPTION_TABLE: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("run", "--fixture", {
        "metavar": "FILE", "help": "the fixture, - for standard input (default: the bundled one)"}),
    ("run", "--case", {
        "metavar": "ID", "action": "append", "default": [],
        "help": "run only this case; may be repeated"}),
    ("run", "--format", {
        "choices": ("auto", "text", "json"), "default": "auto",
        "help": "auto is text on a terminal and JSON otherwise"}),
    ("run", "--explain", {
        "action": "store_true",
        "help": "show for each step what was asked, its gates, its result and its payload"}),
    ("instead", "--print-schema", {
        "action": "store_true", "help": "print the JSON Schema of a fixture"}),
    ("instead", "--tools", {
        "metavar": "PROVIDER", "choices": [*PROFILES],
        "help": f"print the demo's tool definitions for {', '.join(PROFILES)}"}),
    ("instead", "--version", {"action": "store_true", "help": "print the version"}),
    ("instead", "-h --help", {"action": "store_true", "help": "print this help"}),
)


def _make_parser() -> argparse.ArgumentParser:
    """Make the parser of the table above.

    Help and version are options like others: argparse's own would print and exit past `_emit`.
    """
    # With a width given, argparse does not import `shutil` to find one: the command starts sooner.
    parser = _Parser(
        prog=PROGRAM, add_help=False, allow_abbrev=False,
        description="Replay a fixture of tool calls against the trusted boundary, offline.",
        formatter_class=functools.partial(argparse.HelpFormatter, width=_find_width() or WIDTH),
    )
    groups = {"run": parser, "instead": parser.add_mutually_exclusive_group()}

    for group, names, settings in _OPTION_TABLE:
        groups[group].add_argument(*names.split(), **settings)
    return parser


def _read_fixture(source: str | None) -> JsonObject:
    if source == "-":
        return _require_fixture(lambda: _decode_file(sys.stdin.buffer))
    # Its own file, wherever the command is called from; an empty name is a file that is not there.
    return load_fixture(
        pathlib.Path(__file__).with_name("tool-cases.json") if source is None else source)


def _select_cases(fixture: JsonObject, case_ids: list[str]) -> JsonObject:
    """Return the fixture with these cases only, in its own order; with all where none is named.

    Raises `_UsageError`: a misspelt id that ran nothing would look like a success.
    """
    if not {*case_ids} <= {case["id"] for case in fixture["cases"]}:
        raise _UsageError("the fixture has no case of this id")
    return {**fixture, "cases": [
        case for case in fixture["cases"] if not case_ids or case["id"] in case_ids]}


def _fit(text: str, width: int | None, label: str = "") -> list[str]:
    """Break a text into lines of `width`; beside a label into at most four, the last cut with dots.

    Without a width there is one line: whoever reads it through a pipe looks for a step a line.
    """
    # What could steer a terminal is escaped: control, bidirectional and other invisible characters.
    # Before anything is measured, for an escape is longer than what it stands for.
    text = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text)
    if width is None:
        return [text]

    import textwrap  # needed by nothing else: the other commands start sooner without it
    return textwrap.wrap(
        text, width, initial_indent=label, subsequent_indent=" " * (len(label) or 8),
        max_lines=4 if label else None, placeholder=" ..", break_on_hyphens=False,
    )


_spell = functools.partial(json.dumps, ensure_ascii=False)      # with spaces, where lines may break


def _tell_gates(told: JsonObject) -> str:
    """Tell which gates a step passed; where one stopped it, which one, and what it found wrong."""
    gates, last = told["gates"], told["stopped_at"]
    if last is None:
        return ", ".join(gates)

    broken = ", ".join(f"{readable(violation['path'])} {violation['rule']}"
                       for violation in told["model_result"]["error"]["violations"])
    return ", ".join([*gates[:-1], f"[{last}] stopped here{broken and ': '}{broken}"])


def _tell_step(told: JsonObject) -> dict[str, str]:
    """Tell one step by label: what came in, how far it got, how it ended, what goes out."""
    said, by, host = told["proposal"], told["principal"], told["execution_context"]
    return {
        "model says": f"{said['name']} {canonical_json(said['arguments'])}",
        "host says": f"{told['action']} for {by['subject_id']} of {by['tenant_id']}"
                     + "".join(f", {role}" for role in by["roles"])
                     + "; {provider} {api_family}; response {response_id}; call {call_id}; "
                       "operation {operation_id}; key ".format_map(host)
                     + (host["idempotency_key"] or "none"),
        "test sets": "now {now}; approval {approval}; failure {failure}".format_map(told),
        "gates": _tell_gates(told),
        "ends": "{code}  {status}  {outcome}  {delivery}  recovery {recovery}  "
                "effects {side_effect_count}".format_map(told),
        "digests": "  ".join(
            f"{name.removesuffix('_sha256')} {sha256[:12]}.."
            for name, sha256 in told["digests"].items()),

        # Inside the payload the text is a JSON string, escaped once more: it stands by itself.
        "provider gets": _spell(told["payload"]).replace(
            _spell(canonical_json(told["model_result"])), '".."'),
        "model reads": _spell(told["model_result"]),
    }


def _lay_out_step(case_id: str, step: JsonObject, width: int | None) -> Iterator[str]:
    """Yield the lines of one step: one by itself, more where something failed or is explained."""
    line = f"{'ok' if step['passed'] else 'FAIL':<6}{case_id} / {step['step_id']}"
    if "code" in step and "explanation" not in step:
        # Endings stand in one column, behind which the longest code fits; two spaces part them from
        # a name that is longer.
        line = f"{line:<{min(54, (width or WIDTH) - 55)}}  " + (
            "{code}  {outcome}  {delivery}  effects {side_effect_count}".format_map(step))
    yield from _fit(line, width)

    # As JSON, so that "1" and 1 are told apart.
    for mismatch in step["mismatches"]:
        yield from _fit(
            f"      {mismatch['field']:<20}  expected {json.dumps(mismatch['expected']):<28}"
            f"  actual {json.dumps(mismatch['actual'])}", width)

    if "explanation" in step:
        for label, text in _tell_step({**step, **step["explanation"]}).items():
            yield from _fit(text, width or WIDTH, f"  {label:<15}")
        yield ""


def _write_text(report: JsonObject) -> str:
    """Write a report for people: a line a step, and the sum at the end."""
    width = _find_width()
    lines = [line for case in report["cases"] for step in case["steps"]
             for line in _lay_out_step(case["id"], step, width)]
    # The sum is for scripts as well, so `passed` is spelt as in JSON.
    return "\n".join([
        *lines, f"passed={_spell(report['passed'])} case_count={report['case_count']}"
                f" step_count={report['step_count']}\n"])


def _write_json(document: object) -> str:
    return json.dumps(document, indent=2) + "\n"  # in ASCII: nothing in it steers a console


def _answer_command(options: argparse.Namespace) -> tuple[str, int]:
    """Return what to print, and the exit status. Raises `_UsageError` and `FixtureError`."""
    if options.help:
        return _make_parser().format_help(), 0
    if options.version:
        return f"{PROGRAM} {__version__}\n", 0
    if options.print_schema:
        return _write_json(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **FIXTURE_SCHEMA}), 0
    if options.tools:
        return _write_json(advertise_tools(demo_dispatcher().registry, PROFILES[options.tools])), 0

    report = _run_cases(
        _select_cases(_read_fixture(options.fixture), options.case), options.explain)
    is_terminal = not getattr(sys.stdout, "closed", True) and sys.stdout.isatty()
    as_text = options.format == "text" or (options.format == "auto" and is_terminal)
    return _write_text(report) if as_text else _write_json(report), 0 if report["passed"] else 1


def _emit(text: str, stream: Any) -> bool:
    """Write UTF-8 with LF on every platform; tell whether that went well.

    It did if the stream is closed, or a pipe that nobody reads any more; on a full disk it did not.
    """
    if getattr(stream, "closed", True):  # a stream is None where Python was started without it
        return True

    try:
        if hasattr(stream, "buffer"):
            stream.flush()
            raw = text.encode("utf-8")
            while raw:  # an unbuffered stream (python -u) may take a part of it only
                raw = raw[stream.buffer.write(raw):]
        else:
            stream.write(text)
        stream.flush()
    except OSError as error:
        # Python flushes once more as it ends: into nothing, for that would be a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        # A closed pipe is EINVAL on Windows.
        return isinstance(error, BrokenPipeError) or error.errno == errno.EINVAL
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; nothing is raised.

    0: all steps passed. 1: a step did not. 2: the fixture or the options are wrong, or the output
    could not be written. 130: interrupted by Ctrl-C, as a shell says it.
    """
    try:
        # In Python 3.11 argparse takes `--` for no value and passes on a list. `-` it refuses.
        text, status = _answer_command(_make_parser().parse_args([
            re.sub("^--[a-z-]+=--$", "-", given)
            for given in (sys.argv[1:] if argv is None else argv)]))
        if _emit(text, sys.stdout):
            return status
        complaint = "the output cannot be written"
    except (_UsageError, FixtureError) as error:
        complaint = str(error)
    except KeyboardInterrupt:
        return 130
    _emit("\n".join([f"{PROGRAM}: error:", *complaint.splitlines()]) + "\n", sys.stderr)
    return 2


if __name__ == "__main__":
    gc.freeze()  # what is loaded by now lives until the end: no collection need look at it
    raise SystemExit(main())
