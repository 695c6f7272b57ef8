"""Writes the program of a conversion: a plain loop, a script with transformers' Trainer, or a loop with
Accelerate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gemini.cli.conversion import AUTO, Conversion, Schedule, Target

_WIDTH = 88
_HAS = {
    Target.LOOP: "model and loader",
    Target.TRAINER: "model and train_dataset",
    Target.ACCELERATE: "model and loader",
}
# Option of AdamW -> its name in TrainingArguments.
_ARGUMENTS = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
_VALUES = {
    "lr": "args.learning_rate",
    "eps": "args.adam_epsilon",
    "betas": "(args.adam_beta1, args.adam_beta2)",
}
_OF_TRAINER_ADAMW = frozenset((*_ARGUMENTS, "betas", "state_dtype", "bias_correction"))


def program(found: Conversion) -> str:
    """Return the text of the program, for a script that has a model and its data."""
    lines = [f"# from {found.source}, for a script that defines {_HAS[found.target]}"]
    lines += [f"# {note}" for note in found.notes]
    lines += _imports(found)
    if any("ranks" in text for group in found.groups.values() for text in group.values()):
        lines += ['ranks = int(os.environ.get("WORLD_SIZE", 1))']
    if found.of("model").get("mixed_precision") == "mixed_precision":
        lines += ['mixed_precision = None  # "bf16" or "fp16": the file has "auto"']
    body = {Target.LOOP: _loop, Target.TRAINER: _trainer, Target.ACCELERATE: _accelerate}[found.target]
    return "\n".join([*lines, *body(found)]) + "\n"


def _imports(found: Conversion) -> list[str]:
    trains = found.target is Target.TRAINER
    own_class = trains and not _is_plain(found)
    texts = [text for group in found.groups.values() for text in group.values()]
    schedule = found.schedule
    names = []
    if schedule is not None and any("math." in line for line in (*schedule.share, *schedule.height)):
        names.append("math")
    if any("ranks" in text for text in texts):
        names.append("os")
    if not trains or (own_class and found.optimizer_class.startswith("gemini.")):
        names.append("gemini")
    if schedule is not None or any("torch." in text for text in (*texts, found.optimizer_class)):
        names.append("torch")
    lines = [f"import {name}" for name in names]
    if trains:
        lines += ["from gemini.integrations.transformers import GeminiTrainer"]
        lines += ["from transformers import TrainingArguments"]
    if found.target is Target.LOOP:
        lines += ["from gemini.parallel import join_ranks"]
    if found.target is Target.ACCELERATE:
        lines += ["from gemini.integrations.accelerate import GeminiAccelerator"]
    return [*lines, ""]


# --------------------------------------------------------------------------------------- the loop
def _loop(found: Conversion) -> Iterator[str]:
    yield "join_ranks()  # joins the ranks that torchrun started; does nothing without torchrun"
    yield from _checkpointing(found)
    yield from _call("model = gemini.GeminiDDP", ["model"], found.of("model"))
    yield from _call(f"optimizer = {found.optimizer_class}", [_params(found)], found.of("optimizer"))
    yield from _call("optimizer = gemini.GeminiOptimizer", ["optimizer", "model"], found.of("managed"))
    if found.schedule is not None:
        yield from _schedule(found.schedule, "optimizer")
    yield ""
    yield from _batch(found)
    step = ["optimizer.step()", *(["scheduler.step()"] if found.schedule else []), "optimizer.zero_grad()"]
    times = found.of("loop").get("accumulation", "1")
    if times == "1":
        yield from ("for batch in loader:", "    optimizer.backward(model(**batch).loss)", *_indented(step))
        return
    yield f"accumulation = {times}"
    yield "for index, batch in enumerate(loader, start=1):"
    yield "    optimizer.backward(model(**batch).loss / accumulation)"
    yield "    if index % accumulation == 0:"
    yield from _indented(step, 2)


def _params(found: Conversion) -> str:
    """Return the optimizer's first argument. Muon needs names, to recognize hidden matrices."""
    return "model.named_parameters()" if found.optimizer_class == "gemini.Muon" else "model.parameters()"


def _checkpointing(found: Conversion) -> Iterator[str]:
    if "checkpointing" in found.of("loop"):
        yield "model.gradient_checkpointing_enable()  # of transformers' models"


def _batch(found: Conversion) -> Iterator[str]:
    batch = found.of("loop").get("batch")
    if batch is not None:
        yield f"# each rank's loader has batches of {batch}"


# ---------------------------------------------------------------------------------- Accelerate's
def _accelerate(found: Conversion) -> Iterator[str]:
    options = {**found.of("accelerator"), "gemini": _dict(found.of("model"))}
    if found.of("managed"):
        options["gemini_optimizer"] = _dict(found.of("managed"))
    yield from _call("accelerator = GeminiAccelerator", [], options)
    yield from _checkpointing(found)
    yield from _call(f"optimizer = {found.optimizer_class}", [_params(found)], found.of("optimizer"))
    yield "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
    if found.schedule is not None:
        yield from _schedule(found.schedule, "optimizer.optimizer")
    yield ""
    yield from _batch(found)
    yield from ("for batch in loader:", "    with accelerator.accumulate(model):")
    yield "        accelerator.backward(model(**batch).loss)"
    norm = found.of("loop").get("max_norm")
    if norm is not None:
        yield "        if accelerator.sync_gradients:"
        yield f"            accelerator.clip_grad_norm_(model.parameters(), {norm})"
    yield "        optimizer.step()"
    if found.schedule is not None:
        yield "        if accelerator.sync_gradients:"
        yield "            scheduler.step()"
    yield "        optimizer.zero_grad()"


# ------------------------------------------------------------------------------------ the Trainer
def _is_plain(found: Conversion) -> bool:
    """Return whether the Trainer makes the optimizer from its TrainingArguments."""
    is_adam = found.optimizer_class == "gemini.HybridAdam"
    return is_adam and found.of("optimizer").keys() <= _OF_TRAINER_ADAMW


def _trainer(found: Conversion) -> Iterator[str]:
    arguments, own = dict(found.of("arguments")), dict(found.of("managed"))
    optimizer = found.of("optimizer")
    given = {name: text for name, text in optimizer.items() if text != AUTO}
    arguments.update({_ARGUMENTS[name]: given[name] for name in _ARGUMENTS.keys() & given.keys()})
    options: dict[str, str] = {}
    if _is_plain(found):
        if "betas" in given:
            first, second = given["betas"].strip("()").split(", ")
            arguments.update(adam_beta1=first, adam_beta2=second)
        own.update({name: text for name, text in given.items() if name in ("state_dtype", "bias_correction")})
    else:
        arguments.pop("adam_epsilon", None)
        texts = {
            name: _VALUES[name] if text == AUTO else text
            for name, text in optimizer.items()
            if name != "weight_decay"  # each group of the Trainer has its own
        }
        options["optimizer_cls_and_kwargs"] = f"({found.optimizer_class}, {_dict(texts)})"
    yield from _call("args = TrainingArguments", ['"output"'], dict(sorted(arguments.items())))
    name = "GeminiTrainer"
    methods = [*_decay(optimizer), *_scheduler(found)]
    if methods:
        name = "Trainer"
        yield from ("", "", "class Trainer(GeminiTrainer):", *_indented(methods), "", "")
    given_too = {"model": "model", "args": "args", "train_dataset": "train_dataset"}
    if found.of("model"):
        given_too["gemini"] = _dict(found.of("model"))
    if own:
        given_too["gemini_optimizer"] = _dict(own)
    yield from _call(f"trainer = {name}", [], {**given_too, **options})
    yield "trainer.train()"


def _decay(optimizer: Mapping[str, str]) -> Iterator[str]:
    if optimizer.get("weight_decay", "0.0") not in ("0.0", "0"):
        yield "def get_decay_parameter_names(self, model):"
        yield "    # DeepSpeed's optimizer decays biases and norms, too"
        yield "    return [name for name, _ in model.named_parameters()]"


def _scheduler(found: Conversion) -> Iterator[str]:
    if found.schedule is None:
        return
    if found.of("optimizer").get("weight_decay", "0.0") not in ("0.0", "0"):
        yield ""
    yield "def create_scheduler(self, num_training_steps, optimizer=None):"
    yield from _indented(list(_schedule(found.schedule, "optimizer or self.optimizer"))[1:])
    yield "    self.lr_scheduler = scheduler"
    yield "    return scheduler"


# ------------------------------------------------------------------------------------- schedules
def _schedule(schedule: Schedule, optimizer: str) -> Iterator[str]:
    """Yield the lines that make ``scheduler`` over ``optimizer``."""
    yield ""
    yield from (f"{name} = {text}" for name, text in schedule.settings)
    for name, body in (
        ("height", schedule.height),
        ("momentum", schedule.momentum),
        ("share", schedule.share),
    ):
        if body:
            comment = {"share": "  # of the learning rate", "height": "  # of the cycle, 0 to 1"}.get(
                name, ""
            )
            yield from ("", f"def {name}(update):{comment}", *_indented(body))
    yield ""
    if not schedule.momentum:
        yield f"scheduler = torch.optim.lr_scheduler.LambdaLR({optimizer}, share)"
        return
    yield "class OneCycle(torch.optim.lr_scheduler.LambdaLR):"
    yield "    def step(self, epoch=None):"
    yield "        super().step(epoch)"
    yield "        for group in self.optimizer.param_groups:"
    yield '            group["betas"] = (momentum(self.last_epoch), 0.99)'
    yield ""
    yield f"scheduler = OneCycle({optimizer}, share)"


# ------------------------------------------------------------------------------------------ texts
def _indented(lines: Iterable[str], depth: int = 1) -> list[str]:
    return [f"{'    ' * depth}{line}" if line else "" for line in lines]


def _dict(options: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {text}' for name, text in options.items()) + "}"


def _call(name: str, first: list[str], options: Mapping[str, str]) -> list[str]:
    given = [*first, *(f"{key}={value}" for key, value in options.items())]
    line = f"{name}({', '.join(given)})"
    return [line] if len(line) <= _WIDTH else [f"{name}(", *_indented(f"{text}," for text in given), ")"]
