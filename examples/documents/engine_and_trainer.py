# Example: EX16, Use engine and trainer in training
# Repair: config.py is a temporary file; generated pictures, a small ResNet, three epochs
# Run: gemini run --nproc-per-node 2 examples/documents/engine_and_trainer.py
# Shows: an engine with torch's AMP trains in its own loop and by a trainer with hooks, and
#   classifies the pictures of the test
import tempfile
from pathlib import Path

import torch
from stand_ins import pictures, resnet34

import gemini.compat as colossalai
from gemini.compat.core import global_context as gpc
from gemini.compat.logging import get_dist_logger
from gemini.compat.nn.lr_scheduler import CosineAnnealingLR
from gemini.compat.nn.metric import Accuracy
from gemini.compat.trainer import Trainer, hooks
from gemini.compat.utils import get_current_device, get_dataloader

CONFIG = """
from gemini.compat.amp import AMP_TYPE

BATCH_SIZE = 32
NUM_EPOCHS = 3

fp16 = dict(
    mode=AMP_TYPE.TORCH
)
"""

with tempfile.TemporaryDirectory() as directory:
    config = Path(directory, "config.py")
    config.write_text(CONFIG)
    colossalai.launch_from_torch(config=str(config))

# build logger
logger = get_dist_logger()


def build():
    # build resnet
    model = resnet34(num_classes=10)

    # build dataloaders
    train_dataloader = get_dataloader(dataset=pictures(), shuffle=True, batch_size=gpc.config.BATCH_SIZE)
    test_dataloader = get_dataloader(
        dataset=pictures(64, seed=1), add_sampler=False, batch_size=gpc.config.BATCH_SIZE
    )

    # build criterion
    criterion = torch.nn.CrossEntropyLoss()

    # optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    # lr_scheduler
    lr_scheduler = CosineAnnealingLR(optimizer, total_steps=gpc.config.NUM_EPOCHS)

    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader
    )
    return engine, train_dataloader, test_dataloader, lr_scheduler


def test(engine, test_dataloader):
    engine.eval()
    correct = 0
    total = 0
    for img, label in test_dataloader:
        img = img.to(get_current_device())
        label = label.to(get_current_device())

        # run prediction without back-propagation
        with torch.no_grad():
            output = engine(img)
            test_loss = engine.criterion(output, label)

        # compute the number of correct prediction
        pred = torch.argmax(output, dim=-1)
        correct += torch.sum(pred == label)
        total += img.size(0)
    return test_loss, (correct / total).item()


# with engine
engine, train_dataloader, test_dataloader, lr_scheduler = build()
for epoch in range(gpc.config.NUM_EPOCHS):
    # execute a training iteration
    engine.train()
    for img, label in train_dataloader:
        img = img.to(get_current_device())
        label = label.to(get_current_device())

        # set gradients to zero
        engine.zero_grad()

        # run forward pass
        output = engine(img)

        # compute loss value and run backward pass
        train_loss = engine.criterion(output, label)
        engine.backward(train_loss)

        # update parameters
        engine.step()

    # update learning rate
    lr_scheduler.step()

    # execute a testing iteration
    test_loss, accuracy = test(engine, test_dataloader)
    logger.info(
        f"Epoch {epoch} - train loss: {train_loss:.5}, test loss: {test_loss:.5}, acc: {accuracy:.5}, "
        f"lr: {lr_scheduler.get_last_lr()[0]:.5g}",
        ranks=[0],
    )
assert accuracy > 0.3, accuracy

# with trainer
engine, train_dataloader, test_dataloader, lr_scheduler = build()

# create a trainer object
trainer = Trainer(engine=engine, logger=logger)

# define the hooks to attach to the trainer
hook_list = [
    hooks.LossHook(),
    hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=True),
    hooks.AccuracyHook(accuracy_func=Accuracy()),
    hooks.LogMetricByEpochHook(logger),
    hooks.LogMemoryByEpochHook(logger),
]

# start training
# run testing every 1 epoch
trainer.fit(
    train_dataloader=train_dataloader,
    epochs=gpc.config.NUM_EPOCHS,
    test_dataloader=test_dataloader,
    test_interval=1,
    hooks=hook_list,
    display_progress=True,
)
accuracy = test(engine, test_dataloader)[1]
assert accuracy > 0.3, accuracy
