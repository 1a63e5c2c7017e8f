"""How much memory models with weights of few bits take on CPUs, and how long they take to load.

    python benchmarks/scripts/quantized_memory.py --json FILE.json

Each row is a process of its own, with a cache folder of its own: the first load rounds and packs the weights and writes
them into the cache, the second maps them from there. Both then write tokens. "folder" is the shape with its random
weights in a checkpoint on the disk, as published models are; of a "shape" all weights are made in memory.

Peaks are the system's `VmHWM`; pages that are mapped from a file count, once. The goal: what a peak has beyond that of
a process that has only imported is at most `GOAL` times the weights and the cache of one row. Two imports are measured:
`import paradraft, torch` ("plain"), for which the goal is, and all that loading a Llama imports ("models").
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOAL, MOST_SECONDS = 1.15, 2.0
TOKENS = 60
SHAPES = ("shape:smollm2-360m", "shape:smollm2-135m")
DTYPES = ("int8", "int4")


def peak_bytes() -> int:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def imported(kind: str) -> dict[str, Any]:
    """What a process takes that loads nothing."""
    import torch  # noqa: F401  # what it takes is asked

    import paradraft  # noqa: F401  # as above

    if kind == "models":
        from transformers.models.llama import modeling_llama  # noqa: F401  # which loading a Llama imports

        from paradraft.sources import target_loading  # noqa: F401  # as above
    return {"peak_bytes": peak_bytes()}


def loaded(name: str, dtype: str) -> dict[str, Any]:
    """What a process takes that loads a model and writes tokens."""
    import torch

    from paradraft.models.runtime import Runtime
    from paradraft.sources.target_loading import load_target

    start = time.perf_counter()
    lm = load_target(name, Runtime(device="cpu", dtype=dtype)).lm
    seconds = time.perf_counter() - start
    at_load = peak_bytes()
    lm.start()
    lm.cache.join(1)
    token, start = 1, time.perf_counter()
    for _ in range(TOKENS):
        logits_N = lm.forward(torch.tensor([[token]])).logits[0, 0, : lm.vocab_size]
        token = int(logits_N.argmax())
        lm.cache.advance([1])
    tokens_s = TOKENS / (time.perf_counter() - start)
    peak = peak_bytes()
    from paradraft.bench.hardware.roofline import Size  # after the peak, which it would be part of

    size = Size.of(lm.model)
    embedding, head = lm.model.get_input_embeddings().weight, lm.model.get_output_embeddings().weight
    rest = 0 if embedding is head else embedding.numel() * embedding.itemsize
    slots = lm.cache._slots_for(min(lm.capacity, 4096))
    return {
        "load_s": seconds, "peak_after_load_bytes": at_load, "peak_bytes": peak, "tokens_s": tokens_s,
        "weights_bytes": size.body_bytes + size.head_bytes + rest, "cache_bytes": slots * size.kv_bytes,
        "last_token": token, "is_native": lm.is_native, "probe": lm.probe,
    }  # fmt: skip


def saved(shape: str, folder: Path) -> None:
    """Writes a shape as a checkpoint."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from paradraft.sources.presets import random_model

    random_model(shape, dtype=torch.bfloat16, device="cpu").save_pretrained(folder)
    plain = Tokenizer(models.WordLevel({str(token): token for token in range(1000)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder)


def child(cache: Path, *arguments: str) -> dict[str, Any]:
    """What a process of this script prints at its end."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments], capture_output=True, text=True, check=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "PARADRAFT_PACKED_FILES": "1"},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs="+")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.child:
        from paradraft.bench.report.summary import write_json  # not in a child, whose memory is measured
        from paradraft.environment import describe_machine
    if given.child:
        kind, *more = given.child
        if kind == "saved":
            saved(more[0], Path(more[1]))
            found: dict[str, Any] = {}
        else:
            found = loaded(*more) if kind == "loaded" else imported(kind)
        return print(json.dumps(found))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        cache = Path(temporary) / "cache"
        child(cache, "loaded", "shape:tiny-target", "int8")  # so that the library is there
        base = {kind: child(cache, kind)["peak_bytes"] for kind in ("plain", "models")}
        for shape in given.shapes:
            folder = Path(temporary) / shape.partition(":")[2]
            child(cache, "saved", shape, str(folder))
            for source, name in (("shape", shape), ("folder", str(folder))):
                for dtype in DTYPES:
                    for load in ("first", "second"):
                        row = {"shape": shape, "source": source, "dtype": dtype, "load": load}
                        row |= child(cache, "loaded", name, dtype)
                        needed = row["weights_bytes"] + row["cache_bytes"]
                        for kind, before in base.items():
                            row[f"ratio_over_{kind}"] = (row["peak_bytes"] - before) / needed
                        row["meets_goals"] = {
                            "memory": row["ratio_over_plain"] <= GOAL, "seconds": row["load_s"] <= MOST_SECONDS,
                        }  # fmt: skip
                        rows.append(row)
                        ratios = f"{row['ratio_over_plain']:.2f} {row['ratio_over_models']:.2f}"
                        took = (
                            f"{row['load_s']:6.2f} s {row['peak_bytes'] / 1e6:5.0f} MB, needed {needed / 1e6:4.0f} MB"
                        )
                        print(f"{shape} {source:6} {dtype} {load:6} {took} {ratios} {row['tokens_s']:.1f} tokens/s")
    if given.json is not None:
        found = {"machine": describe_machine("cpu"), "imports_bytes": base, "goal": GOAL, "rows": rows}
        write_json(given.json, found)


if __name__ == "__main__":
    main()
