"""`paradraft audit --endpoint`: the audit of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from paradraft.cli import options
from paradraft.cli.terminal import console
from paradraft.engine.speculation import Speculation
from paradraft.export.handoff import VLLM
from paradraft.export.vllm import DEFAULT_PYTHON, NOT_INSTALLED, installed_python, speculative_config
from paradraft.formats.pard import declared_mask_id
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.serve.vllm import VllmServer
from paradraft.sources.loading import (
    load_config,
    load_generation_config,
    load_tokenizer,
    locate,
    pocket_folder,
    tokenizer_for,
)
from paradraft.text.chat_template import Message
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.audit.server.draft_causes import DraftComparison, DraftModel
    from paradraft.audit.server.endpoint import AuditedServer
    from paradraft.audit.server.served import ServedReport

SERVED_NAME = "target"
"""Model name of an engine that is started here."""
MOST_SHOWN = 20
"""Most positions listed at which the reference prefers another token."""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """Settings of both audits.

    Args:
        prompts: a prompt file; None for the pocket family's.
        num_prompts: None for `options.FEW`, or all if there are fewer.
        seeds: sampled answers per prompt.
    """

    target: str
    prompts: Path | None
    num_prompts: int | None
    seeds: int
    max_new_tokens: int
    sampling: Sampling
    runtime: Runtime


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The audited server and its reference.

    Args:
        draft: folder of the server's draft model; None does not audit drafting.
        is_k_given: whether the server drafts k tokens; else at most k, and the most accepted in a round count.
        endpoint: URL of the server, up to `/v1`; None starts an engine.
        model: name of the target on the server.
        reference_endpoint: URL of a server to compare with; None loads the target here.
        reference_model: name of the target on the reference; None for `model`.
    """

    draft: str | None
    k: int
    is_k_given: bool
    endpoint: str | None
    model: str | None
    api_key_env: str | None
    engine: str | None
    vllm_python: Path | None
    reference_endpoint: str | None
    reference_model: str | None
    reference_api_key_env: str | None

    def __post_init__(self) -> None:
        if self.endpoint is not None and self.engine is not None:
            raise ValueError("give either --endpoint or --engine")
        if self.engine not in (None, VLLM):
            raise ValueError(f"--engine {self.engine}: use vllm, or name the address of a server by --endpoint")
        if self.endpoint is not None and self.model is None:
            raise ValueError("--endpoint: name the model that it serves by --model")
        if self.engine is not None and (self.model or self.api_key_env):
            raise ValueError("--model and --api-key-env are for --endpoint: what is started here needs neither")
        if self.engine is not None and self.draft is None:
            raise ValueError("--engine: name the folder that it drafts with, as in `paradraft audit OUT --engine vllm`")
        is_same = self.reference_endpoint == self.endpoint and self.reference_model in (None, self.model)
        if self.endpoint is not None and is_same:
            raise ValueError(f"--reference-endpoint {self.endpoint}: a server cannot be its own reference")
        if self.reference_endpoint is None and (self.reference_model or self.reference_api_key_env):
            raise ValueError("--reference-model and --reference-api-key-env need --reference-endpoint")


def audit_served(common: AuditSettings, served: ServerSettings) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Audits a server; returns the report as lines and as JSON, and the settings."""
    from paradraft.data.prompts import first_prompts
    from paradraft.text.generation_config import end_ids

    temperature = common.sampling.temperature or 1.0
    if served.reference_endpoint is not None and common.seeds and temperature != 1.0:
        raise ValueError(
            f"--temperature {temperature:g}: a reference server tells probabilities at temperature 1, leave it out, or "
            "compare with the target's weights here"
        )
    records = first_prompts(common.prompts or pocket_folder("prompts.jsonl"), common.num_prompts, options.FEW)
    questions = [record["prompt"] if "prompt" in record else record["messages"] for record in records]
    folder = locate(common.target, "target")
    tokenizer = tokenizer_for(folder, common.runtime.tokenizer)
    ends = frozenset(end_ids(load_generation_config(folder), common.target))
    rows = load_config(folder).get_text_config().vocab_size
    draft = None if served.draft is None else _draft_model(served, common.runtime, tokenizer, ends)
    with console(stderr=True).status("preparing") as status, _address(served, common, status.update) as (url, model):
        report = _audited(
            _endpoint(url, model, served.api_key_env, "--api-key-env", tokenizer, ends, rows), common, served,
            questions, draft, status.update,
        )  # fmt: skip
    settings = {key: value for key, value in asdict(served).items() if value is not None}
    settings = (
        settings
        | {"num_prompts": len(questions)}
        | ({} if served.vllm_python is None else {"vllm_python": str(served.vllm_python)})
    )
    return findings(report, tokenizer), report.as_json(), settings


@contextmanager
def _address(served: ServerSettings, common: AuditSettings, report: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """URL of the server and its model name; starts an engine if there is no endpoint."""
    if served.endpoint is not None and served.model is not None:
        yield served.endpoint, served.model
        return
    from paradraft.serve.address import bound, url_of

    assert served.draft is not None
    if installed_python(served.vllm_python) is None:
        raise ValueError(NOT_INSTALLED)
    folder, draft = locate(common.target, "target"), locate(served.draft, "pard")
    is_parallel = declared_mask_id(load_config(draft)) is not None
    speculation = Speculation(drafter="pard" if is_parallel else "autoregressive", draft=draft, k=served.k)
    speculative = speculative_config(speculation, folder)
    with closing(bound("127.0.0.1", 0)) as free:
        url = url_of(free)
    settings = {
        "--host": "127.0.0.1", "--port": url.rpartition(":")[2], "--served-model-name": SERVED_NAME,
        "--dtype": common.runtime.dtype, "--max-num-seqs": 4,
    }  # fmt: skip
    server = VllmServer(
        python=served.vllm_python or DEFAULT_PYTHON,
        target=folder,
        speculative=speculative,
        options=settings,
        eager=True,
    )
    name = server.check(common.runtime.device)
    report(f"starting {name}")
    with server.running(url):
        yield f"{url}/v1", SERVED_NAME


def _audited(
    endpoint: AuditedServer,
    common: AuditSettings,
    served: ServerSettings,
    prompts: list[str | list[Message]],
    draft: DraftModel | None,
    report: Callable[[str], None],
) -> ServedReport:
    from paradraft.audit.server.endpoint_audit import audit_endpoint
    from paradraft.audit.server.prompt_causes import expected_ids
    from paradraft.audit.server.tables import ModelReference, Reference, ServerReference
    from paradraft.engine.request import requests_of
    from paradraft.sampling_params import GREEDY
    from paradraft.sources.target_loading import load_target

    reference: Reference
    if served.reference_endpoint is not None:
        model = served.reference_model or endpoint.model
        option = "--reference-api-key-env"
        other = _endpoint(
            served.reference_endpoint,
            model,
            served.reference_api_key_env,
            option,
            endpoint.tokenizer,
            endpoint.end_ids,
            endpoint.rows,
        )
        reference = ServerReference(endpoint=other)
    else:
        report("loading the target, which the answers are compared with")
        target = load_target(common.target, common.runtime)
        rows = [expected_ids(prompt, endpoint.tokenizer) for prompt in prompts]
        requests_of(target, rows, common.max_new_tokens, GREEDY)  # raises ValueError
        reference = ModelReference(target.lm)
    return audit_endpoint(
        endpoint, reference, prompts, samples=common.seeds, max_new_tokens=common.max_new_tokens,
        temperature=common.sampling.temperature or 1.0, seed=common.sampling.seed, draft=draft,
        draft_tokenizer=None if served.draft is None else load_tokenizer(locate(served.draft, "pard")), report=report,
    )  # fmt: skip


def _endpoint(
    url: str,
    model: str,
    key_env: str | None,
    option: str,
    tokenizer: PreTrainedTokenizerBase,
    ends: frozenset[int],
    rows: int,
) -> AuditedServer:
    """Client of a server that answers."""
    from paradraft.audit.server.endpoint import AuditedServer

    key = options.key_in(key_env, option)
    endpoint = AuditedServer(url=url, model=model, tokenizer=tokenizer, end_ids=ends, rows=rows, api_key=key)
    endpoint.check()
    return endpoint


def _draft_model(
    served: ServerSettings, runtime: Runtime, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]
) -> DraftModel:
    """Loads the server's draft model; raises ValueError for a head that reads the target's hidden states."""
    from paradraft.audit.server.draft_causes import DraftModel, special_ids
    from paradraft.drafters.parts.draft_loading import draft_runtime
    from paradraft.formats.head import is_head
    from paradraft.formats.pard import RANK, TRAINED_LENGTH, mask_token_id
    from paradraft.sources.loading import load_model
    from paradraft.text.vocabulary import of_one_family, used_rows

    assert served.draft is not None
    folder = locate(served.draft, "pard")
    if is_head(folder):
        raise ValueError(
            f"{served.draft!r} reads its target's states, and what it drafts is not compared: leave it out"
        )
    config = load_config(folder)
    if hasattr(config, RANK):
        raise ValueError(
            f"{served.draft!r} has a head that engines do not read: name the folder that `paradraft export` has written"
        )
    if not of_one_family(tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()):
        raise ValueError(f"{served.draft!r} has another vocabulary than the target: no engine drafts with it")
    mask_id = None if declared_mask_id(config) is None else mask_token_id(config, served.draft)
    return DraftModel(
        model=load_model(folder, draft_runtime(folder, runtime)), k=served.k, mask_id=mask_id,
        known_ids=used_rows(tokenizer), special=special_ids(tokenizer, ends),
        training_rows=getattr(config, TRAINED_LENGTH, None),
        is_k_known=served.is_k_given or served.engine is not None,
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
