"""A whole run: load, resume, step by step, save, export. Owns the run folder, signals and what stops a run.

<output>/config.flags     every flag, as it was resolved
<output>/checkpoints/     training state, latest few
<output>/metrics.jsonl    one record for every line of progress
<output>/events/          the same for TensorBoard
<output>/export/          orbax/ and hf/, when the last step is made
"""

import json
import math
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lilicorr_jax.config import check_pair
from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.flags import flags_from_record
from lilicorr_jax.losses.terms import Terms, metrics
from lilicorr_jax.sharding import make_mesh, replicated
from train.checkpoint import Checkpoints
from train.cluster import Stop, check_mesh, is_first, join, stop_on_signal
from train.config import TrainConfig
from train.data import Batch, Examples, Rows, batches, hold_out, in_order, trainable_examples
from train.export import export
from train.objective import Objective, Params, make_objective
from train.progress import Reporter
from train.records import RecordFolder
from train.revision import of_target, target_revision
from train.step import (
    StepReport,
    TrainState,
    TrainStep,
    abstract_state,
    init_state,
    learning_rate,
    make_optimizer,
    make_train_step,
    place,
)
from train.tau import Tau
from train.tokens import read_token_file
from train.warm import warm_params

CONFIG, CHECKPOINTS, NON_FINITE = "config.flags", "checkpoints", "nonfinite.json"
OWN_METRICS = {
    "dflash": (),
    "lilicorr": ("rerank_loss", "distractor_loss", "margin_loss", "selected_prefix", "factor_spread"),
    "domino": ("corrected_loss", "selected_prefix"),
    "dspark": ("corrected_loss", "distance", "confidence_loss", "selected_prefix"),
}
"""What only some methods report, besides what every drafter does."""

COLLAPSE = 1e-3
"""Spread of a reranker's vectors below which a run warns: candidates look alike to it, and no gradient parts them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that a run is made of but its state."""

    config: TrainConfig
    objective: Objective
    target_params: Params
    rows: Rows
    held_out: Rows
    num_examples: int
    num_steps: int
    identity: dict[str, Any]

    @property
    def output(self) -> Path:
        return Path(self.config.output)


def prepare(config: TrainConfig) -> Run:
    """Loads target and data and checks that they and the preset's models belong together; writes nothing."""
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    check_mesh(mesh)
    target, target_params = load_target(config.target, mesh=mesh)
    check_pair(target, *config.models())
    examples = read_examples(config, target.vocab_size)
    usable = trainable_examples(examples, config.sequence_length)
    train_ids, held_ids = hold_out(usable, config.eval_rows)
    num_steps = config.num_steps(len(train_ids))
    return Run(
        config=config,
        objective=make_objective(config, target, mesh, num_steps),
        target_params=target_params,
        rows=Rows(examples, train_ids, config.sequence_length),
        held_out=Rows(examples, held_ids, config.sequence_length),
        num_examples=len(examples),
        num_steps=num_steps,
        identity={"config": config.fixed(), "data": examples.fingerprint(), "target": target_revision(config.target)},
    )


def read_examples(config: TrainConfig, vocab_size: int) -> Examples:
    """Prepared texts or a token file, whichever `--data` names.

    Raises ValueError for texts that were prepared with anything else than the target's folder now holds.
    """
    if not Path(config.data).is_dir():
        return read_token_file(config.data, vocab_size)
    folder = RecordFolder(config.data)
    if stale := folder.made_with.differences(replace(folder.made_with, **of_target(config.target))):
        raise ValueError(
            f"{config.data} was not prepared for {config.target} as it is: {'; '.join(stale)}. Prepare it."
        )
    return folder


def train(config: TrainConfig) -> int:
    """Trains, or goes on training, and exports; returns the exit code.

    Raises:
        ValueError: the inputs do not fit each other, the run folder belongs to another run, or the loss is not finite.
    """
    join(config.cluster)
    run = prepare(config)
    optimizer = make_optimizer(config, run.num_steps)
    state = init_state(config, optimizer, run.objective.mesh)
    with Checkpoints(run.output / CHECKPOINTS, config.checkpoints_kept, run.identity) as checkpoints:
        restored = checkpoints.restore_latest(abstract_state(state))
        fresh = ()
        if restored is not None:
            state = restored
        elif config.init_from is not None:
            params, fresh = warm_params(config.init_from, *config.models(), state.params)
            state = state.replace(params=params)
        if is_first():
            (run.output / CONFIG).write_text("\n".join(flags_from_record(config)) + "\n", encoding="utf-8")
        start = int(state.step)
        folder = run.output if is_first() else None
        with Reporter(folder, start, run.num_steps) as reporter, stop_on_signal(run.objective.mesh) as stop:
            reporter.say(opening(run, start))
            if config.init_from is not None and restored is None:
                reporter.say(f"Weights from {config.init_from}; {' and '.join(fresh) or 'nothing'} starts fresh.")
            step = make_train_step(run.objective, optimizer, config.accumulation, state)
            state = train_steps(run, step, state, checkpoints, reporter, stop)
            if int(state.step) < run.num_steps:
                reporter.say(f"Stopped by a signal after step {int(state.step)}; the same command goes on from there.")
                return stop.exit_code
            folder = export(run.output, config, state.params)
            reporter.say(f"Trained {run.num_steps} steps; exported to {folder}.")
    return 0


def opening(run: Run, start: int) -> str:
    used, held = len(run.rows), len(run.held_out)
    dropped = run.num_examples - used - held
    line = f"{used} examples to train on, {held} held out, {dropped} dropped (fewer than two reply tokens in a row)"
    return f"{line}; {'from step ' + str(start) if start else 'from the beginning'} to {run.num_steps}."


class ReportReader:
    """Reads the report of each step one step late, so that the devices never wait for the host."""

    def __init__(self, run: Run, reporter: Reporter):
        self.run, self.reporter = run, reporter
        self.unread: deque[tuple[int, Batch, StepReport]] = deque()
        self.window: list[StepReport] = []
        self.has_compiled = False

    def add(self, step: int, batch: Batch, report: StepReport) -> None:
        self.unread.append((step, batch, report))
        if len(self.unread) > 1:
            self._read()

    def read_all(self) -> None:
        while self.unread:
            self._read()

    def _read(self) -> None:
        step, batch, report = self.unread.popleft()
        report = jax.device_get(report)
        refuse_non_finite(self.run.output, step, batch, report)
        self.window.append(report)
        self.reporter.advance(step, int(report.num_tokens))
        if not self.has_compiled:
            self.has_compiled = True
            self.reporter.restart_clock()
        if step % self.run.config.log_every == 0 or step == self.run.num_steps:
            values = self._means(step)
            self.reporter.report(step, values)
            if values.get("factor_spread", 1.0) < COLLAPSE:
                self.reporter.say(
                    f"Warning: the reranker has collapsed: its vectors' spread is {values['factor_spread']:.1e}, so it "
                    "can't tell candidates apart; start anew with another --seed, --reranker_init or learning rate."
                )
            self.window.clear()

    def _means(self, step: int) -> dict[str, float]:
        """Means over the window, each over all that it counted; rates and weights are those of its last step."""
        config, num_steps = self.run.config, self.run.num_steps
        values = term_values(self.run, sum((report.terms for report in self.window), Terms.zero()), step - 1)
        values["gradient_norm"] = float(np.mean([report.gradient_norm for report in self.window]))
        for name in self.window[-1].group_norms:
            values[f"{name}_gradient_norm"] = float(np.mean([report.group_norms[name] for report in self.window]))
        for group in trained_groups(config):
            rate = learning_rate(getattr(config, f"{group}_learning_rate"), num_steps, config.warmup_share)
            values[f"{group}_learning_rate"] = float(rate(step - 1))
        if config.method == "domino":
            values["base_weight"] = float(self.run.objective.mixture(step - 1).drafter)
        return values


def trained_groups(config: TrainConfig) -> tuple[str, ...]:
    return ("drafter", "reranker") if config.method == "lilicorr" else ("drafter",)


def term_values(run: Run, terms: Terms, step: int) -> dict[str, float]:
    """The loss, as it is weighed in `step`, and those of its parts that the method has."""
    foreign = {name for names in OWN_METRICS.values() for name in names} - set(OWN_METRICS[run.config.method])
    values = {"loss": run.objective.loss(terms, step)} | metrics(terms)
    return {name: float(value) for name, value in values.items() if name not in foreign}


def refuse_non_finite(output: Path, step: int, batch: Batch, report: StepReport) -> None:
    """Raises ValueError, and leaves the batch's example ids behind, unless loss and gradient are numbers."""
    if math.isfinite(report.loss) and math.isfinite(report.gradient_norm):
        return
    numbers = {name: str(value) for name, value in vars(report.terms).items()}
    record = {"step": step, "example_ids": np.asarray(batch.example_id).tolist(), "terms": numbers}
    if is_first():
        (output / NON_FINITE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    raise ValueError(
        f"At step {step} the loss is {report.loss} and the gradient's norm {report.gradient_norm}; the examples of its "
        f"batch are named in {output / NON_FINITE}, and no checkpoint was written since. Lower the learning rates, or "
        "look at those examples."
    )


class HeldOut:
    """The objective's terms on rows that are never trained on, always at the same anchors."""

    def __init__(self, run: Run):
        self.run = run
        rows = run.config.batch_rows // run.config.accumulation
        self.batches = in_order(run.held_out, rows)
        self.terms = jax.jit(run.objective, out_shardings=replicated(run.objective.mesh))

    def measure(self, params: Params, step: int) -> dict[str, float]:
        mesh = self.run.objective.mesh
        parts = (self.terms(params, self.run.target_params, place(rows, mesh), 0) for rows in self.batches)
        return term_values(self.run, sum(map(jax.device_get, parts), Terms.zero()), step)


def train_steps(
    run: Run, step: TrainStep, state: TrainState, checkpoints: Checkpoints, reporter: Reporter, stop: Stop
) -> TrainState:
    """Steps until the last one or a signal, with their reports, measurements and checkpoints."""
    config = run.config
    data = batches(run.rows, config.batch_rows, config.seed, config.buckets)
    reader = ReportReader(run, reporter)
    held_out = HeldOut(run) if config.eval_every else None
    tau = Tau(run.objective, run.held_out, config.tau_prompts, config.tau_tokens) if config.tau_every else None
    for number in range(int(state.step), run.num_steps):
        batch = data[number]
        state, report = step(state, run.target_params, place(batch, run.objective.mesh))
        done = number + 1
        reader.add(done, batch, report)
        is_end = done == run.num_steps
        if held_out and (is_end or done % config.eval_every == 0):
            reader.read_all()
            reporter.report_held_out(done, held_out.measure(state.params, done))
        if tau and (is_end or done % config.tau_every == 0):
            reader.read_all()
            reporter.report_decoded(done, tau.measure(state.params, run.target_params))
        must_stop = stop.is_agreed()
        if is_end or must_stop or done % config.checkpoint_every == 0:
            reader.read_all()  # what is not finite is never saved
            checkpoints.save(done, state)
        if must_stop:
            break
    return state
