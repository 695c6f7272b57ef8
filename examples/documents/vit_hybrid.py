# Example: EX10 and EX11, Hybrid parallelism with ViT
# Repair: sizes are set before they are used, and smaller; build_cifar() is given its batch size; the
#   loader is iterated again in each epoch; the loss scale begins at 2**10, from 2**32 so few steps do
#   not come down; the two configurations are temporary files; model_zoo, CIFAR10 and
#   device of the stand-ins
# Run: gemini run --nproc-per-node 4 examples/documents/vit_hybrid.py
# Shows: stages built by hand train in fp16 with clipping, first in two stages over two ranks of data
#   each, then with layers cut over two ranks (1d), from another configuration file alone; the loss falls
import inspect
import os
import tempfile
from pathlib import Path
from typing import Callable

import torch
from stand_ins import pictures
from torch import dtype, nn
from tqdm import tqdm
from zoo_stand_ins import ViTBlock, ViTEmbedding, ViTHead, _create_vit_model

import gemini.compat as colossalai
from gemini.compat import nn as col_nn
from gemini.compat.builder.pipeline import partition_uniform
from gemini.compat.context import ParallelMode
from gemini.compat.core import global_context as gpc
from gemini.compat.logging import get_dist_logger
from gemini.compat.nn import CrossEntropyLoss
from gemini.compat.nn.lr_scheduler import CosineAnnealingWarmupLR
from gemini.compat.registry import MODELS
from gemini.compat.utils import get_current_device, get_dataloader, is_using_pp

SIZES = """
from gemini.compat.amp import AMP_TYPE

# hyper parameters
# BATCH_SIZE is as per GPU
# global batch size = BATCH_SIZE x data parallel size
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.3
NUM_EPOCHS = 4
WARMUP_EPOCHS = 1

# model config
IMG_SIZE = 32
PATCH_SIZE = 8
HIDDEN_SIZE = 32
DEPTH = 4
NUM_HEADS = 4
MLP_RATIO = 4
NUM_CLASSES = 10
CHECKPOINT = True
SEQ_LENGTH = (IMG_SIZE // PATCH_SIZE) ** 2 + 1  # add 1 for cls token
"""
VIT_PIPELINE = """
parallel = dict(
    pipeline=2
)

# pipeline config
NUM_MICRO_BATCHES = parallel['pipeline']
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)

fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2**10)
clip_grad_norm = 1.0
"""
VIT_1D_TP2_PP2 = """
# parallel setting
TENSOR_PARALLEL_SIZE = 2
TENSOR_PARALLEL_MODE = '1d'

parallel = dict(
    pipeline=2,
    tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE)
)

fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2**10)
clip_grad_norm = 1.0

# pipeline config
NUM_MICRO_BATCHES = parallel['pipeline']
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)
"""


@MODELS.register_module
class PipelineVisionTransformer(nn.Module):
    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        depth: int = 12,
        num_heads: int = 12,
        dim: int = 768,
        mlp_ratio: int = 4,
        attention_dropout: float = 0.0,
        dropout: float = 0.1,
        drop_path: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        activation: Callable = nn.functional.gelu,
        representation_size: int = None,
        dtype: dtype = None,
        bias: bool = True,
        checkpoint: bool = False,
        init_method: str = "torch",
        first_stage=True,
        last_stage=True,
        start_idx=None,
        end_idx=None,
    ):
        super().__init__()
        layers = []
        if first_stage:
            embed = ViTEmbedding(
                img_size=img_size,
                patch_size=patch_size,
                in_chans=in_chans,
                embedding_dim=dim,
                dropout=dropout,
                dtype=dtype,
                init_method=init_method,
            )
            layers.append(embed)
        # stochastic depth decay rule
        dpr = [x.item() for x in torch.linspace(0, drop_path, depth)]
        if start_idx is None and end_idx is None:
            start_idx = 0
            end_idx = depth
        blocks = [
            ViTBlock(
                dim=dim,
                num_heads=num_heads,
                mlp_ratio=mlp_ratio,
                attention_dropout=attention_dropout,
                dropout=dropout,
                drop_path=dpr[i],
                activation=activation,
                dtype=dtype,
                bias=bias,
                checkpoint=checkpoint,
                init_method=init_method,
            )
            for i in range(start_idx, end_idx)
        ]
        layers.extend(blocks)
        if last_stage:
            norm = col_nn.LayerNorm(normalized_shape=dim, eps=layernorm_epsilon, dtype=dtype)
            head = ViTHead(
                dim=dim,
                num_classes=num_classes,
                representation_size=representation_size,
                dtype=dtype,
                bias=bias,
                init_method=init_method,
            )
            layers.extend([norm, head])
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        x = self.layers(x)
        return x


def _filter_kwargs(func, kwargs):
    sig = inspect.signature(func)
    return {k: v for k, v in kwargs.items() if k in sig.parameters}


def _build_pipeline_vit(module_cls, num_layers, num_chunks, device=None, **kwargs):
    device = device or get_current_device()
    logger = get_dist_logger()
    if gpc.is_initialized(ParallelMode.PIPELINE):
        pipeline_size = gpc.get_world_size(ParallelMode.PIPELINE)
        pipeline_rank = gpc.get_local_rank(ParallelMode.PIPELINE)
    else:
        pipeline_size = 1
        pipeline_rank = 0
    rank = gpc.get_global_rank()
    parts = partition_uniform(num_layers, pipeline_size, num_chunks)[pipeline_rank]
    models = []
    for start, end in parts:
        kwargs["first_stage"] = start == 0
        kwargs["last_stage"] = end == num_layers
        kwargs["start_idx"] = start
        kwargs["end_idx"] = end
        logger.info(f"Rank{rank} build layer {start}-{end}, {end - start}/{num_layers} layers")
        chunk = module_cls(**_filter_kwargs(module_cls.__init__, kwargs)).to(device)
        models.append(chunk)
    if len(models) == 1:
        model = models[0]
    else:
        model = nn.ModuleList(models)
    return model


def build_pipeline_vit(num_layers, num_chunks, device=None, **kwargs):
    return _build_pipeline_vit(PipelineVisionTransformer, num_layers, num_chunks, device, **kwargs)


def build_cifar(batch_size):
    train_dataset = pictures(128)
    test_dataset = pictures(32, seed=1)
    train_dataloader = get_dataloader(
        dataset=train_dataset, shuffle=True, batch_size=batch_size, pin_memory=True
    )
    test_dataloader = get_dataloader(dataset=test_dataset, batch_size=batch_size, pin_memory=True)
    return train_dataloader, test_dataloader


def train(config):
    # launch from torch
    colossalai.launch_from_torch(config=config)

    # get logger
    logger = get_dist_logger()
    logger.info("initialized distributed environment", ranks=[0])
    if hasattr(gpc.config, "LOG_PATH"):
        if gpc.get_global_rank() == 0:
            log_path = gpc.config.LOG_PATH
            if not os.path.exists(log_path):
                os.mkdir(log_path)
            logger.log_to_file(log_path)
    use_pipeline = is_using_pp()

    # create model
    model_kwargs = dict(
        img_size=gpc.config.IMG_SIZE,
        patch_size=gpc.config.PATCH_SIZE,
        dim=gpc.config.HIDDEN_SIZE,
        depth=gpc.config.DEPTH,
        num_heads=gpc.config.NUM_HEADS,
        mlp_ratio=gpc.config.MLP_RATIO,
        num_classes=gpc.config.NUM_CLASSES,
        init_method="jax",
        checkpoint=gpc.config.CHECKPOINT,
    )
    if use_pipeline:
        model = build_pipeline_vit(num_layers=model_kwargs["depth"], num_chunks=1, **model_kwargs)
    else:
        model = _create_vit_model(**model_kwargs)

    # count number of parameters
    total_numel = 0
    for p in model.parameters():
        total_numel += p.numel()
    if not gpc.is_initialized(ParallelMode.PIPELINE):
        pipeline_stage = 0
    else:
        pipeline_stage = gpc.get_local_rank(ParallelMode.PIPELINE)
    logger.info(f"number of parameters: {total_numel} on pipeline stage {pipeline_stage}")

    # create dataloaders
    train_dataloader, test_dataloader = build_cifar(gpc.config.BATCH_SIZE)
    # create loss function
    criterion = CrossEntropyLoss(label_smoothing=0.1)
    # create optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=gpc.config.LEARNING_RATE, weight_decay=gpc.config.WEIGHT_DECAY
    )
    # create lr scheduler
    lr_scheduler = CosineAnnealingWarmupLR(
        optimizer=optimizer, total_steps=gpc.config.NUM_EPOCHS, warmup_steps=gpc.config.WARMUP_EPOCHS
    )

    # initialize
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model=model,
        optimizer=optimizer,
        criterion=criterion,
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
    )
    logger.info("Engine is built", ranks=[0])

    losses = []
    for epoch in range(gpc.config.NUM_EPOCHS):
        data_iter = iter(train_dataloader)
        # training
        engine.train()
        if gpc.get_global_rank() == 0:
            description = "Epoch {} / {}".format(epoch, gpc.config.NUM_EPOCHS)
            progress = tqdm(range(len(train_dataloader)), desc=description)
        else:
            progress = range(len(train_dataloader))
        for _ in progress:
            engine.zero_grad()
            _, _, loss = engine.execute_schedule(data_iter, return_output_label=False)
            engine.step()
            lr_scheduler.step()
            losses.append(loss.item())
    assert {p.dtype for p in model.parameters()} == {torch.half}
    assert losses[-1] < losses[0] - 0.2, losses
    return total_numel


with tempfile.TemporaryDirectory() as directory:
    numels = []
    for configuration in (VIT_PIPELINE, VIT_1D_TP2_PP2):
        config = Path(directory, "config.py")
        config.write_text(SIZES + configuration)
        numels.append(train(str(config)))
assert numels[1] < 0.7 * numels[0], "each rank has half of the layers of its stage"
