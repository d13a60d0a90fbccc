"""Pretrain the demo target from nothing: `python -m demo.pretrain --output=demo/target`.

Trains the tokenizer, then the model on the corpus's pretraining split, and writes both. A killed run goes on from its
last checkpoint; rows are a function of the seed and the step, so it sees what it would have seen.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from absl import logging
from tokenizers import Tokenizer

from demo import corpus, rows
from demo import tokenizer as demo_tokenizer
from demo.quality import measure
from lilicorr_jax import presets
from lilicorr_jax.config import setting
from lilicorr_jax.conversion.checkpoint import save_target
from lilicorr_jax.flags import run_main
from lilicorr_jax.models.target import Target
from lilicorr_jax.shapes import Array, Float
from lilicorr_jax.sharding import count_parameters, init_parameters

INIT_STD = 0.08  # about 1 / sqrt(width): with 0.02, 75 steps reach a loss of 3.9 instead of 1.3
TOKENIZER_RECORDS = 8000
WATCHED = dict.fromkeys(corpus.CATEGORIES, 16)  # held-out prompts that watch the run
PRINT_EVERY = 25


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Pretrain the demo target."""

    output: str = setting(dataclasses.MISSING, "Folder for the model and its tokenizer.")
    checkpoints: str = setting("runs/demo_pretrain", "Folder for the checkpoints that a killed run goes on from.")
    steps: int = setting(3600, "Optimizer steps of about 4,000 tokens.")
    seed: int = setting(0, "Seed of the corpus and of the initial weights.")
    learning_rate: float = setting(4e-3, "Peak rate, after 2 % warm-up; it falls to 0 as a cosine.")
    save_every: int = setting(200, "Steps between checkpoints.")
    watch_every: int = setting(300, "Steps between looks at held-out replies.")

    def __post_init__(self):
        for name in ("steps", "learning_rate", "save_every", "watch_every"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"--{name} must be positive; got {value}.")


def optimizer(steps: int, learning_rate: float) -> optax.GradientTransformation:
    """AdamW with decay 0.05 on matrices, clip 1, warm-up and cosine."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, steps // 50), steps)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.05, mask=_matrices),
    )


def _matrices(params):
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def loss(target: Target, params, step_rows: Sequence[rows.Rows]) -> Float[Array, ""]:
    """Weighted mean cross-entropy of every next token, over rows of several widths."""
    total, weight = jnp.float32(0), jnp.float32(0)
    for group in step_rows:
        hidden = target.apply({"params": params}, group.token_ids[:, :-1]).hidden
        logits = target.apply({"params": params}, hidden, method="unembed")
        each = optax.softmax_cross_entropy_with_integer_labels(logits, group.token_ids[:, 1:])  # [B, T-1]
        total, weight = total + jnp.sum(each * group.weights[:, 1:]), weight + jnp.sum(group.weights[:, 1:])
    return total / weight


def make_step(target: Target, update: optax.GradientTransformation):
    """A jitted (state, rows) -> (state, loss); state is (params, optimizer state)."""

    def step(state, step_rows):
        params, optimizer_state = state
        value, gradient = jax.value_and_grad(lambda p: loss(target, p, step_rows))(params)
        change, optimizer_state = update.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, change), optimizer_state), value

    return jax.jit(step, donate_argnums=0)


def watch(target: Target, params, tokenizer: Tokenizer) -> str:
    """Quality on a few held-out prompts, and one reply of each category to read."""
    records = corpus.distinct("heldout", seed=1, per_category=WATCHED)
    quality, answers = measure(target, params, tokenizer, records)
    shown = {
        record.category: f"    {record.prompt!r}\n    -> {tokenizer.decode(answer)!r}"
        for record, answer in zip(records, answers, strict=True)
    }
    return "\n".join(f"  {line}\n{shown[line.category]}" for line in quality)


def train(target: Target, tokenizer: Tokenizer, settings: PretrainConfig, look: Callable[..., str] = watch):
    """Runs or resumes the optimizer steps; returns the parameters. `look(target, params, tokenizer)` is printed."""
    update = optimizer(settings.steps, settings.learning_rate)
    params = init_parameters(target, jax.random.key(settings.seed), jnp.zeros((1, 8), jnp.int32))
    _tell(f"{count_parameters(params):,} parameters")
    state, step = (params, update.init(params)), make_step(target, update)
    folder = Path(settings.checkpoints).absolute()
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
            _tell(f"going on from step {done} of {folder}")
        progress = Progress(done, settings.steps)
        stream = itertools.islice(rows.steps(tokenizer, seed=settings.seed), done, settings.steps)
        for number, step_rows in enumerate(stream, done + 1):
            state, value = step(state, step_rows)
            last = number == settings.steps
            if number % PRINT_EVERY == 0 or last:
                _tell(progress.line(number, float(value), sum(group.token_ids.size for group in step_rows)))
            if number % settings.watch_every == 0 or last:
                _tell(look(target, state[0], tokenizer))
            if number % settings.save_every == 0 or last:
                manager.save(number, args=ocp.args.StandardSave(state), force=True)
    return state[0]


@dataclass(frozen=True)
class Progress:
    """Says how far a run is; the clock starts when the record is made."""

    first: int
    steps: int
    began: float = dataclasses.field(default_factory=time.monotonic)

    def line(self, number: int, value: float, tokens: int) -> str:
        """Loss, speed (padding included) and time left at a step; `tokens` is how many one step has."""
        each = (time.monotonic() - self.began) / (number - self.first)
        left = each * (self.steps - number) / 60
        return f"step {number}/{self.steps} loss {value:.4f}, {tokens / each:,.0f} tok/s, {left:.1f} min left"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(settings: PretrainConfig) -> None:
    """The whole command: tokenizer, training, files."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of its work
    output, model = Path(settings.output), presets.demo().target
    records = itertools.islice(corpus.records("pretrain", seed=settings.seed), TOKENIZER_RECORDS)
    tokenizer = demo_tokenizer.train(text for record in records for text in (record.prompt, record.reply))
    params = train(Target(dataclasses.replace(model, init_std=INIT_STD)), tokenizer, settings)
    save_target(output, model, params)
    demo_tokenizer.write(tokenizer, output, context=model.max_positions)


if __name__ == "__main__":
    sys.exit(run_main(PretrainConfig, run, program="demo.pretrain", examples="python -m demo.pretrain --output=out"))
