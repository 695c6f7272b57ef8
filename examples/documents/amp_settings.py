# Example: EX21, settings of automatic mixed precision
# Repair: the fragments are put together, with a model; apex is refused except where torch does the same
# Run: gemini run examples/documents/amp_settings.py
# Shows: the printed defaults are ours, and convert_to_amp works without initialize
import inspect

import torch
from stand_ins import resnet18

import gemini.compat as colossalai
from gemini.compat.amp import AMP_TYPE
from gemini.compat.booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision

TORCH = dict(init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
NAIVE = dict(
    initial_scale=2**32,
    min_scale=1,
    growth_factor=2,
    backoff_factor=0.5,
    growth_interval=1000,
    hysteresis=2,
)
APEX = dict(
    enabled=True,
    opt_level="O1",
    cast_model_type=None,
    patch_torch_functions=None,
    keep_batchnorm_fp32=None,
    master_weights=None,
    loss_scale=None,
    cast_model_outputs=None,
    num_losses=1,
    verbosity=1,
    min_loss_scale=None,
)

for precision, printed_defaults in ((FP16TorchMixedPrecision, TORCH), (FP16NaiveMixedPrecision, NAIVE)):
    parameters = inspect.signature(precision).parameters
    assert {name: parameters[name].default for name in printed_defaults} == printed_defaults

colossalai.launch_from_torch(config={})
for mode, config in (
    (AMP_TYPE.TORCH, {**TORCH, "enabled": True}),
    (AMP_TYPE.NAIVE, {**NAIVE, "log_num_zeros_in_grad": False}),
    (AMP_TYPE.APEX, APEX),
):
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = torch.nn.CrossEntropyLoss()
    model, optimizer, criterion = colossalai.amp.convert_to_amp(model, optimizer, criterion, mode, config)
    loss = criterion(model(torch.randn(4, 3, 32, 32)).float(), torch.arange(4))
    optimizer.backward(loss)
    optimizer.step()
    assert torch.isfinite(loss)
