"""Ray Train, with compressed gradients: the variable in the workers' environment, and nothing in the script.

python examples/train_ray.py
"""

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn


def train() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    rank, world_size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    x, y = x[rank::world_size], y[rank::world_size]
    model = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        from cgx.torch.ddp import handle_of  # only to show that it worked

        handle = handle_of(model)
        ratio = 1.0 if handle is None else handle.report().ratio
        print(f"loss {loss.item():.3f}, {ratio:.1f}x fewer bytes")


if __name__ == "__main__":
    ray.init(runtime_env={"env_vars": {"CGX": "uniform:4"}})
    scaling = ScalingConfig(num_workers=2)
    TorchTrainer(train, scaling_config=scaling, run_config=RunConfig(name="cgx-digits")).fit()
