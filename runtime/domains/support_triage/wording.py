"""How customers write: the phrases of one split, and messages composed from them.

Each split has a file of phrases of its own (`phrases/<split>.yaml`) and shares no family with
another: other frames, other sentences, other asides. A message is a frame around a core sentence
that states the topic; slots are filled from vocabularies that say nothing about topic or answer.
"""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SLOTS: dict[str, tuple[str, ...]] = {
    "amount": tuple(
        f"{sign}{n}"
        for sign in ("£", "€", "$")
        for n in (15, 20, 35, 49, 60, 75, 80, 120, 150, 180, 240, 300, 450, 600, 950)
    ),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "days": ("3", "4", "5", "6", "8", "9", "10", "12", "14"),
    "month": (
        "January", "February", "March", "April", "May", "June",
        "July", "August", "September", "October", "November", "December",
    ),
    "city": (
        "Lyon", "Porto", "Leeds", "Ghent", "Turin", "Oslo", "Krakow", "Malmo", "Bilbao", "Graz",
        "Cork", "Tampere", "Bern", "Utrecht", "Split", "Riga", "Bath", "Nice", "Kiel", "Brno",
    ),
    "shop": (
        "Halden Books", "Tesco", "the corner bakery", "Nordlight", "Amazon", "Greenleaf", "IKEA",
        "the petrol station", "Milo Shoes", "Pronto Pizza", "Lidl", "the pharmacy", "Zara",
        "Kettle Cafe", "the airline", "Bloom Florist", "Uber", "the gym",
    ),
    "person": (
        "Ada", "Ben", "Chiara", "Dmitri", "Elif", "Farah", "Goran", "Hana", "Ivan", "Jonas",
        "Kofi", "Lena", "Mateo", "Nadia", "Oscar", "Priya", "Quinn", "Rosa", "Sven", "Tara",
        "Uma", "Viktor", "Wen", "Yara", "Zoe",
    ),
    "currency": ("dollars", "euros", "yen", "francs", "kroner", "zloty", "pounds", "lira"),
    "mention": (
        "cards", "payments", "transfers", "top-ups", "cash", "exchange", "fees", "refunds",
        "identity", "access", "accounts",
    ),
    "file": ("letter.txt", "note.txt", "scan.txt", "form.txt", "mail.txt", "page.txt"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phrases:
    """What one split can say."""

    families: dict[str, dict[str, list[str]]]
    """Family → level → frames around `{core}` (and `{aside}`)."""
    asides: list[str]
    attached: list[str]
    """Messages that only point to an attachment."""
    attached_full: list[str]
    """The same with a misleading mention of a department."""
    letters: list[str]
    topics: dict[str, list[str]]
    """Topic → sentences that state it."""


@cache
def phrases_of(split: str) -> Phrases:
    """Raises FileNotFoundError for a split without phrases."""
    text = (Path(__file__).parent / "phrases" / f"{split}.yaml").read_text("utf-8")
    values: dict[str, Any] = yaml.safe_load(text)
    return Phrases(**values)


def filled(template: str, dice: random.Random) -> str:
    """The template with each slot drawn from its vocabulary, white space collapsed."""
    text = template
    for name, words in SLOTS.items():
        while f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", dice.choice(words), 1)
    return " ".join(text.split())


def message(split: str, family: str, level: str, core: str, dice: random.Random) -> str:
    """A message of the family around the core; at level `full` often with a misleading aside."""
    phrases = phrases_of(split)
    frame = dice.choice(phrases.families[family][level])
    aside = dice.choice(phrases.asides) if dice.random() < 0.5 else ""
    return filled(frame.replace("{core}", core).replace("{aside}", aside), dice)


def pointer(split: str, level: str, file: str, dice: random.Random) -> str:
    """A core that says nothing but where to read."""
    phrases = phrases_of(split)
    choices = phrases.attached
    if level == "full" and dice.random() < 0.4:
        choices = phrases.attached_full
    return dice.choice(choices).replace("{file}", file)


def letter(split: str, core: str, dice: random.Random) -> str:
    """The text of an attachment."""
    return filled(dice.choice(phrases_of(split).letters).replace("{core}", core), dice)
