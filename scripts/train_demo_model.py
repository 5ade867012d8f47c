"""Train `demo` or `demo-qwen3-next` from scratch on synthetic documents. Needs pip install -e '.[train]'.

    python scripts/train_demo_model.py llama --out build/llama
    python scripts/train_demo_model.py qwen3-next --out build/qwen3-next

`--seed` fixes the run. The model has the shipped model's configuration and chat template. A stage ends when the
running exact-match accuracy reaches its target, or after its last step. The model is saved after every stage.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from results_page import options
from safetensors.numpy import save_file
from training_batches import ANSWER, COPY, TEXT, Mix, Progress, SequenceMaker, exact_match
from training_priming import prime
from training_tokenizer import train_tokenizer

from mlx_snapkv.demo import MODELS

SHIPPED = {"llama": MODELS["demo"], "qwen3-next": MODELS["demo-qwen3-next"]}
PEAK_RATE = 0.02  # Muon's learning rate
ADAM_SHARE = 0.3  # AdamW's learning rate, as a share of Muon's
FIRST_TOKEN_WEIGHT = 5.0  # weight of an answer's first token in the loss
TEXT_WEIGHT = 0.2  # weight of the text's loss


@dataclass
class Stage:
    """A training stage.

    Attributes:
        mix: composition of the batches.
        tokens: tokens per batch.
        target: running exact-match accuracy that ends the stage.
        lr: learning rate at the start, as a factor of the peak rate.
        final_lr: learning rate after `max_steps`, as a factor of the rate at the start, with linear interpolation.
    """

    mix: Mix
    tokens: int
    max_steps: int
    target: float
    lr: float = 1.0
    final_lr: float = 1.0


# Start with short, dense documents. The learning rate falls in the last and longest stages.
FIRST = [
    Stage(Mix(96, facts=40, copy=0.3, made_up=0.05), 4096, 600, 0.90),
    Stage(Mix(192, facts=30, copy=0.1), 4096, 600, 0.94),
]
CURRICULUM = {
    "llama": [
        *FIRST,
        Stage(Mix(384, facts=20, copy=0.1), 4096, 600, 0.96),
        Stage(Mix(768, facts=12, copy=0.05), 6144, 500, 0.975),
        Stage(Mix(1536, facts=8), 6144, 200, 0.98, lr=0.8),
        Stage(Mix(3072, facts=5, questions=16), 6144, 150, 0.985, lr=0.6),
        Stage(Mix(4608, facts=4, questions=24), 9216, 150, 2.0, lr=0.5, final_lr=0.3),
        Stage(Mix(8400, facts=3, questions=32), 8400, 80, 2.0, lr=0.15, final_lr=0.0),
        Stage(Mix(9000, facts=4, questions=40), 9000, 150, 2.0, lr=0.3, final_lr=0.0),
    ],
    "qwen3-next": [
        *FIRST,
        Stage(Mix(384, facts=20, copy=0.1), 4096, 150, 0.96),
        Stage(Mix(768, facts=12, copy=0.05), 6144, 150, 0.97),
        Stage(Mix(1536, facts=8), 6144, 150, 0.98, lr=0.8),
        Stage(Mix(3072, facts=5, questions=16), 6144, 150, 0.985, lr=0.6),
        Stage(Mix(4608, facts=4, questions=24), 9216, 150, 2.0, lr=0.5, final_lr=0.0),
        Stage(Mix(2048, facts=10, questions=24), 8192, 200, 2.0, lr=0.8, final_lr=0.6),
        Stage(Mix(4608, facts=5, questions=32), 9216, 160, 2.0, lr=0.5, final_lr=0.0),
    ],
}


class Muon(torch.optim.Optimizer):
    """Momentum with updates orthogonalised by a Newton-Schulz iteration (Keller Jordan, 2024).

    For the weight matrices of a small transformer, it needs about half as many steps as AdamW. Embeddings, norms and
    vectors are trained with AdamW.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        """Optimize the weight matrices `params`. `lr` is the step size for a square matrix."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Update all matrices from their gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalised(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalised(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return an approximately orthogonal matrix near `update`."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update / (update.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def build(arch: str, config: dict[str, Any]) -> torch.nn.Module:
    """Return a Hugging Face model with a shipped model's configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

    named = ("model_type", "architectures", "torch_dtype")
    settings = {key: value for key, value in config.items() if key not in named}
    settings |= {"use_cache": False}
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    if arch == "llama":
        return LlamaForCausalLM(LlamaConfig(**settings, rope_parameters=rope))
    interval = settings.pop("full_attention_interval")
    rope["partial_rotary_factor"] = settings.pop("partial_rotary_factor")
    kinds = [
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(settings["num_hidden_layers"])
    ]
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(**settings, rope_parameters=rope, layer_types=kinds)
    )


def mlx_weights(arch: str, state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Convert weights for mlx-lm: drop the tied head, and for Qwen3-Next add 1 to norms and transpose convolutions."""
    weights = {}
    for name, tensor in state.items():
        if name == "lm_head.weight" or "rotary_emb" in name:
            continue
        value = tensor.detach().float()
        if arch == "qwen3-next" and name.endswith("conv1d.weight"):
            value = value.transpose(1, 2)
        elif arch == "qwen3-next" and name.endswith("norm.weight") and "linear_attn" not in name:
            value = value + 1.0
        weights[name] = np.ascontiguousarray(value.numpy().astype(np.float16))
    return weights


def losses(model, ids: torch.Tensor, labels: torch.Tensor, generator) -> tuple[torch.Tensor, float]:
    """Return the loss of answers and copies plus a share of the text's loss, and the answers' exact-match accuracy."""
    hidden = model.model(ids[:, :-1]).last_hidden_state
    targets, kinds = ids[:, 1:], labels[:, 1:]
    sampled = torch.rand(kinds.shape, generator=generator) < 0.25
    picked = (kinds == ANSWER) | (kinds == COPY) | ((kinds == TEXT) & sampled)
    logits = model.lm_head(hidden[picked])
    kind, target = kinds[picked], targets[picked]
    each = F.cross_entropy(logits, target, reduction="none")
    # An answer's first token has a higher weight, because it needs the look-up, and the other tokens follow from it.
    first = ((kinds == ANSWER) & (labels[:, :-1] != ANSWER))[picked]
    hard = kind != TEXT
    weight = torch.where(first, FIRST_TOKEN_WEIGHT, 1.0)[hard]
    loss = (weight * each[hard]).sum() / weight.sum() + TEXT_WEIGHT * each[~hard].mean()
    correct = torch.ones_like(kinds, dtype=torch.bool)
    correct[picked] = logits.argmax(-1) == target
    return loss, exact_match(correct.numpy(), kinds.numpy())


class Run:
    """A training run: the model, its random generators, its optimizers and its progress."""

    def __init__(self, arch: str, seed: int, out: Path):
        """Create tokenizer, model and optimizers from the seed."""
        torch.manual_seed(seed)
        self.arch, self.out, self.progress = arch, out, Progress(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.tokenizer = train_tokenizer(seed)
        self.maker = SequenceMaker(self.tokenizer, seed)
        self.model = build(arch, json.loads((SHIPPED[arch] / "config.json").read_text()))
        prime(arch, self.model)
        named = list(self.model.named_parameters())
        matrices = {n: p for n, p in named if p.ndim == 2 and "embed" not in n}
        rest = [p for n, p in named if n not in matrices]
        adam = {"betas": (0.9, 0.98), "weight_decay": 0.0}
        self.optimizers = {
            Muon(matrices.values(), lr=PEAK_RATE): PEAK_RATE,
            torch.optim.AdamW(rest, lr=PEAK_RATE * ADAM_SHARE, **adam): PEAK_RATE * ADAM_SHARE,
        }

    def train(self, stage: Stage) -> None:
        """Train until the stage reaches its target or its last step."""
        accuracy = 0.0
        for step in range(stage.max_steps):
            self._set_rate(stage, step)
            loss, exact = self._step(stage)
            if not math.isnan(exact):
                accuracy += (exact - accuracy) / min(step + 1, 20)
            self.progress.show(stage.mix, loss, accuracy)
            if step >= 40 and accuracy >= stage.target:
                break

    def _set_rate(self, stage: Stage, step: int) -> None:
        """Set the learning rates, which rise over the first 50 steps of the run."""
        factor = stage.lr + (stage.final_lr * stage.lr - stage.lr) * step / stage.max_steps
        warm = min(1.0, (self.progress.steps + 1) / 50)
        for optimizer, peak in self.optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * factor * warm

    def _step(self, stage: Stage) -> tuple[float, float]:
        """Train on one batch. Return its loss and exact-match accuracy."""
        length = stage.mix.length
        mix = replace(stage.mix, length=self.maker.rng.randint(length // 2, length))
        ids, labels = self.maker.batch(mix, stage.tokens)
        loss, exact = losses(
            self.model, torch.from_numpy(ids), torch.from_numpy(labels), self.generator
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            if torch.isfinite(loss) and torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.count(labels)
        return loss.item(), exact

    def save(self) -> None:
        """Write the model folder in mlx-lm's format."""
        self.out.mkdir(parents=True, exist_ok=True)
        weights = mlx_weights(self.arch, self.model.state_dict())
        save_file(weights, self.out / "model.safetensors", metadata={"format": "mlx"})
        self.tokenizer.save(str(self.out / "tokenizer.json"), pretty=False)
        for name in ("config.json", "tokenizer_config.json"):
            shutil.copy(SHIPPED[self.arch] / name, self.out)
        longest = max(stage.mix.length for stage in CURRICULUM[self.arch])
        self.progress.write(self.out, longest=longest, **{"peak learning rate": PEAK_RATE})


def main() -> None:
    """Train the requested architecture and save it after each stage."""
    parser = options(__doc__)
    parser.add_argument("arch", choices=list(CURRICULUM))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(args.arch, args.seed, args.out)
    for stage in CURRICULUM[args.arch]:
        run.train(stage)
        run.save()


if __name__ == "__main__":
    main()
