"""How many tokens an ideal parallel drafter would yield at a temperature, beside the drafters that there are.

    python benchmarks/scripts/parallel_ceiling.py --json FILE.json

A parallel drafter guesses the tokens at K places at once, so at the second place it does not know which token was
drawn at the first one. The best it can learn is a mean of next-token distributions, over all tokens that may stand
before. The script computes two such means, from many continuations that the target draws after places in its own
answers:

- `perfect`: the mean of the target's distributions, about the most that a parallel drafter of any size can yield.
- `ideal`: the mean of the draft model's distributions. It knows as much as the draft, and lacks only the drawn tokens.
  So `draft` against `ideal` is what independent guesses cost, and `ideal` against `pard` is what PARD has not learnt.

Each mean is over the other continuations whose drafts have been accepted so far, to the power that is best at that
place (1 is the mean itself). The power is chosen on the continuations that it is judged by, which flatters a little.
All drafters are judged at the same places, with the same noise, by the same rule (match).

Shape letters: M continuations, K places, V vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import paradraft
from paradraft.bench.report.summary import write_json
from paradraft.data.prompts import read_prompts
from paradraft.environment import describe_machine, without_folder
from paradraft.formats.pard import mask_token_id
from paradraft.models.runtime import Runtime
from paradraft.sampling.noise import gumbel_noise
from paradraft.sources.loading import load_model, locate

POWERS = (1.0, 1.25, 1.5, 2.0, 3.0)
PLACES = (0, 40, 80)
"""Tokens of an answer behind which a round begins."""


class Round:
    """All continuations of one place, as the target draws them.

    Args:
        target: the model.
        context: `[n]` token ids before the place.
        noise_MKV: Gumbel noise, which decides what is drawn.
        temperature: above 0.
        mask_id: an id that is never drawn.
    """

    def __init__(
        self, target: PreTrainedModel, context: Tensor, noise_MKV: Tensor, temperature: float, mask_id: int
    ) -> None:
        self.noise_MKV = noise_MKV
        self.temperature, self.mask_id = temperature, mask_id
        self.context = context
        M, K, _ = noise_MKV.shape
        cache = DynamicCache()
        if len(context) > 1:
            target(context[None, :-1], past_key_values=cache)
            cache.batch_repeat_interleave(M)
        token_M1, log_probs, tokens = context[-1:].expand(M, 1), [], []
        for place in range(K):
            log_probs.append(self.log_probs(target(token_M1, past_key_values=cache).logits[:, -1]))
            token_M1 = (log_probs[-1] + noise_MKV[:, place]).argmax(-1, keepdim=True)
            tokens.append(token_M1)
        self.tokens_MK = torch.cat(tokens, dim=1)
        self.log_probs_MKV = torch.stack(log_probs, dim=1)

    def log_probs(self, logits: Tensor) -> Tensor:
        """What tokens are drawn from."""
        logits = logits[..., : self.noise_MKV.shape[2]].float() / self.temperature
        if self.mask_id < logits.shape[-1]:
            logits[..., self.mask_id] = -torch.inf
        return logits.log_softmax(-1)

    def accepted(self, log_q_MKV: Tensor) -> list[float]:
        """Share of the continuations whose first 1, 2, … tokens are what a drafter draws from q."""
        matches_MK = (log_q_MKV + self.noise_MKV).argmax(-1) == self.tokens_MK
        return list(map(float, matches_MK.cumprod(1).float().mean(0)))

    def log_probs_of_draft(self, draft: PreTrainedModel) -> Tensor:
        """What an ordinary draft model says at each place, `[M, K, V]`; it sees the tokens before that place."""
        M, n = len(self.tokens_MK), len(self.context)
        text = torch.cat([self.context.expand(M, n), self.tokens_MK[:, :-1]], dim=1)
        return self.log_probs(draft(text, logits_to_keep=self.tokens_MK.shape[1]).logits)

    def accepted_of_pard(self, pard: PreTrainedModel) -> list[float]:
        """The same of a PARD drafter, which sees masks in their stead."""
        K = self.tokens_MK.shape[1]
        text = torch.cat([self.context, torch.full((K - 1,), self.mask_id)])
        log_q_1KV = self.log_probs(pard(text[None], logits_to_keep=K).logits)
        return self.accepted(log_q_1KV.expand_as(self.noise_MKV))

    def accepted_of_mean(self, log_probs_MKV: Tensor) -> list[float]:
        """The same of a model's mean over the other continuations that have been accepted so far, to the best power."""
        is_alive_M = torch.ones(len(self.tokens_MK), dtype=torch.bool)
        shares = []
        for place in range(self.tokens_MK.shape[1]):
            probs_MV = log_probs_MKV[:, place].exp()
            log_q_MV = (probs_MV[is_alive_M].sum(0) - probs_MV).clamp(min=1e-30).log()
            ways = []
            for power in POWERS:
                drawn_M = (power * log_q_MV + self.noise_MKV[:, place]).argmax(-1)
                ways.append(is_alive_M & (drawn_M == self.tokens_MK[:, place]))
            is_alive_M = max(ways, key=lambda way: int(way.sum()))
            shares.append(float(is_alive_M.float().mean()))
        return shares


def contexts(prompts: list[str], temperature: float, engine: paradraft.Engine) -> list[Tensor]:
    """Token ids up to places in the target's answers."""
    found = []
    for number, prompt in enumerate(prompts):
        sampling = paradraft.Sampling(temperature=temperature, seed=number)
        before = engine.target.tokenizer(prompt)["input_ids"]
        answer = engine.generate(prompt, max_new_tokens=max(PLACES), sampling=sampling).tokens
        found += [torch.tensor(before + answer[:place]) for place in PLACES if place <= len(answer)]
    return found


@torch.no_grad()
def main() -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--draft", default="pocket")
    parser.add_argument("--pard", default="pocket")
    parser.add_argument("--prompts", type=Path, help='JSONL file with one {"prompt": …} per line; the family\'s own')
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--continuations", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("-k", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    roles = {"target": args.target, "draft": args.draft, "pard": args.pard}
    target, draft, pard = (
        load_model(locate(name, role), Runtime(device="cpu", dtype="float32")) for role, name in roles.items()
    )
    mask_id = mask_token_id(pard.config, args.pard)
    if getattr(pard.config, "pard_masks", 1) > 1:
        parser.error(f"{args.pard} has a mask for each place: name a drafter with one for all")
    engine = paradraft.load(args.target)
    file = args.prompts or Path(locate("pocket", "target")).parent / "prompts.jsonl"
    prompts = [record["prompt"] for record in read_prompts(file)][: args.num_prompts]
    shares: dict[str, list[list[float]]] = {}
    places = contexts(prompts, args.temperature, engine)
    for number, context in enumerate(track(places, "places")):
        seeds = torch.arange(args.continuations) + number * args.continuations
        positions = (len(context) + torch.arange(args.k)).expand(len(seeds), args.k)
        noise = gumbel_noise(seeds, positions, engine.target.lm.vocab_size).float()
        found = Round(target, context, noise, args.temperature, mask_id)
        of_draft = found.log_probs_of_draft(draft)
        shares.setdefault("draft", []).append(found.accepted(of_draft))
        shares.setdefault("ideal", []).append(found.accepted_of_mean(of_draft))
        shares.setdefault("pard", []).append(found.accepted_of_pard(pard))
        shares.setdefault("perfect", []).append(found.accepted_of_mean(found.log_probs_MKV))
    results: dict[str, Any] = {}
    for name, each in shares.items():
        mean = torch.tensor(each).mean(0)
        results[name] = {"length": 1 + float(mean.sum()), "accepted": mean.tolist()}
        print(f"{name}: {results[name]['length']:.2f} tokens, accepted {' '.join(f'{share:.2f}' for share in mean)}")
    if args.json:
        arguments = {key: without_folder(str(value)) for key, value in vars(args).items() if key != "json" and value}
        found_here = {"machine": describe_machine("cpu"), "arguments": arguments, "places": len(places)}
        write_json(args.json, found_here | {"results": results})


if __name__ == "__main__":
    main()
