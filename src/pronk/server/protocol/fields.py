"""The table of fields of other servers that pronk does not implement, and their treatment.

Four rules decide about such a field in a request:

1. A field that **changes the answer** is refused, and the error names the field to use instead. A
   name that means the same as one of pronk's fields is read as that field.
2. A field that **asks for nothing here** is accepted: storage, caching, telemetry, routing,
  scheduling.
3. A **hint** (effort, verbosity, thinking) becomes the nearest one that the model has, or is
  accepted.
4. A **neutral value**, such as null or an empty list, is the same as no field.

Two fields that mean the same may have the same value; different values are refused.

An option that is not in the table for its route is treated by the first rule that applies:

1. An option whose name is almost that of a field of pronk is refused as a typing error.
2. An option in the table for another route is treated as on that route.
3. An option whose name has a word such as ``stop`` or ``schema`` is refused.
4. An option with a number that is not neutral is refused, because every sampler has one.
5. Any other option is accepted: in practice such options choose a machine, a record or a view.

Unknown fields of messages, items and tools only describe what the client has, and are accepted.

The names of accepted and renamed fields are reported (``RequestBody.ignored``), and the server
sends the report in the header ``X-Pronk-Ignored``.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, LiteralString
from urllib.parse import quote

from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class Accepted:
    """Treatment of a field that does not change the answer: the server ignores and reports it."""


@dataclass(frozen=True)
class Renamed:
    """Treatment of a field that is another name for the field ``name``."""

    name: str


@dataclass(frozen=True)
class Refused:
    """Treatment of a field that changes the answer: the request is refused.

    A field with an empty value, or one of ``neutral``, is the same as no field.
    """

    neutral: tuple[Any, ...] = ()
    advice: str = "leave the field out"  # last part of the error message


@dataclass(frozen=True)
class Envelope:
    """Treatment of an object whose fields are read as if they stood in the request itself."""


Treatment = Accepted | Renamed | Refused | Envelope

IGNORED_HEADER = "X-Pronk-Ignored"
_MAX_HEADER = 1000  # maximum number of characters of the header's value
# Characters that are not percent-encoded in the header: printable ASCII except the comma, which
# separates paths, and the percent sign.
_HEADER_CHARACTERS = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in ",%")
# Values that are the same as no field, for those of pronk's own fields that have a default.
EMPTY: tuple[Any, ...] = ("", [], {})
# Values that are the same as no field, for fields that pronk lacks: they switch a sampler or an
# option off, or are empty.
_EMPTY: tuple[Any, ...] = (False, "", [], {}, 0, -1)
# Limits on hostile bodies: a comparison of names takes 0.1 ms, and a report with many names is of
# no use.
_MAX_OPTIONS = 128  # maximum number of options of one request
_MAX_MISSPELT = 64  # maximum number of characters of a name that is compared with known names
_MAX_REPORTED = 32  # maximum number of names in the report about one object
_INDEX = re.compile(r"\[\d+\]")
# Words in names of options that only describe a request, its sender or its time. Clients invent
# options for their own records, so that the names differ from client to client, and some values are
# numbers.
_FOR_RECORDS = re.compile(
    r"cache|session|trace|tracing|telemetry|metadata|request_id|client_|^user_|^x[-_]|^_"
    r"|(^|_)(timestamp|time|deadline|date|created|updated|attempts?|retry|retries|version|revision"
    r"|turn|index)(_|$)"
)
# Words in names of options that change the answer, even if the value is a text or an object. The
# answer would be wrong without the option.
_CHANGES_ANSWER = re.compile(
    # words about where the text ends
    r"stop|ban|bad_words|until|terminator|^eos|^bos|max_words|limit|token"
    # words about what the model reads
    r"|prompt|instruction|system|tool|function|prefix|suffix|history|prefill|image|context|knowledge"
    # words about the form of the answer
    r"|schema|json|format|grammar|choices|enum|pattern|constraint|output_type|do_not|exclude"
    # words about how tokens are drawn
    r"|sampl|generation|param|penalt|greedy|beam|mirostat|^adapter|steering|vector"
    # words about what the reply reports
    r"|logprob"
)


def _accepted(names: str) -> dict[str, Treatment]:
    return dict.fromkeys(names.split(), Accepted())


def _refused(
    *neutral: Any, advice: str = "leave the field out", names: str
) -> dict[str, Treatment]:
    return dict.fromkeys(names.split(), Refused(neutral, advice))


# Options of every request for text.
_TEXT: dict[str, Treatment] = {
    # Options about records, caches and billing, and about the choice of a machine, slot or
    # provider.
    **_accepted(
        """
        user safety_identifier metadata store service_tier keep_alive ttl preset debug verbose
        id_slot slot_id n_cache_reuse usage extra_headers tags caching guardrails drop_params
        provider transforms route models model_key fallbacks timeout num_retries max_retries
        custom_llm_provider api_base allowed_openai_params kv_transfer_params vllm_xargs rid
        num_ctx num_keep num_batch num_thread num_gpu n_threads t_max_predict_ms t_max_prompt_ms
        max_context_length num_gqa main_gpu rope_frequency_base rope_frequency_scale
        use_mmap use_mlock api_key base_url organization request_timeout max_budget mock_response
        data_parallel_rank stream_include_usage stream_continuous_usage_stats user_name char_name
        chat_id background_tasks features variables tool_ids tool_servers files filter_ids
        parent_id model_item title id intent intent_threshold state snippy copilot_thread_id
        inference_geo speed betas anthropic_beta anthropic_version diagnostics billing_policy
        moderation safety_settings safe_prompt sensitive_word_check deferred
        """
    ),
    # Options about details of the reply and its stream that other servers have, and pronk does not.
    **_accepted(
        """
        timings_per_token return_progress response_fields stream_obfuscation stream_interval
        sse_ping_interval reasoning_control backend_sampling return_hidden_states tool_stream
        incremental_output result_format detokenize return_prompt_text return_token_ids
        return_tokens return_tokens_as_token_ids include_reasoning n_indent chat_format
        """
    ),
    # Hints about drafts, on which the text does not depend, and about verbosity, which no model
    # has.
    **_accepted("prediction draft_model speculative num_draft_tokens verbosity plugins"),
    # Searches that the server cannot make; the request asks for an answer all the same.
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
    "num_return_sequences": Renamed("n"),
    "min_new_tokens": Renamed("min_tokens"),
    "max_completion_tokens": Renamed("max_tokens"),
    "max_output_tokens": Renamed("max_tokens"),
    "thinking_token_budget": Renamed("thinking_budget"),
    "reasoning_budget": Renamed("thinking_budget"),
    "regex": Renamed("guided_regex"),
    # Objects whose fields are options of the request.
    "options": Envelope(),
    "extra_body": Envelope(),
    # Samplers that pronk does not have, and the values that turn them off.
    **_refused(
        1, names="typical_p typ_p typical tfs tfs_z length_penalty", advice="use top_p or min_p"
    ),
    **_refused(1, names="guidance_scale encoder_repetition_penalty rep_pen_slope"),
    **_refused(names="dynamic_temperature", advice="use temperature"),
    **_refused(1, names="dynatemp_low dynatemp_high", advice="use temperature"),
    **_refused(0, names="diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size skew"),
    **_refused(0, names="min_length", advice="use min_tokens"),
    **_refused(names="max_time", advice="use max_tokens"),
    **_refused(
        0,
        names="penalty_alpha nsigma mirostat mirostat_mode top_a xtc_probability dry_multiplier",
        advice="use min_p",
    ),
    **_refused(
        0, names="dynatemp_range smoothing_factor epsilon_cutoff eta_cutoff", advice="use min_p"
    ),
    **_refused(0, -1, names="top_n_sigma adaptive_target", advice="use min_p"),
    # Parameters of the samplers above. A request with such a sampler on is refused, so that its
    # parameters never change an answer.
    **_accepted(
        """
        mirostat_tau mirostat_eta xtc_threshold dynatemp_exponent smoothing_curve adaptive_decay
        dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers temperature_last
        """
    ),
    # Details of samplers and penalties, such as the order of samplers and the number of tokens that
    # a penalty looks back at. The server ignores and reports them.
    **_accepted(
        """
        samplers sampler_seq sampler_order sampler_priority penalize_nl repeat_last_n min_keep
        rep_pen_range repetition_penalty_range truncation_length
        """
    ),
    **_refused(1, names="use_beam_search num_beams num_beam_groups best_of", advice="use n"),
    **_refused(names="early_stopping include_stop_str_in_output"),
    **_refused(True, names="skip_special_tokens spaces_between_special_tokens add_special_tokens"),
    **_refused(True, names="add_bos_token add_generation_prompt"),
    **_refused(names="ban_eos_token", advice="use ignore_eos"),
    **_refused(["text"], names="modalities", advice="the model answers with text"),
    **_refused(names="no_stop_trim stop_regex until terminators", advice="use stop"),
    **_refused(names="choices enum", advice="use guided_choice"),
    **_refused(names="pattern constraint", advice="use guided_regex or guided_grammar"),
    **_refused(names="allowed_token_ids", advice="use logit_bias or guided_choice"),
    **_refused(
        names="suppress_tokens begin_suppress_tokens bad_words_ids", advice="use logit_bias"
    ),
    **_refused(
        -1, 0, names="truncate_prompt_tokens n_keep n_discard", advice="send a shorter prompt"
    ),
    **_refused(
        0, names="prompt_logprobs n_probs", advice="use logprobs, with echo for those of the prompt"
    ),
    **_refused(names="post_sampling_probs logprob_token_ids", advice="use logprobs"),
    **_refused(
        names="lora lora_adapter lora_path adapter adapters",
        advice="name the adapter in the field model",
    ),
    **_refused(names="images image image_url audio mm_processor_kwargs", advice="send text only"),
    **_refused(names="documents", advice="write the documents into a message"),
    **_refused(
        names="logits_processors custom_logit_processor", advice="use logit_bias or bad_words"
    ),
    **_refused(names="prompt_embeds", advice="send the prompt as text"),
    # Structured output: pronk has one backend, and writes JSON like Python's json.dumps.
    **_accepted("guided_decoding_backend"),
    **_refused(
        names="guided_whitespace_pattern", advice="JSON is written as by Python's json.dumps"
    ),
    **_refused(names="grammar ebnf", advice="use guided_grammar, in llguidance's dialect of Lark"),
    **_refused(names="chat_template", advice="the server uses the model's template"),
}

# Options of `/v1/chat/completions`.
_CHAT: dict[str, Treatment] = {
    **_accepted(
        """
        separate_reasoning function_calling add_special_tokens stream_reasoning reasoning_split
        reasoning_format parse_tool_calls thinking_forced_open max_tool_calls raw prompt_mode
        """
    ),
    **_refused(names="functions", advice="use tools"),
    **_refused("none", "auto", names="function_call", advice="use tool_choice"),
    **_refused(names="echo", advice="use /v1/completions"),
    **_refused(names="template system context", advice="send messages"),
    **_refused(names="prompt", advice="send messages, or use /v1/completions"),
    **_refused(names="input", advice="send messages, or use /v1/responses"),
}

# Options of `/v1/completions`.
_COMPLETIONS: dict[str, Treatment] = {
    **_refused(
        names="suffix template system context raw", advice="write the whole text into prompt"
    ),
    **_refused(names="messages", advice="use /v1/chat/completions"),
    **_refused(names="tools", advice="use /v1/chat/completions"),
    **_refused("auto", "none", names="tool_choice", advice="use /v1/chat/completions"),
    **_accepted("parallel_tool_calls"),
}

# Options of `/v1/responses`.
_RESPONSES: dict[str, Treatment] = {
    **_accepted(
        """
        client_metadata truncation max_tool_calls context_management background_options
        access_programs enable_response_messages previous_input_messages
        """
    ),
    **_refused({"context_compression": "auto"}, names="image", advice="send text only"),
    **_refused(names="background", advice="read the stream instead"),
    **_refused(
        names="previous_response_id conversation", advice="send the whole conversation in input"
    ),
    **_refused(names="prompt", advice="send instructions and input"),
    **_refused(names="messages", advice="use input"),
    **_refused(names="response_format structured_outputs", advice="use text.format"),
    **_refused(names="grammar ebnf json_schema format", advice="use text.format"),
    **_refused(
        names="guided_json guided_regex guided_choice guided_grammar", advice="use text.format"
    ),
    "max_tokens": Renamed("max_output_tokens"),
}

# Options of `/v1/messages`.
_ANTHROPIC: dict[str, Treatment] = {
    # Edits of a context that is too long: without them the model reads the whole context.
    **_accepted("context_management compaction cache_edits"),
    # Tools of other servers, which the answer cannot call.
    **_accepted("mcp_servers container"),
    **_accepted("fallback_credit_token user_profile_id"),
    **_refused(names="thread", advice="send the whole conversation in messages"),
    **_refused(names="response_format structured_outputs", advice="use output_config.format"),
    **_refused(names="grammar ebnf json_schema format", advice="use output_config.format"),
    **_refused(
        names="guided_json guided_regex guided_choice guided_grammar",
        advice="use output_config.format",
    ),
    "stop": Renamed("stop_sequences"),
}

# Fields of a message in a conversation. Each server has its own name for the thoughts of an earlier
# answer.
_TURN: dict[str, Treatment] = {
    **_refused(names="images audio", advice="send text only"),
    "reasoning": Renamed("reasoning_content"),
    "reasoning_text": Renamed("reasoning_content"),
    "thinking": Renamed("reasoning_content"),
    "partial": Renamed("prefix"),
}

# Fields of a function that the model may call.
_FUNCTION: dict[str, Treatment] = {
    "input_schema": Renamed("parameters"),
}

# Options of vLLM's `structured_outputs`.
_STRUCTURED_OUTPUTS: dict[str, Treatment] = {
    **_accepted("disable_fallback"),
    **_refused(names="disable_additional_properties", advice="close the objects in the schema"),
    **_refused(
        True, names="disable_any_whitespace", advice="JSON is written as by Python's json.dumps"
    ),
    **_refused(names="structural_tag whitespace_pattern", advice="use a grammar"),
}

# Options of `/v1/embeddings`.
_EMBEDDINGS: dict[str, Treatment] = {
    **_accepted(
        """
        user metadata input_type task truncate late_chunking priority embedding_type embed_dtype
        embd_normalize keep_alive endianness mm_processor_kwargs
        """
    ),
    # Options of generated text: an embedding generates none.
    **_accepted("temperature top_p top_k min_p seed stop max_tokens"),
    **_refused(True, names="add_special_tokens"),
    **_refused(-1, names="truncate_prompt_tokens", advice="send shorter texts"),
    "normalized": Renamed("normalize"),
    "prompt": Renamed("input"),
    "options": Accepted(),
}

# Options of `/tokenize` besides those of `/v1/chat/completions`: those of llama.cpp's server.
_TOKENIZE: dict[str, Treatment] = {
    **_accepted("return_token_strs with_pieces parse_special"),
    "content": Renamed("prompt"),
    "add_special": Renamed("add_special_tokens"),
}

# Options of `/v1/moderations`, a route of OpenAI's API.
_MODERATIONS: dict[str, Treatment] = {
    **_accepted("user metadata"),
    # Options of generated text: a moderation sets its own.
    **_accepted("temperature top_p top_k min_p seed stop max_tokens"),
}

# The table, in parts. A part is for a route or for an object in a request, which its key names;
# "text" is for all routes that generate text.
TABLE: Mapping[str, dict[str, Treatment]] = {
    "text": _TEXT,
    "chat": _CHAT,
    "completions": _COMPLETIONS,
    "responses": _RESPONSES,
    "messages": _ANTHROPIC,
    "message": _TURN,
    "function": _FUNCTION,
    "structured_outputs": _STRUCTURED_OUTPUTS,
    "embeddings": _EMBEDDINGS,
    "moderations": _MODERATIONS,
    "tokenize": _TOKENIZE,
}
# Parts of the table for objects in a request; the other parts are for the options of routes.
_OBJECTS = ("message", "function", "structured_outputs")
_OPTIONS: Sequence[Mapping[str, Treatment]] = [
    rows for place, rows in TABLE.items() if place not in _OBJECTS
]

# Values of pronk's own fields that clients of other servers send for "not set", such as seed -1.
# They are the same as no field.
NEUTRAL_VALUES: Mapping[str, Collection[Any]] = {
    "seed": (-1,),
    "logprobs": (False,),
}

Path = tuple[str, ...]  # names of the nested fields that lead from an object to a field in it


@dataclass(frozen=True)
class ObjectFields:
    """Fields that an object of a request may have.

    Attributes:
        known: names of the fields that pronk implements.
        optional: names of the fields in ``known`` that may be missing.
        meaningful: empty values that are not the same as no field, by the name of the field.
        rows: treatments of other fields, by name.
        is_record: whether the object only describes something, so that unknown fields are ignored.
    """

    known: Collection[str] = frozenset()
    optional: Collection[str] = frozenset()
    meaningful: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, Treatment] = field(default_factory=dict)
    is_record: bool = False

    def is_neutral(self, name: str, value: Any) -> bool:
        """Return whether a value of a known field is the same as no field."""
        if value is None or _is_among(value, NEUTRAL_VALUES.get(name, ())):
            return True
        means_something = name in self.meaningful and value == self.meaningful[name]
        return name in self.optional and _is_among(value, EMPTY) and not means_something

    def treatment(self, name: str, value: Any) -> Treatment | None:
        """Return the treatment of a field that pronk does not implement.

        Returns ``None`` for an unknown option that may change the answer.
        """
        row = self._row(name, self.rows)
        if row is not None or self.is_record:
            return row or Accepted()
        is_misspelt = len(name) <= _MAX_MISSPELT and _near(name, self.known) is not None
        return None if is_misspelt else self._foreign_treatment(name, value)

    def _foreign_treatment(self, name: str, value: Any) -> Treatment | None:
        """Return the treatment of an option that is not in the table for its own route."""
        for rows in _OPTIONS:
            if (row := self._row(name, rows)) is not None:
                return row
        if _FOR_RECORDS.search(name):
            return Accepted()
        if _is_among(value, _EMPTY):
            return Refused()
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number or _CHANGES_ANSWER.search(name) else Accepted()

    def _row(self, name: str, rows: Mapping[str, Treatment]) -> Treatment | None:
        """Return the treatment of a field in ``rows``, a part of the table, or ``None``.

        A new name may itself be renamed: if ``n_predict`` is ``max_tokens``, and ``max_tokens`` is
        ``max_output_tokens``, then ``n_predict`` is ``max_output_tokens``. If the last name is no
        field of the object, the result is ``None``.
        """
        row = rows.get(name)
        while isinstance(row, Renamed) and row.name not in self.known:
            row = self.rows.get(row.name)
        return row


def rows_of(places: Sequence[str]) -> Mapping[str, Treatment]:
    """Return the treatment of each field in the parts of the table that ``places`` names.

    If several parts have the same field, the last of them counts.
    """
    return ChainMap(*(TABLE[place] for place in reversed(places)))


@dataclass
class Fields:
    """The fields of an object of a request, sorted by the rules of this module.

    Attributes:
        known: values of the fields that pronk implements, by name.
        ignored: names of ignored and renamed fields, for the report.
        written: path of each field in ``known`` that the client wrote under another name.
    """

    known: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    written: dict[str, Path] = field(default_factory=dict)


def read_fields(given: Mapping[str, Any], about: ObjectFields, path: Path = ()) -> Fields:
    """Apply the rules of this module to the fields of an object.

    Args:
        given: the object.
        about: the fields that the object may have.
        path: names of the fields that lead to ``given``, if ``given`` is an object whose fields
            count as fields of the request (``Envelope``); empty for the request itself.

    Raises:
        PydanticCustomError: a field changes the answer, contradicts another one, or is an unknown
            option.
    """
    # Each option costs a search for a similar name.
    if not about.is_record and len(given) > _MAX_OPTIONS:
        message = f"expected at most {_MAX_OPTIONS} fields, found {len(given)}; leave some out"
        raise PydanticCustomError("too_many_fields", "{message}", {"message": message})
    reader = _FieldReader(given, about, path)
    for name, value in given.items():
        if name not in about.known:
            reader.treat(name, value)
        elif not about.is_neutral(name, value):
            reader.fields.known[name] = value
    ignored = reader.fields.ignored
    if (num_left := len(ignored) - _MAX_REPORTED) > 0:
        ignored[_MAX_REPORTED:] = [f"and {num_left} more"]
    return reader.fields


@dataclass
class _FieldReader:
    """Reader of the fields of an object that pronk does not implement."""

    given: Mapping[str, Any]
    about: ObjectFields
    path: Path
    fields: Fields = field(default_factory=Fields)

    def treat(self, name: str, value: Any) -> None:
        """Treat a field as the table says: store it in ``fields``, ignore it or refuse it."""
        if value is None:
            return
        match self.about.treatment(name, value):
            case Renamed(target):
                self._rename(name, value, target)
            case Accepted():
                self.fields.ignored.append(name)
            case Refused() as row:
                _refuse_unless_neutral((*self.path, name), value, row)
            case Envelope() if isinstance(value, Mapping):
                self._open(name, value)
            case _:
                raise _unknown((*self.path, name), self.about.known)

    def _rename(self, name: str, value: Any, target: str) -> None:
        """Read a value as the field ``target``, unless the object already has that field."""
        other = self._value(target)
        if other is None:
            if not self.about.is_neutral(target, value):
                self.fields.known[target] = value
                self.fields.written[target] = (*self.path, name)
            self.fields.ignored.append(f"{name} (as {target})")
        # The value -1 means "no limit", and contradicts no other value.
        elif self.about.is_record or value == -1 or _is_same(value, other):
            self.fields.ignored.append(name)
        else:
            raise self._contradiction((*self.path, name), target, value)

    def _open(self, name: str, value: Mapping[str, Any]) -> None:
        """Read the fields of ``value``, an envelope, as fields of the object that contains it.

        Envelopes within ``value`` are ignored.
        """
        nested = [key for key in value if isinstance(self.about.rows.get(key), Envelope)]
        options = {key: each for key, each in value.items() if key not in nested}
        inner = read_fields(options, self.about, (*self.path, name))
        self.fields.ignored += [f"{name}.{each}" for each in [*inner.ignored, *nested]]
        for target, each in inner.known.items():
            other = self._value(target)
            written = inner.written.get(target, (*self.path, name, target))
            if other is None:
                self.fields.known[target] = each
                self.fields.written[target] = written
            elif not _is_same(each, other):
                raise self._contradiction(written, target, each)

    def _value(self, name: str) -> Any:
        """Return the value that the object has for a known field, under any of the field's names.

        Returns ``None`` if the object does not have the field.
        """
        own = self.given.get(name)
        return self.fields.known.get(name) if self.about.is_neutral(name, own) else own

    def _contradiction(self, path: Path, target: str, value: Any) -> PydanticCustomError:
        """Return the error for two fields with one meaning and different values.

        The field at ``path`` is another name for ``target``; ``value`` is its value.
        """
        other = self.fields.written.get(target, (target,))
        if not self.about.is_neutral(target, self.given.get(target)):
            other = (*self.path, target)
        expected = f"expected the value of {'.'.join(other)}, which means the same"
        return _unsupported(path, expected, value, "leave one out")


def _near(name: str, known: Collection[str]) -> str | None:
    close = get_close_matches(name, known, 1, cutoff=0.8)
    return close[0] if close else None


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values mean the same; a list with one text means the text."""
    return bool(other in (value, [value]) or value == [other])


def _refuse_unless_neutral(path: Path, value: Any, row: Refused) -> None:
    neutral = row.neutral
    if not row.neutral:
        neutral = _EMPTY
    # If True is neutral, the switch is on by default, and False changes the answer.
    elif not _is_among(True, row.neutral):
        # The numbers 0 and -1 of _EMPTY are left out: row.neutral has the number that switches the
        # sampler off, and 0 may switch it on.
        neutral = (*row.neutral, *EMPTY, False)
    if _is_among(value, neutral):
        return
    shown = " or ".join(json.dumps(each) for each in row.neutral)
    raise _unsupported(path, f"expected {shown or 'no such field'}", value, row.advice)


def _is_among(value: Any, values: Collection[Any]) -> bool:
    """Return whether a JSON value is among others; ``False`` and 0 differ, as do ``True`` and 1."""
    is_bool = isinstance(value, bool)
    return any(is_bool == isinstance(each, bool) and value == each for each in values)


def _unsupported(path: Path, expected: str, value: Any, advice: str) -> PydanticCustomError:
    if isinstance(value, Mapping):
        found = "an object"
    elif isinstance(value, list):
        found = "a list"
    else:
        found = f"{json.dumps(value):.40}"
    message = f"{expected}, found {found}; other values are not supported, {advice}"
    return _field_error("unsupported", message, path)


def _unknown(path: Path, known: Collection[str]) -> PydanticCustomError:
    near = _near(path[-1], known)
    advice = f"use {near}" if near else "remove it"
    message = f"expected only known fields, found an unknown one; {advice}"
    return _field_error("unknown_field", message, path)


def _field_error(kind: LiteralString, message: str, path: Path) -> PydanticCustomError:
    """Return the error that pydantic reports for the field at a path in the request's object.

    ``kind`` is the error's type, from which ``validation_to_api_error`` takes the error's code.
    """
    context = {"message": message, "field": [_encodable(name) for name in path]}
    return PydanticCustomError(kind, "{message}", context)


def _encodable(name: str) -> str:
    """Return a name with halves of surrogate pairs escaped, because UTF-8 cannot encode them."""
    return name.encode("utf-8", "backslashreplace").decode()


def summarize(paths: Iterable[str]) -> list[str]:
    """Replace paths that differ only in indices by one path with empty brackets.

    For example ``messages[].id`` stands for ``messages[0].id`` and ``messages[1].id``.
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_INDEX.sub("[]", path), []).append(path)
    return [paths[0] if len(paths) == 1 else general for general, paths in groups.items()]


def report_header(paths: Sequence[str]) -> str:
    """Return the value of the header ``X-Pronk-Ignored``: percent-encoded paths with commas."""
    shown = list[str]()
    length = 0
    for path in paths:
        text = quote(path, safe=_HEADER_CHARACTERS, errors="backslashreplace")
        length += len(text) + len(", ")
        if length > _MAX_HEADER:
            return ", ".join([*shown, f"and {len(paths) - len(shown)} more"])
        shown.append(text)
    return ", ".join(shown)
