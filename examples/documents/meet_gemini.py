# Example: EX1, Meet Gemini
# Repair: HybridAdam is imported; one bracket too many is gone; a launch, and a step that shows that it
#   trains
# Run: gemini run examples/documents/meet_gemini.py
# Shows: a model made in ColoInitContext trains under GeminiPlugin, its gradient clipped at norm 1.0
import torch
from stand_ins import resnet18

import gemini.compat as colossalai
from gemini.compat.booster import Booster
from gemini.compat.booster.plugin import GeminiPlugin
from gemini.compat.nn.optimizer import HybridAdam
from gemini.compat.utils import get_current_device
from gemini.compat.zero import ColoInitContext

colossalai.launch_from_torch(config={})
plugin = GeminiPlugin(placement_policy="cuda", strict_ddp_mode=True, max_norm=1.0, initial_scale=2**5)
booster = Booster(plugin=plugin)
ctx = ColoInitContext()
with ctx:
    model = resnet18()
optimizer = HybridAdam(model.parameters(), lr=1e-3)
criterion = lambda x: x.mean()
model, optimizer, criterion, _, _ = booster.boost(model, optimizer, criterion)

x = torch.randn(4, 3, 32, 32, device=get_current_device())
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = criterion(model(x))
    booster.backward(loss, optimizer)
    optimizer.step()
    losses.append(loss.item())
assert losses[0] > losses[1] > losses[2], losses
model.close()
