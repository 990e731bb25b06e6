"""A `tokenizers.Tokenizer` from the key-values of a GGUF file.

Two kinds of vocabulary are in use among the models served here: byte-level BPE with merges ("gpt2"), and SentencePiece
BPE with scores ("llama"). Key names: the GGUF specification, "tokenizer.ggml.*".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stenograph.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type
SPACE = "▁"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(suffix)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(suffix)s"
    rf"|%(digits)s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _REST
)
# Regular expressions that cut text into words, by the kind that "tokenizer.ggml.pre" names. GPT2 stands for the one
# that is built into the tokenizers package; DIGITS for the same after every digit was set apart.
GPT2, DIGITS = "gpt-2", "digits"
LLAMA3 = _WORDS % r"\p{N}{1,3}"
QWEN2 = _WORDS % r"\p{N}"
TEKKEN = _CASED % {"suffix": "", "digits": r"\p{N}"}
O200K = _CASED % {"suffix": _CONTRACTIONS + "?", "digits": r"\p{N}{1,3}"}
WORD_PATTERNS = {
    "default": GPT2, "gpt-2": GPT2, "phi-2": GPT2, "olmo": GPT2, "mpt": GPT2,
    "smollm": DIGITS, "starcoder": DIGITS, "refact": DIGITS, "command-r": DIGITS,
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "falcon3": LLAMA3, "pixtral": LLAMA3,
    "dbrx": LLAMA3, "smaug-bpe": LLAMA3,
    "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2, "stablelm2": QWEN2, "megrez": QWEN2,
    "tekken": TEKKEN, "gpt-4o": O200K, "llama4": O200K,
}  # fmt: skip
# A word that is a token as a whole is taken as such, even where no merges lead to it.
WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}
ADDS_BOS = WHOLE_WORDS_FIRST  # where the file doesn't say


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Raises `ModelLoadError` for a kind that is not known, or damaged data."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ModelLoadError(
            f"The GGUF file's tokenizer is of the kind {kind!r}; known are {', '.join(builders)}.",
            remedy="Name a directory with a tokenizer.json with --tokenizer.",
        )
    tokens, types = _tokens(metadata)
    try:
        tokenizer = builders[kind](metadata, tokens, types)
        _mark_added(tokenizer, metadata, tokens, types)
    except ModelLoadError:
        raise
    except Exception as error:  # the tokenizers package raises bare exceptions, and type errors for broken text
        why = str(error).partition("\n")[0]
        raise ModelLoadError(
            f"The GGUF file's tokenizer is damaged: {why}.",
            remedy="Fetch the file again, or name another tokenizer with --tokenizer.",
        ) from error
    return tokenizer


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether text is to begin with the beginning-of-sequence token."""
    default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in ADDS_BOS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _tokens(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError("The GGUF file has a tokenizer without tokens.", remedy="Fetch the file again.")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelLoadError(
            f"The GGUF file has {len(tokens)} tokens, but {len(types)} token types.", remedy="Fetch the file again."
        )
    return tokens, types


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in WORD_PATTERNS:
        raise ModelLoadError(
            f"The GGUF file's tokenizer cuts words in the way {pre!r}; known are {', '.join(WORD_PATTERNS)}.",
            remedy="Name a directory with a tokenizer.json with --tokenizer.",
        )
    split = (merge.partition(" ") for merge in metadata.get("tokenizer.ggml.merges") or [])
    merges = [(left, right) for left, _, right in split]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=pre in WHOLE_WORDS_FIRST))
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    pattern = WORD_PATTERNS[pre]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=pattern in (GPT2, DIGITS))
    if pattern == GPT2:
        tokenizer.pre_tokenizer = to_bytes
    elif pattern == DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), to_bytes])
    else:
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    if pattern == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelLoadError("The GGUF file's tokenizer lacks a score for each token.", remedy="Fetch the file again.")
    vocabulary = _vocabulary(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_by_score(tokens, types, scores, vocabulary),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    tokenizer = Tokenizer(model)
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    before: list[Any] = [normalizers.Prepend(SPACE)] if space else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after: list[Any] = [decoders.Strip(" ", 1, 0)] if space else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(
    tokens: list[str], types: list[int], scores: list[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours that make the token of the best score: a merge for each way to make it."""
    found: list[tuple[float, int, str, str]] = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if len(token) < 2 or kind in (UNKNOWN, CONTROL, BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], index, left, right))
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):  # padding of the vocabulary repeats names: the first of each counts
        vocabulary = {token: index for index, token in reversed(list(enumerate(tokens)))}
    return vocabulary


def _mark_added(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], types: list[int]) -> None:
    """Control tokens are found in text and hidden from answers; tokens that the model's makers added are found alone.

    Tokens that end or begin a sequence are control tokens, even where the file calls them something else.
    """
    from tokenizers import AddedToken

    keys = ("bos", "eos", "eot", "eom")
    named = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys}
    control, added = [], []
    marks = metadata["tokenizer.ggml.model"] == "llama" and not metadata.get("tokenizer.ggml.add_space_prefix", True)
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if token and (kind in (UNKNOWN, CONTROL) or index in named):
            control.append(AddedToken(token, special=True, normalized=False))
        elif token and kind == USER_DEFINED:
            # One that is spelt with the mark of a space is found where spaces have become marks.
            added.append(AddedToken(token, special=False, normalized=marks and SPACE in token))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(added)
