"""The options that several commands share, each declared once: alone, or in groups for `with_options`."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..demo import MODELS
from ..errors import SnapKVError
from ..paths import path_of

if TYPE_CHECKING:
    from ..entries.quantization import Quantization
    from ..policies import Policy, Stages

Model = Annotated[
    str, Option(help=f"Model folder, Hugging Face repository, or: {', '.join(MODELS)}.")
]
Pipeline = Annotated[
    bool,
    Option(
        "--pipeline",
        help="On several Macs, started by mlx.launch: each has some of the layers, instead of a slice of each.",
    ),
]
SystemPrompt = Annotated[str | None, Option(help="System message of the chat template.")]
IgnoreChatTemplate = Annotated[
    bool, Option("--ignore-chat-template", help="Give the prompt as raw text.")
]
ChatTemplateConfig = Annotated[
    str | None, Option(help="Options of the chat template, as a JSON object.", metavar="JSON")
]
MaxTokens = Annotated[
    int, Option("--max-tokens", "-m", min=1, help="Tokens of an answer, at most.")
]
Seed = Annotated[int | None, Option(min=0, max=2**64 - 1, help="Seed of the sampling.")]
PrefillStepSize = Annotated[int, Option(min=1, help="Prompt tokens read at a time, at most.")]
Snapkv = Annotated[str | None, Option(help='SnapKV with these options, such as "top_k=1024".')]
Far = Annotated[
    str | None,
    Option(
        help="Entries farther away than the model was trained to: turned as if they were nearer (pull), or left where "
        "they are (keep). Without it, pulled if the prompt is longer than that, and the policy evicts while it is read."
    ),
]
Concurrency = Annotated[int, Option(min=1, max=1024, help="Requests at once, at most.")]
MaxKVBytes = Annotated[
    str | None,
    Option(metavar="SIZE", help="KV memory, such as 4GB, that requests wait rather than exceed."),
]
Facts = Annotated[int, Option(min=1, max=32, help="Facts to hide and ask for.")]
DocumentSeed = Annotated[int, Option(help="Seed of the documents.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress and no figures on stderr.")]
AsJson = Annotated[bool, Option("--json", help="One JSON object on stdout.")]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: Model
    adapter_path: Annotated[str | None, Option(help="Folder of LoRA adapters.")] = None
    quantize_activations: Annotated[
        bool,
        Option(
            "--quantize-activations",
            "-qa",
            help="Quantise activations as their layers' weights are.",
        ),
    ] = False
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Allow a tokenizer's own code.")
    ] = False

    def load(self) -> tuple[Any, Any]:
        """The model and its tokenizer; see `load_model`."""
        from .loading import load_model

        return load_model(self.model, **{k: v for k, v in vars(self).items() if k != "model"})


@dataclass(frozen=True)
class ShardedModelOptions(ModelOptions):
    """The same for a command that several Macs can run."""

    pipeline: Pipeline = False


@dataclass(frozen=True)
class DraftOptions:
    """A draft model."""

    draft_model: Annotated[
        str | None, Option(help="Small model of the same tokenizer that proposes tokens.")
    ] = None
    num_draft_tokens: Annotated[
        int, Option(min=1, help="Tokens that the draft model proposes at a time.")
    ] = 3

    def load(self, tokenizer: Any, trust_remote_code: bool) -> dict[str, Any]:
        """What `stream_generate` is to know of a draft model; see `load_draft_model`."""
        from .loading import load_draft_model

        if self.draft_model is None:
            return {}
        model = load_draft_model(self.draft_model, tokenizer, trust_remote_code)
        return {"draft_model": model, "num_draft_tokens": self.num_draft_tokens}


@dataclass(frozen=True)
class TextOptions:
    """A text to read."""

    prompt: Annotated[str | None, Option("--prompt", "-p", help="Text, or - for stdin.")] = None
    prompt_file: Annotated[
        str | None, Option(help="Text file to read; a --prompt is put after it.")
    ] = None
    system_prompt: SystemPrompt = None

    def read(self) -> str:
        """The file's text, then the prompt's; see `read_prompt`."""
        from .prompt_text import read_prompt

        return read_prompt(self.prompt, self.prompt_file)


@dataclass(frozen=True)
class PromptOptions(TextOptions):
    """A text to answer."""

    prefill_response: Annotated[str | None, Option(help="What the answer is to begin with.")] = None
    ignore_chat_template: IgnoreChatTemplate = False

    def encode(self, tokenizer: Any, text: str) -> list[int]:
        """Token ids of a prompt with this text; see `prompt_text.encode`."""
        from .prompt_text import encode

        return encode(
            tokenizer,
            text,
            self.system_prompt,
            self.ignore_chat_template,
            prefill_response=self.prefill_response,
        )


@dataclass(frozen=True)
class TokenizerOptions:
    """What a tokenizer is to do besides."""

    chat_template_config: ChatTemplateConfig = None
    extra_eos_token: Annotated[
        list[str] | None,
        Option(help="Token that also ends an answer; repeat it for several."),
    ] = None

    def adapt(self, tokenizer: Any) -> None:
        """Tell the tokenizer; see `adapt_tokenizer`."""
        from .generation import adapt_tokenizer

        adapt_tokenizer(tokenizer, self.extra_eos_token, self.chat_template_config)


@dataclass(frozen=True)
class SamplingOptions:
    """How an answer's tokens are chosen, and how many at most."""

    temp: Annotated[float, Option(min=0, max=100, help="Sampling temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[float, Option(min=0, max=1, help="Sampling top-p; 1 is off.")] = 1.0
    min_p: Annotated[float, Option(min=0, max=1, help="Sampling min-p; 0 is off.")] = 0.0
    top_k: Annotated[int, Option(min=0, help="Sampling top-k; 0 is off.")] = 0
    min_tokens_to_keep: Annotated[int, Option(min=1, help="Tokens that min-p keeps at least.")] = 1
    xtc_probability: Annotated[float, Option(min=0, max=1, help="XTC probability.")] = 0.0
    xtc_threshold: Annotated[float, Option(min=0, max=0.5, help="XTC threshold.")] = 0.1
    max_tokens: MaxTokens = 256

    def generation(self, tokenizer: Any) -> dict[str, Any]:
        """The same as options of mlx-lm's `stream_generate`."""
        from .generation import make_sampler

        options = dict(vars(self))
        return {
            "max_tokens": options.pop("max_tokens"),
            "sampler": make_sampler(tokenizer, **options),
        }


@dataclass(frozen=True)
class CacheOptions:
    """How a prompt is read, and how its entries are stored."""

    prefill_step_size: PrefillStepSize = 2048
    kv_group_size: Annotated[int, Option(help="Values that share a scale: 32, 64 or 128.")] = 64
    kv_bits: Annotated[
        int | None, Option(help="Bits of the KV cache's entries: 2, 3, 4, 6 or 8.")
    ] = None

    def __post_init__(self):
        if self.kv_bits not in (None, 2, 3, 4, 6, 8):
            raise SnapKVError(f"--kv-bits must be 2, 3, 4, 6 or 8, got {self.kv_bits}")
        if self.kv_group_size not in (32, 64, 128):
            raise SnapKVError(f"--kv-group-size must be 32, 64 or 128, got {self.kv_group_size}")

    @property
    def quantization(self) -> Quantization | None:
        from ..entries.quantization import Quantization

        return None if self.kv_bits is None else Quantization(self.kv_bits, self.kv_group_size)

    def keywords(self) -> dict[str, Any]:
        """The same as keywords of batches, conversations and mlx-lm's loop."""
        return dict(vars(self))

    def require(self, model: Any) -> None:
        """Raises: SnapKVError: the model's entries can't be quantised so."""
        from .generation import require_quantization

        require_quantization(model, self.quantization)


@dataclass(frozen=True)
class MLXCacheOptions(CacheOptions):
    """The same with mlx-lm's options of a full cache."""

    max_kv_size: Annotated[
        int | None,
        Option(
            min=1,
            help="mlx-lm's rotating cache, in entries, of models that make no caches of their own.",
        ),
    ] = None
    quantized_kv_start: Annotated[
        int | None,
        Option(min=0, help="Tokens from which --kv-bits counts, without a policy; mlx-lm's 5000."),
    ] = None

    def generation(self, policy: Policy | Stages | None) -> dict[str, Any]:
        """The same as options of mlx-lm's `stream_generate`.

        Raises:
            SnapKVError: one is given that has no effect on a policy's entries.
        """
        options = self.keywords()
        if self.quantized_kv_start is None:
            del options["quantized_kv_start"]
        elif policy is not None:
            raise SnapKVError(
                "--quantized-kv-start is for the full cache: a policy's entries are quantised when they are "
                "compressed; drop it or the policy"
            )
        return options

    def require(self, model: Any, draft_model: str | None = None) -> None:
        """Raises: SnapKVError: the model has no such cache, or not beside the draft model."""
        from .generation import require_rotating

        super().require(model)
        require_rotating(model, self.max_kv_size, kv_bits=self.kv_bits, draft_model=draft_model)


@dataclass(frozen=True)
class PolicyOptions:
    """The policy that compresses prompts, if any does."""

    snapkv: Snapkv = None
    policy: Annotated[
        str | None,
        Option(help='Any policy, such as "keydiff:budget=25%"; see mlx-snapkv policies.'),
    ] = None

    def resolve(self) -> Policy | Stages | None:
        """The policy; SnapKVError for a mistake in it, or for two."""
        from ..policies import resolve_policy

        return resolve_policy(self.snapkv, self.policy)


@dataclass(frozen=True)
class MemoryOptions:
    """What becomes of the entries that a policy does not keep."""

    memory: Annotated[
        str,
        Option(
            help="Entries that are not kept: gone (drop), or all at hand for later turns and --refresh: in memory "
            "(recall, recall:8bit, recall:4bit) or in files (recall:file, recall:file:8bit, recall:file:4bit). A "
            "policy that evicts while it reads, such as keydiff, then reads within its budget."
        ),
    ] = "drop"
    store_dir: Annotated[
        Path | None,
        Option(help="Folder for the files of --memory recall:file; by default TMPDIR."),
    ] = None

    def __post_init__(self):
        """Let temporary files be made in `store_dir`."""
        if self.store_dir is None:
            return
        folder = path_of(self.store_dir, "--store-dir")
        if not folder.is_dir():
            raise SnapKVError(f"--store-dir {folder} is no folder: make it, or give another one")
        if not os.access(folder, os.W_OK):
            raise SnapKVError(f"--store-dir {folder} can't be written to: give another folder")
        tempfile.tempdir = str(folder)


@dataclass(frozen=True)
class VerifyOptions(MemoryOptions):
    """The same, and what an answer does with these entries."""

    verify: Annotated[
        str | None,
        Option(
            help="all: the answer is drafted, and checked on all entries that --memory keeps: the full cache's own."
        ),
    ] = None
    refresh: Annotated[
        str,
        Option(
            help="With --memory, when an answer chooses which entries it reads: at every token (token), or once for "
            "the whole answer, which is faster and less exact (turn)."
        ),
    ] = "token"

    def keywords(self) -> dict[str, Any]:
        """The same as keywords of `stream_generate`, `Conversation` and batches."""
        return {name: value for name, value in vars(self).items() if name != "store_dir"}


@dataclass(frozen=True)
class RetentionOptions(VerifyOptions):
    """The same, and how far entries are seen from."""

    far: Far = None

    def __post_init__(self):
        """Raises: SnapKVError: these options are out of range, or don't go together."""
        super().__post_init__()
        from ..engine.recalling import Recall

        Recall(self.memory, self.verify, self.refresh, self.far)
