import random

import pytest
import torch
from scipy import stats
from torch import Tensor

from dpprof.clipping.noise import NoiseOfStep
from dpprof.norms import normal_numbers
from dpprof.norms.normal_numbers import KEY_WORDS, PART, draw_normal_


def draw(which: int = 0, *, key: int = 1, count: int = 2 * PART + 5, threads: int = 2) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    numbers = torch.empty(count)
    draw_normal_(numbers, 2.0, torch.full((KEY_WORDS,), key), which)
    torch.set_num_threads(before)
    return numbers


def test_numbers_are_normal_and_no_part_repeats_another() -> None:
    numbers = draw() / 2

    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-3
    assert not (numbers[:PART] == numbers[PART : 2 * PART]).any()
    assert torch.corrcoef(numbers[: 2 * PART].view(2, PART))[0, 1].abs() < 5 / PART**0.5


def test_numbers_follow_from_key_and_number_alone() -> None:
    assert torch.equal(draw(threads=1), draw(threads=3))
    assert not (draw() == draw(which=1)).any()
    assert not (draw() == draw(key=2)).any()


def test_generator_starts_at_the_state_that_it_was_given() -> None:
    """Python has a Mersenne Twister too."""
    generator = normal_numbers._make_generator(b"stem", 0)
    words = generator.get_state().numpy()[normal_numbers._WORDS].view("<u8")
    other = random.Random()  # noqa: S311 (not for secrets)
    other.setstate((3, (*map(int, words), 624), None))

    drawn = torch.empty(2000, dtype=torch.int64).random_(0, 2**20, generator=generator)

    assert words.max() > 2**31  # 32 random bits
    assert drawn.tolist() == [other.getrandbits(32) % 2**20 for _ in range(2000)]


class Secure(torch.Generator):
    def get_state(self) -> Tensor:
        raise RuntimeError("not a state")


@pytest.mark.parametrize("kind", [torch.Generator, Secure])
def test_noise_of_a_large_sum_is_derived_unless_its_generator_is_to_be_secure(kind) -> None:
    generator = kind().manual_seed(3)
    summed = torch.zeros(2, PART)

    NoiseOfStep(1.0, 1, lambda _: generator).add_to(summed)

    itself = torch.normal(0.0, 1.0, (2 * PART,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(summed.flatten(), itself) == (kind is Secure)
