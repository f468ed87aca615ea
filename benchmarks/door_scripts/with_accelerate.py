import sys

import torch
from accelerate import Accelerator
from task import BATCH, LEARNING_RATE, STEPS, evaluate, make_data, make_model, mark
from torch.utils.data import DataLoader

seed = int(sys.argv[1])
accelerator = Accelerator(cpu=True)
blocks, held_out = make_data(seed)
model = make_model(seed)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(blocks, batch_size=BATCH))
for step, x in enumerate(loader):
    optimizer.zero_grad()
    accelerator.backward(model(input_ids=x, labels=x).loss)
    optimizer.step()
    if step == 0:
        mark("begin")
assert step == STEPS - 1
mark("end")
mark("loss", evaluate(accelerator.unwrap_model(model), held_out))
accelerator.wait_for_everyone()
accelerator.end_training()
