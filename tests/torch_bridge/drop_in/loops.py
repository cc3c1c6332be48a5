"""Training loops as PyTorch users write them; one line is in question: `model = wrap(model, optimizer)`.

A loop takes `wrap` (the identity, or `RaNNCModule` with settings) and returns the losses it saw and the
module's state_dict at its end. Nothing else in it knows what runs the model.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Wrap = Callable[[nn.Module, torch.optim.Optimizer | None], nn.Module]
Seen = tuple[list[float], dict[str, torch.Tensor]]
STEPS = 20


def _tokens(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (rows, length))


def _plain(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def bert_masked_lm(wrap: Wrap) -> Seen:
    """AdamW, linear warm-up, clipping, padded batches with masks."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 5, STEPS)
    model = wrap(model, optimizer)
    losses = []
    for _ in range(STEPS):
        ids = _tokens(8, 12, 60)
        mask = (torch.arange(12) < torch.randint(6, 13, (8, 1))).long()
        labels = torch.where((torch.rand(8, 12) < 0.3) & (mask == 1), ids, -100)
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    return losses, _plain(model)


def gpt2_accumulating(wrap: Wrap) -> Seen:
    """Gradients of two batches, each with half the loss."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=60,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = wrap(model, optimizer)
    losses = []
    for step in range(STEPS):
        ids = _tokens(8, 12, 60)
        loss = model(input_ids=ids, labels=ids).loss / 2
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, _plain(model)


def t5(wrap: Wrap) -> Seen:
    """Encoder and decoder, RAdam with decay."""
    import transformers

    config = transformers.T5Config(
        vocab_size=60,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
    model = wrap(model, optimizer)
    losses = []
    for _ in range(STEPS):
        out = model(input_ids=_tokens(8, 10, 60), labels=_tokens(8, 6, 60))
        optimizer.zero_grad()
        out["loss"].backward()
        optimizer.step()
        losses.append(out["loss"].detach().item())
    return losses, _plain(model)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        _Residual(8),
        nn.MaxPool2d(2),
        _Residual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def resnet(wrap: Wrap) -> Seen:
    """BatchNorm, SGD with momentum, StepLR, evaluation every five steps, the criterion outside."""
    model = _resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)
    model = wrap(model, optimizer)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for step in range(STEPS):
        x, y = torch.randn(8, 3, 8, 8), torch.randint(5, (8,))
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                losses.append(criterion(model(x), y).item())
            model.train()
    return losses, _plain(model)


def llama_bf16(wrap: Wrap) -> Seen:
    """Tied embedding, bfloat16 parameters."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=32,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = wrap(model, optimizer)
    losses = []
    for _ in range(STEPS):
        ids = _tokens(8, 12, 60)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses, _plain(model)


class _LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 40)

    def forward(self, ids: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        out, state = self.lstm(self.embedding(ids), state)
        return self.head(out), state


def lstm_truncated(wrap: Wrap) -> Seen:
    """Truncated backpropagation: the state goes from call to call, detached."""
    model: nn.Module = _LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model = wrap(model, optimizer)
    state = tuple(torch.zeros(2, 8, 16) for _ in range(2))
    losses = []
    for _ in range(STEPS):
        ids = _tokens(8, 7, 40)
        state = tuple(s.detach() for s in state)
        logits, state = model(ids[:, :-1], state)
        loss = F.cross_entropy(logits.reshape(-1, 40), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        losses.append(loss.item())
    return losses, _plain(model)


def gan(wrap: Wrap) -> Seen:
    """Two models, two optimizers; the generator's gradient comes through the discriminator's input."""
    generator: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    discriminator: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    generator, discriminator = wrap(generator, g_optimizer), wrap(discriminator, d_optimizer)
    losses = []
    for _ in range(STEPS):
        real, ones, zeros = torch.randn(8, 6) + 2, torch.ones(8, 1), torch.zeros(8, 1)
        fake = generator(torch.randn(8, 4))
        d_loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        losses += [d_loss.item(), g_loss.item()]
    return losses, {**_plain(generator), **{f"d.{k}": v for k, v in _plain(discriminator).items()}}


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def criterion_outside(wrap: Wrap) -> Seen:
    """The loss is computed from what the model returns, with a penalty on its parameters."""
    model: nn.Module = _Tower()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    losses = []
    for _ in range(STEPS):
        x, y = torch.randn(8, 8), torch.randint(3, (8,))
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1) + 1e-2 * logits.pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, _plain(model)


def frozen_backbone(wrap: Wrap) -> Seen:
    """Only the head trains, with an optimizer over the parameters that want gradients."""
    model: Any = _Tower()
    for parameter in model.backbone.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model = wrap(model, optimizer)
    return _simple(model, optimizer)


def learning_rates_by_group(wrap: Wrap) -> Seen:
    """Rates and decay by group, changed by hand in the middle."""
    model: Any = _Tower()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.backbone.parameters(), "lr": 1e-3},
            {"params": [model.head.weight], "weight_decay": 0.3},
            {"params": [model.head.bias], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    model = wrap(model, optimizer)

    def by_hand(step: int) -> None:
        if step == 10:
            optimizer.param_groups[0]["lr"] *= 3
            optimizer.param_groups[1]["weight_decay"] = 0.1

    return _simple(model, optimizer, by_hand)


class _SignDescent(torch.optim.Optimizer):
    """Steps by the sign of a running mean: somebody's own optimizer."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.8).add_(p.grad, alpha=0.2)
                    p.add_(mean.sign(), alpha=-group["lr"])


def custom_optimizer(wrap: Wrap) -> Seen:
    """An optimizer that no library knows."""
    model: nn.Module = _Tower()
    optimizer = _SignDescent(model.parameters(), 1e-3)
    return _simple(wrap(model, optimizer), optimizer)


def resumed(wrap: Wrap) -> Seen:
    """Saved with torch.save in the middle, loaded into fresh objects, and continued."""
    losses: list[float] = []
    file: io.BytesIO | None = None
    for _ in range(2):
        model: nn.Module = _Tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model = wrap(model, optimizer)
        if file is not None:
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
        for x, y in _batches(STEPS // 2):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        file = io.BytesIO()
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
    return losses, _plain(model)


def _batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(count):
        yield torch.randn(8, 8), torch.randint(3, (8,))


def _simple(model: nn.Module, optimizer: Any, between: Callable[[int], None] = lambda step: None) -> Seen:
    losses = []
    for step, (x, y) in enumerate(_batches(STEPS)):
        between(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, _plain(model)


def scaled(wrap: Wrap) -> Seen:
    """GradScaler and clipping, as in a loop with mixed precision."""
    model: nn.Module = _Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    losses = []
    for x, y in _batches(STEPS):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, _plain(model)


def short_last_batch(wrap: Wrap) -> Seen:
    """Two epochs over 103 rows with batches of 16."""
    model: nn.Module = _Tower()
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(103, 8), torch.randint(3, (103,)))
    losses = []
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, _plain(model)


def lengths(wrap: Wrap) -> Seen:
    """Sequences padded to the longest of each batch."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=60,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = wrap(model, optimizer)
    losses = []
    for step in range(9):
        length = (6, 9, 12)[step % 3]
        ids, mask = _tokens(4, length, 60), torch.ones(4, length, dtype=torch.long)
        mask[0, length // 2 :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, _plain(model)


QUICK = (criterion_outside, resumed)
SLOW = (
    *(bert_masked_lm, gpt2_accumulating, t5, resnet, llama_bf16, lstm_truncated, gan, frozen_backbone),
    *(learning_rates_by_group, custom_optimizer, scaled, short_last_batch, lengths),
)
