"""Which kind of request serves a prompt: one place for every way in."""

from typing import Any

from ..entries.quantization import Quantization
from ..policies import Policy, Stages
from .book import BookRequest
from .far import pull_for
from .recalling import Recall, RecallingRequest
from .request import Request, held_tokens


def make_request(
    model: Any,
    policy: Policy | Stages,
    n_new: int,
    prompt_cache: list,
    quantization: Quantization | None,
    recall: Recall,
) -> Request:
    """A request to read `n_new` tokens on a prompt cache; one that forgets nothing if `recall` has a memory.

    Raises:
        SnapKVError: as `Request` does.
    """
    pull = pull_for(model, policy, recall, held_tokens(model, prompt_cache) + n_new)
    wanted = model, policy, n_new, prompt_cache, quantization, pull
    if recall.memory == "drop":
        return Request(*wanted)
    kind = BookRequest if policy.reads_in_blocks else RecallingRequest
    return kind(*wanted, recall=recall)
