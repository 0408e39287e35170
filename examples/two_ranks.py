"""Train privately on several ranks, each with samples of its own.

torchrun --nproc-per-node 2 examples/two_ranks.py
"""

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import make_private

SAMPLES, WIDTH, EPOCHS = 512, 16, 3


def main() -> None:
    """Train, and say what was spent."""
    cuda = torch.cuda.is_available()
    distributed.init_process_group("nccl" if cuda else "gloo")
    rank = distributed.get_rank()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)  # every rank has all data, and draws its own
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    y = x @ torch.randn(WIDTH, generator=generator)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = nn.parallel.DistributedDataParallel(body)

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return (model(x.to(device))[:, 0] - y.to(device)).square()

    private = make_private(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True),
        losses_of,
        max_grad_norm=1.0,
        epsilon=8.0,
        delta=1e-4,
        epochs=EPOCHS,
        max_batch_size=16,
        check=False,  # it takes one process: check the model before it is wrapped
    )
    model, optimizer, data_loader = private
    for epoch in range(EPOCHS):
        for batch in data_loader:
            optimizer.backward(losses_of, *batch)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = losses_of(x, y).mean()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.2f}")
    if rank == 0:
        print(f"epsilon {private.epsilon_spent():.2f} at delta {private.delta}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
