"""Words of a prompt: which ones count, the prompt without one of them, and where a word's tokens are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lcs.errors import LcsError

STOP_WORDS = frozenset(
    (
        "a",
        "an",
        "and",
        "at",
        "by",
        "for",
        "from",
        "in",
        "is",
        "it",
        "of",
        "on",
        "or",
        "that",
        "the",
        "this",
        "to",
        "with",
    )
)


@dataclass(frozen=True)
class Word:
    text: str
    begin: int  # characters in the prompt
    end: int
    label: str  # the text, numbered if the prompt repeats it


def content_words(prompt: str) -> list[Word]:
    """Words in order, without the common ones ("a", "the", ...), as the paper skips them."""
    found = [m for m in re.finditer(r"[\w'-]+", prompt) if m.group().lower() not in STOP_WORDS]
    texts = [m.group() for m in found]
    words = []
    for i, m in enumerate(found):
        number = texts[: i + 1].count(m.group())
        label = m.group() if texts.count(m.group()) == 1 else f"{m.group()} {number}"
        words.append(Word(m.group(), m.start(), m.end(), label))
    return words


def without(prompt: str, word: Word) -> str:
    """The prompt with this occurrence of the word removed."""
    return re.sub(r"\s+", " ", prompt[: word.begin] + prompt[word.end :]).replace(" ,", ",").strip()


def dominant_words(influence: dict[str, float], factor: float = 2.0) -> list[str]:
    """The smallest set of strongest words whose weakest is at least `factor` times the next one; [] if none is."""
    ranked = sorted(influence, key=lambda word: -influence[word])
    for m in range(1, len(ranked)):
        if influence[ranked[m - 1]] >= factor * influence[ranked[m]] and influence[ranked[m - 1]] > 0:
            return ranked[:m]
    return []


def tokens_of(tokenizer, prompt: str) -> list[str]:
    """Tokens with start, end and padding, without the end-of-word mark."""
    ids = tokenizer(prompt, padding="max_length", max_length=tokenizer.model_max_length, truncation=True).input_ids
    return [token.removesuffix("</w>") for token in tokenizer.convert_ids_to_tokens(ids)]


def token_index(tokenizer, prompt: str, token: str | None) -> int:
    """Position of a token in the encoded prompt; None is the end-of-text token."""
    tokens = tokens_of(tokenizer, prompt)
    wanted = tokenizer.eos_token if token is None else token.lower()
    if wanted not in tokens:
        raise LcsError(f"{prompt!r} has no token {wanted!r}; its tokens are {', '.join(tokens[1:12])} ...")
    return tokens.index(wanted)


def token_span(tokenizer, prompt: str, phrase: str, taken: Sequence[range] = ()) -> range:
    """Positions of the tokens of a phrase that the prompt contains; the first occurrence outside of those `taken`."""
    tokens = tokens_of(tokenizer, prompt)
    part = tokenizer(phrase, add_special_tokens=False).input_ids
    wanted = [token.removesuffix("</w>") for token in tokenizer.convert_ids_to_tokens(part)]
    for at in range(1, len(tokens) - len(wanted) + 1):
        free = not any(span.start < at + len(wanted) and at < span.stop for span in taken)
        if wanted and free and tokens[at : at + len(wanted)] == wanted:
            return range(at, at + len(wanted))
    raise LcsError(f"{prompt!r} does not contain {phrase!r}{' once more' if taken else ''}")
