"""The training step of `gpu.py` in PyTorch: the model of `models.TransformerLM`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional


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


def step(job: dict[str, Any], median_seconds: Any) -> dict[str, Any]:
    """The row of a variant: float32 (in TF32, as JAX multiplies by default) or AMP."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    size, variant = job["size"], job["variant"]
    with device:
        model = TransformerLM(size, fused="fused" in variant)
        tokens, labels = torch.randint(size["vocab"], (2, size["batch"], size["seq"])).unbind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4, fused=True)

    def loss_fn(tokens, labels):
        with torch.autocast(device.type, torch.bfloat16, enabled="AMP" in variant):
            logits = model(tokens)
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    loss_fn = torch.compile(loss_fn) if "compiled" in variant else loss_fn

    def call():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(tokens, labels)
        loss.backward()
        optimizer.step()
        return loss

    def wait(_: Any = None) -> None:
        if cuda:
            torch.cuda.synchronize()

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
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": f"PyTorch {torch.__version__}",
    }
