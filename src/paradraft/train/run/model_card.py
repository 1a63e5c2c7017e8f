"""Model card of a trained drafter, and the commands that use it."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import version
from pathlib import Path

from paradraft.data.mix import Source
from paradraft.drafters import drafter_config, drafter_names
from paradraft.export.engines import vllm_fixed
from paradraft.export.vllm import NeedsExportError, check_draft
from paradraft.formats.pard import PREVIOUS_TOKEN_HEAD
from paradraft.models.names import POCKET
from paradraft.sources.loading import locate, pocket_folder
from paradraft.train.recipe import Recipe
from paradraft.train.run.progress import BestSoFar, Score
from paradraft.train.run.provenance import RECORD, Learnt

DRAFTER, TARGET = "DRAFTER", "TARGET"
"""Placeholders in the card for the drafter's folder, and for an unknown target."""


def next_steps(name: str, recipe: Recipe, folder: Path, draft: str) -> list[str]:
    """Commands that generate with a drafter, benchmark it, and serve it with vLLM if possible; none if paradraft has no
    such drafter.

    Args:
        name: of the training.
        draft: path of the drafter in the commands.
    """
    name, k = recipe.decoded_with(name)
    if name not in drafter_names():  # nothing here decodes with it
        return []
    has_own_tree = getattr(drafter_config(name, str(folder)), "tree", None) is not None
    depth = None if has_own_tree else k
    models = f"--target {shlex.quote(recipe.measured_with or TARGET)}"
    method = name if depth is None else f"{name}:k={depth}"
    drafter = f"--drafter {name}" if depth is None else f"--drafter {name} -k {depth}"
    served = None if k is None else _for_vllm(name, k, recipe.measured_with, folder, draft)
    return [
        f"paradraft generate {models} {drafter} --draft {shlex.quote(draft)} --prompt 'Once upon a time'",
        f"paradraft bench {models} --methods ar,{method} --draft {shlex.quote(draft)}",
        *([] if served is None else [served]),
    ]


def _for_vllm(name: str, k: int, target: str | None, folder: Path, draft: str) -> str | None:
    """Command that serves a drafter with vLLM, or exports it first if needed; None if vLLM has no such drafter."""
    if (config := vllm_fixed(k, name, draft)) is None:
        return None
    without = "  # without its previous-token head" if (folder / PREVIOUS_TOKEN_HEAD).is_file() else ""
    target_name = TARGET
    if target is not None:
        target_name = str(pocket_folder("target")) if target == POCKET else target  # vLLM knows no model of this name
        try:
            check_draft(name, str(folder), locate(target, "target"), k)
        except NeedsExportError:
            models = shlex.join([draft, f"{draft}-vllm", "--target", target])
            return f"paradraft export {models} --to vllm -k {k}{without}"
        except ValueError as error:
            return f"# vLLM cannot serve it: {str(error).replace(str(folder), draft)}"
    return f"vllm serve {shlex.quote(target_name)} --speculative-config {shlex.quote(json.dumps(config))}{without}"


def model_card(
    drafter: str, recipe: Recipe, folder: Path, learnt: Learnt, standing: BestSoFar, *, done: int, steps: int
) -> str:
    """Renders the model card of a drafter in Markdown.

    Args:
        drafter: name or spec.
        learnt: description of the samples.
        standing: scores of the run.
    """
    name = drafter.partition(":")[0]
    best = standing.best
    rows = [
        ("begun as", recipe.model),
        ("guesses the text of", recipe.measured_with or "the model whose answers the data are"),
        ("data", ", ".join(str(entry.path if isinstance(entry, Source) else entry) for entry in recipe.data)),
        ("learnt", f"{learnt.samples:,} samples of {learnt.tokens:,} tokens, those held out among them"),
        ("steps", f"{done} of {steps}" + ("" if best is None else f"; these weights are those after step {best.step}")),
    ]
    if best is not None:
        rows += _measured(best, standing.first)
    is_published = recipe.model != POCKET and not Path(recipe.model).exists()
    head = ["---", "library_name: paradraft", "pipeline_tag: text-generation"]
    head += [f"base_model: {recipe.model}"] if is_published else []
    head += [f"tags: [speculative-decoding, {name}]", "---"]
    table = [f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in rows]
    lines = next_steps(name, recipe, folder, DRAFTER)
    larger = f", `{TARGET}` the larger model" if recipe.measured_with is None else ""
    use = [f"`{DRAFTER}` is this folder{larger}:", "", "```bash", *lines, "```", ""]
    return "\n".join([
        *head,
        "",
        f"# {name} drafter",
        "",
        "It guesses tokens that a larger model then checks, so that the larger model answers faster with the same text",
        f"(speculative decoding). Trained with paradraft {version('paradraft')}; all settings are in `{RECORD}`.",
        "",
        "| | |",
        "|---|---|",
        *table,
        "",
        *(use if lines else []),
    ])  # fmt: skip


def _measured(best: Score, first: Score | None) -> list[tuple[str, str]]:
    rows = []
    if best.acceptance_length is not None:
        before = "" if first is None or first.acceptance_length is None else f" (before: {first.acceptance_length:.2f})"
        rows.append(
            ("tokens per pass of the target, greedy, held-out prompts", f"{best.acceptance_length:.2f}{before}")
        )
    if best.by_position:
        shares = " ".join(f"{share:.2f}" for share in best.by_position)
        rows.append(("guesses accepted at position 1, 2, …", shares))
    before = "" if first is None else f" (before: {first.held_out_loss:.3f})"
    return [*rows, ("held-out loss, nats a token", f"{best.held_out_loss:.3f}{before}")]
