"""KV cache options shared by commands: quantisation, policies, sparse attention and --policy auto."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import Option as NamedOption
from ..errors import OptionError, SnapKVError, UnsupportedModelError
from ..sparse.options import Sparse
from .command import KV_CACHE, flag_of
from .options import one_of, parse_bytes

if TYPE_CHECKING:
    from ..entries.quantization import Quantization
    from ..planning.auto import Recommendation
    from ..planning.settings import Setting

# Qwen2.5-Coder loses its predictions in 6 bits, and keeps them in 8 (scripts/measure_bits.py).
MAX_RISKY_BITS = 6

PrefillStepSize = Annotated[
    int, Option(min=1, help="Maximum number of prompt tokens per chunk.", rich_help_panel=KV_CACHE)
]
Snapkv = Annotated[
    str | None, Option(help='Keep what SnapKV selects of the prompt, such as "top_k=1024".')
]


@dataclass(frozen=True)
class CacheOptions:
    """Options for the prefill chunk size and the quantisation of KV entries."""

    prefill_step_size: PrefillStepSize = 2048
    kv_group_size: Annotated[
        int,
        Option(
            parser=one_of(32, 64, 128),
            help="Values per quantisation group: 32, 64 or 128.",
            rich_help_panel=KV_CACHE,
        ),
    ] = 64
    kv_bits: Annotated[
        int | None,
        Option(
            parser=one_of(2, 3, 4, 6, 8),
            help="Quantise the entries to 2, 3, 4, 6 or 8 bits.",
            rich_help_panel=KV_CACHE,
        ),
    ] = None

    @property
    def quantization(self) -> Quantization | None:
        """Return the quantisation of KV entries, or None without --kv-bits."""
        from ..entries.quantization import Quantization

        return None if self.kv_bits is None else Quantization(self.kv_bits, self.kv_group_size)

    def bits_notes(self) -> Iterator[str]:
        """Yield a note if --kv-bits is so small that answers of some models become useless."""
        if self.kv_bits is not None and self.kv_bits <= MAX_RISKY_BITS:
            yield (
                f"note: with --kv-bits {self.kv_bits}, answers of some models are useless; --kv-bits 8 changes answers "
                "little"
            )

    def require_supported(self, model: Any) -> None:
        """Raise SnapKVError if the model's KV entries can't be quantised with these options."""
        from mlx_lm.models.cache import make_prompt_cache

        from ..caches.layers import attention_layers, require_quantizable

        if self.quantization is None:
            return
        try:
            layers = attention_layers(model, make_prompt_cache(model))
        except UnsupportedModelError:  # no policy can be used, so mlx-lm does the quantisation
            return
        require_quantizable(model, layers, self.quantization)


@dataclass(frozen=True)
class MLXCacheOptions(CacheOptions):
    """KV cache options, plus mlx-lm's own options for a full cache."""

    max_kv_size: Annotated[
        int | None,
        Option(
            min=1,
            help="Size of mlx-lm's rotating cache, for models that allow one.",
            rich_help_panel=KV_CACHE,
        ),
    ] = None
    quantized_kv_start: Annotated[
        int | None,
        Option(
            min=0,
            help="Tokens before --kv-bits quantises a full cache; default: 5000.",
            rich_help_panel=KV_CACHE,
        ),
    ] = None

    def generate_keywords(self, setting: Setting | None) -> dict[str, Any]:
        """Return the options as keyword arguments for `stream_generate`.

        Raises: SnapKVError: --quantized-kv-start is combined with a policy or sparse attention.
        """
        if self.quantized_kv_start is not None and setting is not None:
            raise SnapKVError(
                "--quantized-kv-start is for the full cache only, since a policy's entries are quantised at the "
                "compression: drop it or the policy"
            )
        keywords = dict(vars(self))
        if self.quantized_kv_start is None:
            del keywords["quantized_kv_start"]  # mlx-lm's default applies
        return keywords

    def notes(self, setting: Setting | None, n_prompt: int, max_tokens: int) -> Iterator[str]:
        """Yield notes on risky --kv-bits, and on options without effect on a prompt of `n_prompt` tokens."""
        from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START

        from ..planning.prompt_plan import reason_to_leave

        if self.kv_bits is None:
            return
        if setting is not None and self.quantized_kv_start is not None:
            # --policy auto chose this setting: `generate_keywords` rejects --quantized-kv-start if the user chose one.
            yield (
                "note: --quantized-kv-start does nothing here, since it is for the full cache only, and this prompt "
                f"uses {setting}"
            )
        if setting is not None and reason_to_leave(setting, n_prompt, None, max_tokens) is None:
            yield from self.bits_notes()
            return
        quantized_from = self.quantized_kv_start
        if quantized_from is None:
            quantized_from = DEFAULT_QUANTIZED_KV_START
        if n_prompt + max_tokens <= quantized_from:
            remedy = "" if setting is not None else "; --quantized-kv-start changes that"
            yield f"note: --kv-bits quantises a full cache only from {quantized_from:,} tokens on{remedy}"
        else:
            yield from self.bits_notes()

    def require_supported(self, model: Any, draft_model: str | None = None) -> None:
        """Check that the model supports the options, and that the options can be combined.

        Raises: SnapKVError: the model does not support an option, or --max-kv-size is combined with --draft-model or
            --kv-bits.
        """
        from ..models import type_of

        super().require_supported(model)
        if self.max_kv_size is None:
            return
        makes_own_caches = hasattr(model, "make_cache")
        if makes_own_caches:
            raise SnapKVError(
                f"--max-kv-size has no effect on {type_of(model)} models, which make their own caches: drop it, "
                f"or limit the entries with --policy streaming_llm:budget={self.max_kv_size}"
            )
        for flag, value in (("--draft-model", draft_model), ("--kv-bits", self.kv_bits)):
            if value is not None:
                raise SnapKVError(f"--max-kv-size can't be combined with {flag}: drop one of them")


def parse_settings(
    policy: Iterable[str] | None, snapkv: str | None = None, sparse: Iterable[str] | None = None
) -> list[Setting]:
    """Parse the values of --snapkv, --policy and --sparse into settings.

    Raises: SnapKVError: a value can't be parsed.
    """
    texts_by_option = {
        "snapkv": [] if snapkv is None else [snapkv],
        "policy": policy or [],
        "sparse": sparse or [],
    }
    return [
        parse_setting(option, text) for option, texts in texts_by_option.items() for text in texts
    ]


def parse_setting(option: str, text: str) -> Setting:
    """Parse `text` as the value of `option`: "snapkv", "policy" or "sparse".

    Raises: SnapKVError: the text can't be parsed. The message names the flag and the text.
    """
    from ..planning.settings import resolve_setting

    try:
        setting = resolve_setting(**{option: text})
    except SnapKVError as error:
        raise SnapKVError("{} {}: {}", flag_of(option), shlex.quote(text), error) from error
    assert setting is not None  # `resolve_setting` returns None only if every option is None
    return setting


@dataclass(frozen=True)
class PolicyOptions:
    """Options that select a policy or sparse attention."""

    policy: Annotated[
        str | None,
        Option(help='A policy such as "keydiff:budget=25%" (see mlx-snapkv policies).'),
    ] = None
    snapkv: Snapkv = None
    sparse: Annotated[
        str | None,
        Option(help='Keep all entries; answers read few, such as "top_k=2048" ("" for defaults).'),
    ] = None

    @property
    def flag(self) -> str:
        """Return the flag that selects the policy or sparse attention, or an empty string if none is set."""
        for option in ("snapkv", "policy", "sparse"):
            if getattr(self, option) is not None:
                return flag_of(option)
        return ""

    def resolve(self) -> Setting | None:
        """Return the selected policy or sparse attention, if any.

        Raises: SnapKVError: a value can't be parsed, or several flags are set.
        """
        from ..planning.settings import resolve_setting

        texts = {"snapkv": self.snapkv, "policy": self.policy, "sparse": self.sparse}
        settings = [parse_setting(name, text) for name, text in texts.items() if text is not None]
        if len(settings) == 1:
            return settings[0]
        return resolve_setting(**texts)  # None if no flag is set; raises if several are


@dataclass(frozen=True)
class AutoPolicyOptions(PolicyOptions):
    """`PolicyOptions` plus --policy auto, which chooses a setting for the prompt and this machine."""

    policy: Annotated[
        str | None,
        Option(help='auto, or a policy such as "keydiff:budget=25%" (see mlx-snapkv policies).'),
    ] = None
    kv_memory: Annotated[
        int | None,
        Option(
            parser=parse_bytes,
            metavar="SIZE",
            help="KV memory limit for --policy auto, such as 2GB.",
            rich_help_panel=KV_CACHE,
        ),
    ] = None

    @property
    def is_auto(self) -> bool:
        """Return whether --policy is auto. Raises: SnapKVError: --snapkv and --policy are both set."""
        from ..planning.settings import asks_for_auto

        return asks_for_auto(self.snapkv, self.policy)

    def resolve(self) -> Setting | None:
        """Return the selected policy or sparse attention.

        Return None for the full cache, or if --policy auto will choose the setting later.

        Raises: SnapKVError: a value can't be parsed, or several options select a setting.
        """
        if self.is_auto and self.sparse is not None:
            raise SnapKVError(
                "--policy auto and --sparse both say how entries are used: give only one"
            )
        return None if self.is_auto else super().resolve()


def _field_of_sparse(name: str) -> Any:
    """Return a dataclass field with default None and the metadata of the `Sparse` option `name`."""
    return field(default=None, metadata=Sparse.__dataclass_fields__[name].metadata)


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Sparse attention options that have their own flags."""

    store: str | None = _field_of_sparse("store")
    store_dir: str | None = _field_of_sparse("store_dir")

    def __post_init__(self) -> None:
        """Check the values. Raises: OptionError: a value is not allowed."""
        for name, value in self.flag_values.items():
            metadata = Sparse.__dataclass_fields__[name].metadata
            is_allowed = metadata["is_allowed"]
            if not is_allowed(value):
                raise OptionError(name, metadata["allowed"], value)

    @property
    def flag_values(self) -> dict[str, Any]:
        """Return the values of the flags that are set, keyed by `Sparse` option."""
        values = {"store": self.store, "store_dir": self.store_dir}
        return {name: value for name, value in values.items() if value is not None}

    def fill_defaults_of(self, setting: Setting | None) -> Setting | None:
        """Return `setting` with these options in place of its default values.

        Only sparse attention has a store, so a policy or None is returned unchanged.
        """
        if not isinstance(setting, Sparse):
            return setting
        changes = {}
        for name, value in self.flag_values.items():
            default = getattr(Sparse, name)
            if getattr(setting, name) == default:
                changes[name] = value
        return replace(setting, **changes)

    def apply_to(self, setting: Setting | None) -> Setting | None:
        """Return `setting` with these options applied.

        Raises: SnapKVError: --store is set without sparse attention.
        """
        self.require_sparse(setting)
        return self.fill_defaults_of(setting)

    def require_sparse(self, setting: Setting | None) -> None:
        """Raise SnapKVError if --store is set but `setting` is not sparse attention."""
        if self.store is None or isinstance(setting, Sparse):
            return
        raise SnapKVError(
            "{} says where sparse attention keeps all entries, but {}: give {} instead, or drop {}",
            NamedOption("store", self.store),
            "no policy was given" if setting is None else f"{setting} evicts",
            NamedOption("sparse"),
            NamedOption("store"),
        )


@dataclass(frozen=True)
class CompressionOptions(StoreOptions, AutoPolicyOptions):
    """All compression options of a request: a policy, sparse attention with its store, or auto."""

    @property
    def setting(self) -> Setting | None:
        """Return the selected setting with its store options.

        Return None for the full cache, or if --policy auto will choose the setting later.

        Raises: SnapKVError: an option can't be parsed, or options conflict.
        """
        setting = self.resolve()
        return None if self.is_auto else self.apply_to(setting)

    def setting_for_task(
        self,
        model: Any,
        task: str,
        say: Callable[[str], None],
        generation: dict[str, Any],
        max_tokens: int | None = None,
    ) -> Setting | None:
        """Return the setting for a task whose prompts are not known yet.

        With --policy auto, the choice is printed. See `recommend` for the arguments.

        Raises: SnapKVError: an option can't be parsed, options conflict, or `recommend` fails.
        """
        setting = self.setting
        recommendation = self.recommend(model, None, task, say, generation, max_tokens)
        return setting if recommendation is None else recommendation.config.setting

    def recommend(
        self,
        model: Any,
        n_prompt: int | None,
        task: str,
        say: Callable[[str], None],
        generation: dict[str, Any],
        max_tokens: int | None = None,
    ) -> Recommendation | None:
        """Choose and print a setting for --policy auto. Return None if --policy is not auto.

        Args:
            model: loaded model, or a model's name.
            n_prompt: prompt length in tokens. None if the prompts are not known yet.
            task: "question", "conversation" or "batch".
            say: prints a line.
            generation: options for mlx-lm's `generate_step`.
            max_tokens: maximum answer length in tokens. None uses mlx-lm's default.

        Raises: SnapKVError: the model is shared by several Macs, can't be loaded, or supports none of the settings that
            auto chooses from.
        """
        from ..planning.auto import resolve
        from ..planning.prompt_plan import MAX_TOKENS
        from .loading import load_without_weights, require_one_process

        if not self.is_auto:
            return None
        require_one_process(policy=self.policy)
        if isinstance(model, str):
            model = load_without_weights(model)
        *_, recommendation = resolve(
            model,
            n_prompt,
            task,
            generation,
            policy=self.policy,
            max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
            kv_memory=self.kv_memory,
            store=self.store,
        )
        assert recommendation is not None  # `is_auto` is true
        say(str(recommendation))
        setting = self.fill_defaults_of(recommendation.config.setting)
        config = replace(recommendation.config, setting=setting)
        return recommendation._replace(config=config)
