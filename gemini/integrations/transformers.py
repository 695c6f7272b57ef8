"""transformers' Trainer with managed models: ``from gemini.integrations.transformers import GeminiTrainer``.

Only the line that makes the Trainer changes::

    trainer = GeminiTrainer(model=model, args=args, train_dataset=data,
                            gemini={"device_bytes": "8GiB", "disk_dir": "/mnt/nvme"})

Other Trainer classes, for example TRL's, are adapted in the same line::

    trainer = GeminiTrainerMixin.on(SFTTrainer)(model=model, args=args, train_dataset=data,
                                                gemini={"device_bytes": "8GiB", "disk_dir": "/mnt/nvme"})
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gemini import checkpoint
from gemini.errors import ConfigError, OutOfBudgetError, StateError
from gemini.integrations import other_engines, trainer_files
from gemini.integrations.accelerate import GeminiAccelerator, load_keeping_random, managed, unwrap_optimizer
from gemini.integrations.whole_files import written_whole
from gemini.model.handle import ManagedModel, handle_of
from gemini.model.in_place import manage
from gemini.model.retry import retry_step
from gemini.optim import GeminiOptimizer, HybridAdam
from gemini.parallel.plan import ParallelPlan
from gemini.runtime.activation.recomputed_blocks import recompute_blocks, refuse_unfit_blocks
from gemini.system.device import ran_out_of_memory
from gemini.system.input_files import errors_of

logger = logging.getLogger(__name__)

_ADAMW = ("adamw_torch", "adamw_torch_fused")
TRAINER_STATE_NAME = "trainer_state.json"
_IN_BACKWARD = ("lomo", "layerwise")  # in names of optimizers that update weights by hooks of gradients


class GeminiTrainerMixin:
    """Makes a Trainer class train a managed model, with the numbers of an unmanaged one.

    The model is managed in place, unless it already is (:func:`gemini.from_pretrained`). Optimizer states are
    streamed to and from ``checkpoint-N/gemini``, with fp32 masters if there are any, so a resume is
    bit-exact. ``adamw_torch`` and ``adamw_torch_fused`` are replaced by our AdamW; other optimizers, of
    ``optim=``, ``optimizers=`` or ``create_optimizer()``, run on chunks (:class:`gemini.GeminiOptimizer`).
    Models that the trainer only evaluates, such as DPO's reference, become managed too, with their own
    budgets.
    """

    model: Any
    args: Any
    state: Any
    control: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any
    label_smoother: Any
    optimizer_cls_and_kwargs: Any
    _staging: Path | None = None  # while saving: the directory in which the checkpoint is written
    _to_push = False

    def __init__(
        self,
        *args: Any,
        gemini: dict[str, Any] | None = None,
        gemini_optimizer: dict[str, Any] | None = None,
        gemini_reference: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Make the trainer.

        Args:
            gemini: options of :func:`gemini.manage` for a model that is not managed yet. With ``"plan"``, a
                :class:`gemini.parallel.ParallelPlan` or its file, budgets, precision and recomputed blocks
                are the plan's; the TrainingArguments must have its batch sizes.
            gemini_optimizer: options of :class:`gemini.GeminiOptimizer` and of our AdamW, in addition to the
                TrainingArguments, such as ``state_dtype`` and ``overlap``.
            gemini_reference: options of :func:`gemini.manage` for models that are only evaluated and not
                managed yet; None: those of the model. Each has its own budgets.

        Raises:
            OutOfBudgetError: the model cannot fit the budgets.
            ConfigError: the arguments are not supported with a managed model.
        """
        self._options = dict(gemini or {})
        plan = self._options.pop("plan", None)
        self._plan = plan if isinstance(plan, ParallelPlan | None) else ParallelPlan.load(plan)
        self._optimizer_options = dict(gemini_optimizer or {})
        self._reference_options = gemini_reference
        super().__init__(*args, **options)
        if self.label_smoother is not None and self.handle.tiled_heads is not None:
            self.label_smoother = _Smoother(self.label_smoother.epsilon, self.label_smoother.ignore_index)
        self._figures = GeminiCallback()
        self.callback_handler.callbacks.insert(0, self._figures)  # first: reporters after it see its figures

    @staticmethod
    @cache
    def on(trainer: type[Trainer]) -> Any:
        """Return a subclass of the class ``trainer`` with this mixin."""
        return type(f"Gemini{trainer.__name__}", (GeminiTrainerMixin, trainer), {"__module__": __name__})

    # -- the model -------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Manage the model, which exists by now in every trainer, and make an accelerator that
        supports it.
        """
        other_engines.refuse_in_arguments(self.args)
        other_engines.refuse_in_environment("trainer")
        if self.args.fp16:
            raise ConfigError(
                "TrainingArguments(fp16=True) scales gradients that are not in chunks; use bf16=True, or "
                "gemini={'mixed_precision': 'fp16'} without it"
            )
        if self.model is not None:
            self._manage(self.model)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if type(self.accelerator) is Accelerator:
            self.accelerator.__class__ = _TrainersAccelerator
            self.accelerator.manage_reference = self._manage_reference
            self.accelerator.driven = self._driven

    def call_model_init(self, trial: Any = None) -> Any:
        """Make the model again, managed; the memory of an earlier one is freed."""
        before = managed(getattr(self, "model", None))
        if before is not None:
            before.close()
        model = super().call_model_init(trial)  # type: ignore[misc]
        self._manage(model)
        return model

    def _manage(self, model: nn.Module) -> None:
        if managed(model) is None:
            options = self._options if self._plan is None else self._planned(self._plan, model)
            handle = manage(model, **options)
            if self._plan is not None:
                recompute_blocks(model, self._plan.recomputed)
                handle.compare_with(self._plan.predicted.of_rank(0))
        elif self._options or self._plan is not None:
            raise ConfigError(
                f"the model is already managed; leave gemini={self._options or 'plan'!r} out, or give it "
                "where the model is loaded"
            )

    def _planned(self, plan: ParallelPlan, model: nn.Module) -> dict[str, Any]:
        """Return the options of a plan, joined with the user's. Raises ConfigError if they contradict the
        plan.
        """
        options = plan.joined(plan.managed_options("GeminiTrainer"), self._options)
        plan.check(model, self.args.world_size)
        said = {
            "per_device_train_batch_size": plan.microbatch_size,
            "gradient_accumulation_steps": plan.num_microbatches,
            "gradient_checkpointing": False,
            "auto_find_batch_size": False,
        }
        if plan.dtype == "fp32":
            said["bf16"] = False
        plan.joined(said, {name: getattr(self.args, name) for name in said})
        refuse_unfit_blocks(model, plan.recomputed)
        return options

    def _manage_reference(self, model: nn.Module) -> None:
        """Manage a model that is only evaluated, without fp32 masters, which only trained parameters need."""
        if not getattr(self.args, "sync_ref_model", False):
            model.requires_grad_(False)
        if self._reference_options is None:
            manage(model, config=replace(self.handle.config, tiled_loss=False))  # no loss is computed on it
        else:
            manage(model, **self._reference_options)

    @property
    def handle(self) -> ManagedModel:
        """The handle of the trained model: ``stats()``, ``plan()``, ``record_timeline()``."""
        return handle_of(self.model)

    # -- the optimizer ---------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        """Make the optimizer: the Trainer's groups, with our AdamW unless another optimizer was given or
        named.

        Raises:
            ConfigError: GeminiOptimizer cannot drive it.
        """
        own, name = self._optimizer_options, self._optim
        is_named = self.optimizer is None and self.optimizer_cls_and_kwargs is None
        if is_named and name in _ADAMW:
            self.optimizer_cls_and_kwargs = (HybridAdam, self._adam_options())
            own = {name: value for name, value in own.items() if name not in _ADAM_OPTIONS}
        elif is_named and any(word in name for word in _IN_BACKWARD):
            raise ConfigError(
                f"optim={name!r} updates weights while gradients are computed, which GeminiOptimizer does "
                "itself; leave it out, and use gemini={'overlap': 'backward'}"
            )
        super().create_optimizer(*args, **options)  # type: ignore[misc]
        self.optimizer = self._driven(self.optimizer, own)
        return self.optimizer

    def _driven(self, optimizer: Any, options: Mapping[str, Any] | None = None) -> Any:
        """Return the GeminiOptimizer that drives ``optimizer``: it, or a new one. An optimizer of other
        parameters than the model's stays as it is.
        """
        inner = unwrap_optimizer(optimizer)
        params = (param for group in inner.param_groups for param in group["params"])
        if isinstance(inner, GeminiOptimizer) or not any(hasattr(param, "_slot") for param in params):
            return optimizer
        return GeminiOptimizer(inner, self.model, **(self._optimizer_options if options is None else options))

    @property
    def _optim(self) -> str:
        """The name of the optimizer in the TrainingArguments."""
        return str(getattr(self.args.optim, "value", self.args.optim))

    def _adam_options(self) -> dict[str, Any]:
        logger.warning("optim=%r: gemini's AdamW updates the chunks, with the same rule", self._optim)
        given = {key: value for key, value in self._optimizer_options.items() if key in _ADAM_OPTIONS}
        return {
            "lr": self.args.learning_rate,
            "betas": (self.args.adam_beta1, self.args.adam_beta2),
            "eps": self.args.adam_epsilon,
            **given,
        }

    # -- files -----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train as transformers does. ``resume_from_checkpoint=True`` takes the newest complete checkpoint
        and logs those that it skips; a named checkpoint must be complete.

        Raises:
            CheckpointError: a file is missing or damaged, or files of several saves are mixed.
        """
        if resume_from_checkpoint:
            rank, named = self.handle.rank(), resume_from_checkpoint is not True

            def choose() -> str:
                if rank.index:
                    return ""
                if not named:
                    return str(trainer_files.newest(Path(self.args.output_dir)) or "")
                trainer_files.check(Path(resume_from_checkpoint))
                return str(resume_from_checkpoint)

            resume_from_checkpoint = rank.agree(choose) or True
        return super().train(resume_from_checkpoint, *args, **options)  # type: ignore[misc]

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Train for an epoch. Skipped if a run that was killed after its last save is resumed: transformers
        checks for the last step only after another step.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **options)  # type: ignore[misc]

    def _get_output_dir(self, trial: Any) -> str:
        """Return the directory of checkpoints; while one is being saved, its temporary directory."""
        if self._staging is not None:
            return str(self._staging)
        found: str = super()._get_output_dir(trial)  # type: ignore[misc]
        return found

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint that is complete or absent, then remove old ones and push it."""
        run, step = Path(self._get_output_dir(trial)), int(self.state.global_step)
        target = run / f"{PREFIX_CHECKPOINT_DIR}-{step}"

        def seal() -> None:
            best = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if self.state.best_global_step and (best == target or best.exists()):
                self.state.best_model_checkpoint = str(best)
                self.state.save_to_json(str(made / TRAINER_STATE_NAME))
            trainer_files.seal(made, step)

        clear = partial(trainer_files.clear, run)
        with written_whole(target, self.handle.rank(), begin=clear, end=seal) as made:
            self._staging, self._to_push = made.parent, False
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            finally:
                self._staging = None
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent == made.parent:
            self.state.best_model_checkpoint = str(run / Path(best).name)
        if self._to_push:
            super()._push_from_checkpoint(str(target))  # type: ignore[misc]
        limit = self.args.save_total_limit
        if self.args.process_index == 0 and limit is not None and limit > 0:
            best = self.state.best_model_checkpoint
            trainer_files.remove_older(run, limit, {target, *([Path(best)] if best is not None else [])})

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint, if it is still being written after it has its name."""
        if self._staging is not None:
            self._to_push = True
        else:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the weights as transformers does. Collective over ranks."""
        if state_dict is None and self.handle.peers is not None:
            state_dict = self.handle.state_dict(only_rank_0=True)  # type: ignore[attr-defined]
        super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Stream weights, masters and optimizer states to ``gemini`` in ``output_dir``."""
        folder = Path(output_dir) / trainer_files.FOLDER
        checkpoint.save(folder, self.handle, unwrap_optimizer(self.optimizer), keep=1)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / trainer_files.SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights only if :meth:`_load_optimizer_and_scheduler` will not load them."""
        if not trainer_files.is_ours(resume_from_checkpoint):
            with _resuming(resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load a checkpoint from :meth:`_save_optimizer_and_scheduler`."""
        if checkpoint is None or not trainer_files.is_ours(checkpoint):
            with _resuming(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        folder = Path(checkpoint) / trainer_files.FOLDER
        load_keeping_random(folder, self.handle, unwrap_optimizer(self.optimizer))
        with _resuming(checkpoint):
            state = torch.load(Path(checkpoint) / trainer_files.SCHEDULER, weights_only=True)
            self.lr_scheduler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _resuming(checkpoint):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: str | None) -> None:
        with _resuming(checkpoint):
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_callback_state(self) -> None:
        with _resuming(TRAINER_STATE_NAME):
            super()._load_callback_state()  # type: ignore[misc]

    # -- the loss --------------------------------------------------------------------------------

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """Compute the loss as the trainer does; for a model with a tiled loss by tiles, also with label
        smoothing or the user's own loss function.
        """
        with self.handle.expecting_loss():
            return super().compute_loss(*args, **options)  # type: ignore[misc]

    # -- what is logged --------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Train on a batch and count its tokens. With ``auto_find_batch_size`` a pass that runs out of memory
        is first repeated with less model data on DEVICE, before the Trainer takes a smaller batch.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = inputs.get(name) if hasattr(inputs, "get") else None
        self._figures.num_tokens += tokens.numel() if isinstance(tokens, torch.Tensor) else 0

        def step() -> Any:
            given = copy.copy(inputs)  # a trainer may remove entries, which a second call needs again
            return super(GeminiTrainerMixin, self).training_step(model, given, *args, **options)  # type: ignore[misc]

        if not self.args.auto_find_batch_size or self.handle.peers is not None:
            return step()
        try:
            return retry_step(self.handle, step)
        except (OutOfBudgetError, StateError) as error:
            if error.__cause__ is None or not ran_out_of_memory(error.__cause__):
                raise
            self.handle.zero_grad()
            raise RuntimeError(f"{error}: out of memory.") from error  # the text that Accelerate looks for


def _resuming(checkpoint: str | None) -> AbstractContextManager[None]:
    """Return a context that names the checkpoint in errors of loading it; without a checkpoint errors are
    unchanged.
    """
    return nullcontext() if checkpoint is None else errors_of(f"cannot go on from {checkpoint}")


class _Smoother(LabelSmoother):  # type: ignore[misc, unused-ignore]
    """transformers' label smoothing through torch's cross entropy: the same loss, which can be computed by
    tiles.
    """

    def __call__(
        self,
        model_output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        labels = labels.flatten()
        loss = functional.cross_entropy(
            logits.float().reshape(-1, logits.shape[-1]),
            labels,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.epsilon,
        )
        count = labels.ne(self.ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)


class GeminiTrainer(GeminiTrainerMixin, Trainer):  # type: ignore[misc, unused-ignore]
    """transformers' Trainer for a managed model; see :class:`GeminiTrainerMixin`."""


class _TrainersAccelerator(GeminiAccelerator):
    """An accelerator that also manages the models that its trainer only evaluates, and its optimizers."""

    manage_reference: Callable[[nn.Module], None]
    driven: Callable[[Any], Any]

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Let an optimizer that a subclass of the trainer has made update chunks."""
        return super().prepare_optimizer(self.driven(optimizer), device_placement)

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Manage a model that is only evaluated before it would be moved to the device whole; then see
        :meth:`GeminiAccelerator.prepare_model`.
        """
        if evaluation_mode and managed(model) is None:
            self.manage_reference(model)
        return super().prepare_model(model, device_placement, evaluation_mode)


class GeminiCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Adds figures of a managed model to a Trainer's logs: stalls, bytes on each tier, tokens per second, and
    the measured step time beside the plan's, once there is one.

    Works with any Trainer, placed before the reporting callbacks; GeminiTrainer includes it. The training
    loop must count up ``num_tokens``.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._since = (time.perf_counter(), 0)
        self._begun: float | None = None  # start time of the current step
        self._steps: list[float] = []  # seconds of the steps since the last log

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Start counting."""
        self._since = (time.perf_counter(), self.num_tokens)
        self._begun, self._steps = None, []
        handle = managed(model)
        if handle is not None:
            handle.stats(since_last=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start timing a step."""
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Record the time of the step, including all accumulation passes and the update."""
        if self._begun is not None:
            self._steps.append(time.perf_counter() - self._begun)
        self._begun = None

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **others: Any
    ) -> None:
        """Add the figures since the last log to the logs of a training step."""
        handle = managed(model)
        if handle is None or not logs or "loss" not in logs:
            return
        now, tokens = time.perf_counter(), self.num_tokens or state.num_input_tokens_seen
        seconds = max(now - self._since[0], 1e-9)
        stats = handle.stats(flat=True, since_last=True)
        figures = {
            f"gemini/{tier}_gib": stats[f"{tier}/bytes"] / 2**30 for tier in ("device", "host", "disk")
        }
        figures["gemini/stall_share"] = stats["stall_seconds"] / seconds
        figures["gemini/written_gib"] = stats["disk_write/bytes"] / 2**30
        if tokens > self._since[1]:
            figures["gemini/tokens_per_second"] = (tokens - self._since[1]) / seconds
        if self._steps:
            figures["gemini/step_seconds"] = statistics.mean(self._steps)
        if handle.predicted_step is not None:
            figures["gemini/predicted_step_seconds"] = handle.predicted_step["step_seconds"]
        planned = handle.plan().step
        if planned is not None:
            figures["gemini/expected_step_seconds"] = planned.promise.simulation.step_seconds
        self._since, self._steps = (now, tokens), []
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)


_ADAM_OPTIONS = frozenset(
    ("state_dtype", "master_remainders", "bias_correction", "nvme_offload_fraction", "nvme_offload_dir")
)
