# Example: EX25, Define your own hook
# Repair: an engine and a trainer around it
# Run: gemini run examples/documents/own_hook.py
# Shows: a hook without super().__init__() is called before and after training
import torch
from stand_ins import pictures, resnet18

import gemini.compat as colossalai
from gemini.compat.logging import get_dist_logger
from gemini.compat.trainer import Trainer, hooks
from gemini.compat.utils import get_dataloader

said = []


class LogMessageHook(hooks.BaseHook):
    def __init__(self, priority=10):
        self._logger = get_dist_logger()

    def before_train(self, trainer):
        self._logger.info("training starts")
        said.append("training starts")

    def after_train(self, trainer):
        self._logger.info("training finished")
        said.append("training finished")


colossalai.launch_from_torch(config={})
model = resnet18(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, train_dataloader, _, _ = colossalai.initialize(
    model, optimizer, torch.nn.CrossEntropyLoss(), get_dataloader(pictures(32), batch_size=16)
)
trainer = Trainer(engine=engine, logger=get_dist_logger())

# then in your training script
hook_list = [hooks.LossHook()]
hook_list.append(LogMessageHook())
trainer.fit(train_dataloader=train_dataloader, epochs=1, hooks=hook_list)
assert said == ["training starts", "training finished"]
