# Example: EX9, Data parallelism with ViT
# Repair: NUM_CLASSES is in the configuration, MixupAccuracy is imported; the files of the hooks are
#   temporary; TensorboardHook is left out, which needs tensorboard; generated pictures, a small ViT,
#   smaller numbers
# Run: gemini run --nproc-per-node 2 examples/documents/vit_data_parallel.py
# Shows: Lamb with clipping, accumulation and AMP by configuration, and a trainer with hooks that save
#   checkpoints
import tempfile
from pathlib import Path

import torch
from stand_ins import pictures, vit_base_patch16_224

import gemini.compat as colossalai
from gemini.compat.amp import AMP_TYPE
from gemini.compat.cluster import DistCoordinator
from gemini.compat.core import global_context as gpc
from gemini.compat.logging import disable_existing_loggers, get_dist_logger
from gemini.compat.nn.lr_scheduler import LinearWarmupLR
from gemini.compat.nn.metric import MixupAccuracy
from gemini.compat.trainer import Trainer, hooks
from gemini.compat.utils import get_dataloader

CONFIG = dict(
    BATCH_SIZE=16,
    DROP_RATE=0.1,
    NUM_EPOCHS=2,
    NUM_CLASSES=10,
    # mix precision
    fp16=dict(mode=AMP_TYPE.TORCH),
    gradient_accumulation=2,
    clip_grad_norm=1.0,
    dali=dict(gpu_aug=True, mixup_alpha=0.2),
)

# initialize distributed setting
parser = colossalai.get_default_parser()
args = parser.parse_args()

colossalai.launch_from_torch(config=CONFIG)

disable_existing_loggers()
logger = get_dist_logger()

# access parameters
print(gpc.config.BATCH_SIZE)

# build model
model = vit_base_patch16_224(drop_rate=0.1, num_classes=gpc.config.NUM_CLASSES)


def build_cifar(batch_size):
    train_dataloader = get_dataloader(
        dataset=pictures(128), shuffle=True, batch_size=batch_size, pin_memory=True
    )
    test_dataloader = get_dataloader(dataset=pictures(32, seed=1), batch_size=batch_size, pin_memory=True)
    return train_dataloader, test_dataloader


# build dataloader
train_dataloader, test_dataloader = build_cifar(gpc.config.BATCH_SIZE)

# build optimizer
optimizer = colossalai.nn.Lamb(model.parameters(), lr=1.8e-2, weight_decay=0.1)

# build loss
criterion = torch.nn.CrossEntropyLoss()

# lr_scheduler
lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=50, total_steps=gpc.config.NUM_EPOCHS)

engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
    model, optimizer, criterion, train_dataloader, test_dataloader
)

# build trainer
trainer = Trainer(engine=engine, logger=logger)
before = [param.detach().clone() for param in model.parameters()]

with tempfile.TemporaryDirectory() as directory:
    shared = [directory]
    torch.distributed.broadcast_object_list(shared)
    checkpoints = Path(shared[0], "ckpt")

    # build hooks
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(accuracy_func=MixupAccuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
        # comment if you do not need to use the hooks below
        hooks.SaveCheckpointHook(interval=1, checkpoint_dir=str(checkpoints)),
    ]

    # start training
    trainer.fit(
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        hooks=hook_list,
        display_progress=True,
        test_interval=1,
    )
    DistCoordinator().block_all()
    assert list(checkpoints.iterdir()) != []
    DistCoordinator().block_all()
assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
