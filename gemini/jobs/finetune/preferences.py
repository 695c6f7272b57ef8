"""Direct preference optimization (DPO): its records and its loss.

A pair is a prompt with a chosen answer and a rejected answer. The loss falls if the model prefers the chosen
answer more than the reference does. The reference is the initial model of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gemini.errors import InputError

SFT, DPO = "sft", "dpo"
OBJECTIVES = (SFT, DPO)
CHOSEN, REJECTED = "chosen", "rejected"
_IGNORED = -100
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Rewards:
    """Sums over ``pairs`` preference pairs: their rewards, and how often the chosen answer had the higher
    one."""

    chosen: float = 0.0
    rejected: float = 0.0
    correct: float = 0.0
    pairs: float = 0.0

    def plus(self, other: Rewards) -> Rewards:
        """Return the sums of both."""
        return Rewards(
            self.chosen + other.chosen,
            self.rejected + other.rejected,
            self.correct + other.correct,
            self.pairs + other.pairs,
        )

    def means(self) -> dict[str, float]:
        """Return means by TRL's names."""
        if not self.pairs:
            return {}
        return {
            "rewards/chosen": self.chosen / self.pairs,
            "rewards/rejected": self.rejected / self.pairs,
            "rewards/margins": (self.chosen - self.rejected) / self.pairs,
            "rewards/accuracies": self.correct / self.pairs,
        }


def answer_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log probability of each row's answer, which is the tokens with a label."""
    wanted = labels[:, 1:].to(logits.device)
    losses = functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), wanted.flatten(), ignore_index=_IGNORED, reduction="none"
    )
    return -losses.view(wanted.shape).sum(dim=1)


def preference_loss(answers: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Rewards]:
    """Return the mean loss over pairs, and their rewards. Both arguments are log probabilities of answers:
    first the chosen answers, then the rejected ones in the same order."""
    chosen, rejected = (beta * (answers - reference)).chunk(2)
    loss = -functional.logsigmoid(chosen - rejected).mean()
    with torch.no_grad():
        correct = (chosen > rejected).float().sum()
        rewards = Rewards(chosen.sum().item(), rejected.sum().item(), correct.item(), float(len(chosen)))
    return loss, rewards


def split_prompt(place: str, value: Mapping[str, Any], prompt: Any) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer of a record: all texts, or all lists of messages.

    ``prompt``: the record's prompt; None: it is the common beginning of both answers.

    Raises:
        InputError: they are neither.
    """
    chosen, rejected = (_answer(value[name]) for name in (CHOSEN, REJECTED))
    if isinstance(chosen, str) and isinstance(rejected, str):
        if isinstance(prompt, str):
            return prompt, chosen, rejected
        chosen, rejected = ([{"role": "assistant", "content": each}] for each in (chosen, rejected))
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise InputError(
            f"{place} needs a chosen and a rejected answer that are both text, or both lists of messages; "
            f"they are {type(value[CHOSEN]).__name__} and {type(value[REJECTED]).__name__}"
        )
    if isinstance(prompt, list):
        return prompt, chosen, rejected
    if isinstance(prompt, str) and not _begins_with_question(chosen):
        return [{"role": "user", "content": prompt}], chosen, rejected
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise InputError(
            f"{place} has no prompt, and its answers do not start with the same messages; add a prompt"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _answer(value: Any) -> Any:
    """Return an answer as text or a list of messages. A single message becomes a list."""
    return [value] if isinstance(value, dict) else value


def _begins_with_question(messages: Messages) -> bool:
    """Return whether an answer repeats the prompt, as in UltraFeedback."""
    first = messages[0] if messages else None
    return isinstance(first, dict) and first.get("role", first.get("from")) not in ("assistant", "gpt")
