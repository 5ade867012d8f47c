"""`mlx-snapkv policies`: the eviction policies, their papers and options."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..policies import Policy


def policies() -> None:
    """List the eviction policies with their papers, options and defaults.

    Give one to generate, or two after each other:

    \b
      --policy keydiff:budget=8192
      --policy "keydiff:budget=25%,n_window=20%"
      --policy "keydiff:budget=8192 then snapkv:top_k=1024"
    """
    from ..policies import POLICIES

    for cls in POLICIES.values():
        paper = f" ({cls.paper})" if cls.paper else ""
        print(f"{cls.name}: {cls.summary}{paper}")
        print(f"    {', '.join(f'{name}={value}' for name, value in defaults(cls).items())}")


def defaults(cls: type[Policy]) -> dict[str, str]:
    """A policy's options and their defaults as they are typed, its own first."""
    policy = cls()
    values = {name: getattr(policy, name) for name in cls.options()}
    return {
        name: str(v).lower() if v is None or isinstance(v, bool) else str(v)
        for name, v in values.items()
    }
