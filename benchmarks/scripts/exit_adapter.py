"""How well a trained layer after a target's first layers predicts the target (Kangaroo, 2404.18911), and the speed.

    python benchmarks/scripts/exit_adapter.py --target FOLDER --costs-of FILE --learn code.parquet \\
        --layers 3 --data humaneval=FILE --data gsm8k=FILE --json benchmarks/FILE.json

The adapter is a whole layer, which begins as the target's next one; the target's norm and head follow. It learns the
target's probabilities after the tokens of answers (forward KL), and reads the target's greedy answers as the exits of
`exits.py` do: agreement, rounds and costs are those of that script, with states reused. "Few rows" is a bound on what a
head of `--rows-of-head` ids wins. A file of few bits
cannot be trained on here: the target is the model before that, and `--costs-of` its file.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from exits import costs, greedy, with_heads
from sampled_answers import loaded, options, write
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from transformers import AutoModelForCausalLM

from paradraft.data.dataset import load_samples
from paradraft.data.mix import Source
from paradraft.data.samples import Sample
from paradraft.models.runtime import Runtime
from paradraft.sources.target_loading import load_target

BATCH, LENGTH = 4, 384


class Adapted(nn.Module):
    """The first layers of a model, which are frozen, an adapter, and the model's norm and head."""

    def __init__(self, model: Any, layers: int) -> None:
        super().__init__()
        self.model, self.layers = model.eval().requires_grad_(False), layers
        self.adapter = copy.deepcopy(model.model.layers[layers]).float().requires_grad_(True)

    def forward(self, ids_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised states `[B, N, D]` of the adapter and of the whole model."""
        decoder = self.model.model
        with torch.no_grad():
            out = decoder(ids_BN, output_hidden_states=True, use_cache=False)
            state, positions = out.hidden_states[self.layers], torch.arange(ids_BN.shape[1])[None]
            rotation = decoder.rotary_emb(state, positions)
        adapted = self.adapter(state, position_embeddings=rotation, position_ids=positions)
        return decoder.norm(adapted[0] if isinstance(adapted, tuple) else adapted), out.last_hidden_state

    def logits(self, states: Tensor) -> Tensor:
        """Of normalised states."""
        logits: Tensor = self.model.lm_head(states)
        return logits.float()


def learn(adapted: Adapted, samples: list[Sample], args: argparse.Namespace) -> None:
    """Trains the adapter."""
    random = torch.Generator().manual_seed(1)
    order = itertools.chain.from_iterable(
        torch.randperm(len(samples), generator=random).tolist() for _ in itertools.count()
    )
    optimizer = torch.optim.AdamW(adapted.adapter.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    begun_s = time.perf_counter()
    for step in range(args.steps):
        some = [samples[next(order)] for _ in range(args.samples_per_step)]
        labels, total = sum(sum(each.is_label[1:LENGTH]) for each in some), 0.0
        for first in range(0, len(some), BATCH):
            batch = [
                (torch.tensor(each.tokens[:LENGTH]), torch.tensor(each.is_label[1:LENGTH], dtype=torch.bool))
                for each in some[first : first + BATCH]
            ]
            ids = nn.utils.rnn.pad_sequence([ids for ids, _ in batch], batch_first=True)
            rows = nn.utils.rnn.pad_sequence([rows for _, rows in batch], batch_first=True)
            with torch.autocast("cpu", torch.bfloat16):
                mine, whole = (adapted.logits(states[:, :-1][rows]) for states in adapted(ids))
            loss = kl_div(log_softmax(mine, -1), log_softmax(whole, -1), reduction="sum", log_target=True) / labels
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(adapted.adapter.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 10)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}/{args.steps}  loss {total:.3f}  {time.perf_counter() - begun_s:.0f} s", flush=True)


def main() -> None:
    """Trains, measures, prints and writes."""
    parser = options(__doc__, drafter="exit", prompts=12)
    parser.add_argument("--learn", action="append", required=True, help="a file of answers to learn from")
    parser.add_argument("--most", type=int, help="most answers of a file, by default all")
    parser.add_argument("--costs-of", required=True, help="the model whose passes are timed")
    parser.add_argument("--layers", type=int, required=True, help="layers before the adapter")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--samples-per-step", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rows-of-head", type=int, default=8192)
    args = parser.parse_args()
    args.draft = None
    target, _, prompts = loaded(args)
    lm, tokenizer = target.lm, target.tokenizer
    model: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    adapted = Adapted(model, args.layers)
    sources = [Source(path=Path(file), most=args.most) for file in args.learn]
    samples = load_samples(sources, tokenizer, max_length=LENGTH, seed=1)
    texts = [(ids := tokenizer(prompt).input_ids, greedy(lm, ids, args.tokens)) for prompt in prompts]

    def agreement() -> list[list[bool]]:
        found = []
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for prompt, answer in texts:
                states, _ = adapted(torch.tensor([prompt + answer[:-1]]))
                chosen = adapted.logits(states[0, -len(answer) :]).argmax(-1)
                found.append((chosen == torch.tensor(answer)).tolist())
        return found

    before = agreement()
    learn(adapted, samples, args)
    agree = agreement()
    timed = load_target(args.costs_of, Runtime(device="cpu")).lm
    cost = costs(timed, {layers: timed.view(layers) for layers in (args.layers, args.layers + 1)})
    adapted_layers = cost["exits"][args.layers + 1]
    body = adapted_layers["read"][1]
    figures: dict[str, Any] = {
        "agreement": statistics.mean(each for text in agree for each in text),
        "agreement_before": statistics.mean(each for text in before for each in text),
    }
    share = args.rows_of_head / model.config.vocab_size
    head = adapted_layers["drafted"] - body
    figures |= with_heads(cost, args.layers, agree, body=body, head=head, share=share, reused=True)
    print(figures, flush=True)
    figures["costs"] = cost
    args.costs_of = Path(args.costs_of).name
    facts = "costs_of", "prompts", "tokens", "layers", "steps", "samples_per_step", "lr", "rows_of_head"
    write(args, figures, *facts)


if __name__ == "__main__":
    main()
