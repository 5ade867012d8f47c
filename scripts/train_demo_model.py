"""Train an embedded model from scratch on synthetic documents (needs the `train` extra: torch, transformers).

    python scripts/train_demo_model.py llama --out mlx_snapkv/demo/models/llama
    python scripts/train_demo_model.py qwen3-next --out mlx_snapkv/demo/models/qwen3-next

The run is fixed by `--seed`. A stage ends when the running exact-match accuracy reaches its target or its
steps are used up; `--resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.demo_training import architectures
from scripts.demo_training.batches import ANSWER, COPY, TEXT, Mix, SequenceMaker
from scripts.demo_training.muon import Muon
from scripts.demo_training.priming import prime
from scripts.demo_training.scores import exact_match
from scripts.demo_training.tokenizer import train_tokenizer

FIRST_TOKEN_WEIGHT = 5.0


@dataclass
class Stage:
    mix: Mix
    tokens: int  # a batch
    max_steps: int
    target: float  # running exact-match accuracy that ends the stage
    lr: float = 1.0
    final_lr: float = 1.0  # factors of the peak rate; the rate moves linearly over max_steps


def curriculum(arch: str) -> list[Stage]:
    """Short and dense documents first; the rate falls in the last, longest stages."""
    stages = [
        Stage(Mix(96, facts=40, copy=0.3, made_up=0.05), 4096, 600, 0.90),
        Stage(Mix(192, facts=30, copy=0.1), 4096, 600, 0.94),
    ]
    if arch == "llama":
        return [
            *stages,
            Stage(Mix(384, facts=20, copy=0.1), 4096, 600, 0.96),
            Stage(Mix(768, facts=12, copy=0.05), 6144, 500, 0.975),
            Stage(Mix(1536, facts=8), 6144, 200, 0.98, lr=0.8),
            Stage(Mix(3072, facts=5, questions=16), 6144, 150, 0.985, lr=0.6),
            Stage(Mix(4608, facts=4, questions=24), 9216, 150, 2.0, lr=0.5, final_lr=0.3),
            Stage(Mix(8400, facts=3, questions=32), 8400, 80, 2.0, lr=0.15, final_lr=0.0),
            Stage(Mix(9000, facts=4, questions=40), 9000, 150, 2.0, lr=0.3, final_lr=0.0),
        ]
    return [
        *stages,
        Stage(Mix(384, facts=20, copy=0.1), 4096, 150, 0.96),
        Stage(Mix(768, facts=12, copy=0.05), 6144, 150, 0.97),
        Stage(Mix(1536, facts=8), 6144, 150, 0.98, lr=0.8),
        Stage(Mix(3072, facts=5, questions=16), 6144, 150, 0.985, lr=0.6),
        Stage(Mix(4608, facts=4, questions=24), 9216, 150, 2.0, lr=0.5, final_lr=0.0),
        Stage(Mix(2048, facts=10, questions=24), 8192, 200, 2.0, lr=0.8, final_lr=0.6),
        Stage(Mix(4608, facts=5, questions=32), 9216, 160, 2.0, lr=0.5, final_lr=0.0),
    ]


def losses(model, ids: torch.Tensor, labels: torch.Tensor, text_weight: float, generator):
    """Mean loss over answers and copies plus a share of the text's; exact-match accuracy of the answers."""
    hidden = model.model(ids[:, :-1]).last_hidden_state
    targets, kinds = ids[:, 1:], labels[:, 1:]
    sampled = torch.rand(kinds.shape, generator=generator) < 0.25
    picked = (kinds == ANSWER) | (kinds == COPY) | ((kinds == TEXT) & sampled)
    logits = model.lm_head(hidden[picked])
    kind, target = kinds[picked], targets[picked]
    each = F.cross_entropy(logits, target, reduction="none")
    # An answer's first token is the look-up, the rest follows it: it weighs as much as the rest.
    first = ((kinds == ANSWER) & (labels[:, :-1] != ANSWER))[picked]
    hard = kind != TEXT
    weight = torch.where(first, FIRST_TOKEN_WEIGHT, 1.0)[hard]
    loss = (weight * each[hard]).sum() / weight.sum() + text_weight * each[~hard].mean()
    correct = torch.ones_like(kinds, dtype=torch.bool)
    correct[picked] = logits.argmax(-1) == target
    return loss, exact_match(correct.numpy(), kinds.numpy())


def optimizers(model, lr: float):
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in chosen]
    return [
        Muon(matrices, lr=lr),
        torch.optim.AdamW(rest, lr=lr * 0.3, betas=(0.9, 0.98), weight_decay=0.0),
    ], [lr, lr * 0.3]


class Run:
    """A training run: the model, everything random about it, and how far it has come."""

    def __init__(self, arch: str, seed: int, lr: float, out: Path):
        torch.manual_seed(seed)
        self.arch, self.seed, self.lr, self.out = arch, seed, lr, out
        self.generator = torch.Generator().manual_seed(seed)
        self.tokenizer = train_tokenizer(seed)
        self.maker = SequenceMaker(self.tokenizer, seed)
        self.model = architectures.build(arch, self.tokenizer.get_vocab_size())
        prime(arch, self.model)
        self.opts, self.peaks = optimizers(self.model, lr)
        self.next_stage = self.steps = self.tokens = 0
        self.sittings = 1
        self.started = time.time()
        out.mkdir(parents=True, exist_ok=True)

    def train_stage(self, number: int, stage: Stage) -> None:
        accuracy = 0.0
        for step in range(stage.max_steps):
            self._set_rate(stage, step)
            loss, exact = self._step(stage)
            if not math.isnan(exact):
                accuracy += (exact - accuracy) / min(step + 1, 20)
            if self.steps % 20 == 0:
                self._log(stage=number, step=step, loss=round(loss, 4), exact=round(accuracy, 4))
            if step >= 40 and accuracy >= stage.target:
                break
        self.next_stage = number + 1

    def _set_rate(self, stage: Stage, step: int) -> None:
        factor = stage.lr + (stage.final_lr * stage.lr - stage.lr) * step / stage.max_steps
        warm = min(1.0, (self.steps + 1) / 50)
        for opt, peak in zip(self.opts, self.peaks):
            opt.param_groups[0]["lr"] = peak * factor * warm

    def _step(self, stage: Stage) -> tuple[float, float]:
        length = stage.mix.length
        mix = replace(stage.mix, length=self.maker.rng.randint(length // 2, length))
        ids, labels = self.maker.batch(mix, stage.tokens)
        loss, exact = losses(
            self.model, torch.from_numpy(ids), torch.from_numpy(labels), 0.2, self.generator
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for opt in self.opts:
            if torch.isfinite(loss) and torch.isfinite(norm):
                opt.step()
            opt.zero_grad(set_to_none=True)
        self.steps += 1
        self.tokens += int((labels >= 0).sum())
        return loss.item(), exact

    def _log(self, **row) -> None:
        row |= {"total": self.steps, "minutes": round((time.time() - self.started) / 60, 2)}
        with (self.out / "training.jsonl").open("a") as log:
            print(json.dumps(row), file=log)
        print(row, flush=True)

    def save(self) -> None:
        """A checkpoint to resume from, and the model folder as it is now."""
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.opts],
            "rng": self.maker.rng.getstate(),
            "generator": self.generator.get_state(),
            "steps": self.steps,
            "tokens": self.tokens,
            "sittings": self.sittings,
            "next_stage": self.next_stage,
        }
        torch.save(checkpoint, self.out / "checkpoint.pt")
        architectures.export(self.arch, self.model, self.tokenizer, self.out)
        about = {
            "seed": self.seed,
            "steps": self.steps,
            "tokens": self.tokens,
            "sittings": self.sittings,
            "longest": max(stage.mix.length for stage in curriculum(self.arch)),
            "peak learning rate": self.lr,
        }
        (self.out / "training.json").write_text(json.dumps(about, indent=2) + "\n")

    def resume(self) -> None:
        saved = torch.load(self.out / "checkpoint.pt", weights_only=False)
        self.model.load_state_dict(saved["model"])
        for opt, state in zip(self.opts, saved["optimizers"]):
            opt.load_state_dict(state)
        self.maker.rng.setstate(saved["rng"])
        self.generator.set_state(saved["generator"])
        self.next_stage, self.steps, self.tokens = (
            saved[k] for k in ("next_stage", "steps", "tokens")
        )
        self.sittings = saved["sittings"] + 1


def train(args) -> None:
    torch.set_num_threads(args.threads)
    run = Run(args.arch, args.seed, args.lr, args.out)
    print(f"{args.arch}: {sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    if args.resume:
        run.resume()
    for number, stage in list(enumerate(curriculum(args.arch)))[run.next_stage :]:
        run.train_stage(number, stage)
        run.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("arch", choices=list(architectures.CONFIGS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
