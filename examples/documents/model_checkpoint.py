# Example: EX29, Model checkpoint
# Repair: a model and a step instead of the three dots; hooks= for hook=; a temporary file
# Run: gemini run --nproc-per-node 2 examples/documents/model_checkpoint.py
# Shows: what save_checkpoint and SaveCheckpointHook write, load_checkpoint loads
import tempfile
from pathlib import Path

import torch
from stand_ins import pictures, resnet18

import gemini.compat as colossalai
from gemini.compat.cluster import DistCoordinator
from gemini.compat.trainer import Trainer, hooks
from gemini.compat.utils import get_dataloader, load_checkpoint, save_checkpoint

num_epochs = 1

colossalai.launch_from_torch(config={})
model = resnet18(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, train_dataloader, _, _ = colossalai.initialize(
    model=model,
    optimizer=optimizer,
    criterion=torch.nn.CrossEntropyLoss(),
    train_dataloader=get_dataloader(pictures(64), batch_size=16),
)


def assert_loads(file):
    other = resnet18(num_classes=10)
    load_checkpoint(file, other)
    if torch.distributed.get_rank() == 0:  # statistics of batch norm are each rank's own
        for name, value in other.state_dict().items():
            assert torch.equal(value, model.state_dict()[name].cpu()), name


with tempfile.TemporaryDirectory() as directory:
    shared = [directory]
    torch.distributed.broadcast_object_list(shared)
    file = str(Path(shared[0], "xxx.pt"))

    # with the engine
    for epoch in range(num_epochs):
        for img, label in train_dataloader:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(img), label))
            engine.step()
        save_checkpoint(file, epoch, model)
    DistCoordinator().block_all()
    assert_loads(file)
    DistCoordinator().block_all()

    # with the trainer
    trainer = Trainer(engine)
    trainer.fit(train_dataloader, epochs=1, hooks=[hooks.SaveCheckpointHook(1, file, model)])
    DistCoordinator().block_all()
    assert_loads(file)
    DistCoordinator().block_all()
