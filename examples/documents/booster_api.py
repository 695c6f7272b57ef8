# Example: EX2, Booster API
# Repair: train() is called; rank, world_size, port and use_safetensors, nowhere defined, come from the
#   launcher and are True; the directory is a temporary one
# Run: gemini run --nproc-per-node 2 examples/documents/booster_api.py
# Shows: launch, boost, backward, clip, save in shards, and load into a model that was not boosted
import tempfile
from pathlib import Path

import torch
from stand_ins import resnet18
from torch.optim import SGD

import gemini.compat as colossalai
from gemini.compat.booster import Booster
from gemini.compat.booster.plugin import TorchDDPPlugin
from gemini.compat.cluster import DistCoordinator
from gemini.compat.utils import get_current_device


def train(save_path, use_safetensors=True):
    plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)
    model = resnet18()
    criterion = lambda x: x.mean()
    optimizer = SGD((model.parameters()), lr=0.001)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    model, optimizer, criterion, _, scheduler = booster.boost(
        model, optimizer, criterion, lr_scheduler=scheduler
    )

    x = torch.randn(4, 3, 224, 224)
    x = x.to(get_current_device())
    output = model(x)
    loss = criterion(output)
    booster.backward(loss, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert torch.nn.utils.get_total_norm(grads) <= 1.0001
    optimizer.step()
    scheduler.step()
    assert abs(scheduler.get_last_lr()[0] - 1e-4) < 1e-12

    booster.save_model(model, save_path, True, True, "", 10, use_safetensors=use_safetensors)

    new_model = resnet18()
    booster.load_model(new_model, save_path)
    trained = model.module.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in new_model.state_dict().items())


colossalai.launch_from_torch(config={})
with tempfile.TemporaryDirectory() as directory:
    shared = [directory]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(shared)
    train(str(Path(shared[0], "model")))
    DistCoordinator().block_all()
