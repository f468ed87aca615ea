import sys

import torch
import torch.distributed as dist
from task import BATCH, LEARNING_RATE, STEPS, evaluate, make_data, make_model, mark
from torch.nn.parallel import DistributedDataParallel

seed = int(sys.argv[1])
dist.init_process_group("gloo")
blocks, held_out = make_data(seed)
mine = blocks[dist.get_rank() :: 2]
model = DistributedDataParallel(make_model(seed))
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
for step in range(STEPS):
    x = mine[step * BATCH : (step + 1) * BATCH]
    optimizer.zero_grad()
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    if step == 0:
        mark("begin")
mark("end")
mark("loss", evaluate(model.module, held_out))
dist.barrier()
dist.destroy_process_group()
