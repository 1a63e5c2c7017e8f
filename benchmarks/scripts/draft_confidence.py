"""Whether a draft's own confidence chooses its length better than counted shares do, by replay.

    python benchmarks/scripts/draft_confidence.py --target FILE --draft FILE --data humaneval=FILE --data gsm8k=FILE \\
        --costs TARGET.json DRAFT.json --json benchmarks/FILE.json

The target answers under the match rule, one token per round, and the draft model drafts a chain of K tokens at each
position. Under this rule neither text nor draft depends on the rounds before, so every length policy can be replayed
on these drafts: a round at a position drafts some tokens, adds those that the text has too and one more, and the next
round begins behind them. Times are those of passes on a quiet machine, from files of `pass_costs.py`; a policy stops
the draft between two passes of the draft model.

Survival is the chance that a token and all before it are accepted: the product of chances that are fitted to the draft
model's largest probability (isotonic, from the other prompts), or those that its counted shares give ("counted"), or
those of the text itself ("oracle"). "Margin" fits them to the distance of the two best scores instead, which include
the noise that target and draft share: under the match rule a policy may look at the drawn token.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from replayed_drafts import cost_line
from sampled_answers import batches, loaded, options, write
from torch import Tensor

from paradraft.bench.synthetic import rounds
from paradraft.core import Draft, TargetOut, Verdict
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.decode.lengths.isotonic import decreasing
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.sampling.candidates import Candidates
from paradraft.sampling.sampler import Sampler
from paradraft.verify.match import verify


@dataclass(frozen=True)
class Place:
    """A position of a text: how many drafted tokens the text has too, and confidence and margin of each."""

    accepted: int
    confidence: list[float]
    margin: list[float]


Text = list[Place]
Chances = Callable[[Place, int], float]
"""The estimated chance that token `k` of a draft is accepted, if all before it are."""


def with_margin(self: Sampler, logits_BRV: Tensor, depths_BR: Tensor, *given: Any) -> Candidates:
    """The candidates, with the margin of the drawn token beside the drafter's confidence, in one complex number."""
    candidates = DRAWN(self, logits_BRV, depths_BR, *given)
    best_BR2 = self.scores(logits_BRV, depths_BR).topk(2, dim=-1).values
    assert candidates.confidence is not None
    margin_BR = 1 - (best_BR2[..., 1] - best_BR2[..., 0]).exp().double()
    return replace(candidates, confidence=torch.complex(candidates.confidence, margin_BR))


DRAWN = Sampler._candidates_at


class Whole(Fixed):
    """Drafts whole chains, with the drafter's confidence."""

    wants_confidence = True


class OneByOne:
    """Commits one token per round, and notes what the match rule would accept."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.rounds: list[list[Place | None]] = []

    def __call__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        """Accepts nothing."""
        verdict = verify(draft, out, sampler)
        sure_BN = torch.zeros(draft.tokens.shape) + 0j if draft.confidence is None else draft.confidence
        rows = zip(verdict.paths, draft.lists[0], sure_BN.real.tolist(), sure_BN.imag.tolist(), strict=True)
        self.rounds.append(
            [
                Place(len(path), *sure) if sum(token >= 0 for token in tokens) == self._k else None
                for path, tokens, *sure in rows
            ]
        )
        return Verdict.of(draft, [[] for _ in verdict.paths], [tokens[0] for tokens in verdict.tokens])


def recorded(engine: Engine, prompts: list[str], args: argparse.Namespace, temperature: float) -> list[Text]:
    """The places of all answers."""
    texts = []
    for some, samplings in batches(prompts, 1, args.rows, {"temperature": temperature}):
        rule = OneByOne(args.k)
        with engine.in_round(), mock.patch.object(Sampler, "_candidates_at", with_margin):
            for _ in rounds(engine.new_batch(verify=rule, lengths=Whole(args.k)), some, args.tokens, samplings):
                pass
        for row in range(len(some)):
            places = [each[row] for each in rule.rounds]
            texts.append([place for place in itertools.takewhile(lambda place: place is not None, places) if place])
        print(f"T = {temperature}: {len(texts)} of {len(prompts)} answers", flush=True)
    return texts


class Replay:
    """Rounds on recorded drafts, with the costs of passes in ms."""

    def __init__(self, target_ms: Callable[[int], float], draft_ms: float, k: int) -> None:
        self._target_ms, self._draft_ms, self._k = target_ms, draft_ms, k

    def rate(self, texts: Sequence[Text], length: Callable[[Place], tuple[int, int]]) -> float:
        """Tokens per second where a policy chooses the tokens to draft and those to verify."""
        tokens, ms = 0, 0.0
        for text in texts:
            at = 0
            while at < len(text):
                drafted, verified = length(text[at])
                added = min(text[at].accepted, verified) + 1
                at += added
                tokens += added
                ms += drafted * self._draft_ms + self._target_ms(1 + verified)
        return tokens / ms * 1000

    def stopping(self, chances: Chances, rate: float) -> Callable[[Place], tuple[int, int]]:
        """Goes on while a token is worth a pass of the draft model and its place in that of the target, at a rate."""

        def length(place: Place) -> tuple[int, int]:
            survival = 1.0
            for drafted in range(self._k):
                place_ms = self._target_ms(drafted + 2) - self._target_ms(drafted + 1)
                # Before the pass the chance of the next token is unknown: that of the last one, or 1.
                if survival < rate / 1000 * (self._draft_ms + place_ms):
                    return drafted, drafted
                survival *= chances(place, drafted)
                if survival < rate / 1000 * place_ms:
                    return drafted + 1, drafted
            return self._k, self._k

        return length

    def best_stopping(self, texts: Sequence[Text], chances: Chances) -> float:
        """The rate of `stopping` at its own rate: that of the optimal policy for such chances."""
        rate = self.rate(texts, lambda _: (0, 0))
        for _ in range(8):
            rate = max(rate, self.rate(texts, self.stopping(chances, rate)))
        return rate


def fitted(texts: Sequence[Text], signal: str) -> Callable[[float], float]:
    """The chance of acceptance by a signal, never falling (isotonic), from tokens whose predecessors are accepted."""
    pairs = sorted(
        (getattr(place, signal)[k], float(k < place.accepted))
        for text in texts
        for place in text
        for k in range(min(place.accepted + 1, len(place.confidence)))
    )
    size = max(len(pairs) // 40, 1)
    groups = [pairs[first : first + size] for first in range(0, len(pairs), size)]
    bounds = [group[-1][0] for group in groups]
    chances = decreasing([statistics.mean(was for _, was in group) for group in groups][::-1])[::-1]
    return lambda confidence: chances[min(bisect.bisect_left(bounds, confidence), len(chances) - 1)]


def always(length: int) -> Callable[[Place], tuple[int, int]]:
    """The policy of a fixed K."""
    return lambda _: (length, length)


def tabulated(chances: dict[int, list[float]]) -> Chances:
    """Chances that are known for each place."""
    return lambda place, at: chances[id(place)][at]


def compared(texts: list[Text], replay: Replay, k: int) -> dict[str, float]:
    """Tokens per second by policy."""
    found = {"plain": replay.rate(texts, always(0))}
    fixed = {length: replay.rate(texts, always(length)) for length in range(1, k + 1)}
    found["best fixed K"] = max(fixed.values())
    found["K of best fixed K"] = max(fixed, key=fixed.__getitem__)
    best_ms = [len(text) / max(replay.rate([text], always(length)) for length in range(k + 1)) for text in texts]
    found["best K of each text"] = sum(map(len, texts)) / sum(best_ms)

    def threshold(least: float) -> Callable[[Place], tuple[int, int]]:
        def length(place: Place) -> tuple[int, int]:
            sure = sum(1 for _ in itertools.takewhile(lambda value: value >= least, place.confidence))
            return min(sure + 1, k), sure

        return length

    found["best confidence"] = max(replay.rate(texts, threshold(least / 20)) for least in range(1, 20))
    halves = texts[::2], texts[1::2]
    for signal in ("confidence", "margin"):
        of_half = [fitted(half, signal) for half in halves]
        chances = {
            id(place): [*map(of_half[1 - side], getattr(place, signal))]
            for side, half in enumerate(halves)
            for text in half
            for place in text
        }
        found[f"survival by {signal}"] = replay.best_stopping(texts, tabulated(chances))
    found["oracle"] = replay.best_stopping(texts, lambda place, at: float(at < place.accepted))
    return found


def calibration(texts: list[Text], k: int) -> list[dict[str, float]]:
    """By depth, the mean predicted survival and the counted one, with the curve of the other texts."""
    halves, found = (texts[::2], texts[1::2]), []
    curves = [fitted(half, "confidence") for half in halves]
    for depth in range(k):
        predicted, counted = [], []
        for side, half in enumerate(halves):
            for place in itertools.chain.from_iterable(half):
                survival = 1.0
                for confidence in place.confidence[: depth + 1]:
                    survival *= curves[1 - side](confidence)
                predicted.append(survival)
                counted.append(float(place.accepted > depth))
        found.append({"predicted": statistics.mean(predicted), "counted": statistics.mean(counted)})
    return found


def main() -> None:
    """Records, replays and writes the file."""
    parser = options(__doc__, drafter="autoregressive", prompts=48, tokens=96)
    parser.set_defaults(temperatures="0,0.8")
    parser.add_argument("-k", type=int, default=8)
    parser.add_argument("--costs", type=Path, nargs=2, required=True)
    parser.add_argument("--records", type=Path, help="where recorded drafts are kept for another replay")
    args = parser.parse_args()
    if args.records and args.records.is_file():
        kept = json.loads(args.records.read_text(encoding="utf-8"))
        texts_at = {key: [[Place(*place) for place in text] for text in texts] for key, texts in kept.items()}
    else:
        target, drafter, prompts = loaded(args)
        speculation = Speculation(drafter=args.drafter, draft=args.draft, k=args.k, lengths="confidence")
        engine = Engine(target, drafter, speculation)
        texts_at = {t: recorded(engine, prompts, args, float(t)) for t in args.temperatures.split(",")}
        if args.records:
            kept = {
                key: [[(place.accepted, place.confidence, place.margin) for place in text] for text in texts]
                for key, texts in texts_at.items()
            }
            args.records.write_text(json.dumps(kept), encoding="utf-8")
    target_ms, draft_ms = map(cost_line, args.costs)
    found: dict[str, Any] = {}
    for temperature, texts in texts_at.items():
        replay = Replay(target_ms, draft_ms(1), args.k)
        found[temperature] = {
            "tokens": sum(map(len, texts)),
            "tokens_per_second": compared(texts, replay, args.k),
            "survival_by_depth": calibration(texts, args.k),
        }
        print(temperature, json.dumps(found[temperature], indent=1), flush=True)
    write(args, {"temperatures": found}, "drafter", "k", "prompts", "tokens")


if __name__ == "__main__":
    main()
