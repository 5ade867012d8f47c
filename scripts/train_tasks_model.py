"""Train `demo-tasks`: the built-in LLaMA with one more layer, on harder tasks (with MLX, on a CPU).

    python scripts/train_tasks_model.py --out build/tasks

Training starts from the weights of `demo`, with a new layer that does nothing at first. `--seed` fixes the run. The
model is saved after each stage. The last stages need 10 GB of memory. With glibc, the variables
MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000 make training up to three times as fast, because
MLX then gets its large arrays without page faults.
"""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from evaluation.suite_tasks import TASKS
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.llama import Model, ModelArgs
from results_page import options
from tokenizers import Tokenizer
from training_batches import ANSWER, COPY, TEXT, Mix, Progress, SequenceMaker, exact_match
from training_quick_exp import cross_entropy, quick_llama

from mlx_snapkv.demo import MODELS

TEXT_WEIGHT = 0.2  # weight of the text's loss
FIRST_WEIGHT = 4.0  # weight of the first answer about a document
AVERAGED = 2  # number of final stages whose weights are averaged
EMBEDDING_RATE = 0.3  # AdamW's learning rate, as a share of Muon's


@dataclass
class Stage:
    """A training stage.

    Attributes:
        mix: composition of the batches.
        tokens: tokens per batch.
        lr, final_lr: learning rate at the start and at the end, with linear interpolation.
        rope_base: RoPE's base, which is raised for longer documents.
        spread: documents have between 1/spread of the mix's length and its full length.
    """

    mix: Mix
    tokens: int
    steps: int
    lr: float = 0.01
    final_lr: float = 0.01
    rope_base: float = 1e8
    spread: int = 2


# Tasks that are learned last are listed several times, so that they are drawn more often.
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
    """Return the configuration and the model: the built-in LLaMA with an extra layer at the end."""
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
    """Return the weighted loss at the picked positions, and whether each token is predicted correctly."""
    hidden = model.model(ids[:, :-1])
    logits = model.model.embed_tokens.as_linear(hidden.reshape(-1, hidden.shape[-1])[picked])
    target = ids[:, 1:].reshape(-1)[picked]
    return (weight * cross_entropy(logits, target)).sum(), logits.argmax(-1) == target


def picked_positions(kinds: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Pick and weight the positions that count in the loss: answers, copies and a quarter of the text.

    Positions index the flattened batch. An answer's weight grows with the square root of its length. The first answer
    has a higher weight, because a single question is the most common use, and only its answer comes directly after the
    document.
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
    """A training run: the model, its random generators, its optimizers and its progress."""

    def __init__(self, seed: int, out: Path):
        """Create the optimizers, and the model from the built-in one."""
        mx.random.seed(seed)
        self.out, self.progress = out, Progress(seed)
        self.config, self.model = start()
        tokenizer = Tokenizer.from_file(str(MODELS["demo"] / "tokenizer.json"))
        self.maker = SequenceMaker(tokenizer, seed)
        self.rng = np.random.default_rng(seed)
        self.optimizer = optim.MultiOptimizer(
            [optim.Muon(0.0), optim.AdamW(0.0, betas=[0.9, 0.98], weight_decay=0.0)],
            [lambda name, weight: weight.ndim == 2 and "embed" not in name],
        )
        self.optimizer.init(self.model.trainable_parameters())
        self.gradients = nn.value_and_grad(self.model, loss_and_hits)

    def train(self, stage: Stage) -> None:
        """Train for all steps of a stage."""
        exact = math.nan
        self.config["rope_theta"] = stage.rope_base
        for layer in self.model.layers:
            layer.self_attn.rope.base = stage.rope_base
        for step in range(stage.steps):
            rate = stage.lr + (stage.final_lr - stage.lr) * step / stage.steps
            rate *= min(1.0, (self.progress.steps + 1) / 50)
            for optimizer, share in zip(self.optimizer.optimizers, (1.0, EMBEDDING_RATE)):
                optimizer.learning_rate = rate * share
            loss, hit = self._step(stage)
            exact = hit if math.isnan(exact) else exact + 0.05 * (hit - exact)
            self.progress.show(stage.mix, loss, exact)

    def _step(self, stage: Stage) -> tuple[float, float]:
        """Train on one batch. Return its loss and exact-match accuracy."""
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
        self.progress.count(labels)
        correct = np.ones(kinds.size, bool)
        correct[picked] = np.array(hits)
        return loss.item(), exact_match(correct.reshape(kinds.shape), kinds)

    def save(self) -> None:
        """Write the model folder, with float16 weights."""
        self.out.mkdir(parents=True, exist_ok=True)
        halves = tree_map(lambda weight: weight.astype(mx.float16), self.model.parameters())
        path = str(self.out / "model.safetensors")
        mx.save_safetensors(path, dict(tree_flatten(halves)), {"format": "mlx"})
        (self.out / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODELS["demo"] / name, self.out / name)
        lengths = [stage.mix.length for stage in CURRICULUM]
        self.progress.write(self.out, shortest=lengths[0], longest=max(lengths))


def main() -> None:
    """Train all stages and save the mean weights of the last ones."""
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    run = Run(args.seed, args.out)
    ends: list[dict] = []
    with quick_llama():
        for stage in CURRICULUM:
            run.train(stage)
            run.save()
            ends.append(tree_map(np.array, run.model.parameters()))
    run.model.update(tree_map(lambda *each: mx.array(sum(each) / len(each)), *ends[-AVERAGED:]))
    run.save()


if __name__ == "__main__":
    main()
