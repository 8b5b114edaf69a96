"""What the policy wrote → tool calls; and how a call is written.

The protocol is one call a line, `name key=value key="text with spaces"`: a third fewer sampled
tokens than the same call as JSON. `name {"key": value}`, `name(key=value)`, a JSON object with
`name` and `arguments`, and the same inside `<tool_call>` tags are read as well, so larger models
may answer as they were taught. What is wrong is mended where only one reading is possible
(single quotes, bare words, trailing commas, a missing last brace); everything else becomes a
`ToolCall` whose `error` says what was wrong and what is right. Parsing never raises and takes
linear time: the scanner only moves forward, and size, depth and number are capped.

Scaling out: pure functions.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from runtime.run import Json, ToolCall

MAX_CHARACTERS = 65_536
MAX_DEPTH = 16
MAX_CALLS = 16

FORM = 'name key=value key="text with spaces"'
"""The protocol in one line, as prompts and error messages show it."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_PAIR = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}=")
_PHRASE_END = re.compile(r"\n|[ \t][A-Za-z_][A-Za-z0-9_-]{0,63}=")
_BARE = re.compile(r"""[^\s"'`{}\[\]()<>,=:]+""")
_PLAIN = re.compile(r"""[^\s"'`{}\[\]()<>,=]+""")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,63})(?:\.[0-9]{1,64})?(?:[eE][+-]?[0-9]{1,4})?")
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_SPACE = re.compile(r"\s*")
_BLANK = re.compile(r"[ \t]*")
_QUOTED = {quote: re.compile(rf"[^{quote}\\]*") for quote in ('"', "'")}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_WORDS: Mapping[str, Json] = {
    "true": True,
    "false": False,
    "null": None,
    "True": True,
    "False": False,
    "None": None,
}
_NOT_FINITE = frozenset({"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"})
_OPEN_TAG, _CLOSE_TAG = "<tool_call>", "</tool_call>"


def parse_calls(text: str, step: int) -> list[ToolCall]:
    """The calls of one reply, in order; at least one, with `error` set where it is not usable."""
    if len(text) > MAX_CHARACTERS:
        problem = f"the reply has {len(text)} characters; at most {MAX_CHARACTERS} are read"
        return [_broken(f"{step}.0", "", problem)]
    found = _Reply(text).calls()
    if not found:
        return [_broken(f"{step}.0", "", f"no tool call found; answer with one line: {FORM}")]
    return [
        ToolCall(id=f"{step}.{index}", name=name, arguments=arguments, error=error)
        for index, (name, arguments, error) in enumerate(found)
    ]


def _broken(call_id: str, name: str, error: str) -> ToolCall:
    return ToolCall(id=call_id, name=name, error=error)


def format_call(call: ToolCall) -> str:
    """The call as the protocol writes it: `parse_calls` reads the same name and arguments.

    Raises ValueError for arguments that JSON cannot hold (NaN, infinity).
    """
    if not _NAME.fullmatch(call.name):
        return _dump({"name": call.name, "arguments": call.arguments})
    if not call.arguments:
        return f"{call.name}()"
    if not all(_KEY.fullmatch(key) for key in call.arguments):
        return f"{call.name} {_dump(call.arguments)}"
    pairs = (f"{key}={_format_value(value)}" for key, value in call.arguments.items())
    return " ".join([call.name, *pairs])


def _format_value(value: Json) -> str:
    return value if isinstance(value, str) and _reads_as_text(value) else _dump(value)


def _reads_as_text(value: str) -> bool:
    """The bare word would be read back as this text, not as a number or another JSON word."""
    other = value in _WORDS or value in _NOT_FINITE or _NUMBER.fullmatch(value)
    return not other and _PLAIN.fullmatch(value) is not None


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class _Malformed(Exception):
    """What is wrong with the call being read; becomes its `error`."""


_Found = tuple[str, dict[str, Any], str | None]


class _Reply:
    """A forward-only scanner over one reply."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    # ------------------------------------------------------------ calls

    def calls(self) -> list[_Found]:
        found: list[_Found] = []
        while self._skip(_SPACE) and len(found) < MAX_CALLS:
            self._name = ""
            try:
                call = self._call()
            except _Malformed as problem:
                call = (self._name, {}, f"{problem}; write {FORM}")
            if call is not None:
                found.append(call)
            if call is None or call[2] is not None:
                self._to_next_line()
        if len(found) == MAX_CALLS and self._skip(_SPACE):
            found[-1] = (found[-1][0], {}, f"more than {MAX_CALLS} calls in one reply; make fewer")
        return found

    def _call(self) -> _Found | None:
        """The call that begins here, or None where this line is prose."""
        if self._take(_OPEN_TAG):
            self._skip(_SPACE)
            call = self._json_call()
            self._skip(_SPACE)
            self._take(_CLOSE_TAG)
            return call
        if self._peek() == "{":
            return self._json_call()
        name = self._match(_NAME)
        if name is None:
            return None
        self._name = name
        return self._named_call(name)

    def _named_call(self, name: str) -> _Found | None:
        if self._take("("):
            self._skip(_SPACE)
            arguments = self._object() if self._peek() == "{" else self._pairs(closing=True)
            self._skip(_SPACE)
            if not self._take(")") and self._peek():
                raise _Malformed(f"{name}( is not closed with )")
            return self._complete(name, arguments)
        self._skip(_BLANK)
        if self._peek() == "{":
            return self._complete(name, self._object())
        if self._sees(_PAIR):
            return self._complete(name, self._pairs(closing=False))
        return None

    def _complete(self, name: str, arguments: dict[str, Json]) -> _Found:
        """The call, once nothing but the end of the line follows it."""
        while self._skip(_BLANK) and self._peek() in "});,":
            self._at += 1  # a brace or separator too many changes nothing
        if self._peek() not in ("", "\n", "\r", "<", "`"):
            raise _Malformed(f"{self._near()} after the call is not understood")
        return name, arguments, None

    def _json_call(self) -> _Found:
        value = self._object() if self._peek() == "{" else None
        if value is None:
            raise _Malformed(f"expected {{ but found {self._near()}")
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(name, str) or not name:
            raise _Malformed('a JSON call needs "name" (text) and "arguments" (object)')
        self._name = name[:64]
        if isinstance(arguments, str):
            arguments = _Reply(arguments)._whole_object()
        if not isinstance(arguments, dict):
            raise _Malformed('"arguments" must be a JSON object')
        return self._complete(name, arguments)

    def _whole_object(self) -> dict[str, Json]:
        self._skip(_SPACE)
        if self._peek() != "{":
            raise _Malformed('"arguments" must be a JSON object')
        return self._object()

    # ------------------------------------------------------------ key=value

    def _pairs(self, *, closing: bool) -> dict[str, Json]:
        """`key=value` up to the end of the line, or up to `)` where `closing`."""
        arguments: dict[str, Json] = {}
        gap = _SPACE if closing else _BLANK
        while self._sees(_PAIR):
            key = self._match(_KEY) or ""
            self._at += 1  # the =
            _add(arguments, key, self._pair_value(closing=closing))
            self._skip(gap)
            if self._take(","):
                self._skip(gap)
        return arguments

    def _pair_value(self, *, closing: bool) -> Json:
        self._skip(_BLANK)
        if self._peek() in ('"', "'", "{", "["):
            return self._value(1)
        word = self._match(_PLAIN)
        if word is None:
            raise _Malformed(f"a value is missing before {self._near()}")
        if closing or self._ends_value():
            return _literal(word)
        return f"{word}{self._rest_of_phrase()}"

    def _ends_value(self) -> bool:
        """The bare word is the whole value: a gap and another pair, or the line's end, follow."""
        here = self._at
        self._skip(_BLANK)
        ends = self._peek() in ("", "\n", "\r", ",", "<", "`") or self._sees(_PAIR)
        self._at = here
        return ends

    def _rest_of_phrase(self) -> str:
        """Unquoted words up to the next pair or the end of the line: one reading only."""
        stop = _PHRASE_END.search(self._text, self._at)
        end = stop.start() if stop else len(self._text)
        phrase = self._text[self._at : end]
        if any(mark in phrase for mark in '"{}[]<>='):
            raise _Malformed(f"text with spaces or marks must be quoted, near {self._near()}")
        self._at = end
        return phrase.rstrip()

    # ------------------------------------------------------------ JSON, mended

    def _value(self, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise _Malformed(f"values are nested more than {MAX_DEPTH} deep")
        head = self._peek()
        if head == "{":
            return self._object(depth)
        if head == "[":
            return self._array(depth)
        if head in _QUOTED:
            return self._string()
        word = self._match(_BARE)
        if word is None:
            raise _Malformed(f"a value is missing before {self._near()}")
        return _literal(word)

    def _object(self, depth: int = 1) -> dict[str, Json]:
        members: dict[str, Json] = {}
        self._at += 1
        while not self._closed("}"):
            key = self._string() if self._peek() in _QUOTED else self._match(_BARE)
            if key is None:
                raise _Malformed(f"expected a key but found {self._near()}")
            self._skip(_SPACE)
            if not (self._take(":") or self._take("=")):
                raise _Malformed(f"a colon is missing after key {key[:40]!r}")
            self._skip(_SPACE)
            _add(members, key, self._value(depth + 1))
            self._separator("}")
        return members

    def _array(self, depth: int) -> list[Json]:
        items: list[Json] = []
        self._at += 1
        while not self._closed("]"):
            items.append(self._value(depth + 1))
            self._separator("]")
        return items

    def _closed(self, bracket: str) -> bool:
        """The bracket, or the end of the reply where only brackets are missing."""
        self._skip(_SPACE)
        return self._take(bracket) or not self._peek()

    def _separator(self, bracket: str) -> None:
        self._skip(_SPACE)
        if not self._take(",") and self._peek() not in ("", bracket):
            raise _Malformed(f"a comma or {bracket} is missing before {self._near()}")

    def _string(self) -> str:
        quote = self._peek()
        self._at += 1
        parts: list[str] = []
        while True:
            parts.append(self._match(_QUOTED[quote]) or "")
            mark = self._peek()
            if not mark:
                raise _Malformed(f"a quote {quote} is not closed")
            self._at += 1
            if mark == quote:
                return _join_surrogates("".join(parts))
            parts.append(self._escape())

    def _escape(self) -> str:
        mark = self._peek()
        self._at += 1
        if mark != "u":
            return _ESCAPES.get(mark, mark)
        digits = self._text[self._at : self._at + 4]
        if len(digits) < 4 or not all(c in "0123456789abcdefABCDEF" for c in digits):
            raise _Malformed(r"\u needs four hexadecimal digits")
        self._at += 4
        return chr(int(digits, 16))

    # ------------------------------------------------------------ moving

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _sees(self, pattern: re.Pattern[str]) -> bool:
        return pattern.match(self._text, self._at) is not None

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match.group()

    def _take(self, literal: str) -> bool:
        found = self._text.startswith(literal, self._at)
        self._at += len(literal) if found else 0
        return found

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Skip blanks; True while something is left."""
        self._match(pattern)
        return self._at < len(self._text)

    def _to_next_line(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end + 1

    def _near(self) -> str:
        rest = self._text[self._at : self._at + 16].split("\n", 1)[0]
        return repr(rest) if rest else "the end"


def _add(members: dict[str, Json], key: str, value: Json) -> None:
    if key in members:
        raise _Malformed(f"{key[:40]!r} is given twice")
    members[key] = value


def _literal(word: str) -> Json:
    """A bare word as JSON where it is JSON, else as text. Raises _Malformed: not finite."""
    if word in _WORDS:
        return _WORDS[word]
    if not _NUMBER.fullmatch(word):
        if word in _NOT_FINITE:
            raise _Malformed(f"{word} is not a finite number")
        return word
    number = json.loads(word)
    if isinstance(number, float) and not math.isfinite(number):
        raise _Malformed(f"{word} is not a finite number")
    return number


def _join_surrogates(text: str) -> str:
    r"""`\ud83d\ude00` as the one character it stands for; a lone half stays as it is."""
    return _SURROGATES.sub(_join, text)


def _join(pair: re.Match[str]) -> str:
    return pair.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le")
