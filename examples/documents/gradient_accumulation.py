# Example: EX17, Gradient accumulation with booster
# Repair: param_by_iter is made; the update is after the fourth micro-batch, the document's condition has
#   one after the first as well; generated pictures
# Run: gemini run --nproc-per-node 2 examples/documents/gradient_accumulation.py
# Shows: within no_sync() the parameters stay; they change in the fourth iteration alone
import torch
from stand_ins import pictures, printed, resnet18

import gemini.compat as colossalai
from gemini.compat.booster import Booster
from gemini.compat.booster.plugin import TorchDDPPlugin
from gemini.compat.cluster.dist_coordinator import priority_execution
from gemini.compat.utils import get_current_device

# initialize distributed setting
parser = colossalai.get_default_parser()
args = parser.parse_args()
# launch from torch
colossalai.launch_from_torch(config=dict())

# define the training hyperparameters
BATCH_SIZE = 16
GRADIENT_ACCUMULATION = 4

# build resnet
model = resnet18(num_classes=10)

# build dataloaders
with priority_execution():
    train_dataset = pictures()

# build criterion
criterion = torch.nn.CrossEntropyLoss()

# optimizer
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

plugin = TorchDDPPlugin()
booster = Booster(plugin=plugin)
train_dataloader = plugin.prepare_dataloader(
    train_dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True
)
model, optimizer, criterion, train_dataloader, _ = booster.boost(
    model=model, optimizer=optimizer, criterion=criterion, dataloader=train_dataloader
)

param_by_iter = []
optimizer.zero_grad()
for idx, (img, label) in enumerate(train_dataloader):
    sync_context = booster.no_sync(model)
    img = img.to(get_current_device())
    label = label.to(get_current_device())
    if idx % GRADIENT_ACCUMULATION != GRADIENT_ACCUMULATION - 1:
        with sync_context:
            output = model(img)
            train_loss = criterion(output, label)
            booster.backward(train_loss, optimizer)
    else:
        output = model(img)
        train_loss = criterion(output, label)
        booster.backward(train_loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    ele_1st = next(model.parameters()).flatten()[0]
    param_by_iter.append(str(ele_1st.item()))

    if idx == GRADIENT_ACCUMULATION - 1:
        break


def show():
    for iteration, val in enumerate(param_by_iter):
        print(f"iteration {iteration} - value: {val}")

    if param_by_iter[-1] != param_by_iter[0]:
        print("The parameter is only updated in the last iteration")


assert printed(show)[-1] == "The parameter is only updated in the last iteration"
assert param_by_iter[0] == param_by_iter[1] == param_by_iter[2] != param_by_iter[3]
