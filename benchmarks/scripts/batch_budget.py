"""One budget of drafted tokens for a whole batch, against lengths that each row chooses for itself, and plain decoding.

    python benchmarks/scripts/batch_budget.py --target FILE --draft FILE --data humaneval=FILE --data gsm8k=FILE \\
        --json benchmarks/FILE.json

Batches mix prompts of all tasks and of chats. The policy `expected` drafts the tokens of all rows whose chances reach a
threshold, the one with the most tokens per second of the batch. "by row" has the same statistics and trials, but each
row takes the length that would be best if all rows were like it; this replacement lives here only. All three answer the
same batches side by side, a round each in turn, so that a machine whose speed changes slows all of them. Several times
they begin as new engines, which know no times.

Speed is that of all rows together, until the first answer has its length: from then on the batch has fewer rows, unless
others join. Times until the last answer has its length are measured too; rows that draft little may end later than
without drafts. Times are without the target's prompts, and with the drafter's. Greedy, so all must have the same text,
which is checked.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
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


class Answers:
    """The answers of an engine to a batch, and what they took after the round that read the prompts."""

    def __init__(self, engine: Engine, prompts: list[str], tokens: int) -> None:
        self._engine = engine
        self._rounds = rounds(engine.new_batch(), prompts, tokens, [GREEDY] * len(prompts))
        self.texts = defaultdict[int, list[int]](list)
        """By request."""
        self._nodes, self._passes, self._tokens, self._seconds = 0, -1, 0, 0.0
        self._ended = False
        """Whether an answer has its length."""

    def step(self) -> bool:
        """Runs a round; returns False where the answers had ended."""
        start = time.perf_counter()
        with self._engine.in_round():
            output = next(self._rounds, None)
        if output is None:
            return False
        seconds = time.perf_counter() - start
        for request, tokens in zip(output.requests, output.tokens, strict=True):
            self.texts[request] += tokens
        self._passes += 1
        if self._passes:
            self._seconds += seconds
            if not self._ended:
                self._whole_s, self._whole_passes = self._seconds, self._passes
                self._tokens += sum(map(len, output.tokens))
                self._nodes += sum(output.nodes)
        self._ended |= any(output.finished)
        return True

    def figures(self) -> dict[str, float]:
        """Speed, time, and size of the rounds."""
        return {
            "tokens_per_s": self._tokens / self._whole_s,
            "nodes_per_pass": self._nodes / self._whole_passes,
            "seconds": self._seconds,
            "passes": self._passes,
        }


class Turns:
    """Answers of three engines, new ones, to the same batches."""

    def __init__(self, engines: dict[str, Engine], tokens: int) -> None:
        self._engines, self._tokens = engines, tokens
        self.runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}

    def answer(self, prompts: list[str]) -> None:
        """Answers a batch with all engines."""
        running = answers = {name: Answers(engine, prompts, self._tokens) for name, engine in self._engines.items()}
        while running:
            running = {name: each for name, each in running.items() if each.step()}
        for name, each in answers.items():
            assert each.texts == answers[PLAIN].texts, f"{name}: another text"
            self.runs[name].append(each.figures())

    def speedups(self, name: str) -> list[tuple[float, float]]:
        """Of each batch, the speed of an engine relative to plain decoding, and that of the whole batch."""
        pairs = zip(self.runs[name], self.runs[PLAIN], strict=True)
        return [
            (own["tokens_per_s"] / plain["tokens_per_s"], plain["seconds"] / own["seconds"]) for own, plain in pairs
        ]


def figures(all_turns: Sequence[Turns]) -> dict[str, Any]:
    """Of each kind of engine: all runs, and medians of its speedups in first batches and in later ones."""
    of_name: dict[str, Any] = {}
    for name in all_turns[0].runs:
        speedups = [turns.speedups(name) for turns in all_turns]
        first, later = [first for first, *_ in speedups], [each for _, *later in speedups for each in later]
        of_name[name] = {
            "first": statistics.median(speed for speed, _ in first),
            "later": statistics.median(speed for speed, _ in later),
            "first_to_last_answer": statistics.median(whole for _, whole in first),
            "later_to_last_answer": statistics.median(whole for _, whole in later),
            "runs": [turns.runs[name] for turns in all_turns],
        }
    return of_name


def main() -> None:
    """Measures and writes the file."""
    parser = options(__doc__, drafter="autoregressive", prompts=96, tokens=128)
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--engines", type=int, default=3, help="how often they begin as new ones")
    parser.add_argument("--repeats", type=int, default=2, help="batches of an engine")
    args = parser.parse_args()
    # Each has its own models, because a target runs one batch at a time.
    (plain_target, _, prompts), *drafting = (loaded(args) for _ in range(3))
    share = len(prompts) // (len(args.data) + 1)
    prompts = [prompts[at] for first in range(share) for at in range(first, share * (len(args.data) + 1), share)]
    batches = {}
    for size in map(int, args.batches.split(",")):
        all_turns = []
        following = itertools.cycle(prompts)
        for _ in range(args.engines):
            plain = Engine(plain_target, NoDrafter(), Speculation())
            speculation = Speculation(drafter=args.drafter, draft=args.draft, k=args.k, lengths="expected")
            whole, by_row = (Engine(target, drafter, speculation) for target, drafter, _ in drafting)
            lengths = ByRow(
                args.k,
                one_by_one=by_row.drafter.traits.drafts_one_by_one,
                reading_work=by_row.target.relative_work(by_row.drafter.models),
            )
            by_row.lengths = Compared(lengths, tries_plain=True)
            all_turns.append(Turns({PLAIN: plain, BATCH: whole, ROW: by_row}, args.tokens))
            for _ in range(args.repeats):
                all_turns[-1].answer(list(itertools.islice(following, size)))
        batches[str(size)] = figures(all_turns)
        print(size, {name: (one["first"], one["later"]) for name, one in batches[str(size)].items()}, flush=True)
        write(args, {"batches": batches}, "drafter", "k", "tokens")


if __name__ == "__main__":
    main()
