"""`paradraft audit --endpoint`: the audit of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from paradraft.cli import options
from paradraft.cli.terminal import console
from paradraft.cli.values import key_in
from paradraft.drafters import is_drafter, serving_of
from paradraft.engine.speculation import Speculation
from paradraft.export.block_engines import METHODS, check_k
from paradraft.export.engines import VLLM
from paradraft.export.vllm import NOT_INSTALLED, installed_python, python_to_run, speculative_config
from paradraft.formats.block import BlockSettings
from paradraft.formats.head import is_head, kind_of
from paradraft.formats.pard import declared_mask_id
from paradraft.formats.published_block import is_published_block, read_block
from paradraft.serve.vllm import VllmServer
from paradraft.sources.loading import (
    load_config,
    load_generation_config,
    load_tokenizer,
    locate,
    pocket_folder,
    tokenizer_for,
)
from paradraft.sources.target_loading import load_target
from paradraft.text.chat_template import Message
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.audit.server.block_drafts import BlockDraft
    from paradraft.audit.server.draft_causes import DraftComparison
    from paradraft.audit.server.draft_passes import DraftModel
    from paradraft.audit.server.endpoint import AuditedServer
    from paradraft.audit.server.rounds import AuditedDraft
    from paradraft.audit.server.served import ServedReport
    from paradraft.audit.server.tables import Reference
    from paradraft.cli.commands.audit import AuditArgs
    from paradraft.models.target import Target

SERVED_NAME = "target"
"""Model name of an engine that is started here."""
MOST_SHOWN = 20
"""Most positions listed at which the reference prefers another token."""


SERVER = (
    "endpoint", "model", "api_key_env", "engine", "vllm_python", "reference_endpoint", "reference_model",
    "reference_api_key_env",
)  # fmt: skip
"""Options of server audits in their JSON."""


def check(args: AuditArgs) -> None:
    """Raises ValueError for options that conflict."""
    if args.endpoint is not None and args.engine is not None:
        raise ValueError("give either --endpoint or --engine")
    if args.engine not in (None, VLLM):
        raise ValueError(f"--engine {args.engine}: use vllm, or name the address of a server by --endpoint")
    if args.endpoint is not None and args.model is None:
        raise ValueError("--endpoint: name the model that it serves by --model")
    if args.engine is not None and (args.model or args.api_key_env):
        raise ValueError("--model and --api-key-env are for --endpoint: what is started here needs neither")
    if args.engine is not None and args.draft_folder is None:
        raise ValueError("--engine: name the folder that it drafts with, as in `paradraft audit OUT --engine vllm`")
    is_same = args.reference_endpoint == args.endpoint and args.reference_model in (None, args.model)
    if args.endpoint is not None and is_same:
        raise ValueError(f"--reference-endpoint {args.endpoint}: a server cannot be its own reference")
    if args.reference_endpoint is None and (args.reference_model or args.reference_api_key_env):
        raise ValueError("--reference-model and --reference-api-key-env need --reference-endpoint")
    temperature = args.sampling.temperature or 1.0
    if args.reference_endpoint is not None and args.seeds and temperature != 1.0:
        raise ValueError(
            f"--temperature {temperature:g}: a reference server tells probabilities at temperature 1, leave it out, or "
            "compare with the target's weights here"
        )


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What the tokens of a target mean: its tokenizer, end tokens and rows."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    rows: int

    def server(self, url: str, model: str, key_env: str | None, option: str) -> AuditedServer:
        """Client of a server that answers; `option` names the variable of its key."""
        from paradraft.audit.server.endpoint import AuditedServer

        server = AuditedServer(
            url=url, model=model, tokenizer=self.tokenizer, end_ids=self.end_ids, rows=self.rows,
            api_key=key_in(key_env, option),
        )  # fmt: skip
        server.check_model()
        return server


def audit_served(args: AuditArgs, *, is_k_given: bool) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Audits a server; returns the report as lines and as JSON, and the settings.

    Args:
        is_k_given: whether the server drafts k tokens; else at most k, and the most accepted in a round count.
    """
    from paradraft.audit.server.endpoint_audit import audit_endpoint
    from paradraft.data.prompts import first_prompts
    from paradraft.text.generation_config import end_ids

    check(args)
    records = first_prompts(args.prompts or pocket_folder("prompts.jsonl"), args.num_prompts, options.FEW)
    questions = [record["prompt"] if "prompt" in record else record["messages"] for record in records]
    folder = locate(args.target, "target")
    vocabulary = Vocabulary(
        tokenizer=tokenizer_for(folder, args.runtime.tokenizer),
        end_ids=frozenset(end_ids(load_generation_config(folder), args.target)),
        rows=load_config(folder).get_text_config().vocab_size,
    )
    target = cache(partial(load_target, args.target, args.runtime))
    draft: AuditedDraft | None = None
    draft_tokenizer = None
    if args.draft_folder is not None and _is_block(args.draft_folder):
        draft = _block_draft(args, args.draft_folder, vocabulary, is_k_given, target())
    elif args.draft_folder is not None:
        draft = _draft_model(args, args.draft_folder, vocabulary, is_k_given)
        draft_tokenizer = load_tokenizer(locate(args.draft_folder, "pard"))
    with console(stderr=True).status("preparing") as status, _address(args, status.update) as (url, model):
        server = vocabulary.server(url, model, args.api_key_env, "--api-key-env")
        report = audit_endpoint(
            server, _reference(args, server, vocabulary, questions, target, status.update), questions,
            samples=args.seeds, max_new_tokens=args.max_new_tokens,
            temperature=args.sampling.temperature or 1.0, seed=args.sampling.seed,
            draft=draft, draft_tokenizer=draft_tokenizer, report=status.update,
        )  # fmt: skip
    settings = {
        "draft": args.draft_folder, "k": args.speculation.k, "is_k_given": is_k_given,
        **{name: getattr(args, name) for name in SERVER}, "num_prompts": len(questions),
    } | ({} if args.vllm_python is None else {"vllm_python": str(args.vllm_python)})  # fmt: skip
    settings = {name: value for name, value in settings.items() if value is not None}
    return findings(report, vocabulary.tokenizer), report.as_json(), settings


@contextmanager
def _address(args: AuditArgs, report: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """URL of the server and its model name; starts an engine if there is no endpoint."""
    if args.endpoint is not None and args.model is not None:
        yield args.endpoint, args.model
        return
    from paradraft.serve.address import bound, url_of

    assert args.draft_folder is not None
    if installed_python(args.vllm_python) is None:
        raise ValueError(NOT_INSTALLED)
    folder, draft = locate(args.target, "target"), locate(args.draft_folder, "pard")
    drafter = "dflash"
    if not _is_block(draft):
        drafter = "autoregressive" if declared_mask_id(load_config(draft)) is None else "pard"
    speculation = Speculation(drafter=drafter, draft=draft, k=args.speculation.k)
    speculative = speculative_config(speculation, folder)
    with closing(bound("127.0.0.1", 0)) as free:
        url = url_of(free)
    settings = {
        "--host": "127.0.0.1", "--port": url.rpartition(":")[2], "--served-model-name": SERVED_NAME,
        "--dtype": args.runtime.dtype, "--max-num-seqs": 4,
    }  # fmt: skip
    server = VllmServer(
        python=python_to_run(args.vllm_python),
        target=folder,
        speculative=speculative,
        options=settings,
        eager=True,
    )
    name = server.check(args.runtime.device)
    report(f"starting {name}")
    with server.running(url):
        yield f"{url}/v1", SERVED_NAME


def _reference(
    args: AuditArgs,
    server: AuditedServer,
    vocabulary: Vocabulary,
    prompts: list[str | list[Message]],
    loaded: Callable[[], Target],
    report: Callable[[str], None],
) -> Reference:
    """The other server, or the target, loaded here."""
    from paradraft.audit.server.prompt_causes import expected_ids
    from paradraft.audit.server.tables import ModelReference, ServerReference
    from paradraft.engine.request import requests_of
    from paradraft.sampling_params import GREEDY

    if args.reference_endpoint is not None:
        model, key_env = args.reference_model or server.model, args.reference_api_key_env
        other = vocabulary.server(args.reference_endpoint, model, key_env, "--reference-api-key-env")
        return ServerReference(endpoint=other)
    report("loading the target, which the answers are compared with")
    target = loaded()
    rows = [expected_ids(prompt, vocabulary.tokenizer) for prompt in prompts]
    requests_of(target, rows, args.max_new_tokens, GREEDY)  # raises ValueError
    return ModelReference(target.lm)


def _is_block(draft: str) -> bool:
    folder = locate(draft, "pard")
    if is_head(folder):
        return is_drafter(kind := kind_of(folder)) and serving_of(kind).vllm in METHODS.values()
    return is_published_block(load_config(folder))


def _block_draft(args: AuditArgs, draft: str, vocabulary: Vocabulary, is_k_given: bool, target: Target) -> BlockDraft:
    """Loads the server's block drafter; raises ValueError if it is for another target."""
    from paradraft.audit.server.block_drafts import BlockDraft
    from paradraft.audit.server.draft_causes import special_ids

    head = read_block(locate(draft, "dflash"), "dflash", target.lm.model.config)
    settings, k, is_k_known = BlockSettings.of(head), args.speculation.k, is_k_given or args.engine is not None
    if is_k_known:
        check_k(settings, k, draft)
    return BlockDraft(
        target=target, head=head, runtime=args.runtime, is_k_known=is_k_known or not settings.causal,
        k=min(k, settings.k) if settings.causal else settings.k,
        special=special_ids(vocabulary.tokenizer, vocabulary.end_ids),
    )  # fmt: skip


def _draft_model(args: AuditArgs, draft: str, vocabulary: Vocabulary, is_k_given: bool) -> DraftModel:
    """Loads the server's draft model; raises ValueError for a head that reads the target's hidden states."""
    from paradraft.audit.server.draft_causes import special_ids
    from paradraft.audit.server.draft_passes import DraftModel
    from paradraft.formats.pard import RANK, TRAINED_LENGTH, mask_token_id
    from paradraft.sources.load_plan import Checkpoint, draft_plan
    from paradraft.sources.loading import load_model
    from paradraft.text.vocabulary import of_one_family, used_rows

    tokenizer = vocabulary.tokenizer
    folder = locate(draft, "pard")
    if is_head(folder):
        raise ValueError(f"{draft!r} reads its target's states, and drafts of heads are not compared: leave it out")
    config = load_config(folder)
    if hasattr(config, RANK):
        raise ValueError(
            f"{draft!r} has a head that engines do not read: name the folder that `paradraft export` has written"
        )
    if not of_one_family(tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()):
        raise ValueError(f"{draft!r} has another vocabulary than the target: no engine drafts with it")
    mask_id = None if declared_mask_id(config) is None else mask_token_id(config, draft)
    runtime = draft_plan(Checkpoint.at(folder), args.runtime).runtime
    return DraftModel(
        model=load_model(folder, runtime, config), k=args.speculation.k, mask_id=mask_id,
        known_ids=used_rows(tokenizer), special=special_ids(tokenizer, vocabulary.end_ids),
        training_rows=getattr(config, TRAINED_LENGTH, None), is_k_known=is_k_given or args.engine is not None,
    )  # fmt: skip


def findings(report: ServedReport, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Report in words."""
    lines = [
        f"{report.verdict}: {report.reason}",
        f"  {number_of(report.answers, 'answer')}, {number_of(report.tokens, 'token')}",
    ]
    if report.difference is not None and report.explained is not None:
        lines.append(
            f"  at {report.places} tokens, the logarithms of probabilities that the server tells differ from those of "
            f"{report.reference} by {report.difference}"
        )
        lines.append(f"  up to {report.explained} is allowed: {report.source}")
    if report.greedy_places < report.greedy_tokens:
        lines.append(
            f"  of {report.greedy_tokens} greedy tokens, {report.reference} says for {report.greedy_places} which it "
            "prefers"
        )
    for each in report.preferences[:MOST_SHOWN]:
        token, preferred = (tokenizer.decode([id_]) for id_ in (each.token, each.preferred))
        lines.append(
            f"  prompt {each.prompt}, new token {each.position}: {token!r} is served, {preferred!r} preferred; "
            f"margin {each.margin:.2g}: " + ("a near-tie" if each.is_tie else "NOT explained by rounding")
        )
    if len(report.preferences) > MOST_SHOWN:
        lines.append(f"  and {len(report.preferences) - MOST_SHOWN} more")
    if report.control is not None and report.uniformity is not None:
        caught = "was not caught" if report.control.is_uniform else "was caught"
        lines.append(f"  sampled tokens: {report.uniformity.in_words}")
        lines.append(f"  control, another temperature: {caught}; {report.control.in_words}")
    if (drafting := report.drafting) is not None:
        lines += _of_drafting(drafting)
    return lines


def _of_drafting(drafting: DraftComparison) -> list[str]:
    def shares(of: tuple[float, ...]) -> str:
        return " ".join(f"{share:.2f}".removeprefix("0") for share in of)

    return [
        f"  {drafting.length:.2f} tokens a pass of the target over {drafting.rounds} rounds, "
        f"{drafting.expected_length:.2f} going by the draft here; as many accepted in {drafting.equal:.0%} of them",
        f"  accepted by position: {shares(drafting.by_position)} there, {shares(drafting.expected_by_position)} here",
        *(f"  note: {note}" for note in drafting.notes),
    ]
