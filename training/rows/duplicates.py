"""Texts that say the same but for a word or a number: found by the overlap of their character 5-grams."""

import math
import unicodedata
from collections import defaultdict

GRAM = 5
NEAR = 0.85
"""Jaccard similarity of 5-grams from which two texts are near-duplicates: a number changed in a sentence of twenty words."""


class NearDuplicates:
    """Remembers texts and tells whether a new one is nearly one of them."""

    def __init__(self, near: float = NEAR):
        self._near = near
        self._grams: list[frozenset[str]] = []
        self._by_gram: dict[str, list[int]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """Remembers `text` unless it is a near-duplicate; returns whether it was new."""
        grams = _grams(text)
        if self._similar(grams):
            return False
        for gram in self._prefix(grams):
            self._by_gram[gram].append(len(self._grams))
        self._grams.append(grams)
        return True

    def __contains__(self, text: str) -> bool:
        return self._similar(_grams(text))

    def _similar(self, grams: frozenset[str]) -> bool:
        candidates = {index for gram in self._prefix(grams) for index in self._by_gram.get(gram, ())}
        return any(_jaccard(grams, self._grams[index]) >= self._near for index in candidates)

    def _prefix(self, grams: frozenset[str]) -> list[str]:
        """One gram more than two near texts can differ in, of the first in order: similar texts share one of these.

        The prefix filter of Bayardo et al. 2007 (https://doi.org/10.1145/1242572.1242591).
        """
        return sorted(grams)[: len(grams) - math.ceil(self._near * len(grams)) + 1]


def _grams(text: str) -> frozenset[str]:
    folded = "".join(c for c in unicodedata.normalize("NFKC", text.casefold()) if c.isalnum())
    return frozenset(folded[start : start + GRAM] for start in range(max(1, len(folded) - GRAM + 1)))


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)
