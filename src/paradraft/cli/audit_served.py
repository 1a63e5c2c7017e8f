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
    from paradraft.audit.server.draft_causes import Drafting, DraftModel
    from paradraft.audit.server.endpoint import Endpoint
    from paradraft.audit.server.served import ServedReport

SERVED_NAME = "target"
"""What an engine that is started here calls its model."""
MOST_SHOWN = 20
"""Of the places where the reference prefers another token."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What both audits are asked.

    Args:
        target: the model whose answers are right.
        prompts: a file of them; None for the pocket family's.
        num_prompts: how many of them; None for `options.FEW`, or for all where there are fewer.
        seeds: sampled answers of each.
        max_new_tokens: most tokens of an answer.
        sampling: how answers are chosen.
        runtime: of the models that are loaded here.
    """

    target: str
    prompts: Path | None
    num_prompts: int | None
    seeds: int
    max_new_tokens: int
    sampling: Sampling
    runtime: Runtime


@dataclass(frozen=True, kw_only=True)
class Given:
    """Which server is audited, and what it is compared with.

    Args:
        draft: the folder of the model that it drafts with; None does not look at how it drafts.
        k: tokens that it drafts per round.
        is_k_given: whether that is known; else it is at most these, and as many as are accepted at once.
        endpoint: its address; None starts an engine.
        model: the name that it knows the target by.
        api_key_env: the variable of the environment that has its key.
        engine: what is started; None where there is an address.
        vllm_python: the Python of vLLM's environment; None for the one of `make vllm`.
        reference_endpoint: the address of another server whose answers it must give; None loads the target here.
        reference_model: the name that this one knows the target by; None for that of `model`.
        reference_api_key_env: the variable that has its key.
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


def audit_served(asked: Asked, given: Given) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Audits a server: its report in words and in plain values, and its settings.

    Raises:
        ValueError: a setting is wrong, or a server does not answer as it must.
    """
    from paradraft.data.prompts import first_prompts
    from paradraft.text.generation_config import end_ids

    temperature = asked.sampling.temperature or 1.0
    if given.reference_endpoint is not None and asked.seeds and temperature != 1.0:
        raise ValueError(
            f"--temperature {temperature:g}: a reference server tells probabilities at temperature 1, leave it out, or "
            "compare with the target's weights here"
        )
    records = first_prompts(asked.prompts or pocket_folder("prompts.jsonl"), asked.num_prompts, options.FEW)
    asks = [record["prompt"] if "prompt" in record else record["messages"] for record in records]
    folder = locate(asked.target, "target")
    tokenizer = tokenizer_for(folder, asked.runtime.tokenizer)
    ends = frozenset(end_ids(load_generation_config(folder), asked.target))
    rows = load_config(folder).get_text_config().vocab_size
    draft = None if given.draft is None else _draft_model(given, asked.runtime, tokenizer, ends)
    with console(stderr=True).status("preparing") as status, _address(given, asked, status.update) as (url, model):
        found = _asked(
            _endpoint(url, model, given.api_key_env, "--api-key-env", tokenizer, ends, rows), asked, given, asks, draft,
            status.update,
        )  # fmt: skip
    settings = {key: value for key, value in asdict(given).items() if value is not None}
    settings = (
        settings
        | {"num_prompts": len(asks)}
        | ({} if given.vllm_python is None else {"vllm_python": str(given.vllm_python)})
    )
    return findings(found, tokenizer), found.as_json(), settings


@contextmanager
def _address(given: Given, asked: Asked, report: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """Where the server is, and the name of its model."""
    if given.endpoint is not None and given.model is not None:
        yield given.endpoint, given.model
        return
    from paradraft.serve.address import bound, url_of

    assert given.draft is not None
    if installed_python(given.vllm_python) is None:
        raise ValueError(NOT_INSTALLED)
    folder, draft = locate(asked.target, "target"), locate(given.draft, "pard")
    is_parallel = declared_mask_id(load_config(draft)) is not None
    speculation = Speculation(drafter="pard" if is_parallel else "autoregressive", draft=draft, k=given.k)
    speculative = speculative_config(speculation, folder)
    with closing(bound("127.0.0.1", 0)) as free:
        url = url_of(free)
    settings = {
        "--host": "127.0.0.1", "--port": url.rpartition(":")[2], "--served-model-name": SERVED_NAME,
        "--dtype": asked.runtime.dtype, "--max-num-seqs": 4,
    }  # fmt: skip
    server = VllmServer(
        python=given.vllm_python or DEFAULT_PYTHON, target=folder, speculative=speculative, options=settings, eager=True
    )
    name = server.check(asked.runtime.device)
    report(f"starting {name}")
    with server.running(url):
        yield f"{url}/v1", SERVED_NAME


def _asked(
    endpoint: Endpoint,
    asked: Asked,
    given: Given,
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
    if given.reference_endpoint is not None:
        model = given.reference_model or endpoint.model
        option = "--reference-api-key-env"
        other = _endpoint(
            given.reference_endpoint,
            model,
            given.reference_api_key_env,
            option,
            endpoint.tokenizer,
            endpoint.end_ids,
            endpoint.rows,
        )
        reference = ServerReference(endpoint=other)
    else:
        report("loading the target, which the answers are compared with")
        target = load_target(asked.target, asked.runtime)
        rows = [expected_ids(prompt, endpoint.tokenizer) for prompt in prompts]
        requests_of(target, rows, asked.max_new_tokens, GREEDY)  # raises ValueError
        reference = ModelReference(target.lm)
    return audit_endpoint(
        endpoint, reference, prompts, samples=asked.seeds, max_new_tokens=asked.max_new_tokens,
        temperature=asked.sampling.temperature or 1.0, seed=asked.sampling.seed, draft=draft,
        draft_tokenizer=None if given.draft is None else load_tokenizer(locate(given.draft, "pard")), report=report,
    )  # fmt: skip


def _endpoint(
    url: str,
    model: str,
    key_env: str | None,
    option: str,
    tokenizer: PreTrainedTokenizerBase,
    ends: frozenset[int],
    rows: int,
) -> Endpoint:
    """A server that answers."""
    from paradraft.audit.server.endpoint import Endpoint

    key = options.key_in(key_env, option)
    found = Endpoint(url=url, model=model, tokenizer=tokenizer, end_ids=ends, rows=rows, api_key=key)
    found.check()
    return found


def _draft_model(
    given: Given, runtime: Runtime, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]
) -> DraftModel:
    """What a server drafts with, loaded here.

    Raises:
        ValueError: there is no such model, or it reads the states of the target.
    """
    from paradraft.audit.server.draft_causes import DraftModel, special_ids
    from paradraft.drafters.parts.draft_loading import draft_runtime
    from paradraft.formats.head import is_head
    from paradraft.formats.pard import RANK, TRAINED_LENGTH, mask_token_id
    from paradraft.sources.loading import load_model
    from paradraft.text.vocabulary import of_one_family, used_rows

    assert given.draft is not None
    folder = locate(given.draft, "pard")
    if is_head(folder):
        raise ValueError(f"{given.draft!r} reads its target's states, and what it drafts is not compared: leave it out")
    config = load_config(folder)
    if hasattr(config, RANK):
        raise ValueError(
            f"{given.draft!r} has a head that engines do not read: name the folder that `paradraft export` has written"
        )
    if not of_one_family(tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()):
        raise ValueError(f"{given.draft!r} has another vocabulary than the target: no engine drafts with it")
    mask_id = None if declared_mask_id(config) is None else mask_token_id(config, given.draft)
    return DraftModel(
        model=load_model(folder, draft_runtime(folder, runtime)), k=given.k, mask_id=mask_id,
        known_ids=used_rows(tokenizer), special=special_ids(tokenizer, ends),
        training_rows=getattr(config, TRAINED_LENGTH, None),
        is_k_known=given.is_k_given or given.engine is not None,
    )  # fmt: skip


def findings(report: ServedReport, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """An audit in words, a line each."""
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
        token, preferred = (tokenizer.decode([one]) for one in (each.token, each.preferred))
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


def _of_drafting(drafting: Drafting) -> list[str]:
    def shares(of: tuple[float, ...]) -> str:
        return " ".join(f"{share:.2f}".removeprefix("0") for share in of)

    return [
        f"  {drafting.length:.2f} tokens a pass of the target over {drafting.rounds} rounds, "
        f"{drafting.expected_length:.2f} going by the draft here; as many accepted in {drafting.equal:.0%} of them",
        f"  accepted by position: {shares(drafting.by_position)} there, {shares(drafting.expected_by_position)} here",
        *(f"  note: {note}" for note in drafting.notes),
    ]
