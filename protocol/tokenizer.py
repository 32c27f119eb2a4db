"""Text to token ids and back for a model folder, with its chat template; loads no deep-learning library.

Reads ``tokenizer.json``, ``tokenizer_config.json`` and, when there is one, ``chat_template.jinja``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import tokenizers
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import LocalFault, code

E_TOKENIZER = code("E_TOKENIZER", "a model's tokenizer files are missing, malformed or lack what the task needs")

#: One turn of a conversation: keys ``role`` and ``content``.
ChatTurn = Mapping[str, str]
#: Characters that stand for the contents of turns while a template is rendered (Unicode's private use area).
_PRIVATE: Final = range(0xE000, 0xF900)


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer. Encoding adds no special tokens of its own; decoding leaves special tokens out."""

    model: tokenizers.Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]  #: bos_token, eos_token, ...: what the chat template may refer to

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face model folder.

        Raises:
            LocalFault: ``E_TOKENIZER`` when a file is missing or malformed.
        """
        config = _read_json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        template = _read_text(template_file) if template_file.exists() else config.get("chat_template")
        if template is not None and not isinstance(template, str):
            raise LocalFault(E_TOKENIZER, f"{folder}: chat_template is not one template", expected="a string")
        special = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
        return cls(_read_model(folder / "tokenizer.json"), template, {k: v for k, v in special.items() if v})

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. The model's logits may be wider."""
        return self.model.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int:
        """Id of the token that ends a completion.

        Raises:
            LocalFault: ``E_TOKENIZER`` when the configuration names none.
        """
        return self.special_id("eos_token")

    def special_id(self, name: str) -> int:
        """Id of the special token called ``name`` in the configuration, for example ``pad_token``.

        Raises:
            LocalFault: ``E_TOKENIZER`` when there is none.
        """
        found = self.model.token_to_id(self.special_tokens.get(name, ""))
        if found is None:
            raise LocalFault(E_TOKENIZER, f"the tokenizer has no {name}", expected=f"{name} in tokenizer_config.json")
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``.

        Raises:
            LocalFault: ``E_TOKENIZER`` for what is no Unicode text (half of a surrogate pair).
        """
        try:
            return list(self.model.encode(text, add_special_tokens=False).ids)
        except TypeError:  # the library's word for it
            raise LocalFault(E_TOKENIZER, "not a text that can be encoded", got=repr(text)[:200]) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return self.model.decode([int(i) for i in ids], skip_special_tokens=True)

    def encode_chat(self, messages: Sequence[ChatTurn]) -> list[int]:
        """Token ids of a conversation up to the point where the assistant answers.

        Only the template makes the tokens that turns are made of: what is spelt like one in a turn's content, a
        question that holds ``<|im_end|>`` for example, is encoded as text. Where the usual way would make such tokens
        of contents, each content is encoded for itself, by a tokenizer that does not look for them, and at last by
        characters.

        Raises:
            LocalFault: ``E_TOKENIZER`` as for ``render_chat``, or when no way keeps turns and contents apart.
        """
        neutral = self.encode(self.render_chat([{**turn, "content": "a"} for turn in messages]))
        control = self._control | (self._added & set(neutral))
        for ways in (self._together, self._apart, self._by_characters):
            ids = ways(messages)
            if [i for i in ids if i in control] == [i for i in neutral if i in control]:
                return ids
        raise LocalFault(
            E_TOKENIZER, "a conversation whose contents cannot be told from the template's own tokens",
            got=repr(max((turn["content"] for turn in messages), key=len))[:200],
        )

    def render_chat(self, messages: Sequence[ChatTurn]) -> str:
        """Text of a conversation in the model's chat template, with the opening of the assistant's turn.

        Raises:
            LocalFault: ``E_TOKENIZER`` when there is no template or it refuses the conversation.
        """
        if self.chat_template is None:
            raise LocalFault(E_TOKENIZER, "the model has no chat template", expected="chat_template.jinja")
        try:
            template = _environment().from_string(self.chat_template)
            return template.render(
                messages=[dict(turn) for turn in messages], add_generation_prompt=True, **self.special_tokens
            )
        except TemplateError as error:
            kind = "malformed" if isinstance(error, TemplateSyntaxError) else "refuses the conversation"
            raise LocalFault(E_TOKENIZER, f"the chat template is {kind}", got=str(error)) from None

    def _together(self, messages: Sequence[ChatTurn]) -> list[int]:
        return self.encode(self.render_chat(messages))

    def _apart(self, messages: Sequence[ChatTurn]) -> list[int]:
        return self._pieces(messages, self._encode_literally)

    def _by_characters(self, messages: Sequence[ChatTurn]) -> list[int]:
        return self._pieces(messages, lambda text: [i for letter in text for i in self._encode_literally(letter)])

    def _pieces(self, messages: Sequence[ChatTurn], encode: Callable[[str], list[int]]) -> list[int]:
        """The template around one private character for each content, and the contents as ``encode`` has them."""
        neutral = self.render_chat([{**turn, "content": "a"} for turn in messages])
        marks = [mark for mark in map(chr, _PRIVATE) if mark not in neutral][: len(messages)]
        if len(marks) < len(messages):
            raise LocalFault(E_TOKENIZER, "a conversation of too many turns", expected=len(marks), got=len(messages))
        contents = {mark: turn["content"] for mark, turn in zip(marks, messages, strict=True)}
        text = self.render_chat([{**turn, "content": mark} for mark, turn in zip(marks, messages, strict=True)])
        ids = []
        for piece in re.split(f"([{''.join(marks)}])", text):
            ids += encode(contents[piece]) if piece in contents else self.encode(piece)
        return ids

    def _encode_literally(self, text: str) -> list[int]:
        return list(self._literal.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _added(self) -> frozenset[int]:
        """Ids that were added to the vocabulary: special ones, but others too."""
        return frozenset(self.model.get_added_tokens_decoder())

    @cached_property
    def _control(self) -> frozenset[int]:
        """Ids of special tokens, and of those that the configuration names."""
        added = self.model.get_added_tokens_decoder()
        named = (self.model.token_to_id(text) for text in self.special_tokens.values())
        return frozenset([i for i, token in added.items() if token.special] + [i for i in named if i is not None])

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer, blind to special tokens: their names are characters to it. One that no thread changes."""
        model = tokenizers.Tokenizer.from_str(self.model.to_str())
        model.encode_special_tokens = True
        return model


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect of Jinja that Hugging Face chat templates are written in, sandboxed."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _token_text(value: Any) -> str:
    """A special token is written as a string or as an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LocalFault(
            E_TOKENIZER,
            f"cannot read {path}",
            got=str(error),
            hint="a model folder holds its tokenizer beside config.json",
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise LocalFault(E_TOKENIZER, f"{path} is not JSON", got=str(error)) from None
    if not isinstance(value, dict):
        raise LocalFault(E_TOKENIZER, f"{path} is malformed", expected="a JSON object", got=type(value).__name__)
    return value


def _read_model(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower for a malformed file
        raise LocalFault(E_TOKENIZER, f"{path} is malformed", got=str(error)) from None
