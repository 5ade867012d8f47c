"""Model folders for soak tests, with a chat template that writes tool calls in one of four formats."""

import json
import shutil
from pathlib import Path

# How each format writes a call to tool `f` with arguments `f.arguments`. Formats are named as in mlx-lm.
CALLS = {
    "json_tools": """<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>""",
    "mistral": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    "qwen3_coder": """<tool_call>
<function={{ f.name }}>
{% for key, value in f.arguments.items() %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>""",
    "glm47": """<tool_call>{{ f.name }}
{% for key, value in f.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value }}</arg_value>
{% endfor %}</tool_call>""",
}
# Texts before a message's role, after the role, and after the message, for two kinds of models.
CHATML = "<|im_start|>", "\n", "<|im_end|>\n"
BUILT_IN = "<|", "|>", "<|end|>"


def template(call: str, before: str, after_role: str, end: str) -> str:
    """Return a chat template with tools, which writes each call with the template `call`."""
    return (
        f"{{% if tools %}}{before}system{after_role}Tools:{{% for t in tools %}}\n{{{{ t.function | tojson }}}}"
        f"{{% endfor %}}{end}{{% endif %}}{{% for m in messages %}}{before}{{{{ m.role }}}}{after_role}"
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        f"{call}{{% endfor %}}{end}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before}assistant{after_role}{{% endif %}}"
    )


def write_folder(model: Path, tool_format: str, folder: Path) -> None:
    """Write a model folder with a chat template for one tool-call format.

    Args:
        model: the original model's folder. Its weights are linked, not copied.
        tool_format: a key of `CALLS`.
        folder: the new folder.
    """
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file.resolve())
        elif file.is_file():
            shutil.copyfile(file, folder / file.name)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    is_chatml = CHATML[0] in config["chat_template"]
    markers = CHATML if is_chatml else BUILT_IN
    config |= {
        "chat_template": template(CALLS[tool_format], *markers),
        "tool_parser_type": tool_format,
    }
    config_file.write_text(json.dumps(config), encoding="utf-8")
