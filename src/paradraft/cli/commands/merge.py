"""`paradraft merge`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.options import option, with_options
from paradraft.cli.terminal import console, news
from paradraft.cli.values import use_threads
from paradraft.models.names import POCKET


@dataclass(frozen=True, kw_only=True)
class MergeArgs:
    """Options of `paradraft merge`."""

    adapter: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER", help="A folder that PEFT wrote, the adapter/ of a trained draft, or one that is shipped."
        ),
    ]
    out: Annotated[Path, option("The folder to write; it must be empty or not exist.")]
    base: Annotated[
        str | None,
        option(
            "The model that the adapter was trained on, in any format and in few bits too; by default the one that it "
            "names."
        ),
    ] = None
    target: Annotated[
        str | None, option("Of a draft: the model that it drafts for from now on, when no drafter is named.")
    ] = None
    threads: options.Threads = None


@with_options
def merge(*, args: MergeArgs) -> None:
    """Merge a low-rank adapter (LoRA) into its base model.

    The result is a folder that every command and engine reads. The adapter of a PARD draft, which a training with lora
    writes beside it, becomes that draft.
    """
    with importing():
        from paradraft.drafters.parts.draft_loading import check_draft
        from paradraft.engine.automatic import drafter_of
        from paradraft.formats.pard import TRAINED_K
        from paradraft.sources.load_plan import Checkpoint
        from paradraft.sources.recorded import remember_drafter
        from paradraft.sources.shipped import adapter_folder
        from paradraft.sources.target_loading import facts_of
        from paradraft.train.init.merging import base_of, merge
        from paradraft.train.init.vocabulary_size import drafts_in_one_pass

    use_threads(args.threads)
    adapter = adapter_folder(args.adapter)
    named = base_of(adapter)
    if (name := args.base or named) is None:
        raise ValueError(f"{args.adapter!r} names no base model: give --base")
    try:
        base = Checkpoint.find(name, "draft")
    except ValueError as error:
        raise ValueError(f"{error}; --base names the model that the adapter was trained on") from None
    if args.target is not None:
        if args.target == POCKET:
            raise ValueError(f"--target {POCKET}: it always drafts with its own: name another, or leave it out")
        check_draft(base, facts_of(Checkpoint.find(args.target)))
    with news(console(stderr=True), f"merging into {name}"):
        merge(adapter, base, args.out)
    draft = Checkpoint.at(str(args.out))
    drafter, out = drafter_of(str(args.out)), shlex.quote(str(args.out))
    k = getattr(draft.config, TRAINED_K, None)
    if args.target is not None and remember_drafter(args.target, args.out, drafter, k):
        print(f"paradraft chat --target {shlex.quote(args.target)} drafts with it from now on, without --drafter")
        return
    as_draft = f"--target {shlex.quote(args.target or 'TARGET')} --drafter {drafter} --draft {out}"
    print(f"as a draft: paradraft chat {as_draft}")
    if not drafts_in_one_pass(draft):
        print(f"as a model: paradraft chat --target {out}")
