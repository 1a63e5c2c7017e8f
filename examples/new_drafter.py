"""A whole drafter in one file: what followed the last token most often so far will follow it again.

Nothing is trained. Every pair of neighbouring tokens in the committed text is counted, and the draft is a chain of the
most frequent followers. Copied to `src/paradraft/drafters/bigram.py` it is found by its file name: `--drafter bigram`.

Run it: `python examples/new_drafter.py`.
"""

from __future__ import annotations

import argparse
import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paradraft import ragged
from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        min_count: a pair is used once it has occurred this often, at least 1.

    Raises:
        ValueError: `min_count` is below 1.
    """

    min_count: int = 1

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ValueError(f"min_count={self.min_count}: use at least 1")


class Bigrams:
    """The pairs of neighbouring tokens in one text.

    >>> bigrams = Bigrams([5, 6, 5, 7, 5, 6])
    >>> bigrams.guess(3, min_count=1)
    [5, 6, 5]
    >>> bigrams.guess(3, min_count=2)
    []
    """

    def __init__(self, tokens: list[int]) -> None:
        self._followers: dict[int, Counter[int]] = {}
        self._last = tokens[0]
        self.read(tokens[1:])

    def read(self, tokens: list[int]) -> None:
        """Counts the pairs that new tokens form with the text before them."""
        for token in tokens:
            self._followers.setdefault(self._last, Counter())[token] += 1
            self._last = token

    def guess(self, k: int, *, min_count: int) -> list[int]:
        """At most `k` tokens; fewer where a token has no follower seen `min_count` times."""
        guessed: list[int] = []
        last = self._last
        while len(guessed) < k and last in self._followers:
            last, count = self._followers[last].most_common(1)[0]
            if count < min_count:
                break
            guessed.append(last)
        return guessed


class BigramDrafter(Drafter):
    """Guesses from the pairs in the committed tokens; every row of a batch has its own."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """Forgets all rows."""
        self._rows: list[Bigrams] = []
        self._device = device

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Counts the pairs of the prompts."""
        self._rows += [Bigrams(request.tokens) for request in requests]

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """At most so many tokens in each row, filled with `ABSENT` on the right."""
        pairs = zip(self._rows, lengths, strict=True)
        guesses = [row.guess(length, min_count=self.config.min_count) for row, length in pairs]
        return Draft.chain(ragged.from_lists(guesses, self._device))

    def commit(self, new: Committed) -> None:
        """Counts the pairs of the committed tokens."""
        for row, tokens in zip(self._rows, new.tokens, strict=True):
            row.read(tokens)

    def keep(self, rows: torch.Tensor) -> None:
        """Forgets the rows that have left."""
        self._rows = [self._rows[row] for row in rows.tolist()]


def build(config: Config, target: Target, runtime: Runtime) -> BigramDrafter:
    """The drafter; it needs nothing of the target."""
    return BigramDrafter(config)


def main(arguments: list[str] | None = None) -> None:
    """Decodes one prompt with and without the drafter, greedy and sampled, and compares the tokens."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--target", default="pocket", help="Hugging Face id, folder, or pocket")
    parser.add_argument("--prompt", default="def area(width, height):\n", help="what to continue")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(arguments)

    # By name: a file in drafters/ imports nothing that lies above it, and this one can be put there unchanged.
    paradraft = importlib.import_module("paradraft")
    plain = paradraft.load(args.target)
    drafted = paradraft.Engine(plain.target, build(Config(), plain.target, Runtime()), paradraft.Speculation(k=4))
    for sampling in (paradraft.Sampling(), paradraft.Sampling(temperature=0.8, seed=7)):
        expected = plain.generate(args.prompt, max_new_tokens=args.max_new_tokens, sampling=sampling)
        answer = drafted.generate(args.prompt, max_new_tokens=args.max_new_tokens, sampling=sampling)
        print(f"--- temperature {sampling.temperature}\n{args.prompt}{answer.text}")
        print(
            f"--- {answer.stats.tokens} tokens in {answer.stats.rounds} target passes, "
            f"acceptance length {answer.stats.acceptance_length:.2f}"
        )
        if answer.tokens != expected.tokens:
            raise SystemExit("the tokens differ from plain decoding")
    print("both texts equal plain decoding, token for token")


if __name__ == "__main__":
    main()
