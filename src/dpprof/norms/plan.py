"""Which way to a layer's norms is cheapest: decided from shapes, by FLOPs and bytes.

Both tiled ways are priced as on a device that does ``FLOPS_PER_BYTE`` FLOPs in the time in
which it moves a byte, ``flops + FLOPS_PER_BYTE * bytes``, with

* tiled Gram: for each pair of tiles of a and b tokens on or below the diagonal
  ``2 a b (d + p)`` FLOPs, and ``(a + b)(d + p) + 4 a b`` elements moved: operands read,
  two products written and read;
* tiled product: ``2 T d p`` FLOPs, and for each tile of r rows and c columns
  ``T (r + c) + 2 r c`` elements moved.

A sample's gradient has d p elements, what it is made of T (d + p). Where the former is not
more, book-keeping makes it and keeps it in place of the latter (``kept product``): it takes
less memory then, and its weighted sum costs ``2 d p`` FLOPs in place of another ``2 T d p``.
Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost", keep
gradients where ``2 T^2 > d p``; counting what is kept in place of them gives T (d + p).
"""

from typing import NamedTuple

from dpprof.norms.code_paths import Way
from dpprof.norms.linear import PRODUCT_TILE, gram_tile
from dpprof.norms.tiles import spans

FLOPS_PER_BYTE = 10
"""A round figure between a CPU's and a GPU's float32: data sheets of both give 5 to 20."""


class Price(NamedTuple):
    """What a way to the norm of one sample's gradient costs."""

    flops: int
    elements: int
    """Moved, each time a tile's operands are read and its products written and read."""

    def weigh(self, itemsize: int) -> int:
        """Turn it into one figure, in FLOPs."""
        return self.flops + FLOPS_PER_BYTE * self.elements * itemsize


class Choice(NamedTuple):
    """The way that was chosen for a layer, and why."""

    way: Way
    T: int
    d: int
    p: int
    flops: int
    """Products of matrices, for the norms of one sample."""

    prices: dict[Way, int]
    """By the way, what ``Price.weigh`` says; the cheapest is taken unless it is kept."""


def price_gram(T: int, d: int, p: int) -> Price:
    """Price the tiled Gram way for one sample."""
    flops = elements = 0
    tile = gram_tile(T)
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


def choose(T: int, d: int, p: int, itemsize: int, *, keeps: bool) -> Choice:
    """Choose the way to the norms of a layer.

    Args:
        T: Tokens of a sample.
        d: Width of the layer's input.
        p: Width of its output.
        itemsize: Bytes of an element.
        keeps: Whether what gradients are made of, or gradients, must be kept for their
            weighted sum.
    """
    gram, product = price_gram(T, d, p), price_product(T, d, p)
    prices = {
        Way.TILED_GRAM: gram.weigh(itemsize),
        Way.TILED_PRODUCT: product.weigh(itemsize),
    }
    if keeps and d * p <= T * (d + p):
        return Choice(Way.KEPT, T, d, p, product.flops, prices)
    way = min(prices, key=lambda name: prices[name])
    flops = gram.flops if way is Way.TILED_GRAM else product.flops
    return Choice(way, T, d, p, flops, prices)
