"""The chat template and the tokeniser, both ours: text and tools → token ids.

A conversation is ids from the start: an opening (system, tools, first message), then the sampled
ids as they were sampled, then what `after_reply` adds. Nothing is ever tokenised twice. Every turn
is built from pieces: its markers are single control ids looked up by name, its text is encoded
with control tokens switched off, so that `<|im_start|>` in a customer's message stays text and
cannot open a turn. Header and body are encoded apart, which makes the ids of a conversation
built turn by turn equal to those of the whole conversation rendered at once.

Tools are shown as the line the policy must write (`runtime.engine.tool_calls`), one per tool, each
list of allowed values once: prompts are paid for on every turn. The text suits any chat model; a
dialect only says which control tokens its tokeniser marks turns with.

Scaling out: a template is immutable and cheap to share between threads.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jinja2
from tokenizers import Tokenizer

from runtime.engine.tool_calls import FORM
from runtime.errors import InputError
from runtime.run import Json
from runtime.tools import Tool


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one family of chat models marks a turn."""

    begin: str
    """Opens every conversation."""
    header: str
    """Before the text of a turn; `{role}` is system, user, assistant or tool."""
    stop: str
    """The control token that ends a turn."""
    footer: str
    """After `stop`."""


CHATML = Dialect(begin="", header="<|im_start|>{role}\n", stop="<|im_end|>", footer="\n")
LLAMA3 = Dialect(
    begin="<|begin_of_text|>",
    header="<|start_header_id|>{role}<|end_header_id|>\n\n",
    stop="<|eot_id|>",
    footer="",
)
DIALECTS = (CHATML, LLAMA3)

_SYSTEM = """\
{{ system }}
{% if tools %}

Answer with one call per line: {{ form }}
Tools:
{% for tool in tools %}
{{ tool.call }}{{ " - " ~ tool.description if tool.description }}
{% endfor %}
{% endif %}"""

_MARKER = re.compile(r"(<\|[a-z_]+\|>)")


class ChatTemplate:
    """Renders conversations for one tokeniser. `opening` and `after_reply` are all a loop needs."""

    def __init__(
        self, tokenizer: Tokenizer, dialect: Dialect, *, end_tokens: Sequence[str] = ()
    ) -> None:
        """`end_tokens` are control tokens, beside the dialect's `stop`, that end a reply."""
        self._dialect = dialect
        self._control: dict[str, int] = {
            token.content: index
            for index, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        source = tokenizer.to_str()
        self._tokenizer = Tokenizer.from_str(source)
        self._tokenizer.encode_special_tokens = True
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)
        self._system = environment.from_string(_SYSTEM)
        self._stop = self._control[dialect.stop]
        ends = (self._control[token] for token in end_tokens if token in self._control)
        self.stop_ids: tuple[int, ...] = (self._stop, *(i for i in ends if i != self._stop))
        """Ids that end a reply; the first one is what `after_reply` adds where none was sampled."""
        self.digest: str = _digest(source, dialect, self.stop_ids)
        """`sha256:…` over the tokeniser, the markers and the wording."""

    @classmethod
    def from_folder(cls, model_dir: Path) -> Self:
        """The template of a model folder. Raises InputError where it has none we know."""
        path = model_dir / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for any unreadable file
            raise InputError(f"{path}: not a readable tokenizer.json: {error}") from error
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for dialect in DIALECTS:
            if set(_MARKER.findall(f"{dialect.begin}{dialect.header}{dialect.stop}")) <= known:
                return cls(tokenizer, dialect, end_tokens=_end_tokens(model_dir))
        raise InputError(
            f"{path}: no turn markers we know; the model must be a chat model with "
            f"{' or '.join(d.stop for d in DIALECTS)}"
        )

    @cached_property
    def vocabulary(self) -> int:
        """Size of the tokeniser's vocabulary, control tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    # ------------------------------------------------------------ text → ids

    def opening(
        self, system: str, tools: Sequence[Tool], messages: Sequence[tuple[str, str]]
    ) -> list[int]:
        """The ids up to and including the header of the first reply.

        `messages` are (role, text) pairs with roles user, assistant and tool.
        """
        ids = self._pieces(self._dialect.begin)
        instructions = self.system_text(system, tools)
        for role, text in [*([("system", instructions)] if instructions else []), *messages]:
            ids += self._turn(role, text)
        return ids + self._header("assistant")

    def after_reply(
        self, sampled: Sequence[int], observations: Sequence[tuple[str, str]]
    ) -> list[int]:
        """The ids that follow a sampled reply: its end, the observations, the next header.

        `observations` are (tool name, content) pairs in the order of the calls. The stop token
        is among the ids only where the policy did not sample one.
        """
        ended = bool(sampled) and sampled[-1] in self.stop_ids
        ids = [] if ended else [self._stop]
        ids += self._pieces(self._dialect.footer)
        for name, content in observations:
            ids += self._turn("tool", f"{name}: {content}")
        return ids + self._header("assistant")

    def reply(self, text: str) -> list[int]:
        """The ids of a whole reply as a policy would sample it, stop token included."""
        return [*self.encode(text), self._stop]

    def encode(self, text: str) -> list[int]:
        """The ids of plain text: no turn, no control tokens. A lone surrogate becomes `?`."""
        clean = text.encode("utf-8", "replace").decode("utf-8")
        return self._tokenizer.encode(clean, add_special_tokens=False).ids if clean else []

    def piece(self, token: int) -> str:
        """What one id stands for, control tokens by their name; for people, never for ids."""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without control tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def system_text(self, system: str, tools: Sequence[Tool]) -> str:
        """The text of the system turn: the domain's prompt, the protocol, the tools."""
        text = self._system.render(system=system.strip(), form=FORM, tools=_describe(tools))
        return text.strip()

    def _turn(self, role: str, text: str) -> list[int]:
        footer = self._pieces(self._dialect.footer)
        return [*self._header(role), *self.encode(text), self._stop, *footer]

    def _header(self, role: str) -> list[int]:
        return self._pieces(self._dialect.header.format(role=role))

    def _pieces(self, ours: str) -> list[int]:
        """Ids of our own markup, in which control tokens count."""
        ids: list[int] = []
        for piece in _MARKER.split(ours):
            ids += [self._control[piece]] if piece in self._control else self.encode(piece)
        return ids


def _digest(tokenizer: str, dialect: Dialect, stop_ids: Sequence[int]) -> str:
    parts = json.dumps([tokenizer, repr(dialect), list(stop_ids), _SYSTEM, FORM])
    return f"sha256:{hashlib.sha256(parts.encode()).hexdigest()}"


def _end_tokens(model_dir: Path) -> list[str]:
    """End-of-text tokens named by the model folder, beside the usual one."""
    try:
        config = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    eos = config.get("eos_token")
    name = eos.get("content") if isinstance(eos, dict) else eos
    return [*([name] if isinstance(name, str) else []), "<|endoftext|>", "<|end_of_text|>"]


# ---------------------------------------------------------------- tools as lines


def _describe(tools: Sequence[Tool]) -> list[dict[str, str]]:
    """Each tool as the call to write, and what it does; equal lists of values are shown once."""
    shown: dict[str, str] = {}
    return [{"call": _signature(tool, shown), "description": _description(tool)} for tool in tools]


def _signature(tool: Tool, shown: dict[str, str]) -> str:
    schema = tool.parameters
    required = set(schema.get("required", ()))
    pairs = [pair if name in required else f"[{pair}]" for name, pair in _pairs(schema, shown)]
    return " ".join([tool.name, *pairs]) if pairs else f"{tool.name}()"


def _pairs(schema: Mapping[str, Json], shown: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, field in schema.get("properties", {}).items():
        values = _type(_resolve(field, schema))
        if values in shown:
            values = f"<{shown[values]}>"
        elif values.count("|") > 1:
            shown[values] = name
        yield name, f"{name}={values}"


def _description(tool: Tool) -> str:
    fields = tool.parameters.get("properties", {})
    notes = [
        f"{name}: {field['description']}"
        for name, field in fields.items()
        if isinstance(field, dict) and field.get("description")
    ]
    return "; ".join([tool.description.strip(), *notes]).strip("; ")


_TYPES: Mapping[str, str] = {
    "string": "text",
    "integer": "int",
    "number": "number",
    "boolean": "true|false",
    "null": "null",
    "array": "[...]",
    "object": "{...}",
}


def _type(field: Mapping[str, Any]) -> str:
    """A field's type as it is written in a call: allowed values, or a word for its kind."""
    if "enum" in field:
        return "|".join(str(value) for value in field["enum"])
    if "const" in field:
        return str(field["const"])
    if "anyOf" in field:
        return "|".join(kind for kind in map(_type, field["anyOf"]) if kind != "null")
    kinds = field.get("type", "text")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return "|".join(_TYPES.get(kind, kind) for kind in kinds if kind != "null")


def _resolve(field: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A field with a local `$ref` replaced by what it names."""
    reference = str(field.get("$ref", ""))
    if not reference.startswith("#/$defs/"):
        return field
    return schema.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
