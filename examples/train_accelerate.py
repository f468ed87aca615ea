"""accelerate, with compressed gradients: two lines more than without.

torchrun --standalone --nproc-per-node 2 examples/train_accelerate.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cgx.adapters.accelerate import CgxKwargs  # the first line

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
cgx = CgxKwargs("uniform:4").attach(accelerator)  # the second, before prepare

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
loader = DataLoader(data, batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, {cgx.scalars()['cgx/ratio']:.1f}x fewer bytes")
accelerator.end_training()
