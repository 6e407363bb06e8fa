"""A checkpoint's tokenizer and its chat template.

The token ids are those of Hugging Face's `tokenizers` library on `tokenizer.json`,
its post-processor included. The chat template is a program that came with somebody's
checkpoint: it runs in jinja2's sandbox, with the names that templates expect from
transformers, and whatever goes wrong in it is a ValueError.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers


class CheckpointTokenizer:
    """Text to token ids and back, and messages to a prompt.

    Attributes:
        chat_template: Source of the checkpoint's jinja2 template; None: it has none.
        bos_token: Text of the beginning-of-sequence token, where there is one.
        eos_token: Text of the end-of-sequence token, where there is one.
        num_token_ids: Highest token id plus one; a model's vocabulary may be larger.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]):
        """Wrap a tokenizer.

        Args:
            tokenizer: From here on it neither truncates nor pads.
            config: What `tokenizer_config.json` holds.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_tokens = read_special_tokens(config)
        self._template: jinja2.Template | None = None
        self.chat_template = _default_template(config.get("chat_template"))
        self.bos_token = self._special_tokens.get("bos_token")
        self.eos_token = self._special_tokens.get("eos_token")
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.num_token_ids = max(vocabulary.values(), default=-1) + 1

    @classmethod
    def from_files(
        cls, tokenizer_json: Path, config: Mapping[str, Any]
    ) -> "CheckpointTokenizer":
        """Read a `tokenizer.json`.

        Raises:
            ValueError: The file is not one; names it.
        """
        return cls(read_tokenizer(tokenizer_json), config)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: Special tokens written out in it are recognised.
            add_special_tokens: Let the post-processor add its own, as a beginning of
                sequence. A rendered chat template brings them already.

        Raises:
            ValueError: The text has lone surrogates, as text read from bytes that
                are not UTF-8 has.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error}") from None
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, special tokens left out unless asked for."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens
        )

    def apply_chat_template(
        self, messages: Sequence[Any], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation as the checkpoint was trained to see it.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first.
            add_generation_prompt: End with the opening of the assistant's answer.

        Returns:
            The prompt, special tokens included: encode it with
            `add_special_tokens=False`.

        Raises:
            ValueError: There is no template, a message is malformed, or the template
                refuses the conversation.
        """
        if self.chat_template is None:
            raise ValueError("this checkpoint has no chat template")
        _check_messages(messages)
        try:
            if self._template is None:
                self._template = _compile(self.chat_template)
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # somebody else's program: it may raise anything
            raise ValueError(f"the chat template failed: {error}") from error


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`.

    Raises:
        ValueError: The file is not one; names it.
    """
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error


def read_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each `*_token` of a `tokenizer_config.json`.

    A token is written as its text, or as a dict with the text under `content`.
    """
    tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _default_template(templates: Any) -> str | None:
    """Pick the template: a plain one, or the one called `default` of a list."""
    if isinstance(templates, list):
        named = [item for item in templates if isinstance(item, Mapping)]
        defaults = [item for item in named if item.get("name") == "default"]
        templates = defaults[0].get("template") if defaults else None
    return templates if isinstance(templates, str) else None


def _check_messages(messages: Sequence[Any]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            f"messages must be a non-empty list of dicts, got {messages!r}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {index} must be a dict, got {message!r}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} has no role: {dict(message)!r}")
        content = message.get("content")
        if not isinstance(content, str | list) and "tool_calls" not in message:
            raise ValueError(
                f"message {index} must have a text as its content: {dict(message)!r}"
            )


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is plain."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like jinja2's own filter, but without escaping HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
