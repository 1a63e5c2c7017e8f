"""What rounding costs: the loss of a target on held-out text, with its weights whole, in 8 and in 4 bits.

    python benchmarks/scripts/rounding_loss.py --json FILE.json

The text is that of the Python library's modules which the pocket family has not learnt, in windows that begin with no
context. "int8, weights only" has the same weights as "int8" and multiplies them as numbers, in float32.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paradraft.bench.summary import write_json
from paradraft.environment import describe_machine
from paradraft.models.causal_lm import CausalLM
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.runtime import Runtime
from paradraft.models.target_loading import load_target

CORPUS = Path(__file__).parents[2] / "recipes" / "pocket" / "corpus.py"
WINDOW, PASS = 256, 64
"""Tokens of a window, and of a pass."""


def loss(lm: CausalLM, windows: torch.Tensor) -> float:
    """Mean cross-entropy in nats per token of windows `[windows, WINDOW]`."""
    total, count = 0.0, 0
    for window in windows:
        lm.start()
        lm.join(1)
        for start in range(0, WINDOW, PASS):
            tokens_1N = window[None, start : start + PASS]
            logits_NV = lm.forward(tokens_1N).logits[0].float()
            lm.advance([tokens_1N.shape[1]])
            next_N = window[start + 1 : start + 1 + PASS]
            total += float(cross_entropy(logits_NV[: len(next_N)], next_N, reduction="sum"))
            count += len(next_N)
    return total / count


def with_numbers(lm: CausalLM) -> CausalLM:
    """The same weights as numbers, so that what is multiplied with them is not rounded."""
    for module in lm.model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, QuantizedTensor):
            module.weight = nn.Parameter(module.weight.dequantize().float(), requires_grad=False)
    return CausalLM(lm.model.float(), vocab_size=lm.vocab_size, width=PASS)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    _, documents = runpy.run_path(str(CORPUS))["read_library"]()
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        target = load_target(given.target, Runtime(device="cpu", dtype=dtype, width=PASS))
        stream = torch.tensor([token for text in documents for token in target.tokenizer(text.text)["input_ids"]])
        some = stream[: len(stream) // WINDOW * WINDOW].view(-1, WINDOW)
        windows = some[:: max(len(some) // given.windows, 1)][: given.windows]
        found[dtype] = loss(target.lm, windows)
        if dtype.startswith("int"):
            found[f"{dtype}, weights only"] = loss(with_numbers(target.lm), windows)
        print({name: round(value, 4) for name, value in found.items()}, flush=True)
    if given.json:
        tokens = len(windows) * (WINDOW - 1)
        write_json(
            given.json, {"loss": found, "tokens": tokens, "target": given.target, "machine": describe_machine("cpu")}
        )


if __name__ == "__main__":
    main()
