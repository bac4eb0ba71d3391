# SPDX-License-Identifier: Apache-2.0
"""The shapes of what is transferred: lists of (source offset, target offset, length) within two buffers."""

from __future__ import annotations

import random
from typing import NamedTuple

#: DeepSeek-V2-Lite's KV cache (MLA, bfloat16): layers, and bytes of one token in one layer.
LAYERS, TOKEN = 27, 576 * 2


class Piece(NamedTuple):
    """One descriptor."""

    source: int
    target: int
    size: int


class Shape(NamedTuple):
    """What is moved in one transfer."""

    name: str
    pieces: list[Piece]

    @property
    def bytes(self) -> int:
        """Bytes of one transfer."""
        return sum(piece.size for piece in self.pieces)

    @property
    def extent(self) -> int:
        """Bytes that both buffers must have."""
        return max(max(piece.source, piece.target) + piece.size for piece in self.pieces)


def large(size: int, number: int = 8) -> Shape:
    """A few large descriptors, one after the other; in the target the last comes first."""
    step = max(size // number // 4096 * 4096, 4096)
    return Shape("large", [Piece(i * step, (number - 1 - i) * step, step) for i in range(number)])


def request(tokens: int, runs: int = 12, seed: int = 1) -> Shape:
    """One request's KV cache at page size 1, as SGLang sends it: in each layer the tokens lie in a dozen runs of
    consecutive slots, which are elsewhere in the target."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, tokens), min(runs, tokens) - 1)) if tokens > 1 else []
    borders = list(zip([0, *cuts], [*cuts, tokens], strict=True))
    places: list[tuple[int, int, int]] = []
    slot = 0
    for start, end in reversed(borders):
        places.append((start, slot, end - start))
        slot += end - start
    layer = tokens * TOKEN
    pieces = [
        Piece(i * layer + start * TOKEN, i * layer + target * TOKEN, n * TOKEN)
        for i in range(LAYERS)
        for start, target, n in places
    ]
    return Shape("kv", pieces)


def scattered(tokens: int, number: int = 16, seed: int = 2) -> Shape:
    """Single tokens, each a descriptor of 1,152 bytes: the smallest that page size 1 gives."""
    rng = random.Random(seed)
    slots = rng.sample(range(tokens), min(number, tokens))
    targets = rng.sample(range(tokens), len(slots))
    layer = tokens * TOKEN
    pieces = [
        Piece(i * layer + slot * TOKEN, i * layer + target * TOKEN, TOKEN)
        for i in range(LAYERS)
        for slot, target in zip(slots, targets, strict=True)
    ]
    return Shape("tokens", pieces)


def all_of(size: int, tokens: int) -> list[Shape]:
    """Every shape of a verification."""
    return [large(size), request(tokens), scattered(tokens)]
