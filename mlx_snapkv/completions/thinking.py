"""How much a model is to think, as clients say it, in the variables of its chat template."""

from collections.abc import Iterator
from typing import Any

from .body import ChatBody
from .rendering import variables

# Of a budget in tokens: the effort that it stands for, up to so many.
EFFORTS = ((2048, "low"), (8192, "medium"))
BUDGETS = ("thinking_budget", "reasoning_budget")  # by which templates call it


def thinking_options(body: ChatBody, tokenizer) -> tuple[dict[str, Any], list[str]]:
    """The template's options, which those that a client gives by name precede, and what is left out."""
    names, notes = variables(tokenizer), []
    options: dict[str, Any] = {}
    switch = getattr(tokenizer, "_thinking_kwarg", "enable_thinking")
    for field, thinks, effort, budget in _wishes(body):
        switches: dict[str, Any] = {}
        if "reasoning_effort" in names and effort is not None:
            switches["reasoning_effort"] = effort
        if switch in names:
            switches["enable_thinking"] = thinks
        if budget is not None:
            switches |= {name: budget for name in BUDGETS if name in names}
        if not switches and (thinks or tokenizer.has_thinking):
            notes.append(f"{field} is left out: this model's chat template has no variable for it")
        options |= switches
    kinds = {"enable_thinking": bool, "reasoning_effort": str}
    for name, kind in kinds.items():
        value = getattr(body, name)
        if not (value is None or isinstance(value, kind)):
            notes.append(f"{name} is left out: it should be a {kind.__name__}")
    return options | (body.chat_template_kwargs or {}), notes


def _wishes(body: ChatBody) -> Iterator[tuple[str, bool, str | None, int | None]]:
    """What clients ask for: a field, whether to think, with what effort, and how many tokens of it."""
    for field, thinks in (("enable_thinking", body.enable_thinking), ("think", body.think)):
        if isinstance(thinks, bool):
            yield field, thinks, None, None
    thinking = body.thinking if isinstance(body.thinking, dict) else {}
    if body.thinking is not None:
        kind, budget = thinking.get("type", body.thinking), thinking.get("budget_tokens")
        thinks = kind not in ("disabled", False)
        budget = budget if isinstance(budget, int) and thinks else None
        effort = None if budget is None else _effort(budget)
        yield "thinking" if budget is None else "thinking.budget_tokens", thinks, effort, budget
    reasoning = body.reasoning if isinstance(body.reasoning, dict) else {}
    budget = reasoning.get("max_tokens")
    for field, effort in (
        ("reasoning_effort", body.reasoning_effort),
        ("think", body.think),
        ("reasoning.effort", reasoning.get("effort")),
        ("reasoning.max_tokens", _effort(budget) if isinstance(budget, int) else None),
    ):
        if isinstance(effort, str):
            yield field, effort != "none", effort, None


def _effort(budget: int) -> str:
    return next((effort for most, effort in EFFORTS if budget <= most), "high")
