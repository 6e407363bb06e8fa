"""A GGUF file's tokenizer as a Hugging Face `tokenizer.json`.

GGUF keeps a tokenizer's tables (tokens, their types, merges or scores) but only the
*name* of the rule that cuts text into words before merging; getting that rule wrong
gives a model that works a little worse. So the names are a closed list, and each rule
is the one that the family's own tokenizer.json has.

Two kinds exist. `gpt2`: byte-level BPE, with merges in order. `llama`: SentencePiece
BPE, which has scores instead of merges: two neighbours may merge if together they
are a piece, and the best score goes first. Every way to cut a piece in two is then a
merge, ranked by the piece's score.
"""

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from convert.gguf_header import Header

# llama.cpp's llama_token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "\u2581"
"""What SentencePiece writes for a space."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}
_CHANGES_TEXT = (
    "tokenizer.ggml.precompiled_charsmap",
    "tokenizer.ggml.remove_extra_whitespaces",
    "tokenizer.ggml.add_sep_token",
    "tokenizer.ggml.normalizer.lowercase",
    "tokenizer.ggml.normalizer.strip_accents",
)
"""Keys that would change what text becomes; none of our tokenizers sets one."""

_END_KEYS = {
    "tokenizer.ggml.eos_token_id": (),
    "tokenizer.ggml.eot_token_id": ("<|eot_id|>", "<|im_end|>"),
    "tokenizer.ggml.eom_token_id": ("<|eom_id|>",),
}
"""Keys of ids that end generation, and the control tokens they mean when absent."""


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_words() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2_words()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2_words,
    "smollm": _smollm_words,
    "llama-bpe": lambda: _split_by(_LLAMA3),
    "qwen2": lambda: _split_by(_QWEN2),
}


def tokenizer_json(header: Header) -> str | None:
    """Build the text of a `tokenizer.json`.

    Args:
        header: Of a GGUF file; its `tokenizer.ggml.*` keys are read.

    Returns:
        JSON that `tokenizers.Tokenizer.from_str` reads; None: the file has no
        tokenizer.

    Raises:
        ValueError: The tokenizer model or the pre-tokenizer is not a known one, or
            the tables contradict each other.
    """
    tables = header.metadata
    model = tables.get("tokenizer.ggml.model", "none")
    if model == "none":
        return None
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if model not in builders:
        raise ValueError(
            f"{header.path}: tokenizer model {model!r} is unknown; known are "
            f"{', '.join(builders)}"
        )
    _check_tables(header)
    tokenizer = builders[model](header)
    _add_special_tokens(tokenizer, tables)
    _add_template(tokenizer, header)
    return tokenizer.to_str()


def tokenizer_config(header: Header) -> dict[str, Any]:
    """Return what `tokenizer_config.json` holds of this: template, BOS, EOS."""
    tables = header.metadata
    config: dict[str, Any] = {}
    tokens = tables.get("tokenizer.ggml.tokens", [])
    for name in ("bos_token", "eos_token"):
        token_id = tables.get(f"tokenizer.ggml.{name}_id")
        if token_id is not None and token_id < len(tokens):
            config[name] = tokens[token_id]
    if "tokenizer.chat_template" in tables:
        config["chat_template"] = tables["tokenizer.chat_template"]
    return config


def end_of_generation_ids(header: Header) -> tuple[int, ...]:
    """Return every id that ends generation, in ascending order.

    The union of the end-of-text, end-of-turn and end-of-message keys. The last two
    are often absent; then a control token of the usual name stands in for them, as
    in llama.cpp.
    """
    tables = header.metadata
    tokens = tables.get("tokenizer.ggml.tokens", ())
    kinds = tables.get("tokenizer.ggml.token_type", ())
    control = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL
    }
    ids = set()
    for key, names in _END_KEYS.items():
        if key in tables:
            ids.add(tables[key])
        else:
            ids.update(control[name] for name in names if name in control)
    return tuple(sorted(ids))


def _check_tables(header: Header) -> None:
    """Check that the tables are there, of one length, and ask for nothing unknown."""
    tables = header.metadata
    tokens = tables.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(f"{header.path}: tokenizer.ggml.tokens is missing")
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(t for t in tokens if t in seen or seen.add(t))
        raise ValueError(f"{header.path}: token {twice!r} occurs twice")
    for name in ("token_type", "scores"):
        table = tables.get(f"tokenizer.ggml.{name}")
        if table is not None and len(table) != len(tokens):
            raise ValueError(
                f"{header.path}: tokenizer.ggml.{name} has {len(table)} entries for "
                f"{len(tokens)} tokens"
            )
    for key in _CHANGES_TEXT:
        if tables.get(key):
            raise ValueError(f"{header.path}: {key} is set, which is not supported")


def _byte_level_bpe(header: Header) -> Tokenizer:
    tables = header.metadata
    name = _pre_tokenizer_name(tables)
    words = _PRE_TOKENIZERS.get(name)
    if words is None:
        known = ", ".join((*_PRE_TOKENIZERS, *_ALIASES))
        raise ValueError(
            f"{header.path}: pre-tokenizer {name!r} is unknown; known are {known}"
        )
    vocab = {token: i for i, token in enumerate(tables["tokenizer.ggml.tokens"])}
    merges = _read_merges(header, vocab)
    # Llama 3's own tables hold tokens that their merges do not reach.
    ignore_merges = name == "llama-bpe"
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    )
    tokenizer.pre_tokenizer = words()
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        # llama.cpp leaves this out; Qwen's own tokenizer.json has it.
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pre_tokenizer_name(tables: dict[str, Any]) -> str:
    name = str(tables.get("tokenizer.ggml.pre", "none"))
    return _ALIASES.get(name, name)


def _read_merges(header: Header, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in header.metadata.get("tokenizer.ggml.merges", ()):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise ValueError(
                f"{header.path}: merge {line!r} is not of two tokens that make a third"
            )
        merges.append((left, right))
    return merges


def _sentencepiece_bpe(header: Header) -> Tokenizer:
    tables = header.metadata
    tokens = tables["tokenizer.ggml.tokens"]
    scores = tables.get("tokenizer.ggml.scores")
    kinds = tables.get("tokenizer.ggml.token_type")
    if scores is None or kinds is None:
        raise ValueError(
            f"{header.path}: a llama tokenizer needs tokenizer.ggml.scores and "
            "tokenizer.ggml.token_type"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    missing = [f"<0x{b:02X}>" for b in range(256) if f"<0x{b:02X}>" not in vocab]
    if missing:
        raise ValueError(
            f"{header.path}: a llama tokenizer needs all 256 byte tokens, "
            f"{len(missing)} are missing, the first {missing[0]}"
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(tokens, scores, kinds),
            unk_token=next(
                (t for t, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN),
                None,
            ),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = tables.get("tokenizer.ggml.add_space_prefix", True)
    to_pieces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    to_text: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        to_pieces.insert(0, normalizers.Prepend(SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(to_pieces)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _merges_from_scores(
    tokens: list[str], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """Return every cut of every piece into two pieces, the best score first.

    SentencePiece takes the leftmost of equal scores, and so does BPE for one merge;
    between cuts of one piece, what has merged before decides which of them is there.
    """
    pieces = {t for t, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    ranked = sorted(range(len(tokens)), key=lambda i: (-scores[i], i))
    return [
        (piece[:cut], piece[cut:])
        for piece in (tokens[i] for i in ranked if tokens[i] in pieces)
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _add_special_tokens(tokenizer: Tokenizer, tables: dict[str, Any]) -> None:
    """Make control, unknown and user-defined tokens match as a whole."""
    tokens = tables["tokenizer.ggml.tokens"]
    kinds = tables.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    special, plain = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_template(tokenizer: Tokenizer, header: Header) -> None:
    """Add BOS and EOS where the file, or its kind's default, says so."""
    tables = header.metadata
    is_llama3 = _pre_tokenizer_name(tables) == "llama-bpe"
    defaults = {
        "bos": tables["tokenizer.ggml.model"] == "llama" or is_llama3,
        "eos": False,
    }
    parts, specials = ["$A"], []
    for end, default in defaults.items():
        if not tables.get(f"tokenizer.ggml.add_{end}_token", default):
            continue
        token_id = tables.get(f"tokenizer.ggml.{end}_token_id")
        token = None if token_id is None else tokenizer.id_to_token(token_id)
        if token is None:
            raise ValueError(
                f"{header.path}: tokenizer.ggml.add_{end}_token asks for a token, but "
                f"tokenizer.ggml.{end}_token_id is {token_id!r}"
            )
        parts.insert(0 if end == "bos" else len(parts), token)
        specials.append((token, token_id))
    if specials:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=specials
        )
