"""A GAN: its discriminator reads private samples, its generator only the discriminator."""

import copy

import pytest
import torch
from documents import PRIVATE_TRAINING, find_code
from one_call import seeded
from small_models import one_by_one, take_step
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import make_private

SAMPLES, BATCH, D, NOISE, BOUND = 64, 16, 2, 3, 0.5


class Gan:
    """Both models; the discriminator is private."""

    def __init__(self, data: Tensor, **options) -> None:
        torch.manual_seed(0)
        self.generator = nn.Linear(NOISE, D)
        self.discriminator = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 1))
        self.noise = seeded(5)
        given = {"max_grad_norm": BOUND, "noise_multiplier": 1.0, "delta": 1e-3}
        given |= {"sampling_generator": seeded(2), "noise_generator": seeded(3)} | options
        self.private = make_private(
            self.discriminator,
            torch.optim.Adam(self.discriminator.parameters(), lr=0.02),
            DataLoader(TensorDataset(data), batch_size=BATCH, shuffle=True),
            self.losses_of,
            **given,
        )
        self.optimizer = torch.optim.Adam(self.generator.parameters(), lr=0.02)

    def losses_of(self, x_BD: Tensor) -> Tensor:
        """Each real sample has a fake one beside it, which follows from noise; (B,)."""
        with torch.no_grad():
            fake_BD = self.generator(torch.randn(len(x_BD), NOISE, generator=self.noise))
        return (softplus(-self.discriminator(x_BD)) + softplus(self.discriminator(fake_BD)))[:, 0]

    def train_generator(self) -> Tensor:
        """Step on fakes alone; return the gradient."""
        fake_BD = self.generator(torch.randn(BATCH, NOISE, generator=self.noise))
        loss = softplus(-self.discriminator(fake_BD)).mean()
        self.optimizer.zero_grad()
        loss.backward(inputs=list(self.generator.parameters()))
        self.optimizer.step()
        return torch.cat([p.grad.flatten() for p in self.generator.parameters()])

    def train(self, epochs: int, steps_of_generator: int = 1) -> None:
        for _ in range(epochs):
            for batch in self.private.data_loader:
                take_step(self.private.optimizer, self.losses_of, *batch)
                for _ in range(steps_of_generator):
                    self.train_generator()


def draw(mean: float) -> Tensor:
    return mean + 0.3 * torch.randn(SAMPLES, D, generator=seeded(1))


def test_the_discriminators_step_is_exact_and_the_generators_is_not_counted() -> None:
    """Against gradients of one sample, with its fake, at a time; without noise."""
    gan = Gan(draw(1.0), noise_multiplier=0.0, check=False)
    twin = copy.deepcopy(gan.generator)
    for batch in gan.private.data_loader:
        z = torch.randn(len(batch[0]), NOISE, generator=copy.deepcopy(gan.noise))
        fakes = twin(z).detach()
        model = copy.deepcopy(gan.discriminator)
        compute = lambda x, fake, net=model: (softplus(-net(x)) + softplus(net(fake))).sum()  # noqa: E731
        _, total, _ = one_by_one(compute, model, (batch[0], fakes), bound=BOUND)
        gan.private.optimizer.backward(gan.losses_of, *batch)
        gradients = []
        gan.private.optimizer.original_optimizer.register_step_pre_hook(
            lambda *_, into=gradients: into.append(
                torch.cat([p.grad.flatten() for p in gan.discriminator.parameters()])
            )
        )
        gan.private.optimizer.step()
        break
    assert len(batch[0]) > 5
    torch.testing.assert_close(gradients[0].double() * BATCH, total, rtol=1e-5, atol=1e-6)

    gan.private.optimizer.zero_grad()
    for _ in range(5):
        gan.train_generator()
    assert gan.private.spent.history == [(0.0, BATCH / SAMPLES, 1)]


def test_a_backward_that_would_leave_gradients_in_the_discriminator_is_refused() -> None:
    gan = Gan(draw(1.0), check=False)
    loss = softplus(-gan.discriminator(gan.generator(torch.zeros(4, NOISE)))).mean()
    with pytest.raises(RuntimeError, match="this model's gradients are clipped"):
        loss.backward()


def test_the_gan_of_the_page_trains_as_it_stands() -> None:
    names = {
        "generator": nn.Linear(NOISE, D),
        "discriminator": nn.Linear(D, 1),
        "noise_size": NOISE,
    }
    names["data_loader"] = DataLoader(TensorDataset(draw(1.0)), batch_size=BATCH, shuffle=True)
    names["budget"] = {"max_grad_norm": BOUND, "noise_multiplier": 1.0}
    before = [p.detach().clone() for p in names["generator"].parameters()]
    exec(find_code(PRIVATE_TRAINING, "of_generator"), names)  # noqa: S102
    assert names["optimizer"].steps == SAMPLES // BATCH
    assert not any(map(torch.equal, names["generator"].parameters(), before))
