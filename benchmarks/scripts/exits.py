"""What drafts of a target's first layers win: agreement and cost of every early exit, and the speed that follows.

    python benchmarks/scripts/exits.py --target FILE --data humaneval=FILE --data gsm8k=FILE --json benchmarks/FILE.json

The target answers greedily, and each exit (the first E layers, the final norm and the head, without any training) reads
the same answers. A drafted token is accepted if exit and whole model agree at its place, and the state at an exit does
not depend on the draft: so rounds of every E and K are replayed exactly. Costs are those of passes, in turns, after a
context of 128 tokens. Speeds are relative to plain decoding, without prompts:

- "drafts alone": K passes of E layers and the head, and a whole pass over K + 1 tokens;
- "states reused" (LayerSkip, Kangaroo): the whole pass begins after E layers, which have read the last token too;
- "by text" (a bound for DEL): the best E and K of each answer, states reused;
- "needed": the agreement at which an exit is as fast as plain decoding with its best K, states reused, if places are
  independent. An adapter or a target that is trained for exits must reach it.

Targets like shape:NAME have random weights: their costs are measured alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from sampled_answers import loaded, options, write

from paradraft.models.cached_rows import RowsView
from paradraft.models.causal_lm import CausalLM

CONTEXT, PASSES, TURNS, MOST = 128, 3, 7, 8
"""Tokens before a measured pass, passes of a turn, turns, and the largest K."""


def begin(view: CausalLM) -> None:
    """Lets an exit read after the tokens of the whole model."""
    assert isinstance(view.cache, RowsView)
    view.start()
    view.cache.follow()


def greedy(lm: CausalLM, prompt: list[int], tokens: int) -> list[int]:
    """The target's answer."""
    lm.start()
    lm.cache.join(1)
    lm.prefill([prompt])
    answer = [prompt[-1]]
    for _ in range(tokens):
        answer.append(int(lm.forward(torch.tensor([answer[-1:]])).logits.argmax()))
        lm.cache.advance([1])
    return answer[1:]


def agreements(lm: CausalLM, views: dict[int, CausalLM], prompt: list[int], answer: list[int]) -> dict[int, list[bool]]:
    """By exit, whether it predicts each token of the answer."""
    lm.start()
    lm.cache.join(1)
    lm.prefill([prompt])
    read, found = torch.tensor([[prompt[-1], *answer[:-1]]]), dict[int, list[bool]]()
    assert lm.forward(read).logits.argmax(-1)[0].tolist() == answer, "passes must be bitwise equal"
    for layers, view in views.items():
        begin(view)
        found[layers] = (view.forward(read).logits.argmax(-1)[0] == torch.tensor(answer)).tolist()
    return found


def pass_s(lm: CausalLM, tokens: int, *, logits: bool) -> float:
    """Seconds of a pass."""
    read = torch.arange(1, tokens + 1)[None]
    rows = None if logits else torch.zeros(1, 0, dtype=torch.long)
    begun_s = time.perf_counter()
    for _ in range(PASSES):
        lm.forward(read, logit_rows=rows)
    return (time.perf_counter() - begun_s) / PASSES


def costs(lm: CausalLM, views: dict[int, CausalLM]) -> dict[str, Any]:
    """Passes in units of a whole pass over one token: whole ones by tokens; of each exit its drafted token, its pass
    over one token without the head, and over each number of tokens."""
    lm.start()
    lm.cache.join(1)
    lm.prefill([list(range(1, CONTEXT + 2))])
    for view in views.values():
        begin(view)
    turns: list[tuple[dict[int, float], dict[int, dict[str, Any]]]] = []
    for _ in range(TURNS + 1):
        whole = {n: pass_s(lm, n, logits=True) for n in range(1, MOST + 2)}
        exits: dict[int, dict[str, Any]] = {
            layers: {
                "drafted": pass_s(view, 1, logits=True),
                "read": {n: pass_s(view, n, logits=False) for n in range(1, MOST + 2)},
            }
            for layers, view in views.items()
        }
        turns.append((whole, exits))
    turns = turns[1:]  # the first one warms up
    unit = statistics.median(whole[1] for whole, _ in turns)

    def median(values: Sequence[float]) -> float:
        return statistics.median(values) / unit

    return {
        "pass_ms": unit * 1000,
        "whole": {n: median([whole[n] for whole, _ in turns]) for n in range(1, MOST + 2)},
        "exits": {
            layers: {
                "drafted": median([exits[layers]["drafted"] for _, exits in turns]),
                "read": {n: median([exits[layers]["read"][n] for _, exits in turns]) for n in range(1, MOST + 2)},
            }
            for layers in views
        },
    }


def round_cost(cost: dict[str, Any], layers: int, k: int, *, reused: bool) -> float:
    """A round of K tokens, in whole passes over one token."""
    one = cost["exits"][layers]
    again = one["read"][1] - one["read"][k + 1] if reused else 0.0
    return float(k * one["drafted"] + cost["whole"][k + 1] + again)


def rounds(agree: list[bool], k: int) -> int:
    """The rounds of an answer with drafts of K tokens."""
    place = count = 0
    while place < len(agree):
        accepted = next((at for at in range(k) if place + at >= len(agree) or not agree[place + at]), k)
        place, count = place + accepted + 1, count + 1
    return count


def speeds(cost: dict[str, Any], layers: int, texts: list[list[bool]], *, reused: bool) -> dict[int, float]:
    """By K, the speed of all texts together."""
    tokens = sum(map(len, texts))
    return {
        k: tokens / (sum(rounds(text, k) for text in texts) * round_cost(cost, layers, k, reused=reused))
        for k in range(1, MOST + 1)
    }


def fastest(cost: dict[str, Any], layers: int, texts: list[list[bool]], *, reused: bool) -> dict[str, Any]:
    """The best K and its speed."""
    by_k = speeds(cost, layers, texts, reused=reused)
    k = max(by_k, key=by_k.__getitem__)
    return {"k": k, "speed": by_k[k]}


def with_heads(
    cost: dict[str, Any], layers: int, texts: list[list[bool]], *, body: float, head: float, share: float, reused: bool
) -> dict[str, Any]:
    """Speeds if a drafted token costs a body and the whole head and, as a bound, if a share of the head's rows is as
    often right."""
    found = {}
    for name, of_head in (("whole_head", head), ("few_rows", head * share)):
        drafted = body + of_head
        own = cost | {"exits": {layers: cost["exits"][layers] | {"drafted": drafted}}}
        found[name] = {"drafted": drafted, **fastest(own, layers, texts, reused=reused), "needed": needed(own, layers)}
    return found


def needed(cost: dict[str, Any], layers: int) -> float | None:
    """The least agreement, in steps of 0.001, at which the best K is as fast as plain decoding."""
    for thousandths in range(1001):
        chance = thousandths / 1000
        gain = max(
            sum(chance**place for place in range(k + 1)) / round_cost(cost, layers, k, reused=True)
            for k in range(1, MOST + 1)
        )
        if gain >= 1:
            return chance
    return None


def main() -> None:
    """Measures, prints and writes."""
    parser = options(__doc__, drafter="exit", prompts=12)
    parser.add_argument("--step", type=int, default=2, help="layers between exits")
    args = parser.parse_args()
    args.draft, is_shape = None, args.target.startswith("shape:")
    target, _, prompts = loaded(args)
    lm = target.lm
    most = lm.model.config.num_hidden_layers
    views = {layers: lm.view(layers) for layers in range(args.step, most, args.step)}
    texts: dict[int, list[list[bool]]] = {layers: [] for layers in views}
    for prompt in [] if is_shape else prompts:
        ids = target.tokenizer(prompt).input_ids
        for layers, agree in agreements(lm, views, ids, greedy(lm, ids, args.tokens)).items():
            texts[layers].append(agree)
    cost = costs(lm, views)
    table = []
    for layers in views:
        row: dict[str, Any] = {"layers": layers, "drafted": cost["exits"][layers]["drafted"]}
        row["needed"] = needed(cost, layers)
        if texts[layers]:
            row["agreement"] = statistics.mean(agree for text in texts[layers] for agree in text)
            for name, reused in (("drafts_alone", False), ("states_reused", True)):
                row[name] = fastest(cost, layers, texts[layers], reused=reused)
        table.append(row)
        print(row, flush=True)
    figures: dict[str, Any] = {"layers": most, "costs": cost, "exits": table}
    if any(texts.values()):
        least = [
            min(
                rounds(texts[layers][at], k) * round_cost(cost, layers, k, reused=True)
                for layers in views
                for k in range(1, MOST + 1)
            )
            for at in range(len(prompts))
        ]
        figures["by_text"] = len(prompts) * args.tokens / sum(least)
        print("by text", figures["by_text"])
    write(args, figures, "prompts", "tokens")


if __name__ == "__main__":
    main()
