"""Chat templates with tools, one of each dialect, and tokenizers for them."""

from functools import cache

from tokenizers import AddedToken

from checkpoints import byte_tokenizer
from pronk.text.tokenizer import Tokenizer

HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

MISTRAL = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids of 9 letters') }}{%- endif %}
            {%- set written = call.function | tojson %}
            {{- written[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']' + eos_token) }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids of 9 letters') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

LLAMA = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- (message.content | tojson if message.content is iterable else message.content) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# The constructs of Mistral Small 3.2 and Devstral: the name is plain text between two special
# tokens.
NEW_MISTRAL = """{{- bos_token }}
{%- if tools is not none %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}"""

# The constructs of gpt-oss.
CHANNELS = """{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
    {%- for tool in tools %}
        {{- 'type ' + tool.function.name + ' = (_: ' + tool.function | tojson + ')\\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- if reasoning_effort is defined %}
    {{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# The constructs of Granite 3.3, which describes tools and writes no calls.
GRANITE = """{%- if tools and not available_tools %}{%- set available_tools = tools %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set system = 'Respond with <|tool_call|> and a list.' if available_tools else '' %}{%- set turns = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if available_tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' }}
    {{- (available_tools | tojson(indent=4)) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in turns %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

# The constructs of a template for Phi-4-mini; the model's own has no tools.
PHI = """{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- '<|tool_response|>' + (message.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
        {%- if loop.first and tools %}
            {%- for tool in tools %}{{- '<|tool|>' + (tool.function | tojson) + '<|/tool|>' }}{%- endfor %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_call|>' + (call.function | tojson) + '<|/tool_call|>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

# The constructs of LFM2, which describes tools and writes no calls.
LFM2 = """{%- set tool_list = '' %}
{%- if tools %}
    {%- set tool_list = '\\nList of tools: <|tool_list_start|>' + (tools | tojson) + '<|tool_list_end|>' %}
{%- endif %}
{%- set turns = messages if messages[0].role == 'system' else [{'role': 'system', 'content': ''}] + messages %}
{{- bos_token }}
{%- for message in turns %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'tool' %}{{- '<|tool_response_start|>' + message.content + '<|tool_response_end|>' }}
    {%- else %}{{- message.content + (tool_list if loop.first else '') }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Rules of Qwen 3.5, in words of our own: an answer before the last user message has no thoughts, an
# answer after it always has a block of thoughts, and the header of an answer opens or closes this
# block. Small models close it by default: their template tests ``not enable_thinking``.
QWEN35 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- set found = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set found.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if found.query < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else message.content[0].text %}
    {%- set content = content | trim %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > found.query %}
            {{- '<think>\\n' + (message.reasoning_content or '') | trim + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or () %}
            {{- '\\n' if not loop.first else '\\n\\n' if content else '' }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' ~ value ~ '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""
SMALL_QWEN35 = QWEN35.replace(
    "enable_thinking is defined and enable_thinking is false", "not enable_thinking"
)

# Rules of Qwen3-Coder: each argument stands between tags of its own, without quotation marks.
CODER = """{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' + message.content }}
    {%- for call in message.tool_calls or () %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {%- set text = value | tojson if value is mapping or value is sequence and value is not string else value | string %}
            {{- '<parameter=' + name + '>\\n' + text + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Rules of GLM-4.7: names and values of arguments between tags, without line breaks.
GLM = """{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|><tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|observation|><tool_response>' + message.content + '</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
        {%- for call in message.tool_calls or () %}
            {{- '<tool_call>' + call.function.name }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<arg_key>' + name + '</arg_key><arg_value>' }}
                {{- value if value is string else value | tojson }}
                {{- '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

# Rules of Gemma 4: names of arguments without quotation marks, sorted, and strings between tokens.
GEMMA = """{%- macro write(value) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for key, each in value | dictsort -%}
            {{- key + ':' + write(each) + ('' if loop.last else ',') -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}
        {%- for each in value -%}{{- write(each) + ('' if loop.last else ',') -}}{%- endfor -%}
        {{- ']' -}}
    {%- elif value is none -%}{{- 'null' -}}
    {%- else -%}{{- value | string -}}{%- endif -%}
{%- endmacro -%}
{{- bos_token }}
{%- if tools %}
    {{- '<|turn>system\\n' }}
    {%- for tool in tools %}{{- '<|tool>declaration:' + (tool.function | tojson) + '<tool|>' }}{%- endfor %}
    {{- '<turn|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|tool_response>response:' + write(message.content) + '<tool_response|>' }}
    {%- else %}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
        {%- for call in message.tool_calls or () %}
            {{- '<|tool_call>call:' + call.function.name + write(call.function.arguments) }}
            {{- '<tool_call|>' }}
        {%- endfor %}
        {{- message.content }}
        {%- if not message.tool_calls %}{{- '<turn|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{%- endif %}"""

# Rules of Kimi K2: the id of a call stands in place of the name of the tool.
KIMI = """{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
    {%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' }}{%- endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {{- '<|tool_calls_section_begin|>' }}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- (call.function.arguments | tojson) + '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""


def wide(text: str) -> str:
    """Return a text with DeepSeek's wide characters in its markers."""
    return text.replace("<!", "<\uff5c").replace("!>", "\uff5c>").replace("~", "\u2581")


# Rules of DeepSeek V3 and of DeepSeek V3.1, which differ in the text of a call. The tools are
# described as templates of servers do it.
DEEPSEEK = wide(
    """{{- bos_token }}
{%- if tools %}{{- (tools | tojson) + '\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<!User!>' + message.content }}
    {%- elif message.role == 'tool' %}
        {{- '<!tool~output~begin!>' + message.content + '<!tool~output~end!>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<!Assistant!>' + message.content }}
        {%- for call in message.tool_calls or () %}
            {{- '<!tool~calls~begin!>' if loop.first else '\\n' }}
            {{- '<!tool~call~begin!>function<!tool~sep!>' + call.function.name + '\\n```json\\n' }}
            {{- (call.function.arguments | tojson) + '\\n```<!tool~call~end!>' }}
            {%- if loop.last %}{{- '<!tool~calls~end!>' }}{%- endif %}
        {%- endfor %}
        {{- '<!end~of~sentence!>' }}
    {%- else %}{{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<!Assistant!>' }}{%- endif %}"""
)
DEEPSEEK31 = (
    DEEPSEEK.replace("function<", "' + call.function.name + '<")
    .replace(" + call.function.name + '\\n```json\\n'", "")
    .replace("\\n```", "")
    .replace("else '\\n' }}", "else '' }}")
)

# A template without tools, in which user and assistant take turns, as in that of Gemma 3.
PLAIN = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\n\n' %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate.') }}
    {%- endif %}
    {{- '<|turn>' + message.role + '\n' + (system if loop.first else '') + message.content + '<turn|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>assistant\n' }}{%- endif %}"""

TEMPLATES = {
    "hermes": HERMES,
    "parameters": CODER,
    "arg_key": GLM,
    "phi": PHI,
    "granite": GRANITE,
    "mistral list": MISTRAL,
    "mistral": NEW_MISTRAL,
    "llama": LLAMA,
    "lfm2": LFM2,
    "gemma": GEMMA,
    "kimi": KIMI,
    "deepseek": DEEPSEEK,
    "deepseek 3.1": DEEPSEEK31,
    "channels": CHANNELS,
}
DEEPSEEK_TOKENS = {
    wide("<!User!>"): True,
    wide("<!Assistant!>"): True,
    wide("<!end~of~sentence!>"): True,
    wide("<!tool~calls~begin!>"): False,
    wide("<!tool~calls~end!>"): False,
    wide("<!tool~call~begin!>"): False,
    wide("<!tool~call~end!>"): False,
    wide("<!tool~sep!>"): False,
}
# Added tokens of each family; True: a special token, which has no text when decoded.
TOKENS: dict[str, dict[str, bool]] = {
    "hermes": {
        "<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False, "</tool_call>": False, "<think>": False,
    },
    "parameters": {
        "<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False, "</tool_call>": False,
    },
    "arg_key": {
        "<|system|>": True, "<|user|>": True, "<|assistant|>": True, "<|observation|>": True, "<tool_call>": False,
        "</tool_call>": False, "<arg_key>": False, "</arg_key>": False, "<arg_value>": False, "</arg_value>": False,
    },
    "granite": {"<|start_of_role|>": True, "<|end_of_role|>": True, "<|end_of_text|>": True, "<|tool_call|>": True},
    "phi": {
        "<|user|>": True, "<|assistant|>": True, "<|end|>": True, "<|tool_call|>": True, "<|/tool_call|>": True,
    },
    "mistral "
    "list": {"<s>": True, "</s>": True, "[INST]": True, "[/INST]": True, "[TOOL_CALLS]": True},
    "mistral": {"<s>": True, "</s>": True, "[INST]": True, "[/INST]": True, "[TOOL_CALLS]": True, "[ARGS]": True},
    "llama": {
        "<|start_header_id|>": True, "<|end_header_id|>": True, "<|eot_id|>": True, "<|python_tag|>": True,
        "<|spare|>": True,
    },
    "lfm2": {
        "<|im_start|>": True, "<|im_end|>": True, "<|tool_list_start|>": True, "<|tool_list_end|>": True,
        "<|tool_call_start|>": True, "<|tool_call_end|>": True, "<|tool_response_start|>": True,
        "<|tool_response_end|>": True,
    },
    "gemma": {
        "<|turn>": True, "<turn|>": True, "<|tool_call>": True, "<tool_call|>": True, '<|"|>': True,
        "<|tool_response>": True, "<tool_response|>": True,
    },
    "kimi": {
        "<|im_user|>": True, "<|im_assistant|>": True, "<|im_middle|>": True, "<|im_end|>": True,
        "<|tool_calls_section_begin|>": False, "<|tool_calls_section_end|>": False, "<|tool_call_begin|>": False,
        "<|tool_call_argument_begin|>": False, "<|tool_call_end|>": False,
    },
    "deepseek": DEEPSEEK_TOKENS,
    "deepseek 3.1": DEEPSEEK_TOKENS,
    "channels": {
        "<|start|>": True, "<|end|>": True, "<|message|>": True, "<|channel|>": True, "<|constrain|>": True,
        "<|call|>": True, "<|return|>": True,
    },
}  # fmt: skip


AddedTokens = tuple[tuple[str, bool], ...]  # names, and whether they are special

# Added tokens of thoughts. The markers of Qwen3 have text when decoded, those of Mistral have none.
THOUGHTS: AddedTokens = (("<think>", False), ("</think>", False))
THOUGHT_TOKENS: dict[str, AddedTokens] = {
    "mistral": (("[THINK]", True), ("[/THINK]", True)),
    "channels": (),
}
# Text that makes a template one of a model that thinks.
THOUGHT_TEXTS = {"mistral": "{# [THINK] [/THINK] #}", "channels": "{# <|channel|>analysis #}"}


@cache
def thinking_tokenizer(family: str, *, tokens: bool = True) -> Tokenizer:
    """Return the tokenizer of a family whose models think; Mistral's list and Llama have the
    markers of Qwen3.
    """
    made = tool_tokenizer(family, tokens=tokens, more=THOUGHT_TOKENS.get(family, THOUGHTS))
    template = TEMPLATES[family] + THOUGHT_TEXTS.get(family, "{# <think> </think> #}")
    return Tokenizer(made.backend, special_tokens=SPECIAL, chat_template=template)


SPECIAL = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}


@cache
def tool_tokenizer(family: str, *, tokens: bool = True, more: AddedTokens = ()) -> Tokenizer:
    """Return a byte-level tokenizer of about 300 tokens, with or without the added tokens of the
    family.

    Equal ones are shared; tests must not change them.
    """
    backend = byte_tokenizer(300)
    if tokens:
        for name, silent in {**TOKENS[family], **dict(more)}.items():
            backend.add_tokens([AddedToken(name, special=silent, normalized=False)])
            if silent:
                backend.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    return Tokenizer(backend, special_tokens=SPECIAL, chat_template=TEMPLATES[family])
