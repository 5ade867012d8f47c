"""Chat templates for the built-in model, as strict as those of several real model families."""

FAMILIES = {
    # ChatML with tools: a system message must come first, and arguments are objects.
    "chatml": """{%- if tools %}[tools {% for t in tools %}{{ t | tojson }}{% endfor %}]{% endif %}
{%- for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}
<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}}}</tool_call>{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    # Llama 3: one call per message, and tools in the first user message.
    "llama3": """{%- set ns = namespace(tools=tools) %}
{%- if tools and messages | selectattr('role', 'equalto', 'user') | list == [] %}
{{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set f = m.tool_calls[0].function %}<|assistant|>{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- else %}<|{{ m.role }}|>{% if ns.tools and m.role == 'user' %}{% for t in ns.tools %}{{ t | tojson(indent=4) }}
{% endfor %}{% set ns.tools = none %}{% endif %}{{ m.content | trim }}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    # Mistral: call ids have nine characters, and roles must alternate.
    "mistral": """{%- set ns = namespace(user=true) %}{% for m in messages if m.role != 'system' %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}{% if (m.role == 'user') != ns.user %}
{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
{%- endif %}{% set ns.user = not ns.user %}{% endif %}{% endfor %}
{%- if tools %}[AVAILABLE_TOOLS]{% for t in tools %}{{ t | tojson }}{% endfor %}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}{% if c.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- c.function.name }}({{ c.id }}){% endfor %}{% elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('length 9!') }}{% endif %}
[RESULT {{ m.tool_call_id }}]{{ m.content }}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}""",
    # Gemma: no system messages and no tools.
    "gemma": """{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    # gpt-oss: a message with a call has thoughts or a text, not both.
    "harmony": """{%- for m in messages %}{% if m.tool_calls and m.content and m.reasoning_content %}
{{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}{% endif %}
<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>
{%- endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    # No tools, and no refusals.
    "plain": """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>""",
    # A model that thinks, with its effort as an option.
    "thinking": """{%- if tools %}[tools {% for t in tools %}{{ t | tojson }}{% endfor %}]{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{- '{"name": "' }}{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}[{{ reasoning_effort | default('usual') }}]<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}{% endif %}""",
    # A template that ignores add_generation_prompt.
    "ending": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>",
}
