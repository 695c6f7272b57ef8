"""PartsEngine: trains a checkpoint with a part on each rank: layers cut over ``--tp``, stages over ``--pp``,
sequences over ``--sp``, or as a plan says. A booster trains it; its files have the whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini.comm.ranks import Rank
from gemini.errors import StateError
from gemini.integrations.adapters import Adapters
from gemini.integrations.model_directory import check_model
from gemini.integrations.transformers_loading import one_at_a_time
from gemini.jobs.after_training.adapter_merge import merge
from gemini.jobs.finetune import parts_checkpoint
from gemini.jobs.finetune.adapters import adapted, adapter_errors, adapter_of
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.held_out import BestWeights
from gemini.jobs.finetune.layouts import plan_of
from gemini.jobs.finetune.parts_checkpoint import PartOfModel
from gemini.jobs.finetune.samples import IGNORED, Batch
from gemini.jobs.finetune.tuning import BETAS, SHARD, TuningEngine, refuse_mixed_documents
from gemini.jobs.run.managed import make_disk_directory
from gemini.jobs.run.report import LINKS, TIERS
from gemini.model.ddp import GeminiDDP
from gemini.offload.mapped_tensors import IN_MEMORY, MappedTensors, Place
from gemini.optim import HybridAdam
from gemini.optim.kernels import StateFormat
from gemini.parallel.booster import Booster, HybridParallelPlugin
from gemini.runtime.activation.recomputed_blocks import recompute_layers
from gemini.system.durable import temporary_of
from gemini.system.input_files import errors_of
from gemini.system.pages import release_file_pages


class PartsEngine(TuningEngine):
    """This ``rank``'s part of the model of ``config``, with its optimizer. With adapters, only these train.

    Each rank maps the whole model from its files, and keeps its part. ``documents_apart``: rows contain
    several documents, and attention must not cross documents.

    Raises:
        OutOfBudgetError: the part cannot fit the budgets.
        ConfigError: an option is invalid, or the model cannot be cut for the ranks.
    """

    def __init__(
        self, config: FineTuneConfig, best: BestWeights | None, rank: Rank, *, documents_apart: bool
    ) -> None:
        super().__init__(best, rank)
        self._config = config
        torch.manual_seed(config.seed)
        if config.disk_dir is not None:
            make_disk_directory(config.disk_dir)
        self._num_data = config.data_ranks(rank.count)
        self._rows, self._passes = config.rows_of_rank(self._num_data)
        self._whole = _outline(config)
        self._use_cache = getattr(self._whole.config, "use_cache", None)
        with adapter_errors(config):
            module = _plain(config)
        module.config.use_cache = False  # only generation needs cached keys and values
        if documents_apart:
            logits_of = partial(_logits, module)
            with _read_in_passing(module):
                rank.together(lambda: None if rank.index else refuse_mixed_documents(module, logits_of))
        if config.activation_checkpointing:
            recompute_layers(module)
        module.train()
        adam = HybridAdam(
            [param for param in module.parameters() if param.requires_grad],
            lr=config.learning_rate,
            betas=BETAS,
            weight_decay=config.weight_decay,
            state_dtype=config.state_dtype,
        )
        self._plugin = HybridParallelPlugin(**_plugin_options(config, self._rows, self._passes))
        self._booster = Booster(plugin=self._plugin)
        self._model, self._optimizer, *_ = self._booster.boost(module, adam)
        # Dropout must differ between ranks, except along tp: these draw equal numbers for whole tensors.
        torch.manual_seed(config.seed + rank.index // config.tp)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that a learning-rate scheduler drives."""
        optimizer: torch.optim.Optimizer = self._optimizer
        return optimizer

    @property
    def num_parameters(self) -> tuple[int, int]:
        """The number of parameters of the whole model, and how many of them train."""
        params = list(self._whole.parameters())
        return sum(p.numel() for p in params), sum(p.numel() for p in params if p.requires_grad)

    # -- steps -----------------------------------------------------------------------------------

    def train(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Train one step; see :class:`TuningEngine`. The batches are the micro-batches of one pass."""
        loss = self._run([batch.inputs for batch in batches], self._optimizer)
        self._optimizer.step()
        self._optimizer.zero_grad()
        # Ranks that share a copy of the model counted the same tokens.
        (tokens,) = self.sum_over_ranks(sum(batch.num_tokens for batch in batches))
        return loss, round(tokens) // self._config.num_parts

    def evaluate(self, batches: Sequence[Callable[[], Batch]]) -> float:
        """Return the mean loss over all tokens of ``batches``. They are filled up with rows without labels,
        because a pass needs as many micro-batches as in training."""
        total, tokens = 0.0, 0
        together, place = self._passes * self._num_data, self._place_in_data()
        self._model.eval()
        try:
            for first in range(0, len(batches), together):
                made = [make() for make in batches[first : first + together]]
                weight = sum(batch.weight for batch in made)
                own = made[place * self._passes : (place + 1) * self._passes]
                inputs = [_filled(batch.inputs, self._rows) for batch in own]
                empty = _filled(made[0].inputs, self._rows, learned=False)
                inputs += [empty] * (self._passes - len(inputs))
                total += self._run(inputs, None) * weight
                tokens += weight
        finally:
            self._model.train()
        return total / tokens

    def _place_in_data(self) -> int:
        return self._plugin.data_ranks.number

    def _run(self, batches: Sequence[Mapping[str, Tensor]], optimizer: Any) -> float:
        """Run micro-batches through all stages; with an ``optimizer``, run backward too. Return the mean loss
        over the learned tokens of all ranks."""
        batch = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
        done = self._booster.execute_pipeline(
            iter([batch]), self._model, _loss_of, optimizer, count=self._count
        )
        return float(done["loss"])

    def _count(self, batch: Mapping[str, Tensor]) -> float:
        """Return the number of labels of a micro-batch that count. Labels of cut sequences are already
        shifted."""
        labels = batch["labels"] if self._config.sp > 1 else batch["labels"][:, 1:]
        return float((labels != IGNORED).sum())

    def reference(self, batch: Batch) -> Tensor:
        """Raise StateError: DPO with parts was refused before the engine was built."""
        raise StateError("a divided model has no reference")

    # -- memory ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the runtime's counters; below ZeRO 3, the bytes of this rank's part in plain memory."""
        if isinstance(self._model, GeminiDDP):
            return dict(self._model.stats())
        params = {id(param): param.nbytes for param in self._model.parameters()}
        states = [
            each.nbytes
            for state in self._optimizer.optim.state.values()
            for each in state.values()
            if isinstance(each, Tensor)
        ]
        held = sum(params.values()) + sum(states) + sum(self._optimizer.gradient_bytes())
        none = {"bytes": 0, "peak_bytes": 0, "budget_bytes": 0}
        return {
            **dict.fromkeys(TIERS, none),
            **{link: {"bytes": 0} for link in LINKS},
            "device": {"bytes": held, "peak_bytes": held, "budget_bytes": None},
            "model_data_bytes": held,
            "stall_seconds": 0.0,
            **self._plugin.stats(self._model),
        }

    def timeline(self) -> list[dict[str, Any]]:
        """Return the last complete step, moment by moment; empty below ZeRO 3."""
        return list(self._model.timeline()) if isinstance(self._model, GeminiDDP) else []

    def close(self) -> None:
        """Release this rank's resources."""
        if isinstance(self._model, GeminiDDP):
            self._model.close()
        else:
            self._optimizer.close()

    # -- files -----------------------------------------------------------------------------------

    def _save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        parts_checkpoint.save(directory, self._part(), scheduler, extra)

    def _load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        return parts_checkpoint.load(directory, self._part(), scheduler)

    def _part(self) -> PartOfModel:
        return PartOfModel(
            self._booster,
            self._plugin,
            self._model,
            self._optimizer,
            StateFormat(self._config.state_dtype),
            self.rank,
            self._config.part_sizes,
        )

    def _write_trained(self, made: Path, tokenizer: Any) -> None:
        state = self._gathered()
        if self.rank.index:
            return
        self._whole.config.use_cache = self._use_cache
        self._whole.save_pretrained(made, state_dict=state, max_shard_size=SHARD)
        tokenizer.save_pretrained(made)

    def _write_merged(self, made: Path, tokenizer: Any, kept: Path | None) -> None:
        """Write the model that ``gemini merge`` makes from the base and the adapters."""
        adapters = temporary_of(made) if kept is None else kept
        if kept is None:
            with self._written(adapters) as unnamed:
                self._write_trained(unnamed, tokenizer)
        self.rank.together(
            lambda: None if self.rank.index else merge(Path(self._config.model), adapters, made)
        )

    def _gathered(self) -> dict[str, Tensor]:
        """Return the trained tensors, whole and in the types of the exported model, on the first rank; in a
        file on the DISK tier if there is one. Collective."""
        trained = dict(self._whole.named_parameters(remove_duplicate=False))
        outline = self._whole.state_dict(keep_vars=True)
        wanted = {
            name: value
            for name, value in outline.items()
            if not self._config.lora or (name in trained and trained[name].requires_grad)
        }
        contents = self._plugin.whole_contents(self._model, self._optimizer)
        place: Place = IN_MEMORY
        disk_dir = self._config.disk_dir
        if not self.rank.index and disk_dir is not None:
            place = MappedTensors(disk_dir, sum(each.nbytes for each in wanted.values()), len(wanted))
        state: dict[str, Tensor] = {}

        def keep(name: str, whole: Tensor) -> None:
            like = wanted[name]
            flat = place.empty(like.numel(), like.dtype)
            place.put(flat, 0, whole.reshape(-1).to(like.dtype))
            state[name] = flat.view(like.shape)

        for source in contents.sources:
            if source.spec.name in wanted:
                source.stream(partial(keep, source.spec.name))
        state |= {name: state[first] for name, first in contents.aliases.items() if first in state}
        return state


def _loss_of(output: Any, _batch: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(**batch.inputs).logits
    return logits


def _filled(inputs: Mapping[str, Tensor], rows: int, *, learned: bool = True) -> dict[str, Tensor]:
    """Return the inputs filled up to ``rows`` rows. Added rows have no labels; if not ``learned``, none of
    the rows have."""
    missing = rows - len(inputs["labels"])
    found = {name: torch.cat([each, each[:1].expand(missing, -1)]) for name, each in inputs.items()}
    found["labels"][rows - missing if learned else 0 :] = IGNORED
    return found


def _outline(config: FineTuneConfig) -> Any:
    """Return the whole model on ``meta`` with its adapters, in the type in which it is exported."""
    model = adapted(dataclasses.replace(config, model=str(Path(config.model).absolute())))
    return model.to(torch.bfloat16) if config.precision == "bf16" else model


def _plain(config: FineTuneConfig) -> Any:
    """Return the whole model with its weights mapped from its files, in the types of the files."""
    import transformers

    directory = Path(config.model).absolute()  # adapters keep it as the name of their model
    check_model(directory)
    with errors_of(f"transformers cannot load the model of {directory}"), one_at_a_time():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    adapter = adapter_of(config)
    return model if adapter is None else Adapters.of(adapter).applied_to(model)


@contextmanager
def _read_in_passing(model: nn.Module) -> Iterator[None]:
    """Have the pages of mapped weights leave this process's memory as soon as their module has run."""

    def release(module: nn.Module, *_: Any) -> None:
        for param in module.parameters(recurse=False):
            release_file_pages(param.data)

    hooks = [module.register_forward_hook(release) for module in model.modules() if module._parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _plugin_options(config: FineTuneConfig, rows: int, passes: int) -> dict[str, Any]:
    """Return the keywords of HybridParallelPlugin that correspond to ``config``."""
    plan = plan_of(config)
    given = {name: value for name, value in config.managed_options().items() if value is not None}
    if config.tp > 1:
        given["tiled_loss"] = False  # the head is cut
    if plan is None:
        sizes = {f"{name}_size": size for name, size in config.part_sizes.items()}
        cut = {"num_microbatches": passes, "microbatch_size": rows, "recompute": config.recomputed_blocks}
        return {**sizes, **cut, **given, "max_norm": config.clip}
    if plan.zero_stage < 3:
        return {"plan": plan, "max_norm": config.clip}
    return {"plan": plan, "max_norm": config.clip, **given}
