"""Predicts the speed of a way to draft from the time of its rounds and the number of rounds that its answers need.

Rows of a batch step together, and answers need different numbers of rounds, so a batch takes as long as its slowest
answer. Finished rows leave by the loop's own compaction rule (`decode.compaction.should_compact`), and the smaller
batch has the costs of its size, interpolated linearly between the measured sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paradraft.decode.compaction import should_compact
from paradraft.plan.costs import Costs


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to draft.

    Args:
        k: maximum depth; 0 drafts nothing.
        tree: node budget; None for chains.
    """

    k: int
    tree: int | None = None

    @property
    def name(self) -> str:
        """The way as settings of a benchmark's method.

        >>> Way(k=8, tree=12).name, Way(k=4).name, Way(k=0).name
        ('k=8:tree=12', 'k=4', 'plain')
        """
        if not self.k:
            return "plain"
        return f"k={self.k}" + (f":tree={self.tree}" if self.tree else "")

    @property
    def drafted(self) -> int:
        """Maximum number of tokens in a draft."""
        return self.k if self.tree is None else self.tree


PLAIN = Way(k=0)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted figures of a way at a batch size.

    Args:
        total_s: for all answers, prefill included.
        tokens_per_pass: emitted tokens per target pass.
        speedup: against plain decoding at the same batch size.
    """

    batch: int
    way: Way
    total_s: float
    tokens_per_s: float
    tokens_per_pass: float
    speedup: float


def predict(
    passes: Mapping[Way, Sequence[float]],
    answers: Mapping[Way, Sequence[int]],
    costs: Mapping[int, Mapping[Way, Costs]],
    *,
    fewest_rows: int,
) -> list[Prediction]:
    """Predicts every way at every measured batch size.

    Args:
        passes: by way, the target passes of each answer in the order of batching; must contain `PLAIN`.
        answers: by way, the tokens of these answers.
        costs: by batch size and way; a way's rounds are those of its `k`.
        fewest_rows: the smallest size that compaction may shrink a larger batch to.
    """
    predictions = []
    for batch in sorted(costs):
        totals = {way: total_s(passes[way], way, batch, costs, fewest_rows=fewest_rows) for way in passes}
        speeds = {way: sum(answers[way]) / total for way, total in totals.items()}
        predictions += [
            Prediction(
                batch=batch,
                way=way,
                total_s=total,
                tokens_per_s=speeds[way],
                tokens_per_pass=sum(answers[way]) / sum(passes[way]),
                speedup=speeds[way] / speeds[PLAIN],
            )
            for way, total in totals.items()
        ]
    return predictions


def total_s(
    passes: Sequence[float], way: Way, batch: int, costs: Mapping[int, Mapping[Way, Costs]], *, fewest_rows: int
) -> float:
    """Seconds for all answers in batches of a size; for the arguments see `predict`."""
    round_s = {size: of_size[way].rounds[way.k].total_s for size, of_size in costs.items()}
    start_s = {size: of_size[way].prefill_s + of_size[way].draft_prefill_s for size, of_size in costs.items()}
    total = 0.0
    for first in range(0, len(passes), batch):
        group = passes[first : first + batch]
        total += on_lines(start_s, len(group))
        total += sum(rounds * on_lines(round_s, size) for size, rounds in sizes(group, fewest_rows=fewest_rows))
    return total


def sizes(passes: Sequence[float], *, fewest_rows: int) -> list[tuple[int, float]]:
    """Batch sizes after each compaction, and the rounds that each lasts.

    Four rows that need 10, 10, 20 and 40 rounds: two leave at once, then one, and the last goes on alone.

    >>> sizes([20, 10, 40, 10], fewest_rows=1)
    [(4, 10.0), (2, 10), (1, 20)]
    """
    steps: list[tuple[int, float]] = []
    size, ended, before = len(passes), 0, 0.0
    for end, count in sorted(Counter(passes).items()):
        steps.append((size, end - before))
        before, ended = end, ended + count
        going = max(min(ended, size - fewest_rows), 0)
        if should_compact(going, size):
            size, ended = size - going, ended - going
    return steps


def best(predictions: Sequence[Prediction], batch: int) -> Prediction:
    """The fastest way at a batch size; among equals the one that drafts least."""
    of_batch = (prediction for prediction in predictions if prediction.batch == batch)
    return max(of_batch, key=lambda prediction: (prediction.speedup, -prediction.way.drafted))


def on_lines(known: Mapping[int, float], x: float) -> float:
    """Linear interpolation at `x` between known points, constant beyond the first and the last.

    >>> on_lines({1: 10.0, 3: 14.0}, 2), on_lines({1: 10.0, 3: 14.0}, 7)
    (12.0, 14.0)
    """
    below = max((other for other in known if other <= x), default=min(known))
    above = min((other for other in known if other >= x), default=max(known))
    share = (x - below) / (above - below) if above > below else 0.0
    return (1 - share) * known[below] + share * known[above]
