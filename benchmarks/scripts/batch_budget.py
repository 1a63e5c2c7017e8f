"""One budget of drafted tokens for a whole batch, against lengths that each row chooses for itself, and plain decoding.

    python benchmarks/scripts/batch_budget.py --target FILE --draft FILE --data humaneval=FILE --data gsm8k=FILE \\
        --json benchmarks/FILE.json

Batches mix prompts of all tasks and of chats. The policy `expected` drafts the tokens of all rows whose chances reach a
threshold, the one with the most tokens per second of the batch. "by row" has the same statistics and trials, but each
row takes the length that would be best if all rows were like it; this replacement lives here only. All three answer a
batch after each other, another one first each time, in answers of one length. Times are without the target's prompts,
and with the drafter's. Greedy, so all must have the same text, which is checked.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

from sampled_answers import loaded, options, write

from paradraft.bench.synthetic import rounds
from paradraft.decode.lengths.expected_length import Expected, NodeBudget
from paradraft.decode.payoff import Compared
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.sampling_params import GREEDY

PLAIN, BATCH, ROW = "plain", "expected", "by row"


class ByRow(Expected):
    """Each row chooses its length as if all rows had its shares."""

    def _choose(self) -> NodeBudget:
        shares, drafted = self._acceptance.shares(), self._acceptance.drafted_nodes()
        self._reading_s = self._costs.reading_s()
        sums = [list(itertools.accumulate(row, initial=1.0)) for row in shares]
        nodes = [self._best_of(row, sums[row], drafted) for row in range(self._rows)]
        order = sorted(range(self._rows), key=lambda row: -sums[row][nodes[row]])
        for row in order[self._costs.rows_to_try :]:
            nodes[row] = 0
        return self._plan_of(nodes, sums, drafted)

    def _best_of(self, row: int, sums: Sequence[float], drafted: Sequence[float]) -> int:
        if not self._costs.knows_drafts:
            return 0
        all_sums = [sums] * self._rows
        rates = [self._plan_of([n] * self._rows, all_sums, drafted).rate for n in range(len(sums))]
        gain = 1.0 if row in self._drafting else self.GAIN
        best = max(range(len(rates)), key=rates.__getitem__)
        return best if rates[best] > gain * rates[0] else 0


class Turns:
    """Answers of all engines to the same batches."""

    def __init__(self, engines: dict[str, Engine], tokens: int) -> None:
        self._engines, self._tokens = engines, tokens
        self.runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}

    def answer(self, prompts: list[str], first: int) -> None:
        """Answers a batch with each engine, the one numbered `first` before the others."""
        names = [*self._engines][first:] + [*self._engines][:first]
        texts = [self._answer(name, prompts) for name in names]
        assert all(each == texts[0] for each in texts), "another text"

    def _answer(self, name: str, prompts: list[str]) -> list[list[int]]:
        engine = self._engines[name]
        texts: list[list[int]] = [[] for _ in prompts]
        nodes = passes = total = 0
        begin = 0.0
        with engine.in_round():
            batch = engine.new_batch(keeps_finished=True)
            for output in rounds(batch, prompts, self._tokens, [GREEDY] * len(prompts)):
                for text, tokens in zip(texts, output.tokens, strict=True):
                    text += tokens
                if begin:
                    total += sum(map(len, output.tokens))
                    nodes, passes = nodes + sum(output.nodes), passes + 1
                begin = begin or time.perf_counter()
        seconds = time.perf_counter() - begin
        self.runs[name].append({"tokens_per_s": total / seconds, "nodes_per_pass": nodes / passes, "passes": passes})
        return texts

    def figures(self) -> dict[str, Any]:
        """Of each engine: all runs, its speed relative to plain decoding in its first batch, and the median later."""
        figures: dict[str, Any] = {}
        for name, runs in self.runs.items():
            pairs = zip(runs, self.runs[PLAIN], strict=True)
            first, *later = (own["tokens_per_s"] / plain["tokens_per_s"] for own, plain in pairs)
            figures[name] = {"first": first, "later": statistics.median(later), "runs": runs}
        return figures


def main() -> None:
    """Measures and writes the file."""
    parser = options(__doc__, drafter="autoregressive", prompts=96, tokens=128)
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--answers", type=int, default=8, help="least number of answers at each size")
    args = parser.parse_args()
    target, drafter, prompts = loaded(args)
    share = len(prompts) // (len(args.data) + 1)
    prompts = [prompts[at] for first in range(share) for at in range(first, share * (len(args.data) + 1), share)]
    batches = {}
    for size in map(int, args.batches.split(",")):
        plain = Engine(target, NoDrafter(), Speculation())
        speculation = Speculation(drafter=args.drafter, draft=args.draft, k=args.k, lengths="expected")
        whole, by_row = (Engine(target, drafter, speculation) for _ in range(2))
        by_row.lengths = Compared(ByRow(args.k), tries_plain=True)
        turns = Turns({PLAIN: plain, BATCH: whole, ROW: by_row}, args.tokens)
        for repeat in range(max(args.repeats, args.answers // size)):
            some = [prompts[(repeat * size + at) % len(prompts)] for at in range(size)]
            turns.answer(some, repeat % 3)
        batches[str(size)] = turns.figures()
        print(size, {name: (one["first"], one["later"]) for name, one in batches[str(size)].items()}, flush=True)
        write(args, {"batches": batches}, "drafter", "k", "tokens")


if __name__ == "__main__":
    main()
