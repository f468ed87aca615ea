import sys

import torch
from lightning.fabric import Fabric
from task import BATCH, LEARNING_RATE, evaluate, make_data, make_model, mark
from torch.utils.data import DataLoader

seed = int(sys.argv[1])
fabric = Fabric(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp")
fabric.launch()
blocks, held_out = make_data(seed)
net = make_model(seed)
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE))
loader = fabric.setup_dataloaders(DataLoader(blocks, batch_size=BATCH))
for step, x in enumerate(loader):
    optimizer.zero_grad()
    fabric.backward(model(input_ids=x, labels=x).loss)
    optimizer.step()
    if step == 0:
        mark("begin")
mark("end")
mark("loss", evaluate(net, held_out))
fabric.barrier()
