"""A regression trained on whole batches in one process; learners must reproduce it in shares."""

import torch

GLOBAL_BATCH, FEATURES, STEPS = 24, 5, 6
CLIP_NORM = 0.5


def network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)]
    return torch.nn.Sequential(*layers)


def optimizer_of(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.05)


def batches() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs, targets and which rows count: ever more towards the last row."""
    random = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(GLOBAL_BATCH, FEATURES, generator=random),
            torch.randn(GLOBAL_BATCH, 2, generator=random),
            torch.rand(GLOBAL_BATCH, generator=random) < torch.linspace(0.2, 1.0, GLOBAL_BATCH),
        )
        for _ in range(STEPS)
    ]


def loss_sum(net: torch.nn.Module, inputs, targets, counted) -> torch.Tensor:
    """Sum over the rows that count of the squared error."""
    return (((net(inputs) - targets) ** 2).sum(-1) * counted).sum()


def big_batch_parameters(seed: int) -> torch.Tensor:
    """Parameters after all steps on the mean loss of each whole batch, clipped by norm."""
    net = network(seed)
    optimizer = optimizer_of(net)
    for inputs, targets, counted in batches():
        optimizer.zero_grad()
        (loss_sum(net, inputs, targets, counted) / counted.sum()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()
