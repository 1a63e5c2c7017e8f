"""What drafts of a target without some of its sublayers win (SWIFT, 2410.06916), by a greedy search for the sublayers.

    python benchmarks/scripts/skipped_sublayers.py --target FOLDER --costs-of FILE --data humaneval=FILE \\
        --data gsm8k=FILE --json benchmarks/FILE.json

A sublayer is the attention or the MLP of a layer. From the target's greedy answers to every other prompt, those are
removed one by one whose absence lowers the probability of the answers least; of `--tried` candidates, which were the
best ones before. The other answers are drafted with each number of sublayers. A place of a draft reads the whole
model's keys and values of all tokens before it, as SWIFT's first drafted token does; so rounds of several tokens are a
bound. A drafted token costs the head and, of the time of all layers, the share of the weights that are left; both
together are a whole pass, whose shares are measured as in `exits.py`. "Few rows" also has a head of `--rows-of-head`
ids that is as often right as the whole one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exits import costs, greedy, with_heads
from sampled_answers import loaded, options, write
from torch import Tensor
from transformers import AutoModelForCausalLM

from paradraft.models.runtime import Runtime
from paradraft.sources.target_loading import load_target

Sublayer = tuple[int, str]
ATTENTION, MLP = "attention", "mlp"


@dataclass(frozen=True)
class Text:
    """An answer, the states of its places before the first layer, their rotations, and by layer the keys and values of
    prompt and answer."""

    answer: Tensor
    states: Tensor
    rotation: tuple[Tensor, Tensor]
    cached: list[tuple[Tensor, Tensor]]


def turned(rows_HNE: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys with their positions."""
    first, second = rows_HNE.chunk(2, dim=-1)
    return rows_HNE * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]


def text_of(model: Any, prompt: list[int], answer: list[int]) -> Text:
    """Reads prompt and answer with the whole model."""
    ids, places = torch.tensor([prompt + answer[:-1]]), slice(len(prompt) - 1, None)
    states = model.model.embed_tokens(ids)
    cosines, sines = (each[0, places] for each in model.model.rotary_emb(states, torch.arange(ids.shape[1])[None]))
    layers = model.model(ids, use_cache=True).past_key_values.layers
    cached = [(layer.keys[0], layer.values[0]) for layer in layers]
    return Text(torch.tensor(answer), states[0, places], (cosines, sines), cached)


def attended(attention: Any, states_ND: Tensor, text: Text, cached: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of the answer's places, each to the cached tokens before it and to itself."""
    size = attention.head_dim
    queries, own_keys, own_values = (
        part(states_ND).unflatten(-1, (-1, size)).transpose(0, 1)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    groups = len(queries) // len(own_keys)
    queries, own_keys = turned(queries, text.rotation), turned(own_keys, text.rotation)
    keys, values, own_keys, own_values = (
        each.repeat_interleave(groups, dim=0) for each in (*cached, own_keys, own_values)
    )
    count, tokens = len(states_ND), keys.shape[1]
    scores = torch.cat([queries @ keys.mT, (queries * own_keys).sum(-1, keepdim=True)], dim=-1).float() / math.sqrt(
        size
    )
    unseen = torch.arange(tokens) >= tokens - count + torch.arange(count)[:, None]
    scores[..., :-1].masked_fill_(unseen, -torch.inf)
    chances = scores.softmax(-1).to(values.dtype)
    mixed = chances[..., :-1] @ values + chances[..., -1:] * own_values
    out: Tensor = attention.o_proj(mixed.transpose(0, 1).flatten(1))
    return out


def logits_of(model: Any, text: Text, skipped: set[Sublayer]) -> Tensor:
    """The logits `[N, V]` of the answer's places without some sublayers."""
    states = text.states
    for index, layer in enumerate(model.model.layers):
        if (index, ATTENTION) not in skipped:
            states = states + attended(layer.self_attn, layer.input_layernorm(states), text, text.cached[index])
        if (index, MLP) not in skipped:
            states = states + layer.mlp(layer.post_attention_layernorm(states))
    logits: Tensor = model.lm_head(model.model.norm(states)).float()
    return logits


def chance(model: Any, texts: Iterable[Text], skipped: set[Sublayer]) -> float:
    """The mean log-probability of the answers' tokens."""
    logs = [logits_of(model, text, skipped).log_softmax(-1).gather(1, text.answer[:, None]).flatten() for text in texts]
    return float(torch.cat(logs).mean())


def agreement(model: Any, texts: Iterable[Text], skipped: set[Sublayer]) -> list[list[bool]]:
    """Of each answer, which tokens are predicted."""
    return [(logits_of(model, text, skipped).argmax(-1) == text.answer).tolist() for text in texts]


def found(model: Any, texts: list[Text], tried: int, most: int) -> list[Sublayer]:
    """Sublayers in the order of their removal."""
    candidates = [(index, part) for index in range(len(model.model.layers)) for part in (ATTENTION, MLP)]
    order: list[Sublayer] = []
    while len(order) < most:
        some = candidates[:tried] if order else candidates
        ranked = sorted(some, key=lambda each: chance(model, texts, {*order, each}), reverse=True)
        order.append(ranked[0])
        candidates = ranked[1:] + candidates[len(some) :]
        print(f"{len(order)}: without {order[-1]}", flush=True)
    return order


@torch.no_grad()
def main() -> None:
    """Searches, measures, prints and writes."""
    parser = options(__doc__, drafter="exit", prompts=12)
    parser.add_argument("--costs-of", required=True, help="the model whose passes are timed")
    parser.add_argument("--tried", type=int, default=12)
    parser.add_argument("--rows-of-head", type=int, default=8192)
    args = parser.parse_args()
    args.draft = None
    target, _, prompts = loaded(args)
    model: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    texts = []
    for prompt in prompts:
        ids = target.tokenizer(prompt).input_ids
        texts.append(text_of(model, ids, greedy(target.lm, ids, args.tokens)))
    learnt, others = texts[::2], texts[1::2]
    layers = len(model.model.layers)
    sizes = {
        part: sum(each.numel() for each in module.parameters())
        for part, module in ((ATTENTION, model.model.layers[0].self_attn), (MLP, model.model.layers[0].mlp))
    }
    timed = load_target(args.costs_of, Runtime(device="cpu")).lm
    most = layers - 1
    cost = costs(timed, {most: timed.view(most)})
    one = cost["exits"][most]
    body, head = one["read"][1] * layers / most, one["drafted"] - one["read"][1]
    cost["layers"] = body / (body + head)
    head = 1 - cost["layers"]
    one["read"] = dict.fromkeys(one["read"], 0.0)  # no state is reused
    order = found(model, learnt, args.tried, round(1.3 * layers))
    share = args.rows_of_head / model.config.vocab_size
    table = []
    for count in range(len(order) + 1):
        agree = agreement(model, others, set(order[:count]))
        left = 1 - sum(sizes[part] for _, part in order[:count]) / (layers * sum(sizes.values()))
        row: dict[str, Any] = {"sublayers": count, "left": left}
        row["agreement"] = statistics.mean(each for text in agree for each in text)
        row |= with_heads(cost, most, agree, body=cost["layers"] * left, head=head, share=share, reused=False)
        table.append(row)
        print(row, flush=True)
    args.costs_of = Path(args.costs_of).name
    facts = "costs_of", "prompts", "tokens", "tried", "rows_of_head"
    write(args, {"costs": cost, "order": order, "skipped": table}, *facts)


if __name__ == "__main__":
    main()
