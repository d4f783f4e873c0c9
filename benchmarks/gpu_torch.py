"""The training steps of `gpu.py` in PyTorch: the models of `models.py`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Block(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm; all with biases, as Flax's are."""

    def __init__(self, width: int, heads: int, *, fused: bool):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x, mask):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        if self.fused:
            h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            h = scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1).to(v.dtype) @ v
        return self.out(h.transpose(1, 2).flatten(-2))

    def forward(self, x, mask):
        x = x + self.attention(self.norms[0](x), mask)
        h = functional.gelu(self.up(self.norms[1](x)), approximate="tanh")
        return x + self.down(h)


class TransformerLM(nn.Module):
    """int64[batch, seq] -> [batch, seq, vocab], tied embeddings."""

    def __init__(self, size: dict[str, int], *, fused: bool):
        super().__init__()
        width = size["width"]
        self.embed = nn.Embedding(size["vocab"], width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.positions = nn.Parameter(0.02 * torch.randn(size["seq"], width))
        self.blocks = nn.ModuleList(
            Block(width, size["heads"], fused=fused) for _ in range(size["layers"])
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        mask = torch.ones(size["seq"], size["seq"], dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x, self.mask)
        return functional.linear(self.norm(x), self.embed.weight)


class Bottleneck(nn.Module):
    """1x1, 3x3 (the strided one) and 1x1 convolutions, each with BatchNorm."""

    def __init__(self, before: int, channels: int, stride: int):
        super().__init__()
        after = 4 * channels
        self.convs = nn.Sequential(
            *_conv(before, channels, 1, 1),
            nn.ReLU(),
            *_conv(channels, channels, 3, stride),
            nn.ReLU(),
            *_conv(channels, after, 1, 1),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(before, after, 1, stride))

    def forward(self, x):
        return functional.relu(self.shortcut(x) + self.convs(x))


def _conv(before: int, after: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return conv, nn.BatchNorm2d(after)


class ResNet(nn.Module):
    """float32[batch, 3, size, size] -> [batch, classes]."""

    def __init__(self, size: dict[str, Any]):
        super().__init__()
        channels = before = size["channels"]
        layers = [*_conv(3, channels, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        for stage, blocks in enumerate(size["stages"]):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(before, channels * 2**stage, stride))
                before = 4 * channels * 2**stage
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, size["classes"])

    def forward(self, images):
        return self.classifier(self.layers(images).mean((2, 3)))


class Multiplied(TorchDispatchMode):
    """The audit: FLOPs of what runs under it, by the dtypes of the operands multiplied."""

    def __init__(self):
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            dtypes = {str(x.dtype) for x in args if isinstance(x, torch.Tensor)}
            name = "*".join(sorted(dtype.removeprefix("torch.") for dtype in dtypes))
            self.flops[name] += count(*args, **(kwargs or {}), out_val=out)
        return out

    def shares(self) -> dict[str, float]:
        return {name: n / self.flops.total() for name, n in self.flops.most_common()}


def batch_and_model(size: dict[str, Any], *, fused: bool) -> tuple[nn.Module, Any, Any]:
    if "seq" in size:
        shape = 2, size["batch"], size["seq"]
        return TransformerLM(size, fused=fused), *torch.randint(size["vocab"], shape).unbind()
    images = torch.randn(size["batch"], 3, size["pixels"], size["pixels"])
    labels = torch.randint(size["classes"], (size["batch"],))
    layout = torch.channels_last  # as JAX's are, and as cuDNN's convolutions in 16 bits want them
    return ResNet(size).to(memory_format=layout), images.to(memory_format=layout), labels


def step(
    job: dict[str, Any],
    median_seconds: Callable[..., float],
    not_as_named: Callable[[str, dict[str, float]], str],
) -> dict[str, Any]:
    """The row of a variant: float32 (in TF32, as JAX multiplies by default) or AMP."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    variant = job["variant"]
    exact = "TF32 off" in variant
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact
    with device:
        model, inputs, labels = batch_and_model(job["size"], fused="fused" in variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4, fused=True)

    def eager_loss(inputs, labels):
        with torch.autocast(device.type, torch.bfloat16, enabled="AMP" in variant):
            logits = model(inputs)
        return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())

    with Multiplied() as audit:
        eager_loss(inputs, labels).backward()
    if wrong := not_as_named(variant, audit.shares()):
        return {"error": wrong, "multiplied": audit.shares()}
    loss_fn = torch.compile(eager_loss) if "compiled" in variant else eager_loss

    def call():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(inputs, labels)
        loss.backward()
        optimizer.step()
        return loss

    def wait(_: Any = None) -> None:
        if cuda:
            torch.cuda.synchronize()

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    first = float(call().detach())
    wait()
    compiled = time.perf_counter() - started
    seconds = median_seconds(call, wait, job["repeats"])
    return {
        "seconds": seconds,
        "compiled": compiled,
        "peak": torch.cuda.max_memory_allocated() if cuda else None,
        "loss": first,
        "multiplied": audit.shares(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": f"PyTorch {torch.__version__}",
    }
