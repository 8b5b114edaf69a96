"""Reading a quantity as people write it: sign, separators, scale word, unit.

`$1,234.5 million`, `(12.3)` (an accountant's minus), `12.5 %`, `EUR 3bn` and plain JSON numbers all
become a value in the unscaled unit. Per cent is a unit, never a division: `12.5 %` is 12.5 with
the unit `%`. Anything ambiguous (two numbers, a stray word beyond one unit) is no quantity.
"""

import math
import re
from dataclasses import dataclass

from runtime.checks.document import normalised
from runtime.run import Json

SCALES = {"one": 1.0, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_SCALE_WORDS = {
    **SCALES,
    **{f"{word}s": factor for word, factor in SCALES.items()},
    "k": 1e3,
    "m": 1e6,
    "mn": 1e6,
    "bn": 1e9,
    "tn": 1e12,
}
_SYMBOLS = {"$": "usd", "€": "eur", "£": "gbp", "¥": "jpy", "%": "%", "percent": "%"}
# Bounded repetitions and no nesting: linear on any input.
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,30})(?:\.\d{1,30})?(?:e[+-]?\d{1,3})?(?!\d)")
MAX_LENGTH = 80


@dataclass(frozen=True, slots=True)
class Quantity:
    value: float
    """In the unscaled unit."""
    unit: str | None
    """Lower case; currency symbols by their ISO code; `%` for per cent."""


def read_quantity(written: Json, scale: str | None = None) -> Quantity | None:
    """The quantity, or None. `scale` applies where the text has no scale word of its own."""
    default = SCALES[scale] if scale else 1.0
    if isinstance(written, bool):
        return None
    if isinstance(written, int | float):
        return Quantity(written * default, None) if math.isfinite(written) else None
    if not isinstance(written, str) or len(written) > MAX_LENGTH:
        return None
    return _read_text(normalised(written), default)


def _read_text(text: str, default: float) -> Quantity | None:
    negative = text.startswith("(") and text.endswith(")")
    body = text[1:-1] if negative else text
    numbers = list(_NUMBER.finditer(body))
    if len(numbers) != 1:
        return None
    number = numbers[0]
    words = _words(f"{body[: number.start()]} {body[number.end() :]}")
    if words[:1] == ["-"]:  # "-$5"
        negative, words = not negative, words[1:]
    factors = [_SCALE_WORDS[word] for word in words if word in _SCALE_WORDS]
    units = [_SYMBOLS.get(word, word) for word in words if word not in _SCALE_WORDS]
    if len(factors) > 1 or len(units) > 1:
        return None
    bare = 1.0 if units == ["%"] else default
    value = float(number.group().replace(",", "")) * (factors[0] if factors else bare)
    return Quantity(-value if negative else value, units[0] if units else None)


def _words(rest: str) -> list[str]:
    spaced = "".join(f" {c} " if c in _SYMBOLS else c for c in rest)
    return spaced.split()
