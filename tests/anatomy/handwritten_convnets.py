"""Convolutional networks as users write them: images of 3 x 32 x 32, ten classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 10


def plain_cnn():
    """Convolution, norm, ReLU, pooling, all in one Sequential; no residuals."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 48, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, CLASSES),
    )


class TutorialCNN(nn.Module):
    """The network of every first tutorial: functional ReLU and pooling, three fully connected layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 60)
        self.fc2 = nn.Linear(60, 42)
        self.fc3 = nn.Linear(42, CLASSES)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc3(F.relu(self.fc2(x)))


class InlineBlock(nn.Module):
    """A residual block with `out += identity` and ReLU inline, a projection where the shape changes."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class InlineResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(InlineBlock(16, 16), InlineBlock(16, 16))
        self.layer2 = nn.Sequential(InlineBlock(16, 32, 2), InlineBlock(32, 32))
        self.layer3 = nn.Sequential(InlineBlock(32, 64, 2), InlineBlock(64, 64))
        self.linear = nn.Linear(64, CLASSES)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.shape[-1])
        return self.linear(out.view(out.size(0), -1))


def double_conv(inputs, outputs):
    """Two 3 x 3 convolutions, each with norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNetClassifier(nn.Module):
    """Down, up again with the finer grid concatenated, then the mean over the image."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = double_conv(3, 16), double_conv(16, 32), double_conv(32, 48)
        self.up2, self.conv2 = nn.ConvTranspose2d(48, 32, 2, 2), double_conv(64, 32)
        self.up1, self.conv1 = nn.ConvTranspose2d(32, 16, 2, 2), double_conv(32, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        x = self.middle(F.max_pool2d(coarse, 2))
        x = self.conv2(torch.cat([coarse, self.up2(x)], dim=1))
        x = self.conv1(torch.cat([fine, self.up1(x)], dim=1))
        return self.head(x.mean((2, 3)))


class DenseCNN(nn.Module):
    """Every layer sees the outputs of all before it."""

    def __init__(self, growth=8, layers=4):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(16 + i * growth), nn.ReLU(), nn.Conv2d(16 + i * growth, growth, 3, 1, 1))
            for i in range(layers)
        )
        self.head = nn.Linear(16 + layers * growth, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
