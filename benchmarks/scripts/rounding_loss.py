"""What rounding costs: the loss of models on answers to questions, with their weights whole and in few bits.

    python benchmarks/scripts/rounding_loss.py build/real/smollm2-135m-instruct \\
        build/real/smollm2-135m-instruct.Q4_1.gguf --data code_alpaca_2k.json gsm8k_test.jsonl --json FILE.json

A folder is measured in float32, bfloat16, int8 and int4, and with all that int4 rounds in llama.cpp's Q4_0, whose
numbers of the largest size become -8. A GGUF file is measured as we decode it, and with its weights as `transformers`
reads them, in float32. Of each question, in the model's chat template, only the answer and its end count, as only
these are written by a model that is asked. The data files take turns; a record has `instruction` (and `input`) and
`output`, or `question` and `answer`.

A difference is from float32, token by token, and so is its standard error: most of what makes one text harder than
another is in both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.bench.report.summary import write_json
from paradraft.data.chat import conversation_samples
from paradraft.data.samples import Sample
from paradraft.environment import describe_machine
from paradraft.models.causal_lm import CausalLM
from paradraft.models.quantization import rounded_to_8_bits
from paradraft.models.quantized import GROUP, QuantizedTensor
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import tokenizer_of
from paradraft.sources.target_loading import load_target
from paradraft.text.chat_template import ChatTemplate

PASS = 128
"""Tokens of a pass."""


def answers(files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[Sample]:
    """Questions and answers, until the answers have so many tokens."""
    found: list[Sample] = []
    for record in chain.from_iterable(zip(*map(records, files), strict=False)):
        question = record.get("question") or "\n".join(filter(None, (record["instruction"], record.get("input"))))
        answer = record.get("answer") or record["output"]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found += conversation_samples(messages, ChatTemplate(tokenizer=tokenizer), is_cut=False)
        if sum(sum(sample.is_label) for sample in found) >= tokens:
            return found
    raise SystemExit(f"the data has answers of {sum(sum(sample.is_label) for sample in found)} tokens, not {tokens}")


def records(file: Path) -> list[dict[str, str]]:
    """Those of a JSON list, or of lines."""
    text = file.read_text()
    if file.suffix == ".json":
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines()]


def losses(lm: CausalLM, samples: Sequence[Sample]) -> Tensor:
    """Cross-entropy in nats of each token of the answers, in float64."""
    found = []
    for sample in samples:
        lm.start()
        lm.cache.join(1)
        tokens, is_label = torch.tensor(list(sample.tokens)), list(sample.is_label)
        for first in range(0, len(tokens) - 1, PASS):
            inputs_1N = tokens[None, first : first + PASS]
            wanted = [row for row, is_one in enumerate(is_label[first + 1 : first + 1 + PASS]) if is_one]
            logits_RV = lm.forward(inputs_1N, logit_rows=torch.tensor([wanted or [0]])).logits[0].double()
            lm.cache.advance([inputs_1N.shape[1]])
            if wanted:
                next_R = tokens[torch.tensor(wanted) + first + 1]
                found.append(functional.cross_entropy(logits_RV, next_R, reduction="none"))
    return torch.cat(found)


def plain_q4_0(weight: Tensor) -> QuantizedTensor:
    """Weights `[N, K]` as llama.cpp's `quantize_row_q4_0_ref` rounds them."""
    groups = functional.pad(weight.detach().float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scales = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)) / -8
    values = (groups / scales.where(scales != 0, torch.inf) + 8.5).floor().clamp(0, 15) - 8
    whole = values.to(torch.int8).flatten(1)[:, : weight.shape[1]]
    return QuantizedTensor(whole, scales[:, :, 0].half(), bits=4, group=GROUP, dtype=weight.dtype)


def in_plain_q4_0(folder: str) -> CausalLM:
    """A folder in Q4_0, with a head of 8 bits as in int4."""
    model = load_target(folder, runtime("bfloat16")).lm.model
    for module in model.modules():
        if isinstance(module, nn.Linear):
            rounded = rounded_to_8_bits if module is model.get_output_embeddings() else plain_q4_0
            module.weight = nn.Parameter(rounded(module.weight), requires_grad=False)
    return causal_lm(model.to(Runtime(device="cpu", dtype="int4").computed_in))


def dequantized(file: str) -> CausalLM:
    """The weights of a GGUF file as `transformers` reads them, in float32."""
    path = Path(file)
    return causal_lm(AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32))


def causal_lm(model: PreTrainedModel) -> CausalLM:
    """A model that is loaded, with its cache."""
    return CausalLM(model, vocab_size=model.config.vocab_size, width=PASS)


def runtime(dtype: str) -> Runtime:
    """How a model runs."""
    return Runtime(device="cpu", dtype=dtype, width=PASS)


def bits(lm: CausalLM) -> float:
    """Bits for each weight of the linear layers but the head, scales included."""
    head = lm.model.get_output_embeddings()
    weights = [layer.weight for layer in lm.model.modules() if isinstance(layer, nn.Linear) and layer is not head]
    stored = [
        weight.stored_bytes if isinstance(weight, QuantizedTensor) else weight.numel() * weight.itemsize
        for weight in weights
    ]
    return 8 * sum(stored) / sum(weight.numel() for weight in weights)


def ways(name: str) -> Iterator[tuple[str, Callable[[], CausalLM]]]:
    """How a folder or a file is measured; the first is what others are compared with."""
    if Path(name).is_file():
        yield "float32 of its weights", lambda: dequantized(name)
        yield "as stored", lambda: load_target(name, runtime("stored")).lm
        return
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        yield dtype, lambda dtype=dtype: load_target(name, runtime(dtype)).lm  # type: ignore[misc]  # bound at once
    yield "plain Q4_0", lambda: in_plain_q4_0(name)


def measured(name: str, files: Sequence[Path], tokens: int) -> dict[str, dict[str, float]]:
    """What each way of a model costs."""
    samples = answers(files, tokenizer_of(name), tokens)
    whole: Tensor | None = None
    found: dict[str, dict[str, float]] = {}
    for way, load in ways(name):
        began = time.monotonic()
        lm = load()
        loss = losses(lm, samples)
        found[way] = {"loss": float(loss.mean()), "tokens": len(loss), "bits": bits(lm)}
        if whole is not None:
            difference = loss - whole
            found[way] |= {
                "difference": float(difference.mean()),
                "standard_error": float(difference.std() / len(difference) ** 0.5),
            }
        whole = loss if whole is None else whole
        print(f"{name} {way}: {found[way]} in {time.monotonic() - began:.0f} s", flush=True)
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders and GGUF files")
    parser.add_argument("--data", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20_000, help="of answers, at least")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    report: dict[str, Any] = {"machine": describe_machine("cpu"), "data": [file.name for file in given.data]}
    report["models"] = {}
    for name in given.models:
        report["models"][Path(name).name] = measured(name, given.data, given.tokens)
        if given.json:
            write_json(given.json, report)


if __name__ == "__main__":
    main()
