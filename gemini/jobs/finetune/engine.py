"""A checkpoint under training: loaded straight into chunks, exported for transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
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
from gemini.jobs.finetune.held_out import BEST, BestWeights
from gemini.jobs.finetune.preferences import Rewards, answer_log_probs, preference_loss
from gemini.jobs.finetune.samples import Batch
from gemini.jobs.run.managed import ManagedTraining, make_disk_directory
from gemini.model.in_place import InPlace
from gemini.offload.mapped import IN_MEMORY, MappedTensors, Place
from gemini.parallel.plan import ParallelPlan
from gemini.runtime.activation.recomputed import recompute_blocks
from gemini.runtime.build import refuse_unfit
from gemini.runtime.config import GeminiConfig
from gemini.system.durable import put_in_place, temporary_of
from gemini.system.files import io_errors
from gemini.system.input_files import InputDirectory, errors_of

_SHARD = "2GB"  # of what is exported, and so of what is in memory at once
_BETAS = (0.9, 0.999)
_BLOCK = 2**20  # bytes of a file that is copied
_PROBED = 4  # tokens of a document that shows whether others see it


class PretrainedEngine(ManagedTraining):
    """The model of ``config`` with its optimizer; with adapters only those train. Checkpoints say which
    weights were ``best``. ``rank``: this process among those that share the model; all of them make the same
    calls.

    Raises:
        OutOfBudgetError: it cannot fit the budgets; said before weights are read.
        ConfigError: an option cannot be.
    """

    def __init__(
        self, config: FineTuneConfig, best: BestWeights | None = None, rank: Rank | None = None
    ) -> None:
        self.best = best
        self._adapters = bool(config.lora)
        self._disk_dir = config.disk_dir
        self._beta = config.dpo_beta
        self.rewards = Rewards()  # of the pairs of this step
        self.rank = Rank() if rank is None else rank
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
                betas=_BETAS,
                weight_decay=config.weight_decay,
                state_dtype=config.state_dtype,
                max_norm=config.clip,
            )
            if config.activation_checkpointing:
                self.module.gradient_checkpointing_enable({"use_reentrant": False})
            recompute_blocks(self.module, config.recomputed_blocks)
            if config.plan is not None:
                handle.compare_with(ParallelPlan.load(config.plan).predicted.of_rank(self.rank.index))
        except BaseException as error:
            handle.leave(type(error), error)
            raise
        super().__init__(handle, optimizer)
        self.device = next(iter(self.module.parameters())).device
        attention = getattr(self.module.config, "_attn_implementation", None) or ""
        self._is_unmasked = "flash" in attention
        self._use_cache = getattr(self.module.config, "use_cache", None)
        self.module.config.use_cache = False  # of keys and values, which only generation needs
        self.module.train()
        torch.manual_seed(config.seed + self.rank.index)  # dropout of each rank is its own

    @property
    def num_parameters(self) -> tuple[int, int]:
        """Return how many parameters there are, and how many of them train."""
        params = list(self.module.parameters())
        return sum(map(_numel, params)), sum(p.numel() for p in params if p.requires_grad)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch in nats."""
        if batch.num_pairs:
            return self._preference_loss(batch)
        loss: Tensor = self._outputs(batch).loss
        return loss

    def _preference_loss(self, batch: Batch) -> Tensor:
        """Return DPO's loss."""
        reference = self.reference(batch) if batch.reference is None else batch.reference
        answers = self._answers(batch)
        loss, rewards = preference_loss(answers, reference.to(answers.device), self._beta)
        self.rewards = self.rewards.plus(rewards)
        return loss

    def reference(self, batch: Batch) -> Tensor:
        """Return the log probability of each answer of pairs by the reference, float32 ``[batch]``: by the
        model without its adapters; where there are none, by its weights of this moment. Dropout is off."""
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

    def forget_rewards(self) -> None:
        """Begin to add up rewards again, for a step that begins."""
        self.rewards = Rewards()

    def _outputs(self, batch: Batch) -> Any:
        inputs = {name: value.to(self.device) for name, value in batch.inputs.items()}
        if "position_ids" in inputs and self._is_unmasked:
            # Such an attention finds the ends of documents in one row only.
            inputs = {name: value.reshape(1, -1) for name, value in inputs.items()}
        return self.module(**inputs)

    def check_documents_are_apart(self) -> None:
        """Raise ConfigError where a document sees the one that is packed before it: masks are made by each
        model's own code, and layers without attention have none. It takes one pass over 16 tokens."""
        batch = probe()
        self.module.eval()
        try:
            with torch.no_grad():
                logits = self._outputs(batch).logits.reshape(*batch.inputs["input_ids"].shape, -1)
        finally:
            self.module.train()
        one, other = logits[:, -_PROBED:].float().unbind()
        near = 8 * torch.finfo(logits.dtype).eps * one.abs().max().item()
        if (one - other).abs().max().item() > near:
            raise ConfigError(
                f"{type(self.module).__name__} does not keep packed documents apart: one sees those before "
                "it in a row, although its positions begin at 0; give --no-packing (a document in each row), "
                "or --documents joined if each may look at those before it"
            )

    def evaluate(self, batches: Sequence[Callable[[], Batch]]) -> float:
        """Return the mean loss over all tokens of ``batches``; no weight and no random state changes. Ranks
        share the batches, and each runs as many passes as the others."""
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

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Return the sums of what all ranks give here."""
        if self.rank.is_alone:
            return list(values)
        said = [json.loads(text) for text in self.rank.collect(lambda: json.dumps(values))]
        return [math.fsum(each) for each in zip(*said, strict=True)]

    def save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        """Stream everything to ``directory``, with what is known of the best weights."""
        if self.best is None:
            super().save(directory, scheduler, extra)
        else:
            super().save(directory, scheduler, {**extra, BEST: self.best.state()})
            self.best.saved()

    def load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        """Stream everything back."""
        extra = super().load(directory, scheduler)
        if self.best is not None:
            self.best.restore(extra.get(BEST))
        return extra

    def keep(self, target: Path, tokenizer: Any) -> None:
        """Write what :meth:`export` needs to return to these weights; the run goes on."""
        with self._written(target) as made:
            self._save_pretrained(self.module, made, tokenizer, only_adapters=self._adapters)

    def export(
        self, target: Path, tokenizer: Any, *, merge: bool, card: str, kept: Path | None = None
    ) -> None:
        """Write a directory that transformers loads to ``target``, whole or not at all: the model, or its
        adapters, with a model card. With ``merge`` adapters become part of the weights, and nothing can be
        trained after. ``kept``: what :meth:`keep` has written of other weights, which take the place of
        these."""
        with self._written(target) as made:
            if kept is not None and not merge:
                if not self.rank.index:
                    _copy(kept, made)
            else:
                if kept is not None:
                    self._read_adapters(kept)
                model = self.module.merge_and_unload() if merge else self.module
                self._save_pretrained(model, made, tokenizer, only_adapters=self._adapters and not merge)
            if not self.rank.index:
                (made / "README.md").unlink(missing_ok=True)  # PEFT has written one
                (made / "README.md").write_text(card, encoding="utf-8")

    @contextmanager
    def _written(self, target: Path) -> Iterator[Path]:
        """Yield the name of a directory to make, which becomes ``target``. Only the first rank makes it."""
        made = temporary_of(target)
        with io_errors("write the trained model", target):
            if not self.rank.index:
                shutil.rmtree(made, ignore_errors=True)
            yield made
            if not self.rank.index:
                put_in_place(made, target)
            self.rank.agree(lambda: "")  # it is there for all

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
            model.save_pretrained(made, max_shard_size=_SHARD, **options)
        finally:
            model.config.use_cache = used
        tokenizer.save_pretrained(made)

    def _gathered(self, model: Any, *, only_adapters: bool) -> dict[str, Tensor]:
        """Return the weights on the first rank, in a file of the DISK tier if there is one. All ranks read
        them together, one after the other."""
        trained = {id(param) for param in model.parameters() if param.requires_grad}
        state = {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if not only_adapters or id(value) in trained
        }
        place: Place = IN_MEMORY
        if not self.rank.index and self._disk_dir is not None:
            place = MappedTensors(self._disk_dir, sum(each.nbytes for each in state.values()), len(state))
        copies: dict[int, Tensor] = {}  # tied weights stay one
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
        """Have the values of adapters that :meth:`keep` has written."""
        import peft

        with errors_of(f"PEFT cannot read the adapters of {kept}"):
            found: Any = peft.set_peft_model_state_dict(
                self.module, peft.load_peft_weights(str(kept), device="cpu")
            )
        if found.unexpected_keys:
            raise ConfigError(f"{kept} has {found.unexpected_keys[0]!r}, which the model has no place for")


def probe() -> Batch:
    """Return two rows of two documents each; the second documents are the same."""
    first = torch.arange(_PROBED)
    rows = torch.stack([torch.cat([first + shift, first]) for shift in (0, _PROBED)])
    positions = first.repeat(2, 2)
    return Batch({"input_ids": rows, "position_ids": positions}, rows.numel())


def _copy(kept: Path, made: Path) -> None:
    """Copy a directory that is not yet published."""
    made.mkdir()
    for entry in kept.iterdir():
        if entry.is_dir():
            _copy(entry, made / entry.name)
            continue
        with entry.open("rb") as source, (made / entry.name).open("wb") as target:
            while block := source.read(_BLOCK):
                target.write(block)


def is_quantized(config: FineTuneConfig) -> bool:
    """Say whether the directory of the model has quantized weights. Raises InputError."""
    if not (Path(config.model) / CONFIG).is_file():
        return False
    return "quantization_config" in InputDirectory(Path(config.model)).json(CONFIG, MAX_CONFIG_BYTES)


def refuse_quantized(config: FineTuneConfig) -> None:
    """Raise ConfigError for what is not done with weights that are quantized already."""
    if not config.lora and is_quantized(config):
        raise ConfigError(
            f"the weights of {config.model} are quantized and do not train; add --lora 16 to train adapters "
            "on them, or give the model that it was made from"
        )
    for wrong, what in (
        (config.merge, "--merge puts adapters into the weights"),
        (config.quantize != NO, f"--quantize {config.quantize} quantizes the weights"),
    ):
        if wrong and is_quantized(config):
            raise ConfigError(
                f"{what}, and those of {config.model} are quantized; leave "
                f"{what.partition(' ')[0]} out, or give the model that it was made from"
            )


def quantization_of(config: FineTuneConfig) -> Any:
    """Return what transformers is to quantize the base to; None: it stays as it is. Raises as
    :func:`quantization_named`."""
    if config.quantize == NO:
        return None
    return quantization_named(
        config.quantize, torch.bfloat16 if config.precision == "bf16" else torch.float32
    )


def quantization_named(name: str, compute_dtype: torch.dtype) -> Any:
    """Return the config of transformers for weights in ``name``, nf4 or int8, which compute in that type.

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
    """Return the model on ``meta`` with its adapters, after what shows without weights was checked: packages,
    what adapters are on, and, in one process on the CPU, whether the budgets can hold it. It takes seconds.

    Raises:
        OutOfBudgetError, ConfigError: as :class:`PretrainedEngine`.
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
    """Return the rule to announce: it has states in fp32; smaller ones may fit where those do not."""
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
    """Return the elements of a parameter; of one of bitsandbytes in 4 bits, those it was quantized from."""
    state = getattr(param, "quant_state", None)
    return param.numel() if state is None else math.prod(state.shape)
