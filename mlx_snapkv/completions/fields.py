"""Field types for request bodies. They accept numbers and lists in the forms that clients send."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from .contents import as_list
from .validation import must

NO_LIMIT = -1  # the value of `max_tokens` or `top_k` that means no limit, as in other servers
NO_SEED = -1  # the value of `seed` that means no fixed seed, as in other servers
MAX_BIAS = 10_000  # larger logit biases could overflow in half precision


class BodyModel(BaseModel):
    """Base class for request bodies and the objects in them.

    Unknown fields, such as `cache_control` and `citations`, are ignored.
    """

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


def _parse_number(value: Any) -> Any:
    """Convert a string such as "0.7" to a number. Return other values unchanged."""
    if not isinstance(value, str) or "_" in value:  # Python would read "1_0" as 10
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _whole_float_as_int(value: Any) -> Any:
    """Convert a whole number such as 4.0 to an int. Return other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Some languages write the integer 4 as 4.0.
WholeFloat = BeforeValidator(_whole_float_as_int)
# PHP writes {} as [].
NoneIfEmptyList = BeforeValidator(lambda value: None if value == [] else value)

Number = Annotated[float, BeforeValidator(_parse_number)]
Probability = Annotated[Number, Field(ge=0, le=1)]
Temperature = Annotated[Number, Field(ge=0, le=100)]
Penalty = Annotated[Number, Field(ge=-100, le=100)]
RepetitionPenalty = Annotated[
    Number,
    must(lambda value: value == 0 or 0.01 <= value <= 100, "should be 0, or from 0.01 to 100"),
]
Bias = Annotated[Number, AfterValidator(lambda value: max(-MAX_BIAS, min(value, MAX_BIAS)))]

Seed = Annotated[
    int | None, BeforeValidator(lambda value: None if value == NO_SEED else value), WholeFloat
]
ContextSize = Annotated[
    int, Field(ge=1), WholeFloat, AfterValidator(lambda value: min(value, 2**31 - 1))
]
MaxTokens = Annotated[
    int,
    must(lambda value: value == NO_LIMIT or value >= 1, "should be greater than or equal to 1"),
    WholeFloat,
]
TopK = Annotated[
    int, Field(ge=0), BeforeValidator(lambda value: 0 if value == NO_LIMIT else value), WholeFloat
]
TopLogprobs = Annotated[int, Field(ge=0, le=20), WholeFloat]

Name = Annotated[str, Field(min_length=1)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,18}$")]  # a key of `logit_bias`
Stops = Annotated[
    list[str],
    BeforeValidator(lambda value: [text for text in as_list(value) if text not in (None, "")]),
]
Unsupported = Annotated[Any, must(lambda value: not value, "is not supported: drop the field")]
