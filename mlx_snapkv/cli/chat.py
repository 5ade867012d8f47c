"""`mlx-snapkv chat`: a conversation in the terminal, its cache kept small."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.report import format_bytes
from ..errors import SnapKVError, UnknownOptionError
from . import flags
from .generation import adapt_tokenizer, make_sampler, quantized_from
from .lines import Lines
from .loading import load_model, read_file
from .waiting import TOKENISING, waited_for

if TYPE_CHECKING:
    from ..chat.conversation import Conversation


def chat(
    model: flags.Model,
    adapter_path: flags.AdapterPath = None,
    quantize_activations: flags.QuantizeActivations = False,
    trust_remote_code: flags.TrustRemoteCode = False,
    temp: flags.Temp = 0.0,
    top_p: flags.TopP = 1.0,
    min_p: flags.MinP = 0.0,
    top_k: flags.TopK = 0,
    min_tokens_to_keep: flags.MinTokensToKeep = 1,
    xtc_probability: flags.XtcProbability = 0.0,
    xtc_threshold: flags.XtcThreshold = 0.1,
    seed: flags.Seed = None,
    max_tokens: flags.MaxTokens = 256,
    system_prompt: flags.SystemPrompt = None,
    chat_template_config: flags.ChatTemplateConfig = None,
    extra_eos_token: flags.ExtraEosToken = None,
    prefill_step_size: flags.PrefillStepSize = 2048,
    max_kv_size: flags.MaxKVSize = None,
    kv_group_size: flags.KVGroupSize = 64,
    kv_bits: flags.KVBits = None,
    quantized_kv_start: flags.QuantizedKVStart = None,
    snapkv: flags.Snapkv = None,
    policy: flags.Policy = None,
    memory: Annotated[
        str,
        typer.Option(
            help="What later turns vote over: what is left (drop) or all entries (the others). "
            "One of: drop, recall, recall:8bit, recall:4bit, recall:file."
        ),
    ] = "drop",
) -> None:
    """Chat with a model; commands start with a slash, /help lists them.

    \b
      mlx-snapkv chat --model demo
      mlx-snapkv chat --model MODEL --snapkv top_k=4096 --memory recall
      mlx-snapkv chat --model MODEL --policy keydiff:budget=8192 < questions.txt
    """
    from ..chat.conversation import Conversation
    from ..policies import resolve_policy

    chosen = resolve_policy(snapkv, policy)
    start_at: dict[str, Any] = quantized_from(quantized_kv_start, chosen)
    lines = Lines(sys.stdin)
    loaded, tokenizer = load_model(
        model, adapter_path, trust_remote_code, quantize_activations=quantize_activations
    )
    adapt_tokenizer(tokenizer, extra_eos_token, chat_template_config)
    sampler = make_sampler(
        tokenizer,
        seed=seed,
        temp=temp,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        min_tokens_to_keep=min_tokens_to_keep,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
    )
    conversation = Conversation(
        loaded,
        tokenizer,
        policy=chosen,
        memory=memory,
        system=system_prompt,
        max_tokens=max_tokens,
        sampler=sampler,
        prefill_step_size=prefill_step_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        max_kv_size=max_kv_size,
        **start_at,
    )
    Repl(conversation, lines).run()


class Repl:
    """Reads lines, sends them, prints answers; a line with a slash is a command.

    Answers go to stdout, all else to stderr. A mistake is one sentence and the chat goes on, unless the lines come
    from a file: then it ends with that mistake.
    """

    def __init__(self, conversation: Conversation, lines: Lines):
        from rich.console import Console

        self.conversation = conversation
        self._lines = lines
        self._policy_wanted, self._memory_wanted = conversation.policy, conversation.memory
        self._console = Console(stderr=True, highlight=False)
        self._speed = ""
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/file": (self._file, "FILE: put a document in front of the next message"),
            "/reset": (self._reset, "forget the conversation"),
            "/stats": (self._stats, "entries kept, memory and speed of the last turn"),
            "/save": (self._save, "FILE: write the conversation to a .safetensors file"),
            "/load": (self._load, "FILE: go on with a saved conversation or text"),
            "/policy": (
                self._policy,
                "POLICY: start again with this policy; none for the full cache",
            ),
            "/system": (self._system, "TEXT: start again with this system prompt"),
            "/help": (self._help, "this list"),
            "/quit": (self._quit, "leave (also Ctrl-D)"),
        }

    def run(self) -> None:
        if self._lines.interactive:
            self._say(
                "Several lines: paste them, or end each with a backslash. /help lists commands."
            )
        for line in self._lines:
            try:
                self._take(line.strip())
            except SnapKVError as error:
                if not self._lines.interactive:
                    raise
                self._say(str(error))
            except KeyboardInterrupt:
                if not self._lines.interactive:
                    raise
                self._say(f"stopped; the conversation goes on{self._waiting}")
            except StopIteration:
                return

    def _take(self, line: str) -> None:
        if not line:
            return
        if not line.startswith("/"):
            self._answer(line)
            return
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            from ..policies.base import suggestion

            close = suggestion(name, self._commands)
            raise UnknownOptionError(f"unknown command {name}{close}: /help lists them")
        self._commands[name][0](rest.strip())

    def _answer(self, text: str) -> None:
        from .progress import PrefillBar

        bar = PrefillBar(self._console)
        last = None
        send = partial(self.conversation.send, text, bar.update)
        responses: Any = waited_for(self._console, TOKENISING, send)
        try:
            for last in responses:
                print(last.text, end="", flush=True)
        finally:
            responses.close()  # now, and not when it is collected: it may have been interrupted
            bar.close()
            if last is not None:
                print(flush=True)
                self._speed = f"prompt {last.prompt_tps:.1f} tokens/s, generation {last.generation_tps:.1f} tokens/s"

    @property
    def _waiting(self) -> str:
        """What was attached and is still to be read."""
        n = len(self.conversation.attached)
        if not n:
            return ""
        them = "the document" if n == 1 else f"the {n} documents"
        return f", and {them} will be read with your next message"

    def _file(self, name: str) -> None:
        path = _named("/file", name)
        text = read_file("/file", path)
        count = partial(self.conversation.count, text)
        tokens = waited_for(self._console, TOKENISING, count)
        self.conversation.attached.append(text)
        self._say(f"{Path(path).name}: {tokens:,} tokens, to be read with your next message")

    def _reset(self, _: str) -> None:
        self._start_again()
        self._say("the conversation is forgotten")

    def _stats(self, _: str) -> None:
        from ..caches.layers import file_bytes, kv_bytes

        report = self.conversation.report
        if report is None:
            self._say("nothing has been said yet")
            return
        self._say(str(report))
        layers = [f"{i}: {n}" for i, n in enumerate(report.entries_kept) if n is not None]
        if layers:
            self._say(f"entries by layer: {', '.join(layers)}")
        caches = self.conversation.prompt_cache
        held = format_bytes(kv_bytes(caches))
        if file_bytes(caches):
            held += f", {format_bytes(file_bytes(caches))} in files"
        self._say(f"KV memory held between turns: {held}; {self._speed}")

    def _save(self, name: str) -> None:
        from ..saved import require_writable

        path = require_writable(_named("/save", name))
        replaced = path.exists()
        self.conversation.save(path)
        self._say(f"saved in {path}{', in place of the one that was there' if replaced else ''}")

    def _load(self, name: str) -> None:
        now = self.conversation
        path = _named("/load", name)
        self.conversation = loaded = type(now).load(
            path,
            now.model,
            now.tokenizer,
            policy=self._policy_wanted,
            memory=self._memory_wanted,
            **now.generation,
        )
        ways = (loaded.policy, loaded.memory)
        whose = "" if ways == (self._policy_wanted, self._memory_wanted) else ", as it was saved"
        how = f"policy {loaded.policy or 'none'}, memory {loaded.memory}{whose}"
        self._say(f"{len(loaded.read):,} tokens loaded, {how}")

    def _start_again(self, **changes: Any) -> None:
        """Forget the conversation, and what the file it came from may have brought with it."""
        now = self.conversation
        options = {"system": now.system, "policy": self._policy_wanted} | changes
        self.conversation = type(now)(
            now.model, now.tokenizer, memory=self._memory_wanted, **options, **now.generation
        )
        self._policy_wanted = self.conversation.policy

    def _policy(self, text: str) -> None:
        if not text:
            self._say(f"policy: {self.conversation.policy or 'none'}")
            return
        self._start_again(policy=None if text == "none" else text)
        self._say(f"a new conversation with policy {self.conversation.policy or 'none'}")

    def _system(self, text: str) -> None:
        self._start_again(system=text or None)
        self._say(f"a new conversation {'with that' if text else 'without a'} system prompt")

    def _help(self, _: str) -> None:
        for name, (_do, meaning) in self._commands.items():
            self._say(f"{name:8} {meaning}")

    def _quit(self, _: str) -> None:
        raise StopIteration

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _named(command: str, name: str) -> str:
    """A file name as it was typed, with or without quotes."""
    if not name:
        raise SnapKVError(f"{command} needs the name of a file")
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "\"'"
    return name[1:-1] if quoted else name
