"""Translate the fields that control reasoning into chat template variables."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from .body import ChatBody
from .rendering import template_variables

# Pairs of (maximum budget in tokens, effort). Larger budgets mean the effort "high".
EFFORTS = ((2048, "low"), (8192, "medium"))
BUDGET_VARIABLES = ("thinking_budget", "reasoning_budget")  # names in chat templates


class ThinkingRequest(NamedTuple):
    """The reasoning that one field of a body requests.

    Attributes:
        field: the field's name, for notes.
        budget: maximum number of reasoning tokens.
    """

    field: str
    thinks: bool
    effort: str | None = None
    budget: int | None = None


def thinking_variables(body: ChatBody, tokenizer) -> tuple[dict[str, Any], list[str]]:
    """Return the chat template variables that a body sets, and notes about ignored fields.

    A client's `chat_template_kwargs` take precedence over its other fields.
    """
    variable_names = template_variables(tokenizer)
    notes = []
    variables: dict[str, Any] = {}
    for request in _thinking_requests(body):
        request_variables = _variables_for(request, variable_names, tokenizer)
        variables |= request_variables
        might_think = request.thinks or tokenizer.has_thinking
        if not request_variables and might_think:
            why = "this model's chat template has no variable for it"
            notes.append(f"{request.field} is left out: {why}")
    # `_thinking_requests` ignores values of the wrong type, so tell the client about them here.
    for name, expected_type in (("enable_thinking", bool), ("reasoning_effort", str)):
        value = getattr(body, name)
        if value is not None and not isinstance(value, expected_type):
            notes.append(f"{name} is left out: it should be a {expected_type.__name__}")
    return variables | (body.chat_template_kwargs or {}), notes


def _variables_for(request: ThinkingRequest, variable_names: set[str], tokenizer) -> dict[str, Any]:
    """Return values for the template variables that can express the request."""
    variables: dict[str, Any] = {}
    if "reasoning_effort" in variable_names and request.effort is not None:
        variables["reasoning_effort"] = request.effort
    # mlx-lm's tokenizer always takes `enable_thinking`, and renames it if the template's variable has another name.
    if tokenizer._thinking_kwarg in variable_names:
        variables["enable_thinking"] = request.thinks
    if request.budget is not None:
        budget_names = [name for name in BUDGET_VARIABLES if name in variable_names]
        variables |= dict.fromkeys(budget_names, request.budget)
    return variables


def _thinking_requests(body: ChatBody) -> Iterator[ThinkingRequest]:
    """Yield a request for each field that controls reasoning. Later requests take precedence."""
    # `think` may also be an effort such as "low", which is read below.
    switches = (("enable_thinking", body.enable_thinking), ("think", body.think))
    for field, thinks in switches:
        if isinstance(thinks, bool):
            yield ThinkingRequest(field=field, thinks=thinks)
    if body.thinking is not None:
        yield _anthropic_request(body.thinking)
    reasoning = body.reasoning if isinstance(body.reasoning, dict) else {}
    max_tokens = reasoning.get("max_tokens")
    effort_of_max_tokens = _effort_of_budget(max_tokens) if isinstance(max_tokens, int) else None
    efforts = (
        ("reasoning_effort", body.reasoning_effort),
        ("think", body.think),
        ("reasoning.effort", reasoning.get("effort")),
        ("reasoning.max_tokens", effort_of_max_tokens),
    )
    for field, effort in efforts:
        if isinstance(effort, str):
            yield ThinkingRequest(field=field, thinks=effort != "none", effort=effort)


def _anthropic_request(thinking: Any) -> ThinkingRequest:
    """Parse Anthropic's `thinking` field, an object with a type and an optional budget."""
    fields = thinking if isinstance(thinking, dict) else {}
    kind = fields.get("type", thinking)
    thinks = kind not in ("disabled", False)
    budget = fields.get("budget_tokens")
    if not thinks or not isinstance(budget, int):
        return ThinkingRequest(field="thinking", thinks=thinks)
    effort = _effort_of_budget(budget)
    return ThinkingRequest("thinking.budget_tokens", thinks=True, effort=effort, budget=budget)


def _effort_of_budget(budget: int) -> str:
    """Return the effort that corresponds to a budget in tokens."""
    for max_budget, effort in EFFORTS:
        if budget <= max_budget:
            return effort
    return "high"
