"""The options of KV caches that commands share: how entries are quantised, and which are kept or read."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SnapKVError, UnsupportedModelError
from ..planning.options import RequestOptions
from .command import flag_of
from .options import n_bytes, one_of

if TYPE_CHECKING:
    from ..entries.quantization import Quantization
    from ..planning.auto import Recommendation
    from ..planning.settings import Setting

PrefillStepSize = Annotated[int, Option(min=1, help="Maximum number of prompt tokens per chunk.")]
Snapkv = Annotated[str | None, Option(help='SnapKV with these options, such as "top_k=1024".')]


@dataclass(frozen=True)
class CacheOptions:
    """How a prompt is read, and how its entries are stored."""

    prefill_step_size: PrefillStepSize = 2048
    kv_group_size: Annotated[
        int,
        Option(parser=one_of(32, 64, 128), help="Values per quantisation group: 32, 64 or 128."),
    ] = 64
    kv_bits: Annotated[
        int | None,
        Option(parser=one_of(2, 3, 4, 6, 8), help="Quantise the entries to 2, 3, 4, 6 or 8 bits."),
    ] = None

    @property
    def quantization(self) -> Quantization | None:
        from ..entries.quantization import Quantization

        return None if self.kv_bits is None else Quantization(self.kv_bits, self.kv_group_size)

    def require(self, model: Any) -> None:
        """Raises: SnapKVError: the model's entries can't be quantised so."""
        from mlx_lm.models.cache import make_prompt_cache

        from ..caches.layers import attention_layers, require_quantizable

        if self.quantization is None:
            return
        try:
            layers = attention_layers(model, make_prompt_cache(model))
        except UnsupportedModelError:  # whose entries are mlx-lm's alone
            return
        require_quantizable(model, layers, self.quantization)


@dataclass(frozen=True)
class MLXCacheOptions(CacheOptions):
    """The options of entries, and mlx-lm's own of a full cache."""

    max_kv_size: Annotated[
        int | None,
        Option(
            min=1,
            help="Size of mlx-lm's rotating cache in entries, for models that don't make their own caches.",
        ),
    ] = None
    quantized_kv_start: Annotated[
        int | None,
        Option(
            min=0,
            help="Without a policy, --kv-bits applies from this many tokens on; mlx-lm's default is 5000.",
        ),
    ] = None

    def generation(self, policy: Setting | None) -> dict[str, Any]:
        """Return these as options of `stream_generate`.

        Raises: SnapKVError: one has no effect on a policy's entries.
        """
        if self.quantized_kv_start is not None and policy is not None:
            raise SnapKVError(
                "--quantized-kv-start is for the full cache only, since a policy's entries are quantised at the "
                "compression: drop it or the policy"
            )
        return {k: v for k, v in vars(self).items() if k != "quantized_kv_start" or v is not None}

    def notes(self, policy: Setting | None, n: int) -> Iterator[str]:
        """Yield a note on each option that has no effect on a prompt and an answer of `n` tokens."""
        from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START

        start = self.quantized_kv_start
        start = DEFAULT_QUANTIZED_KV_START if start is None else start
        if self.kv_bits is not None and policy is None and n <= start:
            yield (
                f"note: --kv-bits does nothing here, since a full cache is quantised from {start:,} tokens on; "
                "--quantized-kv-start changes that"
            )

    def require(self, model: Any, draft_model: str | None = None) -> None:
        """Raises: SnapKVError: the model has no such cache, or mlx-lm would ignore an option beside it."""
        from ..models import type_of

        super().require(model)
        if self.max_kv_size is not None and hasattr(model, "make_cache"):
            raise SnapKVError(
                f"--max-kv-size has no effect on {type_of(model)} models, which make their own caches: drop it, "
                f"or limit the entries with --policy streaming_llm:budget={self.max_kv_size}"
            )
        for flag, value in (("--draft-model", draft_model), ("--kv-bits", self.kv_bits)):
            if self.max_kv_size is not None and value is not None:
                raise SnapKVError(f"--max-kv-size can't be combined with {flag}: drop one of them")


def each_method(
    policy: Iterable[str] | None, snapkv: str | None = None, sparse: Iterable[str] | None = None
) -> list[Setting]:
    """Return what --snapkv and every --policy and --sparse name. Raises: SnapKVError: one can't be read."""
    texts = {"snapkv": [] if snapkv is None else [snapkv], "policy": policy, "sparse": sparse}
    methods = [typed(name, text) for name, some in texts.items() for text in some or []]
    return [method for method in methods if method is not None]


def typed(name: str, text: str) -> Setting | None:
    """Return what an option names. Raises: SnapKVError: it can't be read; the message names the flag and the text."""
    from ..planning.settings import resolve_setting

    try:
        return resolve_setting(**{name: text})
    except SnapKVError as error:
        raise SnapKVError("{} {}: {}", flag_of(name), shlex.quote(text), error) from error


@dataclass(frozen=True)
class PolicyOptions:
    """The policy that compresses prompts, or the sparse attention that reads them, if any does."""

    snapkv: Snapkv = None
    policy: Annotated[
        str | None,
        Option(help='A policy, such as "keydiff:budget=25%"; mlx-snapkv policies lists them.'),
    ] = None
    sparse: Annotated[
        str | None,
        Option(
            help='Sparse attention with these options, such as "top_k=2048" ("" for the defaults): all entries '
            "stay, and chunks of the prompt and tokens of the answer choose which few they read."
        ),
    ] = None

    @property
    def flag(self) -> str:
        """The flag that names the policy or sparse attention, if one does."""
        named = (n for n in ("snapkv", "policy", "sparse") if getattr(self, n) is not None)
        return next(map(flag_of, named), "")

    def resolve(self) -> Setting | None:
        """Return the policy or sparse attention. Raises: SnapKVError: it can't be read, or two are given."""
        from ..planning.settings import resolve_setting

        texts = {"snapkv": self.snapkv, "policy": self.policy, "sparse": self.sparse}
        each = [typed(name, text) for name, text in texts.items() if text is not None]
        return each[0] if len(each) == 1 else resolve_setting(**texts)


@dataclass(frozen=True)
class AutoPolicyOptions(PolicyOptions):
    """The policy or sparse attention, or auto, which chooses one for the prompt and this machine."""

    policy: Annotated[
        str | None,
        Option(
            help='A policy, such as "keydiff:budget=25%" (mlx-snapkv policies lists them), or auto, which '
            "chooses one for the prompt, the task and this machine."
        ),
    ] = None
    kv_memory: Annotated[
        int | None,
        Option(
            parser=n_bytes, metavar="SIZE", help="KV memory limit for --policy auto, such as 2GB."
        ),
    ] = None

    @property
    def is_auto(self) -> bool:
        from ..planning.settings import asks_for_auto

        return asks_for_auto(self.snapkv, self.policy)

    def resolve(self) -> Setting | None:
        """Return the policy or sparse attention; None for the full cache, and until auto chooses."""
        if self.is_auto and self.sparse is not None:
            raise SnapKVError(
                "--policy auto and --sparse both say how entries are used: give only one"
            )
        return None if self.is_auto else super().resolve()


@dataclass(frozen=True)
class CompressionOptions(RequestOptions, AutoPolicyOptions):
    """The policy or sparse attention, or what suits the prompt and the machine, and a request's other options."""

    def __post_init__(self) -> None:
        from ..planning.config import CompressionConfig

        super().__post_init__()
        CompressionConfig(**self.keywords)  # raises for mistakes

    def served(self) -> dict[str, Any]:
        """Return these options as keywords of `generate_step`."""
        from ..planning.config import CompressionConfig

        method = self.resolve()
        return {"policy": method, **CompressionConfig(method, **self.keywords).keywords}

    def require_use(self) -> None:
        """Raises: SnapKVError: an option would do nothing, or what it needs is not there."""
        from ..planning.config import CompressionConfig
        from ..planning.exclusions import When, require_compatible

        if not self.is_auto:
            require_compatible(CompressionConfig(self.resolve(), **self.keywords), When.CHOSEN)

    def recommend(
        self,
        model: Any,
        n_prompt: int | None,
        task: str,
        say: Callable[[str], None],
        generation: dict[str, Any],
        max_tokens: int | None = None,
    ) -> Recommendation | None:
        """Return what --policy auto chooses, and say so in one line; None if auto was not given.

        Args:
            model: a loaded one, or the name of one.
            n_prompt, task, max_tokens: see `resolve`.
            generation: mlx-lm's options.
        """
        from ..planning.auto import resolve
        from ..planning.prompt_plan import MAX_TOKENS
        from .loading import load_without_weights, require_alone

        if not self.is_auto:
            return None
        require_alone(policy=self.policy)
        model = load_without_weights(model) if isinstance(model, str) else model
        *_, found = resolve(
            model,
            n_prompt,
            task,
            generation | self.keywords,
            policy=self.policy,
            max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
            kv_memory=self.kv_memory,
        )
        say(str(found))
        return found


def keywords_of(found: Recommendation | None) -> dict[str, Any]:
    """Return the keywords that --policy auto changes, if it was given; see `CompressionOptions.recommend`."""
    return {} if found is None else found.keywords
