"""Programs of the documents: unchanged under compat, and changed by hand, they have the same numbers."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks

from gemini.parallel.launch import shutdown

CONFIG = """
from {amp} import AMP_TYPE
BATCH_SIZE = 16
NUM_EPOCHS = 2
fp16 = dict(mode=AMP_TYPE.TORCH)
gradient_accumulation = 2
clip_grad_norm = 1.0
dali = dict(gpu_aug=True, mixup_alpha=0.2)
"""

# As the documents train by data parallelism: with the engine, then with the trainer.
PROGRAM = """
import os
import torch
import colossalai
from colossalai.core import global_context as gpc
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.nn.metric import Accuracy, MixupAccuracy
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader

class LogMessageHook(hooks.BaseHook):
    def __init__(self, priority=10):
        self._logger = get_dist_logger()
    def before_train(self, trainer):
        self._logger.info('training starts')
    def after_train(self, trainer):
        self._logger.info('training finished')

def main():
    parser = colossalai.get_default_parser()
    args = parser.parse_args()
    colossalai.launch_from_torch(config=args.config, backend='gloo')
    disable_existing_loggers()
    logger = get_dist_logger()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    x = torch.randn(128, 8)
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    train_dataloader = get_dataloader(dataset=data, shuffle=True, batch_size=gpc.config.BATCH_SIZE)
    test_dataloader = get_dataloader(data, add_sampler=False, batch_size=gpc.config.BATCH_SIZE)
    optimizer = colossalai.nn.Lamb(model.parameters(), lr=1.8e-2, weight_decay=0.1)
    criterion = torch.nn.CrossEntropyLoss()
    lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader)
    for epoch in range(gpc.config.NUM_EPOCHS):
        engine.train()
        for img, label in train_dataloader:
            engine.zero_grad()
            output = engine(img)
            train_loss = engine.criterion(output, label)
            engine.backward(train_loss)
            engine.step()
        lr_scheduler.step()
        engine.eval()
        correct = 0
        for img, label in test_dataloader:
            with torch.no_grad():
                output = engine(img)
            correct += torch.sum(torch.argmax(output, dim=-1) == label)
        rates = lr_scheduler.get_last_lr()
        told = f'rank {gpc.get_global_rank()} {epoch} {train_loss.item()!r} {int(correct)} {rates}'
        open(f'rank{gpc.get_global_rank()}.txt', 'a').write(told + chr(10))
    trainer = Trainer(engine=engine, logger=logger, timer=MultiTimer())
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(accuracy_func=MixupAccuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
        hooks.LogMetricByStepHook(),
        hooks.SaveCheckpointHook(interval=1, checkpoint_dir='./ckpt'),
        LogMessageHook(),
    ]
    trainer.fit(
        train_dataloader=train_dataloader, epochs=gpc.config.NUM_EPOCHS, test_dataloader=test_dataloader,
        HOOKS=hook_list, display_progress=True, test_interval=1)
    again = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    colossalai.utils.load_checkpoint('./ckpt/epoch_2.pt', again)
    total = sum(param.double().sum().item() for param in again.parameters())
    open(f'rank{gpc.get_global_rank()}.txt', 'a').write(f'saved {total!r}')

main()
"""

FROM_ENGINE = "from gemini.parallel.engine import"
BY_HAND = (
    ("import colossalai\n", "import gemini.parallel.engine as colossalai\n"),
    ("from colossalai.core import", FROM_ENGINE),
    ("from colossalai.logging import", FROM_ENGINE),
    ("from colossalai.nn.lr_scheduler import", "from gemini.optim.lr_scheduler import"),
    ("from colossalai.nn.metric import", "from gemini.parallel.trainer import MultiTimer,"),
    ("from colossalai.trainer import", "from gemini.parallel.trainer import"),
    (
        "from colossalai.utils import MultiTimer,",
        "from gemini.optim import Lamb\nfrom gemini.parallel.engine import",
    ),
    ("colossalai.nn.Lamb", "Lamb"),
    ("colossalai.utils.", "colossalai."),
)


def run(directory: Path, program: str, amp: str, *, processes: int) -> list[str]:
    directory.mkdir()
    (directory / "config.py").write_text(CONFIG.format(amp=amp))
    (directory / "train.py").write_text(program)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *launcher, "train.py", "--config", "config.py"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.findall(r"\[Epoch \d / \w+\]: .*", done.stderr)
    assert len(told) == 4
    assert done.stderr.count("training starts") == processes
    losses = [re.sub(r" \| Throughput.*", "", line) for line in told]
    return [(directory / f"rank{rank}.txt").read_text() for rank in range(processes)] + losses


@pytest.mark.dear("programs of the documents in processes of their own")
def test_a_program_changed_by_hand_has_the_numbers_of_the_unchanged_one(tmp_path: Path) -> None:
    documents = PROGRAM.replace("HOOKS", "hook")
    documents = re.sub(r"^from colossalai\b", "from gemini.compat", documents, flags=re.MULTILINE)
    documents = documents.replace("import colossalai\n", "import gemini.compat as colossalai\n")
    by_hand = PROGRAM.replace("HOOKS", "hooks")
    for theirs, ours in BY_HAND:
        assert theirs in by_hand, theirs
        by_hand = by_hand.replace(theirs, ours)
    outside = [theirs for theirs, _ in BY_HAND if "import" not in theirs]
    assert outside == ["colossalai.nn.Lamb", "colossalai.utils."]
    unchanged = run(tmp_path / "documents", documents, "gemini.compat.amp", processes=2)
    assert unchanged == run(tmp_path / "by_hand", by_hand, "gemini.parallel.engine", processes=2)
    assert [said.count("\n") for said in unchanged[:2]] == [2, 2]
    assert unchanged[0].rpartition("saved ")[2] == unchanged[1].rpartition("saved ")[2]


# -- a whole program of the documents, three lines of which are changed -------------------------------

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "documents" / "amp_engine.py"
OUR_LINES = [
    "import gemini.parallel.engine as colossalai",
    "from gemini.optim.lr_scheduler import LinearWarmupLR",
    "from gemini.parallel.engine import "
    "AMP_TYPE, current_device as get_current_device, get_dataloader, global_context as gpc",
]


def numbers(path: str) -> list[Any]:
    """Run a program in this process; return the norms and the loss it saw, and its weights."""
    torch.manual_seed(1024)  # as compat's launch does, and ours leaves to the program
    sys.path.insert(0, str(EXAMPLE.parent))
    sys.argv = [path]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = runpy.run_path(path, run_name="__main__")
    shutdown()
    return [said["norms"], said["loss"].item(), [p.double().sum().item() for p in said["model"].parameters()]]


def test_three_lines_of_imports_are_all_that_a_program_changes(tmp_path: Path) -> None:
    lines = EXAMPLE.read_text().splitlines()
    theirs = [line for line in lines if "gemini.compat" in line]
    place = lines.index(theirs[0])
    assert lines[place : place + len(theirs)] == theirs
    changed = [*lines[:place], *OUR_LINES, *lines[place + len(theirs) :]]
    assert len(OUR_LINES) == 3
    assert "compat" not in "".join(changed)
    ours = tmp_path / "by_hand.py"
    ours.write_text("\n".join(changed))
    unchanged = run_on_ranks(numbers, 2, str(EXAMPLE))
    assert unchanged == run_on_ranks(numbers, 2, str(ours))
    assert unchanged[0][0] != unchanged[0][0][:1] * len(unchanged[0][0])
