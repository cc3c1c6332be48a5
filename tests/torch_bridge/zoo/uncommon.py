"""What is met now and then in networks that people bring, and that a pure function of fixed shapes lacks.

Parameters that forward writes, sizes that are values, masks of plain attributes, vmap in chunks.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.torch_bridge.zoo.specimen import integers, network, normal


def sequence(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 6, 8),)


@network(sequence, name="experts cut by counts")
class ExpertsByCounts(nn.Module):
    """Tokens sorted by expert and cut at Python integers; a balancing loss counts them by bincount."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x: Any) -> Any:
        flat = x.flatten(0, 1)
        shares = self.gate(flat).softmax(-1)
        weight, expert = shares.topk(2, -1)
        order, slots = expert.flatten().argsort(stable=True), torch.arange(flat.shape[0]).repeat_interleave(2)
        parts = flat[slots[order]].split(torch.bincount(expert.flatten(), minlength=3).tolist())
        mixed = torch.cat([mlp(part) for mlp, part in zip(self.experts, parts, strict=True)])
        out = torch.zeros_like(flat).index_add(0, slots[order], mixed * weight.flatten()[order, None])
        used = torch.bincount(expert[:, 0]).float() / flat.shape[0]
        return out.view_as(x), 3 * used.square().sum() * shares.mean(0).square().sum()


@network(lambda rows: (integers(20, rows, 6),), name="written parameters")
class WrittenParameters(nn.Module):
    """Rows of a table kept short, weights clamped and normalised, before each use; a teacher that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, max_norm=1.0, padding_idx=3)
        self.student = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.scales = nn.Parameter(torch.randn(4))

    def forward(self, ids: Any) -> Any:
        with torch.no_grad():
            self.student[0].weight.div_(self.student[0].weight.norm(dim=1, keepdim=True))
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
            for old, new in zip(self.teacher.buffers(), self.student.buffers(), strict=True):
                old.copy_(new)
        self.scales.data.clamp_(min=0.1)
        x = self.table(ids).mean(1)
        with torch.no_grad():
            told = self.teacher(x).softmax(-1)
        return F.cross_entropy(self.student(x) * self.scales, told)


@network(sequence, name="masks of attributes")
class MasksOfAttributes(nn.Module):
    """Columns and pairs chosen by masks that are no buffers, made in forward or before."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv = nn.Linear(8, 8), nn.Conv1d(4, 4, 2)
        self.columns = torch.tensor([True, False] * 4)

    def forward(self, x: Any) -> Any:
        x = self.body(x)
        even = torch.zeros(6, dtype=torch.bool)
        even[::2] = True
        pairs = (x @ x.mT)[:, torch.ones(6, 6).triu(1).bool()]
        chosen = self.conv(x[..., self.columns][:, even].mT)
        repeated = x.repeat_interleave(torch.tensor([1, 2, 0, 1, 1, 2]), 1)
        return pairs, chosen, repeated, x.repeat_interleave(even + 1, 1, output_size=9)


@network(sequence, name="vmap in chunks")
class VmapInChunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        slopes = torch.func.jacrev(lambda row: torch.tanh(self.body(row)), chunk_size=3)
        return torch.vmap(self.body, chunk_size=2)(x), torch.vmap(slopes)(x[:, 0])
