"""A CLIP tokenizer whose vocabulary is our own captions: every caption word is one token.

CLIP's tokenizer is a byte-pair encoding, so whole words need merge rules that lead to them. They are found as
BPE is trained: merge the most frequent pair of neighbours until every word is a single token. Letters stay in
the vocabulary, so any other word is spelled instead of refused.
"""

from __future__ import annotations

import string
from collections import Counter
from itertools import pairwise

from transformers import CLIPTokenizer

from lcs.sdxl.captions import all_words

END = "</w>"
BOS, EOS = "<|startoftext|>", "<|endoftext|>"


def learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Merge rules, in order, that turn each of `words` into one token."""
    spelled = [[*word[:-1], word[-1] + END] for word in words]
    merges = []
    while True:
        pairs = Counter(pair for word in spelled for pair in pairwise(word))
        if not pairs:
            return merges
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelled = [_merge(word, best) for word in spelled]


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


def build_tokenizer(max_length: int) -> CLIPTokenizer:
    """`max_length` tokens with the two special ones; longer prompts are cut, as in SDXL."""
    merges = learn_merges(all_words())
    base = string.ascii_lowercase + string.digits + string.punctuation
    tokens = [*base, *(c + END for c in base), *(a + b for a, b in merges), BOS, EOS]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=max_length)
