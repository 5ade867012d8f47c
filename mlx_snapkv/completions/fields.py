"""The kinds of numbers and texts that a body's fields take, as clients in all languages write them."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from .checks import must
from .contents import as_list


def _number(value: Any) -> Any:
    """A number, which some apps write as they store it: as text."""
    try:
        return float(value) if isinstance(value, str) and "_" not in value else value
    except ValueError:
        return value


Number = Annotated[float, BeforeValidator(_number)]
Probability = Annotated[Number, Field(ge=0, le=1)]
# 4.0, as some languages write 4
Whole = BeforeValidator(lambda v: int(v) if isinstance(v, float) and v.is_integer() else v)
NO_LIMIT = -1  # as other servers have it
Integer = Annotated[int, Whole]
Positive = Annotated[int, Field(ge=1), Whole]
LARGEST = 10_000  # of what is added to logits: more is infinite in half precision, and no likelier
ContextSize = Annotated[Positive, AfterValidator(lambda value: min(value, 2**31 - 1))]
Bias = Annotated[Number, AfterValidator(lambda value: max(-LARGEST, min(value, LARGEST)))]
Count = Annotated[int, Field(ge=0), Whole]
AtMost = Annotated[
    int, must(lambda v: v == NO_LIMIT or v >= 1, "should be greater than or equal to 1"), Whole
]
TopK = Annotated[int, Field(ge=0), BeforeValidator(lambda v: 0 if v == NO_LIMIT else v), Whole]
Name = Annotated[str, Field(min_length=1)]  # of a tool
Temperature = Annotated[Number, Field(ge=0, le=100)]
Penalty = Annotated[Number, Field(ge=-100, le=100)]
Factor = Annotated[
    Number, must(lambda v: v == 0 or 0.01 <= v <= 100, "should be 0, or from 0.01 to 100")
]
NLogprobs = Annotated[int, Field(ge=0, le=20), Whole]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,18}$")]  # the name of a JSON object's value
NoneIfEmpty = BeforeValidator(lambda v: None if v == [] else v)  # PHP writes {} so
Stops = Annotated[list[str], BeforeValidator(lambda v: [s for s in as_list(v) if s is not None])]
Unsupported = Annotated[Any, must(lambda value: not value, "is not supported: drop the field")]
