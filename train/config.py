"""One training run as a frozen record: every flag of `python -m train.main`, its default and its help.

The defaults are the paper's Table 4. What the models are (widths, layers, slots, candidates) stands in
`lilicorr_jax.config`, chosen here by `preset`. Reads no file and knows no device.
"""

import dataclasses
import re
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from lilicorr_jax.config import CorrectorConfig, DrafterConfig, Method, ObjectiveConfig, RerankerConfig, setting
from lilicorr_jax.presets import PRESETS

FREE_TO_CHANGE = frozenset(
    {"target", "data", "output", "mesh", "accumulation", "vocabulary_chunk", "anchor_chunk", "eval_every"}
    | {"checkpoint_every", "checkpoints_kept", "log_every", "tau_every", "tau_prompts", "tau_tokens", "cluster"}
    | {"dry_run", "gpu", "topology", "json"}
)
"""Fields that a resumed run may change: where things lie, how often it reports, and what only moves the rounding.

Folders may move, but what they hold may not: `train.checkpoint.Identity` compares it.
"""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices: data x fsdp x tensor of them."""

    data: int = setting(1, "Replicas; the batch is split over data x fsdp.")
    fsdp: int = setting(1, "Ways to split parameters and optimizer state, and the batch with them.")
    tensor: int = setting(1, "Ways to split heads and feed-forward widths.")

    def __post_init__(self):
        for name in ("data", "fsdp", "tensor"):
            if getattr(self, name) < 1:
                raise ValueError(f"--mesh.{name} must be at least 1; got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Processes that train together; without a coordinator there is one."""

    coordinator: str | None = setting(None, "host:port of process 0; or slurm, which tells all three.")
    processes: int | None = setting(None, "How many processes there are.")
    process: int | None = setting(None, "Which of them this is, from 0.")

    def __post_init__(self):
        numbers = (self.processes, self.process)
        if self.coordinator in (None, "slurm"):
            if numbers != (None, None):
                raise ValueError(
                    "--cluster.processes and --cluster.process need --cluster.coordinator=host:port; got "
                    f"{self.coordinator}."
                )
            return
        if not re.fullmatch(r"[\w.\-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", self.coordinator):
            raise ValueError(f"--cluster.coordinator is host:port or slurm; got {self.coordinator!r}.")
        if self.process is None or self.processes is None or not 0 <= self.process < self.processes:
            raise ValueError(
                "--cluster.process must lie in [0, --cluster.processes), both given; got "
                f"{self.process} of {self.processes}."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Trains a block drafter, alone or jointly with what corrects it, against a frozen target."""

    target: str = setting(MISSING, "Folder of the frozen target: a Hugging Face checkpoint in safetensors.", "Run")
    data: str = setting(MISSING, "The target's own replies: a folder of train.prepare, or a token file (.npz).")
    output: str = setting(MISSING, "Run folder; a run that was stopped goes on from the last checkpoint in it.")
    preset: Literal["tiny", "demo", "qwen3_4b", "qwen3_8b"] = setting(MISSING, "Shapes of the models.")
    method: Method = setting(
        "lilicorr", "The drafter alone, or jointly with LiLiCorr's reranker, Domino's or DSpark's correction."
    )
    reranker_init: Literal["preset", "normal", "fan_in"] = setting(
        "preset", "Initial weights of the reranker: the preset's choice, N(0, 0.02), or N(0, 1 / fan-in)."
    )
    init_from: str | None = setting(None, "Start from the weights in this folder: a DFlash or LiLiCorr drafter.")
    objective: ObjectiveConfig = ObjectiveConfig()

    steps: int | None = setting(None, "Optimizer steps; give this or --epochs.", "Steps and batches")
    epochs: int | None = setting(None, "Passes over the data; give this or --steps.")
    batch_rows: int = setting(64, "Sequences of one optimizer step, over all devices.")
    accumulation: int = setting(1, "Micro-batches in which a step is computed; changes memory, not the result.")
    sequence_length: int = setting(3072, "Tokens of a row; longer examples are cut, shorter ones padded.")
    buckets: tuple[int, ...] = setting((), "Shorter lengths to pad to; a batch then has rows of one of them.")
    anchors: int = setting(512, "Blocks drafted in each row, at anchors drawn anew at every step.")
    seed: int = setting(42, "Decides initial weights, order of the data and anchors.")

    drafter_learning_rate: float = setting(6e-4, "Peak learning rate of the drafter, Domino and DSpark.", "Optimizer")
    reranker_learning_rate: float = setting(1.5e-4, "Peak learning rate of the reranker.")
    drafter_weight_decay: float = setting(0.0, "Weight decay of the drafter's matrices.")
    reranker_weight_decay: float = setting(
        0.01, "Weight decay of the reranker's matrices; biases, norms, tables: none."
    )
    warmup_share: float = setting(0.04, "Share of the steps in which the rates rise from 0; then a cosine to 0.")
    clip: float = setting(1.0, "Largest norm of the gradient, over drafter and reranker together.")

    mesh: MeshConfig = MeshConfig()
    cluster: ClusterConfig = ClusterConfig()
    vocabulary_chunk: int = setting(1024, "Slots multiplied with the unembedding at once, on each device.", "Memory")
    anchor_chunk: int = setting(32, "Blocks computed at once: a row's in attention, a device's in the reranker.")

    checkpoint_every: int = setting(500, "Steps between checkpoints; the last step has one too.", "Reports")
    checkpoints_kept: int = setting(2, "How many of the latest checkpoints stay.")
    log_every: int = setting(20, "Steps between lines of progress and of metrics.jsonl.")
    eval_every: int = setting(0, "Steps between measurements on held-out rows; 0 for none.")
    eval_rows: int = setting(0, "Examples held out of training for them.")
    tau_every: int = setting(0, "Steps between measurements of tau, by decoding held-out prompts; 0 for none.")
    tau_prompts: int = setting(16, "Held-out prompts to decode.")
    tau_tokens: int = setting(64, "Tokens to decode behind each of them.")

    dry_run: bool = setting(False, "Only compile the step for GPUs that need not be there, and report.", "Dry run")
    gpu: Literal["h100"] = setting("h100", "What a dry run compiles for.")
    topology: str = setting("1x8", "Hosts x GPUs per host of a dry run.")
    json: bool = setting(False, "A dry run reports in one JSON line instead of a table.")

    def __post_init__(self):
        self._check_numbers()
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", self.topology):
            raise ValueError(f"--topology is hosts x GPUs per host, such as 1x8; got {self.topology!r}.")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"Give --steps or --epochs, one of the two; got {self.steps} and {self.epochs}.")
        if self.batch_rows % (self.accumulation * self.mesh.data * self.mesh.fsdp):
            raise ValueError(
                f"--batch_rows must divide by accumulation x data x fsdp = {self.accumulation} x {self.mesh.data} x "
                f"{self.mesh.fsdp}; got {self.batch_rows}."
            )
        if self.anchors > self.sequence_length - 1:
            raise ValueError(
                f"A row of {self.sequence_length} tokens has at most {self.sequence_length - 1} anchors; "
                f"--anchors asks for {self.anchors}."
            )
        if self.method in ("domino", "dspark") and self.objective.drafter_weighting != "decay":
            raise ValueError(
                f"--objective.drafter_weighting={self.objective.drafter_weighting} is for dflash and lilicorr; "
                f"--method={self.method} weighs its slots by their decay."
            )
        if self.eval_every and not self.eval_rows:
            raise ValueError(f"--eval_every={self.eval_every} needs rows to measure on: give --eval_rows.")
        if self.tau_every and self.tau_prompts > self.eval_rows:
            raise ValueError(
                f"--tau_every decodes {self.tau_prompts} prompts of held-out rows; --eval_rows holds {self.eval_rows}."
            )
        wrong = [bucket for bucket in self.buckets if not 1 < bucket < self.sequence_length]
        if wrong or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(
                f"--buckets must rise between 2 and --sequence_length={self.sequence_length}, which is always one; got "
                f"{','.join(map(str, self.buckets))}."
            )

    def _check_numbers(self) -> None:
        sizes = ("batch_rows", "accumulation", "sequence_length", "anchors", "vocabulary_chunk", "anchor_chunk")
        counts = ("checkpoint_every", "checkpoints_kept", "log_every", "steps", "epochs", "tau_prompts", "tau_tokens")
        for name in (*sizes, *counts):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1; got {value}.")
        for name in ("eval_every", "eval_rows", "tau_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must not be negative; got {getattr(self, name)}.")
        for name in ("drafter_learning_rate", "reranker_learning_rate", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"--{name} must be positive and finite; got {getattr(self, name)}.")
        for name in ("drafter_weight_decay", "reranker_weight_decay", "warmup_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} must lie in [0, 1); got {getattr(self, name)}.")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"--seed must lie in [0, 2**31); got {self.seed}.")

    def num_steps(self, num_examples: int) -> int:
        """Optimizer steps of the whole run, given how many examples there are to train on."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None  # __post_init__ saw to it
        steps = self.epochs * num_examples // self.batch_rows
        if steps < 1:
            raise ValueError(
                f"--epochs={self.epochs} over {num_examples} examples do not fill one batch of {self.batch_rows} rows: "
                "give more epochs or --steps."
            )
        return steps

    def models(self) -> tuple[DrafterConfig, CorrectorConfig | None]:
        """The method's drafter and corrector in the preset's sizes, with this run's initialisation."""
        drafter, corrector = PRESETS[self.preset]().for_method(self.method)
        if isinstance(corrector, RerankerConfig) and self.reranker_init != "preset":
            return drafter, dataclasses.replace(corrector, init=self.reranker_init)
        return drafter, corrector

    def fixed(self) -> dict[str, Any]:
        """What must be the same when a run is resumed: every field that changes the mathematics."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in FREE_TO_CHANGE}
