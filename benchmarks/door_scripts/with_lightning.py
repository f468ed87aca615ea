import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from task import BATCH, LEARNING_RATE, STEPS, evaluate, make_data, make_model, mark
from torch.utils.data import DataLoader


class Net(LightningModule):
    def __init__(self, seed):
        super().__init__()
        self.net = make_model(seed)

    def training_step(self, x, index):
        if index == 1:
            mark("begin")
        return self.net(input_ids=x, labels=x).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)


seed = int(sys.argv[1])
blocks, held_out = make_data(seed)
net = Net(seed)
trainer = Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=2,
    strategy="ddp",
    max_steps=STEPS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(net, DataLoader(blocks, batch_size=BATCH))
mark("end")
mark("loss", evaluate(net.net, held_out))
