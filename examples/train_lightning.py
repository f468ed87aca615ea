"""Lightning, with compressed gradients: `strategy="ddp"` becomes `strategy=CgxStrategy(...)`.

python examples/train_lightning.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cgx.adapters.lightning import CgxMonitor, CgxStrategy


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CgxStrategy("uniform:4"),
        max_epochs=3,
        logger=CSVLogger("logs"),
        callbacks=[CgxMonitor()],
        log_every_n_steps=5,
    )
    trainer.fit(Digits(), DataLoader(data, batch_size=64, shuffle=True))
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        print(f"loss {metrics['loss']:.3f}, {metrics['cgx/ratio']:.1f}x fewer bytes")
