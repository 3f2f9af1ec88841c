"""The table of fields of other servers that pronk does not implement, and their treatment.

Four rules decide about such a field in a request:

1. A field that **changes the answer** is refused, and the error names the field to use instead. A
   name that means the same as one of pronk's fields is read as that field.
2. A field that **asks for nothing here** is accepted: storage, caching, telemetry, routing,
   scheduling.
3. A **hint** (effort, verbosity, thinking) becomes the nearest one that the model has, or is
   accepted.
4. A **neutral value**, such as null or an empty list, is the same as no field.

Options that are not in the table are treated by :mod:`pronk.server.protocol.fields`.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
    **_accepted("draft_model speculative num_draft_tokens verbosity plugins"),
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
    "reasoning_budget_message": Renamed("thinking_message"),
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
    **_refused(names="template system context raw", advice="write the whole text into prompt"),
    "input_prefix": Refused(advice="use prompt, or /infill"),
    "input_extra": Refused(advice="use /infill"),
    "input_suffix": Renamed("suffix"),
    **_refused(names="messages", advice="use /v1/chat/completions"),
    **_refused(names="tools", advice="use /v1/chat/completions"),
    **_refused("auto", "none", names="tool_choice", advice="use /v1/chat/completions"),
    **_accepted("parallel_tool_calls"),
}

# The expected text, from which only the routes of chats and completions draft.
_PREDICTION = _accepted("prediction")

# Options of `/infill`.
_INFILL: dict[str, Treatment] = {
    "suffix": Renamed("input_suffix"),
}

# Options of `/v1/responses`.
_RESPONSES: dict[str, Treatment] = {
    **_PREDICTION,
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
    **_PREDICTION,
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

# Options of Ollama's `/api/chat` and `/api/generate`: what to do with a prompt that is too long,
# which is refused here.
_OLLAMA: dict[str, Treatment] = {**_PREDICTION, **_accepted("truncate shift")}

# Options of Ollama's `/api/generate`.
_OLLAMA_GENERATE: dict[str, Treatment] = {
    **_refused(names="raw", advice="use /v1/completions"),
    **_refused(names="template", advice="the server uses the model's template"),
    **_refused(names="context", advice="send the conversation to /api/chat"),
    **_refused(names="messages tools", advice="use /api/chat"),
}

# Options of Ollama's `/api/show`.
_OLLAMA_SHOW: dict[str, Treatment] = {
    **_accepted("verbose"),
    **_refused(names="system template options", advice="set them in requests"),
    "name": Renamed("model"),
}

# Options of Ollama's `/api/pull`.
_OLLAMA_PULL: dict[str, Treatment] = {
    **_accepted("insecure"),
    **_refused(names="username password", advice="run `hf auth login` where the server runs"),
    "name": Renamed("model"),
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

# Options of `/v1/rerank`: those of Jina, Cohere, vLLM, Text Embeddings Inference and llama.cpp.
_RERANK: dict[str, Treatment] = {
    **_accepted("user metadata priority truncate truncation_direction raw_scores keep_alive"),
    **_refused(
        -1,
        names="max_tokens_per_doc max_chunks_per_doc truncate_prompt_tokens overlap_tokens",
        advice="send shorter documents",
    ),
    **_refused(["text"], names="rank_fields", advice="send documents as texts"),
    "texts": Renamed("documents"),
    "top_k": Renamed("top_n"),
    "return_text": Renamed("return_documents"),
    "instruct": Renamed("instruction"),
    "instructions": Renamed("instruction"),
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
    "infill": _INFILL,
    "responses": _RESPONSES,
    "messages": _ANTHROPIC,
    "ollama": _OLLAMA,
    "ollama_generate": _OLLAMA_GENERATE,
    "ollama_show": _OLLAMA_SHOW,
    "ollama_pull": _OLLAMA_PULL,
    "message": _TURN,
    "function": _FUNCTION,
    "structured_outputs": _STRUCTURED_OUTPUTS,
    "embeddings": _EMBEDDINGS,
    "moderations": _MODERATIONS,
    "rerank": _RERANK,
    "tokenize": _TOKENIZE,
}
# Parts of the table for objects in a request; the other parts are for the options of routes.
_OBJECTS = ("message", "function", "structured_outputs")
OPTION_PARTS: Sequence[Mapping[str, Treatment]] = [
    rows for place, rows in TABLE.items() if place not in _OBJECTS
]


def rows_of(places: Sequence[str]) -> Mapping[str, Treatment]:
    """Return the treatment of each field in the parts of the table that ``places`` names.

    If several parts have the same field, the last of them counts.
    """
    return ChainMap(*(TABLE[place] for place in reversed(places)))
