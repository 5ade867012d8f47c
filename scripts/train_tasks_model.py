"""Teach the embedded LLaMA harder tasks, as a model of its own (with MLX, on a CPU).

    python scripts/train_tasks_model.py --out build/tasks

It starts from the embedded LLaMA's weights with one layer more, which does nothing at first. The run is fixed
by `--seed`; `--resume` goes on from the last checkpoint, which every stage and every 25 steps leave. It needs
10 GB of memory at the end. With glibc, MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000 before the
command make it up to three times as fast: MLX then gets its large arrays without page faults.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.tasks import TASKS
from scripts.demo_training.batches import ANSWER, COPY, TEXT, Mix, SequenceMaker
from scripts.demo_training.quick_exp import cross_entropy, quick_llama
from scripts.demo_training.scores import exact_match

TEXT_WEIGHT = 0.2
FIRST_WEIGHT = 4.0
AVERAGED = 2  # last stages, of whose final weights the model is the mean
EMBEDDING_RATE = 0.3  # AdamW's rate, as a share of Muon's


@dataclass
class Stage:
    mix: Mix
    tokens: int  # a batch
    steps: int
    lr: float = 0.01
    final_lr: float = 0.01  # the rate moves linearly over the steps
    rope_base: float = 1e8  # raised before documents are lengthened
    spread: int = 2  # documents are between a share of the length and all of it


# Those that are learned last are drawn twice as often.
_TASKS = (*TASKS, "several", "several", "overwritten")

CURRICULUM = [
    Stage(Mix(192, facts=35, tasks=_TASKS), 2048, 600),
    Stage(Mix(384, facts=30, tasks=_TASKS), 3072, 300),
    Stage(Mix(768, facts=20, tasks=_TASKS), 4096, 150),
    Stage(Mix(1536, facts=12, tasks=_TASKS), 6144, 100, final_lr=0.006),
    Stage(Mix(2048, facts=8, tasks=_TASKS), 6144, 120, lr=0.008, final_lr=0.002),
    Stage(Mix(4096, facts=8, tasks=_TASKS), 8192, 100, 0.006, 0.001, rope_base=1e9, spread=4),
    Stage(Mix(6144, facts=6, tasks=_TASKS), 8192, 60, 0.005, 0.0005, rope_base=1e9, spread=3),
    Stage(Mix(4096, facts=8, tasks=_TASKS), 8192, 80, 0.005, 0.0002, rope_base=1e9, spread=4),
]


def start() -> tuple[dict, Model]:
    """The embedded LLaMA with another layer at the end."""
    config = json.loads((MODELS["demo"] / "config.json").read_text())
    config |= {"num_hidden_layers": 4}
    model = Model(ModelArgs.from_dict(config))
    last = model.model.layers[-1]
    for silent in (last.self_attn.o_proj, last.mlp.down_proj):
        silent.weight = mx.zeros_like(silent.weight)
    model.load_weights(str(MODELS["demo"] / "model.safetensors"), strict=False)
    model.set_dtype(mx.float32)
    return config, model


def loss_and_hits(model: Model, ids: mx.array, picked: np.ndarray, weight: mx.array):
    """Weighted loss at the picked positions, and whether each is predicted."""
    hidden = model.model(ids[:, :-1])
    logits = model.model.embed_tokens.as_linear(hidden.reshape(-1, hidden.shape[-1])[picked])
    target = ids[:, 1:].reshape(-1)[picked]
    return (weight * cross_entropy(logits, target)).sum(), logits.argmax(-1) == target


def picked_positions(kinds: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Flat positions that the loss looks at, and their weights: answers and copies, a quarter of the text.

    A long answer weighs more than a short one, but less than its tokens one by one. The first answer, which people
    ask for most, is the only one that follows the document at once.
    """
    begins = (kinds == ANSWER) & (np.roll(kinds, 1, axis=1) != ANSWER)
    first = np.where(begins.cumsum(axis=1) == 1, FIRST_WEIGHT, 1.0).reshape(-1)
    kinds = kinds.reshape(-1)
    bounds = np.flatnonzero(np.diff(kinds, prepend=-2, append=-2))
    lengths = np.repeat(np.diff(bounds), np.diff(bounds))
    hard = np.isin(kinds, (ANSWER, COPY)) * first / np.sqrt(lengths)
    text = (kinds == TEXT) & (rng.random(kinds.shape) < 0.25)
    weight = hard / max(hard.sum(), 1e-9) + TEXT_WEIGHT * text / max(text.sum(), 1)
    picked = np.flatnonzero(weight)
    return picked, weight[picked].astype(np.float32)


class Run:
    """A training run: the model, everything random about it, and how far it has come."""

    def __init__(self, seed: int, out: Path):
        mx.random.seed(seed)
        self.seed, self.out = seed, out
        self.config, self.model = start()
        self.maker = SequenceMaker(
            Tokenizer.from_file(str(MODELS["demo"] / "tokenizer.json")), seed
        )
        self.rng = np.random.default_rng(seed)
        self.optimizer = optim.MultiOptimizer(
            [optim.Muon(0.0), optim.AdamW(0.0, betas=[0.9, 0.98], weight_decay=0.0)],
            [lambda name, weight: weight.ndim == 2 and "embed" not in name],
        )
        self.optimizer.init(self.model.trainable_parameters())
        self.gradients = nn.value_and_grad(self.model, loss_and_hits)
        self.ends: list[dict] = []  # weights at the ends of the last stages
        self.stage = self.step = self.steps = self.tokens = 0
        self.sittings = 1
        self.started = time.time()
        out.mkdir(parents=True, exist_ok=True)

    def train(self) -> None:
        for stage in CURRICULUM[self.stage :]:
            exact = math.nan
            self._set_rope_base(stage.rope_base)
            while self.step < stage.steps:
                self._set_rate(stage)
                loss, hit = self._step(stage)
                exact = hit if math.isnan(exact) else exact + 0.05 * (hit - exact)
                if self.steps % 20 == 0:
                    self._log(stage=self.stage, loss=round(loss, 4), exact=round(exact, 4))
                if self.steps % 25 == 0:
                    self.save()
            self.stage, self.step = self.stage + 1, 0
            self.ends = [*self.ends, self._weights()][-AVERAGED:]
            self.save()
        self.model.update(tree_map(lambda *ends: mx.array(sum(ends) / len(ends)), *self.ends))
        self.export()

    def _set_rope_base(self, base: float) -> None:
        self.config["rope_theta"] = base
        for layer in self.model.layers:
            layer.self_attn.rope.base = base

    def _set_rate(self, stage: Stage) -> None:
        rate = stage.lr + (stage.final_lr - stage.lr) * self.step / stage.steps
        rate *= min(1.0, (self.steps + 1) / 50)
        for optimizer, share in zip(self.optimizer.optimizers, (1.0, EMBEDDING_RATE)):
            optimizer.learning_rate = rate * share

    def _step(self, stage: Stage) -> tuple[float, float]:
        length = self.maker.rng.randint(stage.mix.length // stage.spread, stage.mix.length)
        ids, labels = self.maker.batch(replace(stage.mix, length=length), stage.tokens)
        kinds = labels[:, 1:]
        picked, weight = picked_positions(kinds, self.rng)
        (loss, hits), gradients = self.gradients(
            self.model, mx.array(ids), mx.array(picked), mx.array(weight)
        )
        gradients, norm = optim.clip_grad_norm(gradients, 1.0)
        mx.eval(loss, hits, norm, gradients)
        if math.isfinite(loss.item()) and math.isfinite(norm.item()):
            self.optimizer.update(self.model, gradients)
            mx.eval(self.model.parameters(), self.optimizer.state)
        self.step += 1
        self.steps += 1
        self.tokens += int((labels >= 0).sum())
        correct = np.ones(kinds.size, bool)
        correct[picked] = np.array(hits)
        return loss.item(), exact_match(correct.reshape(kinds.shape), kinds)

    def _log(self, **row) -> None:
        row |= {"steps": self.steps, "minutes": round((time.time() - self.started) / 60, 2)}
        with (self.out / "training.jsonl").open("a") as log:
            print(json.dumps(row), file=log)
        print(row, flush=True)

    def save(self) -> None:
        """A checkpoint to resume from, and the model folder as it is now."""
        checkpoint = {
            "model": self._weights(),
            "ends": self.ends,
            "optimizer": tree_map(np.array, self.optimizer.state),
            "maker": self.maker.rng.getstate(),
            "rng": self.rng,
            "config": self.config,
            "counts": (self.stage, self.step, self.steps, self.tokens, self.sittings),
        }
        part = self.out / "checkpoint.part"
        part.write_bytes(pickle.dumps(checkpoint))
        part.replace(self.out / "checkpoint.pkl")
        self.export()

    def _weights(self) -> dict:
        return tree_map(np.array, self.model.parameters())

    def export(self) -> None:
        halves = tree_map(lambda weight: weight.astype(mx.float16), self.model.parameters())
        mx.save_safetensors(
            str(self.out / "model.safetensors"), dict(tree_flatten(halves)), {"format": "mlx"}
        )
        (self.out / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODELS["demo"] / name, self.out / name)
        about = {
            "seed": self.seed,
            "steps": self.steps,
            "tokens": self.tokens,
            "sittings": self.sittings,
            "shortest": CURRICULUM[0].mix.length,
            "longest": max(stage.mix.length for stage in CURRICULUM),
        }
        (self.out / "training.json").write_text(json.dumps(about, indent=2) + "\n")

    def resume(self) -> None:
        saved = pickle.loads((self.out / "checkpoint.pkl").read_bytes())
        self.model.update(tree_map(mx.array, saved["model"]))
        self.optimizer.state = tree_map(mx.array, saved["optimizer"])
        self.maker.rng.setstate(saved["maker"])
        self.rng, self.ends, self.config = saved["rng"], saved["ends"], saved["config"]
        self.stage, self.step, self.steps, self.tokens, self.sittings = saved["counts"]
        self.sittings += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    run = Run(args.seed, args.out)
    if args.resume:
        run.resume()
    with quick_llama():
        run.train()


if __name__ == "__main__":
    main()
