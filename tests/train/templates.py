"""A small tokenizer whose chat template behaves as Qwen3's does, written for tests.

What it has of Qwen3's: no default system prompt; with thinking off the prompt ends in an empty think block; a turn
behind the last user's question keeps its think block (an empty one, if it is the very last), earlier turns lose theirs;
tools stand in the system turn, calls and results in tags of their own.
"""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from demo import tokenizer as demo_tokenizer

QWEN3_LIKE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}
{%- set content = message.content %}{% set thought = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought.strip('\\n') }}
</think>

{% endif %}{{ content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

WORDS = "What is the sum of two and three? It is five. Thank you! <think>\n\n</think>\n\n"


def write_tokenizer(folder: Path, template: str | None = None) -> Path:
    """A byte-level tokenizer of 512 entries, with the demo's template or another."""
    demo_tokenizer.write(demo_tokenizer.train([WORDS]), folder, context=2048)
    if template is not None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    return folder
