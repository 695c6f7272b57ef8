"""PretrainedEngine: trains a checkpoint that is loaded directly into chunks, and exports it for
transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gemini
from gemini.comm.ranks import Rank
from gemini.errors import ConfigError
from gemini.integrations.model_directory import CONFIG, MAX_CONFIG_BYTES
from gemini.jobs.finetune.adapters import adapted, adapter_errors, adapter_of
from gemini.jobs.finetune.config import NF4, NO, FineTuneConfig
from gemini.jobs.finetune.held_out import BestWeights
from gemini.jobs.finetune.preferences import Rewards, answer_log_probs, preference_loss
from gemini.jobs.finetune.samples import Batch
from gemini.jobs.finetune.tuning import BETAS, CUT_INTO, SHARD, TuningEngine, refuse_mixed_documents
from gemini.jobs.run.managed import ManagedTraining, make_disk_directory
from gemini.model.in_place import InPlace
from gemini.offload.mapped_tensors import IN_MEMORY, MappedTensors, Place
from gemini.parallel.plan import ParallelPlan
from gemini.runtime.activation.recomputed_blocks import recompute_blocks, recompute_layers
from gemini.runtime.build import refuse_unfit
from gemini.runtime.config import GeminiConfig
from gemini.system.input_files import InputDirectory, errors_of


class PretrainedEngine(TuningEngine):
    """The model of ``config`` with its optimizer, whole or in chunks that ranks share (ZeRO 3). With
    adapters, only these train.

    Args:
        rank: this process among those that share the model.
        documents_apart: rows contain several documents, and attention must not cross documents.

    Raises:
        OutOfBudgetError: the model cannot fit the budgets; raised before weights are read.
        ConfigError: an option is invalid.
    """

    def __init__(
        self,
        config: FineTuneConfig,
        best: BestWeights | None = None,
        rank: Rank | None = None,
        *,
        documents_apart: bool = False,
    ) -> None:
        super().__init__(best, Rank() if rank is None else rank)
        self._adapters = bool(config.lora)
        self._disk_dir = config.disk_dir
        self._beta = config.dpo_beta
        self._seed = config.seed
        torch.manual_seed(config.seed)
        if config.disk_dir is not None:
            make_disk_directory(config.disk_dir)
        with adapter_errors(config):
            self.module = _loaded(config)
        handle = gemini.handle_of(self.module)
        assert isinstance(handle, InPlace)
        try:
            optimizer = gemini.GeminiAdamOptimizer(
                handle,
                lr=config.learning_rate,
                betas=BETAS,
                weight_decay=config.weight_decay,
                state_dtype=config.state_dtype,
                max_norm=config.clip,
            )
            if config.activation_checkpointing:
                recompute_layers(self.module)
            recompute_blocks(self.module, config.recomputed_blocks)
            if config.plan is not None:
                # Ranks only divide the data here, so each of them is rank 0 along pp.
                handle.compare_with(ParallelPlan.load(config.plan).predicted.of_rank(0))
        except BaseException as error:
            handle.leave(type(error), error)
            raise
        self._managed = ManagedTraining(handle, optimizer)
        self.device = next(iter(self.module.parameters())).device
        attention = getattr(self.module.config, "_attn_implementation", None) or ""
        self._is_unmasked = "flash" in attention
        self._use_cache = getattr(self.module.config, "use_cache", None)
        self.module.config.use_cache = False  # only generation needs cached keys and values
        self.module.train()
        torch.manual_seed(config.seed + self.rank.index)  # dropout must differ between ranks
        if documents_apart:
            try:
                refuse_mixed_documents(self.module, lambda batch: self._outputs(batch).logits)
            except BaseException:
                self.close()
                raise

    @property
    def num_parameters(self) -> tuple[int, int]:
        """The number of parameters, and how many of them train."""
        params = list(self.module.parameters())
        return sum(map(_numel, params)), sum(p.numel() for p in params if p.requires_grad)

    def train(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Train one step; see :class:`TuningEngine`."""
        shares = [batch.weight for batch in batches]
        learned, tokens = self.sum_over_ranks(sum(shares), sum(batch.num_tokens for batch in batches))

        def run() -> float:
            total = 0.0
            self.rewards = Rewards()
            for batch, share in zip(batches, shares, strict=True):
                loss = self.loss(batch) * (share / learned)
                self._managed.backward(loss * self.rank.count)  # gradients become means over the ranks
                total += loss.item()
            self._managed.step()
            return total

        loss = self._managed.run_step(run)
        total, *rewards = self.sum_over_ranks(loss, *astuple(self.rewards))
        self.rewards = Rewards(*rewards)
        return total, int(tokens)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch in nats."""
        if batch.num_pairs:
            return self._preference_loss(batch)
        loss: Tensor = self._outputs(batch).loss
        return loss

    def _preference_loss(self, batch: Batch) -> Tensor:
        """Return DPO's loss of a batch of pairs."""
        reference = self.reference(batch) if batch.reference is None else batch.reference
        answers = self._answers(batch)
        loss, rewards = preference_loss(answers, reference.to(answers.device), self._beta)
        self.rewards = self.rewards.plus(rewards)
        return loss

    def reference(self, batch: Batch) -> Tensor:
        """Return the reference's log probability of each answer of pairs, float32 ``[batch]``.

        The reference is the model without its adapters; without adapters, the model with its current weights.
        Dropout is off.
        """
        trains = self.module.training
        self.module.eval()
        try:
            with torch.no_grad(), self.module.disable_adapter() if self._adapters else nullcontext():
                return self._answers(batch)
        finally:
            self.module.train(trains)

    def _answers(self, batch: Batch) -> Tensor:
        inputs = {name: value for name, value in batch.inputs.items() if name != "labels"}
        return answer_log_probs(self._outputs(replace(batch, inputs=inputs)).logits, batch.inputs["labels"])

    def _outputs(self, batch: Batch) -> Any:
        inputs = {name: value.to(self.device) for name, value in batch.inputs.items()}
        if "position_ids" in inputs and self._is_unmasked:
            # Attention without a mask detects the ends of documents only if the batch is a single row.
            inputs = {name: value.reshape(1, -1) for name, value in inputs.items()}
        return self.module(**inputs)

    def evaluate(self, batches: Sequence[Callable[[], Batch]]) -> float:
        """Return the mean loss over all tokens of ``batches``, without changing weights or random state.
        Ranks divide the batches, and each runs the same number of passes."""
        total, tokens = 0.0, 0
        index, count = self.rank.index, self.rank.count
        self.module.eval()
        try:
            with torch.no_grad():
                for first in range(0, len(batches), count):
                    is_own = first + index < len(batches)
                    batch = batches[first + index if is_own else first]()
                    loss = self.loss(batch).item()
                    total += loss * batch.weight * is_own
                    tokens += batch.weight * is_own
        finally:
            self.module.train()
        of_all, learned = self.sum_over_ranks(total, tokens)
        return of_all / learned

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that a learning-rate scheduler drives."""
        return self._managed.optimizer

    def stats(self) -> dict[str, Any]:
        """Return the runtime's counters."""
        return self._managed.stats()

    def timeline(self) -> list[dict[str, Any]]:
        """Return the last complete step, moment by moment."""
        return self._managed.timeline()

    def close(self) -> None:
        """Release chunks, threads and the disk file."""
        self._managed.close()

    def _save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        self._managed.save(directory, scheduler, extra)

    def _load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        extra = self._managed.load(directory, scheduler)
        if any(size > 1 for size in extra.pop(CUT_INTO, {}).values()):  # ranks have drawn the same numbers
            torch.manual_seed(self._seed + self.rank.index)
        return extra

    def _write_trained(self, made: Path, tokenizer: Any) -> None:
        self._save_pretrained(self.module, made, tokenizer, only_adapters=self._adapters)

    def _write_merged(self, made: Path, tokenizer: Any, kept: Path | None) -> None:
        if kept is not None:
            self._read_adapters(kept)
        self._save_pretrained(self.module.merge_and_unload(), made, tokenizer, only_adapters=False)

    def _save_pretrained(self, model: Any, made: Path, tokenizer: Any, *, only_adapters: bool) -> None:
        options: dict[str, Any] = {}
        if not self.rank.is_alone:
            options["state_dict"] = self._gathered(model, only_adapters=only_adapters)
            if self.rank.index:
                return
        used = model.config.use_cache
        if self._use_cache is not None:
            model.config.use_cache = self._use_cache
        try:
            model.save_pretrained(made, max_shard_size=SHARD, **options)
        finally:
            model.config.use_cache = used
        tokenizer.save_pretrained(made)

    def _gathered(self, model: Any, *, only_adapters: bool) -> dict[str, Tensor]:
        """Return the weights on the first rank, in a file on the DISK tier if there is one. Collective: all
        ranks read them together, one after another."""
        trained = {id(param) for param in model.parameters() if param.requires_grad}
        state = {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if not only_adapters or id(value) in trained
        }
        place: Place = IN_MEMORY
        if not self.rank.index and self._disk_dir is not None:
            place = MappedTensors(self._disk_dir, sum(each.nbytes for each in state.values()), len(state))
        copies: dict[int, Tensor] = {}  # by id, so that tied weights stay tied
        for value in state.values():
            if id(value) not in copies:
                whole = value.detach().clone().cpu()
                if not self.rank.index:
                    copies[id(value)] = place.empty(whole.numel(), whole.dtype).view(whole.shape)
                    place.put(copies[id(value)].view(-1), 0, whole.view(-1))
                else:
                    copies[id(value)] = whole.new_empty(0)
        return {name: copies[id(value)] for name, value in state.items()}

    def _read_adapters(self, kept: Path) -> None:
        """Load the adapters that :meth:`keep` has written."""
        import peft

        with errors_of(f"PEFT cannot read the adapters of {kept}"):
            found: Any = peft.set_peft_model_state_dict(
                self.module, peft.load_peft_weights(str(kept), device="cpu")
            )
        if found.unexpected_keys:
            raise ConfigError(f"{kept} has {found.unexpected_keys[0]!r}, which is not in the model")


def is_quantized(config: FineTuneConfig) -> bool:
    """Return whether the directory of the model has quantized weights. Raises InputError."""
    return stored_quantization(Path(config.model)) is not None


def stored_quantization(directory: Path) -> Any:
    """Return the quantization config of a directory's weights; None if they are not quantized. Raises
    InputError."""
    if not (directory / CONFIG).is_file():
        return None
    return InputDirectory(directory).json(CONFIG, MAX_CONFIG_BYTES).get("quantization_config")


def refuse_quantized(config: FineTuneConfig) -> None:
    """Raise ConfigError for options that are incompatible with weights that are already quantized."""
    if not config.lora and is_quantized(config):
        raise ConfigError(
            f"the weights of {config.model} are quantized and cannot be trained; add --lora 16 to "
            "train adapters on them, or give the original model"
        )
    if config.num_parts > 1 and is_quantized(config):
        raise ConfigError(
            f"the weights of {config.model} are quantized, and --tp, --pp and --sp cannot divide "
            f"such weights; divide only the rows (--nproc {config.num_ranks}), or give the original "
            "model"
        )
    for wrong, what in (
        (config.merge, "--merge needs weights in floating point"),
        (config.quantize != NO, f"--quantize {config.quantize} quantizes the weights"),
    ):
        if wrong and is_quantized(config):
            raise ConfigError(
                f"{what}, but those of {config.model} are quantized; leave {what.partition(' ')[0]} "
                "out, or give the original model"
            )


def quantization_of(config: FineTuneConfig) -> Any:
    """Return the transformers config to which the base is quantized; None if it is not. Raises the errors of
    :func:`quantization_named`."""
    if config.quantize == NO:
        return None
    return quantization_named(
        config.quantize, torch.bfloat16 if config.precision == "bf16" else torch.float32
    )


def quantization_named(name: str, compute_dtype: torch.dtype) -> Any:
    """Return the transformers config for weights in ``name`` (nf4 or int8) that compute in ``compute_dtype``.

    Raises:
        ConfigError: the package that quantizes is not installed.
    """
    import transformers

    try:
        if name == NF4:
            import bitsandbytes  # type: ignore[import-not-found, unused-ignore] # noqa: F401

            return transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=compute_dtype,
            )
        from torchao.quantization import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
            Int8WeightOnlyConfig,
        )
    except ImportError as error:
        raise ConfigError(
            f"--quantize {name} needs a package: pip install 'gemini-runtime[quantized]' ({error})"
        ) from error
    return transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2))


def checked_early(config: FineTuneConfig, *, ranks: int) -> nn.Module:
    """Return the model on ``meta`` with its adapters, after the checks that need no weights. Takes seconds.

    It checks packages, the targets of adapters and, for one process on the CPU, whether the budgets are
    sufficient.

    Raises:
        OutOfBudgetError, ConfigError: as in :class:`PretrainedEngine`.
    """
    quantization_of(config)
    module = adapted(config)
    is_plain = config.quantize == NO and not is_quantized(config)
    if ranks > 1 or not is_plain or config.device_kind != "cpu" or _rule(config) is None:
        return module
    options = config.managed_options()
    del options["device"]
    refuse_unfit(module, GeminiConfig.choose(None, **options, optimizer_rule=_rule(config)))
    return module


def _rule(config: FineTuneConfig) -> str | None:
    """Return the optimizer rule to announce to the runtime. It assumes fp32 states, so it is None for compact
    states, which may fit although fp32 states do not."""
    return "adam" if config.state_dtype == "fp32" else None


def _loaded(config: FineTuneConfig) -> Any:
    quantization = quantization_of(config)
    asked = {} if quantization is None else {"quantization_config": quantization}
    return gemini.from_pretrained(
        Path(config.model).absolute(),  # adapters keep it as the name of their model
        "AutoModelForCausalLM",
        adapter=adapter_of(config),
        local_files_only=True,
        **asked,
        **config.managed_options(),
        optimizer_rule=_rule(config),
    )


def _numel(param: nn.Parameter) -> int:
    """Return the number of elements of a parameter; for a 4-bit parameter of bitsandbytes, the number before
    quantization."""
    state = getattr(param, "quant_state", None)
    return param.numel() if state is None else math.prod(state.shape)
