"""Trains a causal LM on a stream of tokens.

Muon for the matrices, AdamW for embeddings and norms, warm-up and linear decay to zero: on CPU many
small steps of about two thousand tokens beat few large ones. Windows are drawn by (seed, step), so
a run that was stopped goes on exactly where it was.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from paradraft.models.devices import computes_bf16
from paradraft.train.optimizers import Optimizers


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """One run. `long_share` of the steps, the last ones, use windows of `long_window` tokens."""

    steps: int
    tokens_per_step: int = 2048
    window: int = 256
    long_window: int = 512
    long_share: float = 0.15
    warmup_steps: int = 50
    muon_lr: float = 2e-2
    adamw_lr: float = 2e-3
    weight_decay: float = 0.01
    seed: int = 0
    log_every: int = 25
    save_every: int = 200


def windows(stream: torch.Tensor, config: PretrainConfig) -> Callable[[int], torch.Tensor]:
    """Batches of random windows of a stream `[n]` of tokens.

    Returns:
        A function from the step to `[tokens_per_step / window, window + 1]` token ids.
    """

    def batch(step: int) -> torch.Tensor:
        is_long = step >= config.steps * (1 - config.long_share)
        length = config.long_window if is_long else config.window
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        starts = torch.randint(len(stream) - length - 1, (config.tokens_per_step // length,), generator=generator)
        return torch.stack([stream[start : start + length + 1] for start in starts.tolist()])

    return batch


@torch.no_grad()
def evaluate(model: PreTrainedModel, stream: torch.Tensor, *, window: int = 256, most: int = 64) -> float:
    """Mean cross-entropy in nats per token over the first `most` windows of held-out text."""
    batches = stream[: (len(stream) - 1) // window * window].view(-1, window)[:most].split(8)
    losses = []
    for batch in batches:
        tokens = batch.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=computes_bf16(model.device)):
            logits = model(input_ids=tokens, use_cache=False).logits
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).item())
    return sum(losses) / len(losses)


def pretrain(
    model: PreTrainedModel,
    batch_of_step: Callable[[int], torch.Tensor],
    held_out: torch.Tensor,
    config: PretrainConfig,
    folder: Path,
) -> PreTrainedModel:
    """Trains `model` in place; resumes from `folder/state.pt` if it is there.

    Args:
        model: a causal LM in float32, on the device to train on.
        batch_of_step: from the step to `[rows, window + 1]` token ids, as `windows` makes it.
        held_out: `[m]` token ids of the held-out text.
        config: the run.
        folder: where `state.pt` and `log.txt` go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state_file = folder / "state.pt"
    optimizers = Optimizers(
        model,
        muon_lr=config.muon_lr,
        lr=config.adamw_lr,
        weight_decay=config.weight_decay,
        warmup_steps=config.warmup_steps,
        steps=config.steps,
    )
    first = 0
    if state_file.exists():
        state = torch.load(state_file, map_location=model.device, weights_only=True)
        assert state["config"] == str(config), f"{state_file} belongs to another run: delete its folder"
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        first = state["step"]
    model.train()
    recent: list[float] = []
    began = time.perf_counter()
    for step in range(first, config.steps):
        batch = batch_of_step(step).to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=computes_bf16(model.device)):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        optimizers.step(step)
        recent.append(loss.item())
        assert math.isfinite(recent[-1]), f"the loss is {recent[-1]} at step {step}"
        done = step + 1
        if done % config.log_every == 0 or done == config.steps:
            left_s = (time.perf_counter() - began) / (done - first) * (config.steps - done)
            line = f"step {done}/{config.steps}  loss {sum(recent) / len(recent):.3f}  {left_s / 60:.0f} min left"
            if done % config.save_every == 0 or done == config.steps:
                model.eval()
                line += f"  held-out {evaluate(model, held_out):.3f}"
                model.train()
            print(line, flush=True)
            with (folder / "log.txt").open("a") as log:
                log.write(line + "\n")
            recent = []
        if done % config.save_every == 0 or done == config.steps:
            state = {
                "model": model.state_dict(),
                "optimizers": optimizers.state_dict(),
                "step": done,
                "config": str(config),
            }
            # Replaced in one move: a stop while writing leaves the old one.
            torch.save(state, state_file.with_suffix(".new"))
            os.replace(state_file.with_suffix(".new"), state_file)
    return model.eval()
