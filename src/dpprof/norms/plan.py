"""Chooses the cheapest way to a layer's norms from shapes, by FLOPs and bytes.

The cost of a tiled way is ``flops + FLOPS_PER_BYTE * bytes``:

* tiled Gram: for each pair of tiles of a and b tokens on or below the diagonal
  ``2 a b (d + p)`` FLOPs, and ``(a + b)(d + p) + 4 a b`` elements moved: operands read,
  two products written and read;
* tiled product: ``2 T d p`` FLOPs, and for each tile of r rows and c columns
  ``T (r + c) + 2 r c`` elements moved.

A per-sample gradient has d p elements, its activations and output gradients T (d + p). Where d p is
not more, book-keeping materialises the gradients and keeps them instead (``kept product``): that
needs less memory, and the weighted sum costs ``2 d p`` FLOPs in place of another ``2 T d p``.
Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost", keep gradients
where ``2 T^2 > d p``; comparing what is kept gives T (d + p).
"""

from typing import NamedTuple

from dpprof.norms.code_paths import Way
from dpprof.norms.linear import PRODUCT_TILE, gram_tile_size
from dpprof.norms.tiles import spans

FLOPS_PER_BYTE = 10
"""A round figure: data sheets of CPUs and GPUs give 5 to 20 in float32."""


class Price(NamedTuple):
    """The cost of the norm of one per-sample gradient."""

    flops: int
    elements: int
    """Read and written: the operands of every tile, and its products."""

    def weigh(self, itemsize: int) -> int:
        """Return the whole cost in FLOPs."""
        return self.flops + FLOPS_PER_BYTE * self.elements * itemsize


class WayChoice(NamedTuple):
    """The way to a layer's norms, and why."""

    way: Way
    T: int
    d: int
    p: int
    flops: int
    """Of the matrix products for the norm of one sample."""

    prices: dict[Way, int]
    """``Price.weigh`` of each way; the cheapest is taken, unless gradients are kept."""


def price_gram(T: int, d: int, p: int) -> Price:
    """Price the tiled Gram way for one sample."""
    flops = elements = 0
    tile = gram_tile_size(T)
    for rows in spans(T, tile):
        for columns in spans(rows.stop, tile):
            a, b = rows.stop - rows.start, columns.stop - columns.start
            flops += 2 * a * b * (d + p)
            elements += (a + b) * (d + p) + 4 * a * b
    return Price(flops, elements)


def price_product(T: int, d: int, p: int) -> Price:
    """Price the tiled product way for one sample."""
    high, wide = PRODUCT_TILE
    bands, stripes = -(-d // high), -(-p // wide)
    return Price(2 * T * d * p, T * (d * stripes + p * bands) + 2 * d * p)


def choose_way(T: int, d: int, p: int, itemsize: int, *, keeps: bool) -> WayChoice:
    """Choose the way to a layer's norms.

    T is the tokens of a sample, d and p the widths of input and output, ``itemsize`` the bytes of
    an element; ``keeps`` says whether contributions are kept for the weighted sum.
    """
    gram, product = price_gram(T, d, p), price_product(T, d, p)
    prices = {Way.TILED_GRAM: gram.weigh(itemsize), Way.TILED_PRODUCT: product.weigh(itemsize)}
    if keeps and d * p <= T * (d + p):
        return WayChoice(Way.KEPT, T, d, p, product.flops, prices)
    way = min(prices, key=lambda name: prices[name])
    flops = gram.flops if way is Way.TILED_GRAM else product.flops
    return WayChoice(way, T, d, p, flops, prices)
