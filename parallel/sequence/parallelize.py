"""parallelize_sequence: give each rank a part of the sequence, without other changes to the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.families import Loss, family_of
from gemini.parallel.mesh import Axis, HasAxes
from gemini.parallel.sequence.attention import SequenceAttention
from gemini.parallel.sequence.attention_modules import refuse_torch_attention, replace_torch_attention
from gemini.parallel.sequence.batch import Batch, SequenceCut, cut_batch, filled, shifted
from gemini.parallel.sequence.block_cut import cut_at_blocks, find_blocks
from gemini.parallel.sequence.hugging_face import refuse_unfit, replace_attention
from gemini.parallel.sequence.inner_models import (
    AT_BLOCKS,
    find_pretrained,
    has_own_wrapper,
    refuse_unfit_wrapper,
    require_loss_of,
)
from gemini.parallel.sequence.mean_loss import IGNORED, install_mean_loss, mean_loss
from gemini.parallel.transformers_model import is_pretrained, pretrained_in

METHODS = ("ulysses", "ring")
CUTS = ("batch", "blocks")


class SequenceParallel:
    """Ranks that each have a part of every sequence: the axis ``sp`` of a mesh.

    They are also ranks of data parallelism, with equal weights and averaged gradients: ``GeminiDDP(model,
    process_group=mesh.group("dp", "sp"))``.
    """

    def __init__(self, mesh: HasAxes, method: str = "ulysses", *, zigzag: bool | None = None) -> None:
        """Collective.

        Args:
            method: ``"ulysses"``, with all-to-alls of heads, or ``"ring"``, in which keys and values go
                round.
            zigzag: for the ring, whether each rank has a stretch from the front and one from the back, which
                balances a causal mask; default True.

        Raises:
            ConfigError: the method is unknown, or ``zigzag`` is not for it.
        """
        if method not in METHODS:
            raise ConfigError(f"method is {method!r}; choose {' or '.join(METHODS)}")
        if zigzag and method != "ring":
            raise ConfigError(
                "zigzag=True balances the ring; leave it out with method='ulysses', which is balanced "
                "without it"
            )
        self.axis = mesh.axis("sp")
        self.method = method
        zigzag = method == "ring" if zigzag is None else zigzag
        self.order = SequenceCut(1 if self.axis is None else self.axis.size, zigzag and self.axis is not None)
        self.attention = SequenceAttention(self.axis, self.order, method)
        self.averaging: Axis | None = mesh.axis("dp", "sp")  # the axis over which gradients are averaged
        self.takes_whole_batches = False
        self.shifts_labels = False  # True: a transformers model that predicts the next token
        self.looks_back_only = True
        self.refuses_labels = False
        self.lacks_shifted_labels = ""  # the class of a model with a forward pass without ``shift_labels``
        self._hides_filled = True  # False: masks of batches hide padding, in models of transformers

    @property
    def rank(self) -> int:
        """The index of this process's part of the sequence."""
        return 0 if self.axis is None else self.axis.rank

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Inside the block, ``scaled_dot_product_attention`` of queries, keys and values that are parts
        attends to the whole sequence, in this thread. Recomputation in backward must be inside it too.
        """
        with self.attention.in_place_of_torch():
            yield

    def cut_batch(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        *,
        shifts_labels: bool = True,
        padding: float = 0,
    ) -> Batch:
        """Return this rank's part of whole sequences, which all ranks of the axis have. If several lengths
        give parts of the same length, a model of your own attends as for the length that was cut last.
        """
        if self._hides_filled:
            self.attention.has_cut(inputs.size(1))
        return cut_batch(
            inputs,
            labels,
            positions,
            order=self.order,
            rank=self.rank,
            shifts_labels=shifts_labels,
            padding=padding,
        )

    def mean_loss(
        self, loss: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = IGNORED
    ) -> torch.Tensor:
        """Return the mean loss over the tokens of all ranks, including data parallel ones. ``loss`` is the
        mean over this rank's ``labels`` that count. The gradient is correct if gradients are averaged over
        all ranks.
        """
        return mean_loss(loss, labels, self.averaging, ignore_index)

    def attend_in(self, model: nn.Module) -> None:
        """Make the attention of ``model`` work across the ranks; on ``meta`` it returns the shapes of a part
        without communication.
        """
        inner = find_pretrained(model)
        if inner is not None:
            self._hides_filled = False
            replace_attention(inner, self.attention, cuts_blocks=False)
        else:
            replace_torch_attention(model, self.attention)

    def cut_inside(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        """Make ``blocks`` of ``model`` compute with parts of their sequences. Each model has an attention of
        its own, because the sequences of two models may differ in length.
        """
        attention = SequenceAttention(self.axis, self.order, self.method)
        if is_pretrained(model):
            replace_attention(model, attention, cuts_blocks=True)
        else:
            replace_torch_attention(model, attention)
        cut_at_blocks(blocks, attention)

    def join(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Gather a tensor from the ranks' parts, including padding, without a gradient. Collective."""
        if self.axis is None:
            return part.detach()
        return self.order.whole(self.axis.all_gather(part.detach()), dim)

    def cut(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's part of a batch of whole sequences, by the keywords of a model of transformers.
        Values without the sequence's length stay whole.

        Labels of a causal model of transformers are shifted first, and also passed as ``shift_labels``, so
        that the model does not shift them again. Labels of a model of your own stay at their tokens, as
        without ``sp``. Padding does not count, neither as labels nor as keys.

        Raises:
            ConfigError: the model takes whole batches, there are no tokens, or a mask cannot be padded.
        """
        if self.takes_whole_batches:
            raise ConfigError(
                "the model was parallelized with cut='blocks', which takes whole batches; pass the whole "
                "batch on all ranks of sp, without cut()"
            )
        tokens = batch.get("input_ids", batch.get("inputs_embeds"))
        if tokens is None:
            raise ConfigError(f"a batch has input_ids or inputs_embeds; this one has {', '.join(batch)}")
        length = tokens.size(1)
        missing = self.order.padded(length) - length
        if self._hides_filled:
            self.attention.has_cut(length)
        found = dict(batch)
        if "labels" in found and self.refuses_labels:
            raise ConfigError(
                "the model shifts labels and computes its loss by itself; leave labels out of the batch, "
                "cut them with cut_batch and compute the loss from its logits with mean_loss"
            )
        if "labels" in found and self.lacks_shifted_labels:
            raise ConfigError(
                f"{self.lacks_shifted_labels}.forward() does not take shift_labels, labels that were shifted "
                "before they were cut; add the argument and pass it on, or, without stages, "
                f"{AT_BLOCKS}"
            )
        if "labels" in found and self.shifts_labels:
            found["labels"] = found["shift_labels"] = shifted(found["labels"])
        if missing and "attention_mask" not in found and not self.looks_back_only:
            found["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        return {name: self._part(name, value, length, missing) for name, value in found.items()}

    def _part(self, name: str, value: torch.Tensor, length: int, missing: int) -> torch.Tensor:
        if name == "attention_mask" and value.dim() == 4:
            if missing:
                raise ConfigError(
                    "an attention_mask of 4 dimensions cannot be padded; pad the batch to "
                    f"{length + missing} tokens"
                )
            return value if value.size(2) == 1 else self.order.part(value, self.rank, 2)
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.size(1) != length:
            return value
        if missing and name == "position_ids":
            behind = torch.arange(1, missing + 1, device=value.device)
            value = torch.cat([value, value[:, -1:] + behind], 1)
        elif missing:
            value = filled(value, missing, IGNORED if name in ("labels", "shift_labels") else 0)
        return self.order.part(value, self.rank, 1)


def refuse_unfit_model(model: nn.Module, *, cuts_blocks: bool = False) -> None:
    """Raise ConfigError if ``model`` would treat parts of a sequence as whole sequences."""
    if not cuts_blocks:
        find_pretrained(model)  # raises if there are several
    for inner in _inner_models(model):
        if is_pretrained(inner):
            refuse_unfit(inner, cuts_blocks=cuts_blocks)
            refuse_unfit_wrapper(model, inner, cuts_blocks=cuts_blocks)
        else:
            refuse_torch_attention(model)


def _inner_models(model: nn.Module) -> list[nn.Module]:
    """Return the models with sequences of their own: those of transformers in ``model``, or ``model``."""
    return list(pretrained_in(model).values()) or [model]


def choose_cut(model: nn.Module, *, has_stages: bool) -> str:
    """Return where to cut the sequences of ``model``, "batch" or "blocks" (see :func:`parallelize_sequence`).

    A batch is cut if the model is known to compute the same from parts: a transformers model with a loss over
    tokens, by itself or inside PEFT's, or a model of your own without a transformers model. A classifier, and
    a module of your own around a transformers model, may compute anything from a whole sequence. Their
    sequences are cut at the blocks, unless stages divide these.

    Raises:
        ConfigError: neither is possible.
    """
    found = pretrained_in(model)
    if has_stages or not found:
        refuse_unfit_model(model)
        return "batch"
    if len(found) == 1 and not has_own_wrapper(model, *found):
        with suppress(ConfigError):
            refuse_unfit_model(model)
            return "batch"
    refuse_unfit_model(model, cuts_blocks=True)
    return "blocks"


def parallelize_sequence(
    model: nn.Module,
    mesh: HasAxes,
    method: str = "ulysses",
    *,
    zigzag: bool | None = None,
    cut: str = "batch",
    takes_loss: bool = True,
) -> SequenceParallel:
    """Make ``model`` attend across the ranks of the axis ``sp`` of ``mesh``, which each have a part of every
    sequence. Return the object that cuts batches and averages losses. Only the attention changes.

    Call it before the model is wrapped, and after :func:`gemini.parallel.parallelize` if that is used too.

    Args:
        method, zigzag: see :class:`SequenceParallel`.
        cut: ``"batch"``: each rank passes its part of the batch to the model. ``"blocks"``: all pass the
            whole batch, and the sequence is cut before the first block and gathered behind the last. Use it
            for models that make their sequence themselves (images), or read one position of it (classifiers).
        takes_loss: a causal model of transformers returns the mean loss over the tokens of all ranks. False:
            the mean over this rank's tokens, for :meth:`SequenceParallel.mean_loss`.

    Raises:
        ConfigError: the model cannot work on parts, here or on another rank; nothing was changed.
    """
    if cut not in CUTS:
        raise ConfigError(f"cut is {cut!r}; choose batch or blocks")
    sequence = SequenceParallel(mesh, method, zigzag=zigzag)
    whole = cut == "blocks"

    def check() -> list[tuple[nn.Module, list[nn.Module]]]:
        refuse_unfit_model(model, cuts_blocks=whole)
        return [(inner, find_blocks(inner)) for inner in _inner_models(model)] if whole else []

    cut_inside = check() if sequence.axis is None else sequence.axis.together(check)
    sequence.takes_whole_batches = whole
    if whole:
        for inner, blocks in cut_inside:
            sequence.cut_inside(inner, blocks)
        return sequence
    sequence.attend_in(model)
    inner = find_pretrained(model)
    if inner is not None:
        family = family_of(inner)
        sequence.looks_back_only = family.looks_back_only
        sequence.shifts_labels = family.looks_back_only and family.loss is Loss.CAUSAL
        sequence.refuses_labels = sequence.looks_back_only and not sequence.shifts_labels
        if sequence.shifts_labels:
            install_mean_loss(inner, sequence.averaging if takes_loss else None)
            if inner is not model:
                require_loss_of(inner, model)
                if not _takes(model, "shift_labels"):
                    sequence.lacks_shifted_labels = type(model).__name__
    return sequence


def _takes(model: nn.Module, name: str) -> bool:
    """Return whether the forward pass of ``model`` takes a keyword."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)
