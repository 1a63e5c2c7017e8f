"""Rebuilds the pocket family from nothing: `python recipes/pocket/build.py`.

Stages, each skipped when its result is there: tokenizer, target, text, draft, pard, and the drafters in the target's
own pass. With `--second` it trains a smaller target instead, by the same recipe, for measuring what one drafter is
worth to a family; with `--wide` a wider one and its prompt tokens, for measuring what width is worth to them.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import corpus
from paradraft.cli.commands.train import run_with_display
from paradraft.formats.folder import save_model
from paradraft.formats.head import CONFIG, WEIGHTS
from paradraft.formats.pard import PREVIOUS_TOKEN_HEAD
from paradraft.models.devices import computes_bf16
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_model
from paradraft.sources.target_loading import load_target
from paradraft.train import recipe_class
from paradraft.train.drafters import eagle, eagle_parallel, ppd
from paradraft.train.drafters.pard import build as build_drafter
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.init.init_draft import make
from paradraft.train.init.init_from import PrunedTarget
from paradraft.train.recipe_file import load_recipe
from pretrain import PretrainConfig, pretrain, windows
from tokenizer import train_tokenizer
from write_text import ANSWER_TOKENS, PROMPT_TOKENS, save_jsonl, write_text

SEED = 20261120
MAX_LENGTH = 512
POCKET = Path(__file__).parents[2] / "src" / "paradraft" / "pocket"
EMBEDDING_ROWS = 4096
TARGET = {
    "hidden_size": 320,
    "num_hidden_layers": 8,
    "num_attention_heads": 5,
    "head_dim": 64,
    "intermediate_size": 864,
}
SECOND = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 64,
    "intermediate_size": 704,
}
"""A target of half the size, which learns from the library alone and is not shipped."""
WIDE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1408,
}
"""A target of 2.5 times the size, which is not shipped."""
DRAFT = PrunedTarget(layers=4, intermediate_size=368)
LIBRARY_RUN = PretrainConfig(steps=1800, seed=1)
PACKAGES_RUN = PretrainConfig(steps=3000, seed=4, muon_lr=1.5e-2, adamw_lr=1.5e-3, save_every=100)
WIDE_RUN = PretrainConfig(steps=3000, seed=1, muon_lr=1.5e-2, adamw_lr=1.5e-3, save_every=100)
WIDE_TEXTS = 2560
TEXTS = 4096
MORE_TEXTS = 8192
"""Written three times: for the four legs of the PARD drafter which has seen the others twice by then, and for its last
leg and the drafters on the target's states."""
SHIPPED_TEXTS = 640
SHIPPED_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
"""Of each model; a training run leaves more."""
TEMPERATURES = (0.0, 0.7, 0.7, 0.9)
ONE_PASS = ["previous_token_rank=128", "steps=3600", "muon_lr=2e-2", "lr=2e-3", "seed=1", "evaluate_every=600"]
RECIPES = Path(__file__).parent


def new_model(shape: dict[str, int]) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of the family."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=EMBEDDING_ROWS,
        num_key_value_heads=shape["num_attention_heads"],
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **shape,
    )
    return Qwen3ForCausalLM(config)


def tokenized(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """One stream `[n]` of token ids, end-of-text after every document."""
    ids: list[int] = []
    for row in tokenizer(texts)["input_ids"]:
        ids += [*row, tokenizer.eos_token_id]
    return torch.tensor(ids)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes an ordinary Hugging Face folder in bf16."""
    save_model(folder, model.to(torch.bfloat16), tokenizer)


def build_tokenizer(out: Path) -> PreTrainedTokenizerFast:
    """Trains the tokenizer and writes the held-out prompts."""
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        train, held_out = corpus.read_library()
        prompts = [p for d in held_out for p in corpus.function_prompts(d)]
        random.Random(SEED).shuffle(prompts)
        (out / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts[:64]))
        train_tokenizer([d.text for d in train], max_length=MAX_LENGTH).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def build_target(
    result: Path,
    start: Path | dict[str, int],
    run: PretrainConfig,
    tokenizer: PreTrainedTokenizerFast,
    device: str,
    *,
    has_packages: bool,
) -> None:
    """Trains a new target of a shape, or goes on with a folder's, on the standard library and perhaps packages too."""
    if (result / "config.json").exists():
        return
    documents, held_out = corpus.read_library()
    held = tokenized(tokenizer, [d.text for d in held_out])
    if has_packages:
        documents = documents + corpus.read_packages()
    model = (
        load_model(str(start), Runtime(device="cpu", dtype="float32")) if isinstance(start, Path) else new_model(start)
    )
    random.Random(SEED).shuffle(documents)
    stream = tokenized(tokenizer, [d.text for d in documents])
    print(f"target: {len(stream):,} tokens to learn, {len(held):,} held out", flush=True)
    state = result.with_name(f"{result.name}-run")
    save(pretrain(model.to(device), windows(stream, run), held, run, state), tokenizer, result)


def build_texts(
    target: Path, work: Path, wanted: dict[str, tuple[int, int]], tokenizer: PreTrainedTokenizerFast, device: str
) -> None:
    """Lets a target go on with excerpts of the library; `wanted` are numbers of texts and seeds by file name."""
    if all((work / f"{name}.jsonl").exists() for name in wanted):
        return
    dtype = "bfloat16" if computes_bf16(torch.device(device)) else "float32"
    runtime = Runtime(device=device, dtype=dtype, pad_to=2, capacity=PROMPT_TOKENS + ANSWER_TOKENS)
    loaded = load_target(str(target), runtime)
    train, _ = corpus.read_library()
    random.Random(SEED).shuffle(train)
    stream = tokenized(tokenizer, [d.text for d in train])
    for name, (texts, seed) in wanted.items():
        if not (work / f"{name}.jsonl").exists():
            tokens = write_text(loaded, stream, work / f"{name}.pt", texts=texts, temperatures=TEMPERATURES, seed=seed)
            save_jsonl(tokens, tokenizer, work / f"{name}.jsonl")


def build_drafts(out: Path, device: str) -> None:
    """Trains half of the target's layers on what the target wrote, and adapts them, with the library's trainer."""
    work = out / "work"
    if not (work / "cut" / "config.json").exists():
        make(str(out / "target"), work / "cut", DRAFT)
    legs: tuple[tuple[str, Path, Path, list[str], list[str]], ...] = (
        ("draft", work / "cut", out / "draft", ["text"], []),
        ("pard", out / "draft", work / "pard", ["text"], []),
        ("deeper", work / "pard", work / "deeper", ["text"], []),
        ("further", work / "deeper", work / "further", ["more"], []),
        ("further", work / "further", work / "further-2", ["most"], ["steps=2700", "seed=7"]),
        ("further", work / "further-2", work / "further-3", ["more", "most"], ["steps=2700", "seed=8"]),
        ("further", work / "further-3", work / "further-4", ["more", "most"], ["seed=9"]),
        ("previous_token", work / "further-4", out / "pard", ["again"], ["draft_temperature=0.87"]),
    )
    for name, model, result, texts, settings in legs:
        data = ",".join(str(work / f"{text}.jsonl") for text in texts)
        files = [f"model={model}", f"teacher={out / 'target'}", f"data=[{data}]", f"out={result}"]
        recipe = load_recipe(PardRecipe, RECIPES / f"{name}.yaml", [*files, f"device={device}", *settings])
        run_with_display(recipe, build_drafter)


def build_heads(out: Path, device: str) -> None:
    """Trains a drafter on the target's states, goes on with it as one that drafts in one pass, and prompt tokens."""
    target, text = out / "target", out / "work" / "again.jsonl"
    build_head(eagle, target, text, out / "work" / "eagle", ["steps=600"], device)
    start = f"start={out / 'work' / 'eagle'}"
    build_head(eagle_parallel, target, text, out / "eagle_parallel", [start, *ONE_PASS], device)
    build_head(ppd, target, text, out / "ppd", ["steps=1000", "evaluate_every=500"], device)


def build_head(module: Any, target: Path, text: Path, result: Path, settings: list[str], device: str) -> None:
    """Trains one drafter of those in a target's own pass."""
    name = module.__name__.rpartition(".")[2]
    files = [f"model={target}", f"data=[{text}]", f"out={result}", f"device={device}", "bf16=null"]
    recipe = load_recipe(recipe_class(module), RECIPES / f"{name}.yaml", [*files, *settings])
    run_with_display(recipe, module.build)


def build_wide(out: Path, tokenizer: PreTrainedTokenizerFast, device: str) -> None:
    """Trains the wide target, and prompt tokens on what it writes."""
    out.mkdir(exist_ok=True)
    build_target(out / "target", WIDE, WIDE_RUN, tokenizer, device, has_packages=True)
    build_texts(out / "target", out, {"text": (WIDE_TEXTS, SEED)}, tokenizer, device)
    build_head(ppd, out / "target", out / "text.jsonl", out / "ppd", ["steps=500", "evaluate_every=250"], device)


def main() -> None:
    """Runs all stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/pocket"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--install", action="store_true", help="replace the family in src/paradraft/pocket")
    what.add_argument("--second", action="store_true", help="train only the second, smaller target, into OUT/second")
    what.add_argument("--wide", action="store_true", help="train only a wide target and prompt tokens, into OUT/wide")
    args = parser.parse_args()
    work = args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    if args.second or args.wide:
        # The shipped one: of another Python's library comes another, and no shipped drafter would fit.
        shipped = AutoTokenizer.from_pretrained(POCKET / "target", trust_remote_code=False)
        if args.second:
            build_target(args.out / "second", SECOND, LIBRARY_RUN, shipped, args.device, has_packages=False)
        else:
            build_wide(args.out / "wide", shipped, args.device)
        return
    tokenizer = build_tokenizer(args.out)
    build_target(work / "library", TARGET, LIBRARY_RUN, tokenizer, args.device, has_packages=False)
    build_target(args.out / "target", work / "library", PACKAGES_RUN, tokenizer, args.device, has_packages=True)
    written = {
        "text": (TEXTS, SEED),
        "more": (MORE_TEXTS, SEED + 1_000_000),
        "most": (MORE_TEXTS, SEED + 2_000_000),
        "again": (MORE_TEXTS, SEED + 3_000_000),
    }
    build_texts(args.out / "target", work, written, tokenizer, args.device)
    if not (args.out / "text.jsonl").exists():
        first = (work / "text.jsonl").read_text().splitlines(keepends=True)[:SHIPPED_TEXTS]
        (args.out / "text.jsonl").write_text("".join(first))
    build_drafts(args.out, args.device)
    build_heads(args.out, args.device)
    if args.install:
        for name in ("target", "draft", "pard"):
            for file in SHIPPED_FILES:
                shutil.copy(args.out / name / file, POCKET / name / file)
        (POCKET / "pard" / PREVIOUS_TOKEN_HEAD).parent.mkdir(exist_ok=True)
        shutil.copy(args.out / "pard" / PREVIOUS_TOKEN_HEAD, POCKET / "pard" / PREVIOUS_TOKEN_HEAD)
        for name in ("eagle_parallel", "ppd"):
            for file in (CONFIG, WEIGHTS):
                shutil.copy(args.out / name / file, POCKET / name / file)
        for name in ("prompts.jsonl", "text.jsonl"):
            shutil.copy(args.out / name, POCKET / name)


if __name__ == "__main__":
    main()
