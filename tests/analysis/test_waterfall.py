"""The waterfall by hand: what sums to what, in which order, and what is one bar together."""

from dpprof.results.analysis.difference.waterfall import Bar, fold_blocks, subtract


def held(component, layer, op, size, phase="backward"):
    owner = {"component": component, "layer": layer, "op": op, "phase": phase}
    return owner | {"bytes": size, "storages": 1}


A = [
    held("per_sample_gradients", "head", "bmm", 600),
    held("per_sample_gradients", "head", "mul", 100),
    held("per_sample_gradients", "blocks.0.mlp", "bmm", 300),
    held("parameters", "head", "empty", 50, "setup"),
    held("workspace", None, "mm", 7),
]
B = [
    held("gradients", "head", "mm", 80),
    held("gradients", "tail", "mm", 30),
    held("parameters", "head", "empty", 50, "setup"),
    held("workspace", None, "mm", 5),
    held("workspace", None, "mm", 4, "step"),
]


def plain(bar: Bar) -> tuple:
    return bar.name, bar.a_bytes, bar.b_bytes


def test_components_stand_by_their_difference_with_both_sides() -> None:
    assert [plain(bar) for bar in subtract(A, B)] == [
        ("per_sample_gradients", 1000, 0),
        ("gradients", 0, 110),
        ("workspace", 7, 9),
        ("parameters", 50, 50),
    ]
    assert [bar.difference_bytes for bar in subtract(A, B)] == [1000, -110, -2, 0]


def test_a_difference_within_a_component_of_equal_size_is_one() -> None:
    moved = subtract([held("noise", "a", "normal", 5)], [held("noise", "b", "normal", 5)])
    born = subtract([held("noise", "a", "normal", 5)], [held("noise", "a", "zeros", 5)])

    assert [[bar.differs(depth) for depth in range(3)] for bar in moved] == [[False, True, True]]
    assert [[bar.differs(depth) for depth in range(3)] for bar in born] == [[False, False, True]]


def test_the_same_layer_of_every_block_is_one_bar() -> None:
    names = ["head", "blocks.0.mlp.0", "blocks.1.mlp.0", "blocks.12.mlp.0", "blocks.0.mlp.2"]
    bars = [Bar(name, 10 * i, 1, (Bar("mm", 10 * i, 1),)) for i, name in enumerate(names)]
    folded = fold_blocks([*bars, Bar(None, 5, 5)])

    assert [plain(bar) for bar in folded] == [
        ("blocks.*.mlp.0 (3 layers)", 60, 3),
        ("blocks.0.mlp.2", 40, 1),
        ("head", 0, 1),
        (None, 5, 5),
    ]
    assert folded[0].bars == (Bar("mm", 60, 3),)
