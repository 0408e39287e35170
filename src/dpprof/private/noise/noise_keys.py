"""What the noise of a step follows from, so that no two sums ever get the same noise.

The key of a step is SHAKE-256 of a secret of 256 bits, a nonce of the run, the rank, the number of
the step, the scale of its noise, the shapes of the clipped sums in order, what these are divided by
and a digest of them: noise is bound to what it hides,
as nonces are in deterministic signatures (RFC 6979) and in encryption that withstands their misuse
(RFC 5297).
Where kernels add the noise on one GPU, SHAKE-256 of all but the digest seeds Philox, and the
digest, which stays on the device, is 64 bits of its counter.
Whatever is resumed, rolled back, forked or repeated, other sums get independent noise.
A key of correlated noise follows from that of the step before too: ``buffers`` says why.

What is assumed: SHAKE-256 of a secret is a pseudorandom function, and nobody knows the secret. The
normal numbers that follow from a key are those of Philox4x32-10 and MT19937, which are no ciphers
(``noise``).

The digest is a keyed universal hash: for each 2^15 words of 32 bits, the sum of their products with
secret numbers of 64 bits, modulo 2^64. The difference of two words has at most 31 factors of two,
so two sums that differ have the same digest with a probability of at most 2^-33, whatever they are
(Lemire and Kaser 2014, "Strongly universal string hashing is fast"); on a GPU, which hashes those
again to 64 bits, 2^-32. A processor with units for matrices of bytes takes eight sums of products
of bytes with secret numbers of 7 bits, modulo 2^32, for each 2^13 words: 2^-56, because no two of
those numbers times the difference of two bytes are equal. Ranks whose sums are added up tell each
other digests; nobody else sees one.
"""

import hashlib
import os
import secrets
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from dpprof.private.allocation_marks import allocates
from dpprof.private.contributions.sums import group_small
from dpprof.private.noise.digest import LANES, hash_words
from dpprof.private.norms import triton_ops
from dpprof.private.norms.complex_numbers import as_real

_BYTES = 32

Share = Callable[[Tensor], Tensor]  # of this rank's digest, those of all that add up sums


class NoiseKeys:
    """The secret of a run, its nonce, and the keys of its steps.

    Args:
        generator: Draws the noise itself, in place of all this: its numbers are those of Opacus for
            the same seed, and bound to nothing.
        source: Draws secret and nonce; None for the operating system.
        rank: Of this process: ranks have other keys, even if their sources are seeded alike.
    """

    def __init__(
        self,
        *,
        generator: torch.Generator | None = None,
        source: torch.Generator | None = None,
        rank: int = 0,
    ) -> None:
        self.generator, self._source, self._rank = generator, source, rank
        self._given = generator
        self._tables: dict[torch.device, Tensor] = {}
        self._words: dict[torch.device, Tensor] = {}  # a seed and a digest, for kernels
        self._process = os.getpid()
        self._step, self._scale = 0, b""
        self.secret = self.nonce = b""
        if generator is None:
            self.secret, self.nonce = (_draw_secret(source) for _ in range(2))

    @property
    def on_devices(self) -> list[Tensor]:
        """What a graph reads."""
        return [*self._tables.values(), *self._words.values()]

    def renew(self) -> None:
        """Draw a new nonce, or a secret in place of a given generator: no noise comes again."""
        if self.generator is not None:
            self.generator, self.secret = None, _draw_secret(None)
        self.nonce = _draw_secret(self._source)
        self._process = os.getpid()

    def state_dict(self) -> dict[str, Tensor]:
        """Return what must not be published: secret and nonce, or a generator's state."""
        if self.generator is None:
            return {
                name: torch.tensor(list(getattr(self, name)), dtype=torch.uint8)
                for name in ("secret", "nonce")
            }
        try:
            return {self.generator.device.type: self.generator.get_state()}
        except RuntimeError:
            return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a state of the same source (``ValueError``): equal sums will get equal noise."""
        is_secret = list(state) == ["secret", "nonce"] and self.generator is None
        own = ["secret", "nonce"] if self._given is None else [self._given.device.type]
        if list(state) != own and not is_secret:
            raise ValueError(
                f"the noise of this state follows from: {', '.join(state)}, and here from: "
                f"{', '.join(own)}; leave out exact=True, for fresh noise"
            )
        self._process = os.getpid()
        if is_secret:
            self.secret, self.nonce = (bytes(part.tolist()) for part in state.values())
            self._tables.clear()
            return
        self.generator = self._given
        assert self.generator is not None
        try:
            self.generator.set_state(state[own[0]].cpu())  # map_location may have moved it
        except RuntimeError as error:
            raise ValueError(
                f"the generator of the noise does not take this state ({error}); leave out "
                "exact=True, for fresh noise"
            ) from error

    def begin(self, step: int, sums: Sequence[Tensor], std: float, divisor: float = 1.0) -> None:
        """Note what turns draws into the noise of these sums, and seed the kernels.

        Sums of one kind follow each other in the order in which they get noise; their ``divisor``
        scales what is released, as ``std`` scales draws.

        A graph that is replayed reads on the device what is written here.

        Raises:
            RuntimeError: This is a fork, and its given generator would repeat the other's noise.
        """
        if os.getpid() != self._process:
            if self.generator is not None:
                raise RuntimeError(
                    "this process was forked, and its copy of the generator that draws the noise "
                    "would repeat what the other process draws; make the optimizer anew here"
                )
            self.renew()
        self._step = step
        kinds = [(*total.shape, str(total.dtype)) for total in sums]
        self._scale = struct.pack("<2d", std, divisor) + repr(kinds).encode()
        for device in self._make_words_for(sums):
            self._words[device][0].fill_(_to_number(self.derive("device", 8)))

    def prepare(self, sums: Sequence[Tensor]) -> None:
        """Make what digests and kernels read for sums like these, so that a graph can read it."""
        self._make_words_for(sums)
        for device in {total.device for total in sums} if self.generator is None else ():
            self._table_on(device)

    def _make_words_for(self, sums: Sequence[Tensor]) -> set[torch.device]:
        """Return the devices on which kernels add noise to sums, all of which have words."""
        devices = {total.device for total in sums if takes_kernel(total)}
        for device in devices - self._words.keys():
            self._words[device] = _make_words(device)
        return devices

    def bind(
        self, sums: Sequence[Tensor], share: Share | None = None, after: bytes | None = None
    ) -> "StepKey":
        """Return the key of the step for all sums that get noise in it.

        Where kernels add the noise of all of them on one device, the digest stays there.
        ``share`` is there where ranks add their sums up; the key follows also from that of
        the step before, ``after``.
        """
        devices = {total.device for total in sums}
        if self.generator is not None or not devices:
            return StepKey(b"", generator=self.generator)
        if (share, after) == (None, None) and len(devices) == 1 and all(map(takes_kernel, sums)):
            (device,) = devices
            triton_ops.digest_(self._words[device], _as_words(sums), self._table_on(device))
            return StepKey(b"", self._words)
        digests = []
        for device in sorted(devices, key=str):
            made = self._digest([total for total in sums if total.device == device])
            digests.append(made if share is None else share(made))
        values = b"".join(_read(digest) for digest in digests)
        return StepKey(self.derive("step", _BYTES, values + (after or b"")))

    def _digest(self, sums: Sequence[Tensor]) -> Tensor:
        """Hash sums on one device; two numbers of 64 bits."""
        flat, table = _as_words(sums), self._table_on(sums[0].device)
        words = _make_words(table.device)
        if all(map(takes_kernel, sums)):
            triton_ops.digest_(words, flat, table)
            return words
        hashes = hash_words(flat, table)
        hashed = b"".join(number.to_bytes(8, "little", signed=True) for number in hashes)
        made = self.derive("digest", 16, hashed)
        for word, eight in zip(words, (made[:8], made[8:]), strict=True):
            word.fill_(_to_number(eight))
        return words

    def derive(self, purpose: str, size: int, digest: bytes = b"") -> bytes:
        """Return bytes for a purpose in this step, which follow from the secret and a digest."""
        numbers = b"".join(number.to_bytes(8, "little") for number in (self._rank, self._step))
        # Scaled or placed otherwise, the same draws would bare sums.
        return _derive(self.secret, purpose, size, self.nonce + numbers + self._scale + digest)

    def _table_on(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            self._tables[device] = _make_table(self.secret, device)
        return self._tables[device]


class StepKey:
    """The key of a step: what its noise is drawn from on each device.

    Of an empty ``key`` all follows from what is on the device: ``words`` are what kernels read
    there, a seed and another 64 bits, (2,) int64. A ``generator`` takes its place.
    """

    def __init__(
        self,
        key: bytes,
        words: dict[torch.device, Tensor] | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        self.key, self._words, self._generator = key, words or {}, generator
        self._generators: dict[torch.device, torch.Generator] = {}

    def words_on(self, device: torch.device) -> Tensor:
        """Return what kernels read."""
        if device not in self._words:
            self._words[device] = _make_words(device)
            if self._generator is not None:
                return self._words[device].random_(generator=self._generator)
            made = _derive(self.key, str(device), 16)
            for at, eight in enumerate((made[:8], made[8:])):
                self._words[device][at].fill_(_to_number(eight))
        return self._words[device]

    def generator_on(self, device: torch.device) -> torch.Generator:
        """Return a generator in a state that follows from the key: on a CPU all of its bits."""
        if self._generator is not None:
            return self._generator
        if device not in self._generators:
            self._generators[device] = own = torch.Generator(device)
            if device.type != "cpu":
                made = _derive(self.key, str(device), 8)
                own.manual_seed(_to_number(made) & (2**63 - 1))
            else:
                set_words(own, _derive_words(self.key, str(device)))
        return self._generators[device]


WORDS = 624  # words of 32 bits in the state of PyTorch's generator on a CPU, MT19937


def set_words(generator: torch.Generator, words: Tensor) -> None:
    """Set the state of PyTorch's generator on a CPU, which lies behind a seed and a position."""
    with _disable_current_modes():
        state = torch.Generator("cpu").get_state()
        state.view(torch.int64)[3 : 3 + WORDS] = words
        generator.set_state(state)


def make_generator(source: torch.Generator | None = None, rank: int = 0) -> torch.Generator:
    """Make a generator on the CPU, which follows from a secret of ``source`` and the rank."""
    made = torch.Generator("cpu")
    set_words(made, _derive_words(_draw_secret(source), f"rank {rank}"))
    return made


def takes_kernel(summed: Tensor) -> bool:
    """Tell whether Triton's kernels add the noise of a sum."""
    real = as_real(summed)
    return triton_ops.is_fused(real) and real.dtype == torch.float32 and real.is_contiguous()


@allocates("noise")
def _as_words(sums: Sequence[Tensor]) -> list[Tensor]:
    """Return sums as words of 32 bits, (n,) int32 each; small ones are joined."""
    words = [as_real(total).reshape(-1).view(torch.int32) for total in sums]
    groups = ([words[place] for place in group] for group in group_small(words))
    return [torch.cat(group) if len(group) > 1 else group[0] for group in groups]


@allocates("noise")
def _make_words(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


@allocates("noise")
def _make_table(secret: bytes, device: torch.device) -> Tensor:
    made = _derive(secret, "digest", 8 * 2 * LANES)
    numbers = struct.unpack(f"<{2 * LANES}q", made)
    return torch.tensor(numbers, dtype=torch.int64, device=device).view(2, LANES)


def _derive(secret: bytes, purpose: str, size: int, beside: bytes = b"") -> bytes:
    label = purpose.encode()
    return hashlib.shake_256(secret + bytes([len(label)]) + label + beside).digest(size)


def _draw_secret(generator: torch.Generator | None) -> bytes:
    if generator is None:
        return secrets.token_bytes(_BYTES)
    words = torch.empty(_BYTES // 4, dtype=torch.int64, device=generator.device)
    return _read(words.random_(2**32, generator=generator), size=4)


def _derive_words(secret: bytes, purpose: str) -> Tensor:
    words = struct.unpack(f"<{WORDS}I", _derive(secret, purpose, 4 * WORDS))
    with _disable_current_modes():
        return torch.tensor(words, dtype=torch.int64)


def _to_number(eight: bytes) -> int:
    return int.from_bytes(eight, "little", signed=True)


def _read(words: Tensor, size: int = 8) -> bytes:
    """Return numbers as bytes; zeros of fake tensors, which have none."""
    if isinstance(words, FakeTensor):
        return bytes(size * words.numel())
    numbers = words.flatten().tolist()
    is_signed = size == 8  # noqa: PLR2004 (words of 32 bits are counts)
    return b"".join(number.to_bytes(size, "little", signed=is_signed) for number in numbers)
