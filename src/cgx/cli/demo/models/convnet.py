"""A small convolutional net for the 8 x 8 digits: three convolutions and two dense layers."""

from __future__ import annotations

from torch import Tensor, nn

CLASSES = 10


class DigitsConvNet(nn.Module):
    """Classifies grey images of 8 x 8 pixels, with 0.36 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(128 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Maps fp32 images of shape (batch, 1, 8, 8) to fp32 logits of shape (batch, 10)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits
