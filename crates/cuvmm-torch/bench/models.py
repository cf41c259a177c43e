"""Small models for training runs, written with torch.nn alone.

The lengths and sizes of batches vary from step to step, as they do in training on real data: that is
what divides an allocator's memory.
"""

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 32000


class Encoder(nn.Module):
    """A bidirectional encoder that predicts tokens."""

    def __init__(self, width=1024, layers=8):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).type_as(x) * self.weight


def rotated(x, angles):
    """Rotary positions: x is (batch, heads, length, head), angles is (length, head / 2)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().type_as(x), angles.sin().type_as(x)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class DecoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        inner = width * 8 // 3 // 64 * 64
        self.before, self.after = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, angles):
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            rotated(query, angles), rotated(key, angles), value, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.after(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A causal decoder in the manner of Llama."""

    def __init__(self, checkpoints, width=1536, layers=12, heads=12):
        super().__init__()
        self.checkpoints = checkpoints
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        half = width // heads // 2
        self.register_buffer("rates", 10000.0 ** (-torch.arange(half) / half))

    def forward(self, tokens):
        x = self.embedding(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.outer(places.float(), self.rates)
        for layer in self.layers:
            if self.checkpoints:
                x = checkpoint(layer, x, angles, use_reentrant=False)
            else:
                x = layer(x, angles)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    def __init__(self, channels, inner, stride):
        super().__init__()
        out = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.side = nn.Identity()
        if stride != 1 or channels != out:
            self.side = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x):
        return functional.relu(self.body(x) + self.side(x))


class ResNet(nn.Module):
    """A residual network of 50 layers."""

    def __init__(self, depths=(3, 4, 6, 3)):
        super().__init__()
        layers = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = 64
        for stage, depth in enumerate(depths):
            inner = 64 << stage
            for block in range(depth):
                stride = 2 if block == 0 and stage > 0 else 1
                layers.append(Bottleneck(channels, inner, stride))
                channels = 4 * inner
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def tokens_of(random, budget, shortest, longest):
    """A batch of token ids with a length of its own, and about `budget` tokens in all."""
    length = shortest + random.below((longest - shortest) // 8 + 1) * 8
    return torch.randint(VOCABULARY, (max(1, budget // length), length), device="cuda")


def encoder(random, scale=1):
    model = Encoder().cuda()

    def loss():
        tokens = tokens_of(random, 8192 * scale, 64, 512)
        logits = model(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return model, loss


def decoder(random, checkpoints, scale=1):
    model = Decoder(checkpoints).cuda()

    def loss():
        tokens = tokens_of(random, 8192 * scale, 256, 1024)
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss


def resnet(random, scale=1):
    model = ResNet().cuda()

    def loss():
        side = 160 + 32 * random.below(3)
        batch = (48 + 16 * random.below(3)) * scale
        images = torch.randn(batch, 3, side, side, device="cuda")
        labels = torch.randint(1000, (batch,), device="cuda")
        return functional.cross_entropy(model(images), labels)

    return model, loss


RUNS = {
    "encoder": encoder,
    "llama": lambda random, scale=1: decoder(random, False, scale),
    "llama checkpointed": lambda random, scale=1: decoder(random, True, scale),
    "resnet": resnet,
}
