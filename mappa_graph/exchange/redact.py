"""`Redactor`: takes secrets and personal data out of a record before it is stored or exported.

A redactor is a pipeline of named rules over every text of a nested record: `keys` (always on), `email`, `phone`, `card`, `ip`, and
patterns of the user's own. What a rule finds becomes its placeholder, `[KEY]` or `[EMAIL]`: unnumbered on purpose, since a run is redacted
in pieces (a call, an episode's steps, an exported row), and numbers that begin anew in each piece would call two people one and make
equal prompts differ, which breaks pairing, de-duplication and shared prefixes. The one thing to know: every rule takes linear time.
Built-in patterns have bounded or possessive repeats only; a user's pattern is run by RE2, which can't backtrack.

    store = TraceStore("runs/x/trace.db", redact=Redactor(["email", "phone"], patterns={"customer": r"cust-[0-9]{6}"}))

Numbers that are not text are left as they are, and so are the ids that join records to each other, unless a key or an address is in them.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import ConfigError
from .secrets import card_spans, email_spans, field_level, ip_spans, is_secret, key_spans, phone_spans

_IDS = frozenset({"id", "call_id", "transition_id", "tool_call_id", "parents", "sha256", "episode", "action", "version", "blame"})
_RECORDS = frozenset(
    {"transitions", "actions", "executions", "files", "messages", "tool_calls", "verdicts", "calls", "prompt", "completion", "chosen",
     "rejected", "error"}
)  # fmt: skip
"""Fields whose content is still a record of ours, with ids of ours in it; anything else is the app's own data."""
_PAIR_NAMES = ("name", "key", "header", "field")
_SCHEMA = frozenset({"$ref", "anyOf", "oneOf", "allOf", "enum"})
_SCHEMA_TYPES = ("string", "object", "array", "integer", "number", "boolean", "null")
_SMALL = 1000
"""Whole numbers below this are counts or flags, whatever their field is named."""
_NUMBERS = frozenset({int, float, bool})
_CACHED, _CACHED_LENGTH = 4096, 4096
_PATTERN_LENGTH = 1000
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")

Sub = Callable[[str], tuple[str, int]]


@dataclass(frozen=True)
class Rule:
    """One named rule: `sub(text) -> (text, how many were taken out)`."""

    name: str
    placeholder: str
    what: str
    """What it looks for, in words, for a data card."""
    sub: Sub
    in_ids: bool = False
    """Whether it also looks at ids that join records."""


def _built_in() -> dict[str, Rule]:
    finders: tuple[tuple[str, str, str, Callable[[str], list[tuple[int, int]]], bool], ...] = (
        ("keys", "[KEY]", "API keys and tokens of known providers, JWTs, bearer tokens, private keys, passwords in URLs, assignments and "
         "fields named for secrets", key_spans, True),
        ("email", "[EMAIL]", "e-mail addresses", email_spans, True),
        ("phone", "[PHONE]", "phone numbers: +country code, North American, or after a word such as tel", phone_spans, False),
        ("card", "[CARD]", "payment card numbers of a known issuer that pass the Luhn check", card_spans, False),
        ("ip", "[IP]", "IPv4 and IPv6 addresses other than loopback", ip_spans, False),
    )  # fmt: skip
    return {name: Rule(name, mark, what, _replacing(find, mark), in_ids) for name, mark, what, find, in_ids in finders}


def _replacing(find: Callable[[str], list[tuple[int, int]]], placeholder: str) -> Sub:
    def sub(text: str) -> tuple[str, int]:
        spans = find(text)
        if not spans:
            return text, 0
        out: list[str] = []
        at = found = 0
        for start, end in sorted(spans):
            if start < at:  # overlaps the last one: one secret, found by two patterns
                at = max(at, end)
                continue
            out += (text[at:start], placeholder)
            at, found = end, found + 1
        return "".join((*out, text[at:])), found

    return sub


RULES: Mapping[str, Rule] = _built_in()
"""The built-in rules by name."""


class Redactor:
    """A pipeline of rules; call it with a record and it gives the redacted one. Safe for several threads.

    Args:
        rules: names of built-in rules (`RULES`), or `Rule`s of one's own. `keys` is always among them, first.
        patterns: name -> regular expression in RE2's syntax; matches become `[NAME]`. Needs pyarrow (`mappa-graph[exchange]`).

    Raises `ConfigError` for an unknown rule or for a pattern that RE2 can't run, that is too long, or that matches nothing at all ("").
    """

    def __init__(self, rules: Iterable[str | Rule] = (), *, patterns: Mapping[str, str] | None = None) -> None:
        given = [_rule(rule) for rule in rules]
        own = [_pattern_rule(name, pattern) for name, pattern in (patterns or {}).items()]
        chosen = {rule.name: rule for rule in (RULES["keys"], *own, *given)}
        if len({*RULES, *(r.name for r in own)}) < len(RULES) + len(own):
            clash = next(r.name for r in own if r.name in RULES)
            raise ConfigError(f"the pattern {clash!r} has the name of a built-in rule", hint="give it another name")
        self.rules: tuple[Rule, ...] = tuple(chosen.values())
        self.patterns: dict[str, str] = dict(patterns or {})
        self._in_ids = tuple(rule for rule in self.rules if rule.in_ids)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._cached = lru_cache(_CACHED)(self._sub)

    def __call__(self, record: Any) -> Any:
        """The record with all texts redacted: values, and names of fields in the app's own data. The record itself is left as it is."""
        counts: Counter[str] = Counter()
        placeholder = RULES["keys"].placeholder
        out: list[Any] = [record]
        # A stack instead of recursion: agents can nest data deeper than Python can recurse.
        stack: list[tuple[Any, Any, bool, bool, int]] = [(out, 0, True, False, 0)]
        while stack:
            box, key, ours, is_id, above = stack.pop()
            value = box[key]
            if isinstance(value, str):
                box[key] = self._text(value, counts, is_id)
            elif isinstance(value, Mapping):
                box[key] = inner = dict(value) if ours else self._named(value, counts)
                above = 0 if above and _describes(value) else above
                paired = _paired(value) if "value" in value else 0
                for name, part in inner.items():
                    level = max(above, field_level(name), paired if name == "value" else 0)
                    if level and _secret(level, part):
                        inner[name] = placeholder
                        counts["keys"] += 1
                    elif type(part) is str:
                        inner[name] = self._text(part, counts, ours and name in _IDS)
                    elif part is not None and type(part) not in _NUMBERS:
                        stack.append((inner, name, ours and name in _RECORDS, ours and name in _IDS, level))
            elif isinstance(value, list | tuple):
                box[key] = items = list(value)
                for i, part in enumerate(items):
                    if above and _secret(above, part):
                        items[i] = placeholder
                        counts["keys"] += 1
                    elif type(part) is str:
                        items[i] = self._text(part, counts, is_id)
                    elif part is not None and type(part) not in _NUMBERS:
                        stack.append((items, i, ours, is_id, above))
        if counts:
            with self._lock:
                self._counts.update(counts)
        return out[0]

    def text(self, text: str) -> str:
        """One redacted text."""
        return str(self(text))

    @property
    def counts(self) -> Counter[str]:
        """How many finds each rule had so far."""
        with self._lock:
            return Counter(self._counts)

    def describe(self) -> list[dict[str, str]]:
        """What was looked for, rule by rule, for a data card."""
        return [
            {"rule": rule.name, "placeholder": rule.placeholder, "what": rule.what}
            | ({"pattern": self.patterns[rule.name]} if rule.name in self.patterns else {})
            for rule in self.rules
        ]

    def _named(self, value: Mapping[Any, Any], counts: Counter[str]) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        for name, part in value.items():
            clean = self._text(name, counts) if isinstance(name, str) else name
            place, number = clean, 2
            while place in out:  # two names that have become the same
                place, number = f"{clean} {number}", number + 1
            out[place] = part
        return out

    def _text(self, text: str, counts: Counter[str], ids: bool = False) -> str:
        if ids:
            text, found = self._run(text, self._in_ids)
        elif len(text) <= _CACHED_LENGTH:
            text, found = self._cached(text)
        else:
            text, found = self._sub(text)
        for name, n in found:
            counts[name] += n
        return text

    def _sub(self, text: str) -> tuple[str, tuple[tuple[str, int], ...]]:
        return self._run(text, self.rules)

    @staticmethod
    def _run(text: str, rules: Sequence[Rule]) -> tuple[str, tuple[tuple[str, int], ...]]:
        found = []
        for rule in rules:
            text, n = rule.sub(text)
            if n:
                found.append((rule.name, n))
        return text, tuple(found)


def redactor(rules: str | None = None, patterns: Sequence[str] | None = None) -> Redactor:
    """A redactor as options name it: `rules` "email,phone" (or "all"), `patterns` ["name=REGEX"]. Raises `ConfigError`."""
    names = [name.strip() for name in (rules or "").split(",") if name.strip()]
    own: dict[str, str] = {}
    for text in patterns or ():
        name, equals, pattern = text.partition("=")
        if not equals or not pattern:
            raise ConfigError(f"the pattern {text!r} has no name", hint="write it as name=REGEX, e.g. customer=cust-[0-9]{6}")
        if name in own:
            raise ConfigError(f"there are two patterns named {name!r}", hint="give each its own name")
        own[name] = pattern
    return Redactor(RULES if names == ["all"] else names, patterns=own)


def _rule(rule: str | Rule) -> Rule:
    if isinstance(rule, Rule):
        return rule
    if rule not in RULES:
        raise ConfigError(f"there is no redaction rule {rule!r}", hint=f"use some of: {', '.join(RULES)}; or all; or a pattern of your own")
    return RULES[rule]


def _pattern_rule(name: str, pattern: str) -> Rule:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} can't be the name of a pattern", hint="use lower-case letters, digits, - and _, at most 32")
    if len(pattern) > _PATTERN_LENGTH:
        raise ConfigError(f"the pattern {name!r} has {len(pattern)} characters, more than {_PATTERN_LENGTH}", hint="split it into several")
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.compute as pc  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"the pattern {name!r} needs pyarrow: {error}", hint="pip install 'mappa-graph[exchange]'") from error
    try:
        empty = pc.match_substring_regex(pa.scalar(""), pattern).as_py()
    except (pa.ArrowInvalid, UnicodeEncodeError) as error:
        raise ConfigError(
            f"the pattern {name!r} can't be used: {error}",
            hint="patterns are in RE2's syntax: no look-around and no back-references, so that no text can make them slow",
        ) from error
    if empty:
        raise ConfigError(f"the pattern {name!r} ({pattern}) matches nothing at all, so it is everywhere", hint="make it ask for something")
    placeholder = f"[{name.upper().replace('-', '_')}]"

    def sub(text: str) -> tuple[str, int]:
        try:
            scalar = pa.scalar(text)
        except UnicodeEncodeError:
            # A lone surrogate is no text; what stands around it still is.
            scalar = pa.scalar(text.encode("utf-8", "replace").decode())
        found = int(pc.count_substring_regex(scalar, pattern).as_py())
        if not found:
            return text, 0
        return str(pc.replace_substring_regex(scalar, pattern, placeholder).as_py()), found

    return Rule(name, placeholder, "a pattern of the user's own", sub)


def _secret(level: int, value: Any) -> bool:
    """Whether what is in a field of that level is a secret by itself; of lists and records, each part is looked at."""
    if type(value) is str:
        return value != RULES["keys"].placeholder and is_secret(level, value)
    return level == 2 and type(value) is int and abs(value) >= _SMALL


def _describes(value: Mapping[Any, Any]) -> bool:
    """Whether what is in a field named for a secret is the JSON schema of such a field, and so holds none."""
    return not _SCHEMA.isdisjoint(value) or value.get("type") in _SCHEMA_TYPES or isinstance(value.get("type"), list)


def _paired(value: Mapping[Any, Any]) -> int:
    """The level of `{"name": "x-api-key", "value": ...}`, as headers and variables are often written."""
    return max(field_level(value.get(name)) for name in _PAIR_NAMES)
