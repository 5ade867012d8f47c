"""A JSON object of a request: a body, or a part of one."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A body or a part of one; unknown fields, such as `cache_control` and `citations`, are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
