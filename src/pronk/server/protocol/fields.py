"""Fields that other servers have and pronk does not: one table of what happens to each.

Four rules decide about a field that a request has and pronk does not implement:

1. A field that **changes the answer** is refused, and the error names the field to use instead. A name that means the
   same as one of pronk's fields is read as that field.
2. A field that **asks for nothing here** is accepted: storage, caching, telemetry, routing, scheduling.
3. A **hint** (effort, verbosity, thinking) becomes the nearest that the model has, or is accepted.
4. A **neutral value**, such as null, is the same as no field.

An unknown option is refused if its name is like that of a field, which it may be by a typing error; if its name has a
word such as ``stop`` or ``schema``; or if its value is a number that is not neutral, as that of every sampler is. Other
unknown options are accepted: in practice they choose a machine, a record or a view. Unknown fields of messages, items
and tools only describe what the client has, and are accepted, too.

The names of accepted and renamed fields are reported (``RequestBody.ignored``), and the server sends the report in the
header ``X-Pronk-Ignored``.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote

from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class Accepted:
    """Treatment of a field that asks for nothing here, or is a hint that no model follows."""


@dataclass(frozen=True)
class Renamed:
    """Treatment of another name for the field ``name``."""

    name: str


@dataclass(frozen=True)
class Refused:
    """Treatment of a field that changes the answer.

    It is refused, unless its value is empty or one of ``neutral``.
    """

    neutral: tuple[Any, ...] = ()
    advice: str = "leave the field out"


@dataclass(frozen=True)
class Envelope:
    """Treatment of an object whose fields are fields of the request."""


Treatment = Accepted | Renamed | Refused | Envelope

IGNORED_HEADER = "X-Pronk-Ignored"
_MAX_HEADER = 1000  # maximum characters of the header's value
# Characters of a path that stand for themselves in the header; a comma separates paths.
_HEADER_CHARACTERS = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in ",%")
# Values that ask for nothing in any field, unless the field has a row in the table.
_EMPTY: tuple[Any, ...] = (False, "", [], {}, 0, -1)
# Limits on hostile bodies: comparing names takes 0.1 ms each, and a report with many names is of no use.
_MAX_OPTIONS = 512
_MAX_REPORTED = 32  # names of one object
_INDEX = re.compile(r"\[\d+\]")
# Names of fields for records, caches and traces, whose spelling differs from client to client.
_FOR_RECORDS = re.compile(r"cache|session|trace|tracing|telemetry|metadata|request_id|user_id|client_|^x[-_]|^_")


# Words in names of options that change the answer, whatever their values.
_CHANGES_ANSWER = re.compile(
    r"stop|ban|bad_words|prompt|instruction|system|schema|json|format|grammar|sampl|generation|param|penalt|token|tool"
    r"|function|prefix|suffix|history|logprob|greedy|beam"
)


def _accepted(names: str) -> dict[str, Treatment]:
    return dict.fromkeys(names.split(), Accepted())


def _refused(*neutral: Any, advice: str = "leave the field out", names: str) -> dict[str, Treatment]:
    return dict.fromkeys(names.split(), Refused(neutral, advice))


# Options of every request for text.
_TEXT: dict[str, Treatment] = {
    # Records, caches, billing, and the choice among machines, slots or providers.
    **_accepted("user safety_identifier metadata store service_tier keep_alive ttl preset debug verbose"),
    **_accepted("id_slot slot_id n_cache_reuse usage extra_headers tags caching guardrails drop_params"),
    **_accepted("provider transforms route models model_key fallbacks timeout num_retries max_retries"),
    **_accepted("custom_llm_provider api_base allowed_openai_params kv_transfer_params vllm_xargs rid"),
    **_accepted("num_ctx num_keep num_batch num_thread num_gpu n_threads t_max_predict_ms t_max_prompt_ms"),
    **_accepted("use_mmap use_mlock api_key base_url organization request_timeout max_budget mock_response"),
    **_accepted("data_parallel_rank stream_include_usage stream_continuous_usage_stats user_name char_name"),
    **_accepted("chat_id background_tasks features variables tool_ids tool_servers files filter_ids"),
    **_accepted("parent_id model_item title id intent intent_threshold state snippy copilot_thread_id"),
    **_accepted("inference_geo speed betas anthropic_beta anthropic_version diagnostics billing_policy"),
    **_accepted("moderation safety_settings safe_prompt sensitive_word_check deferred"),
    # Details of the reply and of its stream that pronk does not have.
    **_accepted("timings_per_token return_progress response_fields stream_obfuscation stream_interval"),
    **_accepted("sse_ping_interval reasoning_control backend_sampling return_hidden_states tool_stream"),
    **_accepted("incremental_output result_format detokenize return_prompt_text return_token_ids"),
    **_accepted("return_tokens return_tokens_as_token_ids include_reasoning n_indent chat_format"),
    # Hints: pronk drafts by itself, its texts do not depend on drafts, and no model has a verbosity.
    **_accepted("prediction draft_model speculative num_draft_tokens verbosity plugins"),
    # Searches that the server cannot make: the request asks for an answer all the same.
    **_accepted("web_search_options enable_search search_options search_parameters"),
    # Other names of pronk's fields.
    "repeat_penalty": Renamed("repetition_penalty"),
    "rep_pen": Renamed("repetition_penalty"),
    "n_predict": Renamed("max_tokens"),
    "num_predict": Renamed("max_tokens"),
    "max_new_tokens": Renamed("max_tokens"),
    "max_length": Renamed("max_tokens"),
    "random_seed": Renamed("seed"),
    "sampler_seed": Renamed("seed"),
    "stop_sequences": Renamed("stop"),
    "stopping_strings": Renamed("stop"),
    "n_cmpl": Renamed("n"),
    "thinking_token_budget": Renamed("thinking_budget"),
    "reasoning_budget": Renamed("thinking_budget"),
    "regex": Renamed("guided_regex"),
    # Objects whose fields are options of the request.
    "options": Envelope(),
    "extra_body": Envelope(),
    # Samplers that pronk does not have, and the values that turn them off.
    **_refused(1, names="typical_p typ_p typical tfs tfs_z length_penalty", advice="use top_p or min_p"),
    **_refused(1, names="guidance_scale"),
    **_refused(
        0, names="penalty_alpha nsigma mirostat mirostat_mode top_a xtc_probability dry_multiplier", advice="use min_p"
    ),
    **_refused(0, names="dynatemp_range smoothing_factor epsilon_cutoff eta_cutoff", advice="use min_p"),
    **_refused(0, -1, names="top_n_sigma adaptive_target", advice="use min_p"),
    # Parameters of these samplers, which are off.
    **_accepted("mirostat_tau mirostat_eta xtc_threshold dynatemp_exponent smoothing_curve adaptive_decay"),
    **_accepted("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers temperature_last"),
    # The order of samplers and how far back penalties look: only with several of them at a time.
    **_accepted("samplers sampler_seq sampler_order sampler_priority penalize_nl repeat_last_n min_keep"),
    **_accepted("rep_pen_range repetition_penalty_range truncation_length"),
    **_refused(True, names="do_sample", advice="use temperature: 0"),
    **_refused(1, names="use_beam_search num_beams best_of", advice="use n"),
    **_refused(names="early_stopping include_stop_str_in_output"),
    **_refused(True, names="skip_special_tokens spaces_between_special_tokens add_special_tokens"),
    **_refused(True, names="add_bos_token"),
    **_refused(names="ban_eos_token", advice="use ignore_eos"),
    **_refused(["text"], names="modalities", advice="the model answers with text"),
    **_refused(names="no_stop_trim stop_regex", advice="use stop"),
    **_refused(names="allowed_token_ids", advice="use logit_bias or guided_choice"),
    **_refused(names="suppress_tokens begin_suppress_tokens bad_words_ids", advice="use logit_bias"),
    **_refused(-1, 0, names="truncate_prompt_tokens n_keep n_discard", advice="send a shorter prompt"),
    **_refused(0, names="prompt_logprobs n_probs", advice="use logprobs, with echo for those of the prompt"),
    **_refused(names="post_sampling_probs logprob_token_ids", advice="use logprobs"),
    **_refused(names="lora lora_adapter lora_path adapters", advice="name the adapter in the field model"),
    **_refused(names="images image audio mm_processor_kwargs", advice="send text only"),
    **_refused(names="documents", advice="write the documents into a message"),
    **_refused(names="logits_processors custom_logit_processor", advice="use logit_bias or bad_words"),
    **_refused(names="prompt_embeds", advice="send the prompt as text"),
    # Structured output: pronk has one backend, and writes JSON like Python's json.dumps.
    **_accepted("guided_decoding_backend"),
    **_refused(names="guided_whitespace_pattern", advice="JSON is written as by Python's json.dumps"),
    **_refused(names="grammar ebnf", advice="use guided_grammar, in llguidance's dialect of Lark"),
    **_refused(names="chat_template", advice="the server uses the model's template"),
}

# Options of `/v1/chat/completions`.
_CHAT: dict[str, Treatment] = {
    **_accepted(
        "separate_reasoning function_calling add_special_tokens stream_reasoning reasoning_split reasoning_format"
    ),
    **_accepted("parse_tool_calls thinking_forced_open max_tool_calls raw prompt_mode"),
    **_refused(names="functions", advice="use tools"),
    **_refused("none", "auto", names="function_call", advice="use tool_choice"),
    **_refused(names="echo", advice="use /v1/completions"),
    **_refused(names="template system context", advice="send messages"),
    **_refused(names="prompt", advice="send messages, or use /v1/completions"),
}

# Options of `/v1/completions`.
_COMPLETIONS: dict[str, Treatment] = {
    **_refused(names="suffix template system context raw", advice="write the whole text into prompt"),
    **_refused(names="messages", advice="use /v1/chat/completions"),
    **_refused(names="tools", advice="use /v1/chat/completions"),
}

# Options of `/v1/responses`.
_RESPONSES: dict[str, Treatment] = {
    **_accepted("client_metadata truncation max_tool_calls context_management background_options"),
    **_refused({"context_compression": "auto"}, names="image", advice="send text only"),
    **_accepted("access_programs enable_response_messages previous_input_messages"),
    **_refused(names="background", advice="read the stream instead"),
    **_refused(names="previous_response_id conversation", advice="send the whole conversation in input"),
    **_refused(names="prompt", advice="send instructions and input"),
    **_refused(names="messages", advice="use input"),
    **_refused(names="response_format grammar ebnf json_schema format", advice="use text.format"),
    "max_tokens": Renamed("max_output_tokens"),
    "max_completion_tokens": Renamed("max_output_tokens"),
    "n_predict": Renamed("max_output_tokens"),
    "num_predict": Renamed("max_output_tokens"),
    "max_new_tokens": Renamed("max_output_tokens"),
}

# Options of `/v1/messages`.
_MESSAGES: dict[str, Treatment] = {
    # Edits of a context that is too long: without them the model reads the whole context.
    **_accepted("context_management compaction cache_edits"),
    # Tools of other servers, which the answer cannot call.
    **_accepted("mcp_servers container"),
    **_accepted("fallback_credit_token user_profile_id"),
    **_refused(names="thread", advice="send the whole conversation in messages"),
    **_refused(names="response_format grammar ebnf json_schema format", advice="use output_config.format"),
    "max_output_tokens": Renamed("max_tokens"),
    "max_completion_tokens": Renamed("max_tokens"),
    "stop": Renamed("stop_sequences"),
}

# Fields of messages. Thoughts have several names.
_MESSAGE: dict[str, Treatment] = {
    **_refused(names="images audio", advice="send text only"),
    **_refused(names="function_call", advice="use tool_calls"),
    "reasoning": Renamed("reasoning_content"),
    "reasoning_text": Renamed("reasoning_content"),
    "thinking": Renamed("reasoning_content"),
    "partial": Renamed("prefix"),
}

# Options of vLLM's `structured_outputs`.
_STRUCTURED_OUTPUTS: dict[str, Treatment] = {
    **_accepted("disable_fallback"),
    **_refused(names="disable_additional_properties", advice="close the objects in the schema"),
    **_refused(True, names="disable_any_whitespace", advice="JSON is written as by Python's json.dumps"),
    **_refused(names="structural_tag whitespace_pattern", advice="use a grammar"),
}

# Options of `/v1/embeddings`, which has few.
_EMBEDDINGS: dict[str, Treatment] = {
    **_accepted("user metadata input_type task truncate late_chunking priority"),
    **_accepted("embedding_type embed_dtype embd_normalize keep_alive endianness mm_processor_kwargs"),
    **_refused(True, names="add_special_tokens"),
    **_refused(-1, names="truncate_prompt_tokens", advice="send shorter texts"),
    "normalized": Renamed("normalize"),
    "prompt": Renamed("input"),
    "options": Accepted(),
}

# Options of `/tokenize`: those of llama.cpp's server.
_TOKENIZE: dict[str, Treatment] = {
    **_accepted("return_token_strs with_pieces parse_special"),
    "content": Renamed("prompt"),
    "add_special": Renamed("add_special_tokens"),
}

# The table by place: an object of a request, or a route.
TABLE: Mapping[str, dict[str, Treatment]] = {
    "text": _TEXT,
    "chat": _CHAT,
    "completions": _COMPLETIONS,
    "responses": _RESPONSES,
    "messages": _MESSAGES,
    "message": _MESSAGE,
    "structured_outputs": _STRUCTURED_OUTPUTS,
    "embeddings": _EMBEDDINGS,
    "tokenize": _TOKENIZE,
}

# Values of pronk's own fields that other servers use for the default.
DEFAULT_VALUES: Mapping[str, Collection[Any]] = {
    "thinking_budget": (-1,),
    "seed": (-1,),
    "logprobs": (False,),
    "logit_bias": ([],),
    "tool_choice": ("",),
    "reasoning_effort": ("",),
}


@dataclass
class Fields:
    """Fields of an object that pronk implements, and the names of ignored and renamed ones."""

    known: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def read_fields(given: Mapping[str, Any], known: Collection[str], places: Sequence[str], *, is_record: bool) -> Fields:
    """Sort the fields of an object by the rules of this module.

    Args:
        given: the object.
        known: names of the fields that pronk implements in this object.
        places: parts of the table that apply; the last one that has a field decides.
        is_record: whether the object describes something, so that unknown fields are ignored.

    Raises:
        PydanticCustomError: a field changes the answer, or is an unknown option.
    """
    if not is_record and len(given) > _MAX_OPTIONS:
        message = f"expected at most {_MAX_OPTIONS} fields, found {len(given)}; leave some out"
        raise PydanticCustomError("too_many_fields", "{message}", {"message": message})
    rows: ChainMap[str, Treatment] = ChainMap(*(TABLE[place] for place in reversed(places)))
    fields = Fields()
    for name, value in given.items():
        if value is None:
            continue
        if name not in known:
            row = rows.get(name) or _default_treatment(name, value, known, is_record=is_record)
            _treat(fields, name, value, row, given=given, known=known, places=places, is_record=is_record)
        elif not _is_among(value, DEFAULT_VALUES.get(name, ())):
            fields.known[name] = value
    if (num_left := len(fields.ignored) - _MAX_REPORTED) > 0:
        fields.ignored[_MAX_REPORTED:] = [f"and {num_left} more"]
    return fields


def _treat(
    fields: Fields,
    name: str,
    value: Any,
    row: Treatment | None,
    *,
    given: Mapping[str, Any],
    known: Collection[str],
    places: Sequence[str],
    is_record: bool,
) -> None:
    """Add a field that pronk does not have to ``fields``, as its row of the table says."""
    match row:
        case Renamed(target) if target in known:
            _rename(fields, name, value, target, given, is_record=is_record)
        case Accepted():
            fields.ignored.append(name)
        case Refused():
            _refuse_unless_neutral(name, value, row)
        case Envelope() if isinstance(value, Mapping):
            _open(fields, name, value, given, known, places)
        case _:
            raise _unknown(name, known)


def _default_treatment(name: str, value: Any, known: Collection[str], *, is_record: bool) -> Treatment | None:
    """Return the treatment of a field that has no row; ``None`` for an option that may change the answer."""
    if is_record:
        return Accepted()
    if _near(name, known):
        return None
    if _FOR_RECORDS.search(name):
        return Accepted()
    if _is_among(value, _EMPTY):
        return Refused()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number or _CHANGES_ANSWER.search(name) else Accepted()


def _near(name: str, known: Collection[str]) -> str | None:
    return next(iter(get_close_matches(name, known, 1, cutoff=0.8)), None)


def _open(
    fields: Fields,
    name: str,
    value: Mapping[str, Any],
    given: Mapping[str, Any],
    known: Collection[str],
    places: Sequence[str],
) -> None:
    """Read the fields of an envelope; fields of the request itself come first."""
    nested = {key for key in value if any(isinstance(TABLE[place].get(key), Envelope) for place in places)}
    options = {key: each for key, each in value.items() if key not in nested}
    inner = read_fields(options, known, places, is_record=False)
    twice = [key for key in inner.known if given.get(key) is not None and given[key] != inner.known[key]]
    fields.known = inner.known | fields.known
    fields.ignored += [f"{name}.{each}" for each in [*inner.ignored, *nested, *twice]]


def _rename(fields: Fields, name: str, value: Any, target: str, given: Mapping[str, Any], *, is_record: bool) -> None:
    """Read ``value`` as the field ``target``, unless the object has that field, too."""
    read = given[target] if given.get(target) is not None else fields.known.get(target)
    if read is None:
        if not _is_among(value, DEFAULT_VALUES.get(target, ())):
            fields.known[target] = value
        fields.ignored.append(f"{name} (as {target})")
    elif is_record or value in (read, -1):  # -1 is no limit
        fields.ignored.append(name)
    else:
        raise _unsupported(name, f"expected the value of {target}, which means the same", value, "leave one out")


def _refuse_unless_neutral(name: str, value: Any, row: Refused) -> None:
    # False is no neutral value of a switch that is on by default.
    # Numbers are none of a sampler that another number turns off.
    empty = [each for each in _EMPTY if not row.neutral or each in ("", [], {}) or each is False]
    neutral = row.neutral if _is_among(True, row.neutral) else (*row.neutral, *empty)
    if _is_among(value, neutral):
        return
    shown = " or ".join(json.dumps(each) for each in row.neutral)
    raise _unsupported(name, f"expected {shown or 'no such field'}", value, row.advice)


def _is_among(value: Any, values: Collection[Any]) -> bool:
    """Return whether a JSON value is among others; ``False`` and 0 differ, and so do ``True`` and 1."""
    return any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in values)


def _unsupported(name: str, expected: str, value: Any, advice: str) -> PydanticCustomError:
    kind = "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else None
    found = kind or f"{json.dumps(value):.40}"
    message = f"{expected}, found {found}; other values are not supported, {advice}"
    return PydanticCustomError("unsupported", "{message}", {"message": message, "field": _encodable(name)})


def _unknown(name: str, known: Collection[str]) -> PydanticCustomError:
    near = _near(name, known)
    advice = f"use {near}" if near else "remove it"
    message = f"expected only known fields, found an unknown one; {advice}"
    return PydanticCustomError("unknown_field", "{message}", {"message": message, "field": _encodable(name)})


def _encodable(name: str) -> str:
    """Return a name without halves of surrogate pairs, which no response can have."""
    return name.encode("utf-8", "backslashreplace").decode()


def summarize(paths: Iterable[str]) -> list[str]:
    """Return distinct paths; indices that differ become ``[]``: ``messages[0].id``, ``messages[1].id``."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_INDEX.sub("[]", path), []).append(path)
    return [paths[0] if len(paths) == 1 else general for general, paths in groups.items()]


def report_header(paths: Sequence[str]) -> str:
    """Return the value of the header ``X-Pronk-Ignored``: paths with commas between them, percent-encoded."""
    shown, length = list[str](), 0
    for path in paths:
        text = quote(path, safe=_HEADER_CHARACTERS, errors="backslashreplace")
        length += len(text) + len(", ")
        if length > _MAX_HEADER:
            return ", ".join([*shown, f"and {len(paths) - len(shown)} more"])
        shown.append(text)
    return ", ".join(shown)
