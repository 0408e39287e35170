"""What clipping cannot bound on several ranks is refused in a sentence; one rank shows it."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from small_models import FLAT, gradients, is_clear, private, squares
from torch import nn
from torch.distributed import destroy_process_group
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel

from dpprof.private import BookKeeping, PerLayerClipping, UnsupportedError
from dpprof.private.graph.first_batch import TRIES

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    destroy_process_group()


X = torch.ones(2, 3)


class Small(nn.Module):
    """Two layers, of which the second's weight may be used outside of it."""

    outside = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        return linear(x, self.last.weight) if self.outside else self.last(x)


def sharded(**options) -> nn.Module:
    model = Small()
    fully_shard(model.first, **options)
    return fully_shard(model, **options)


def tensor_parallel(mesh: DeviceMesh | None = None) -> nn.Module:
    return distribute_module(
        Small(),
        mesh or init_device_mesh("cpu", (1,)),
        lambda _, layer, mesh: [
            layer.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))
            for name, p in list(layer.named_parameters(recurse=False))
        ],
    )


def tensor_parallel_and_sharded() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(mesh["tensor"])
    return fully_shard(model, mesh=mesh["data"])


def with_ignored() -> nn.Module:
    model = Small()
    return fully_shard(model, ignored_params={model.last.weight})


def replicas_of_shards() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))


def part_replicated() -> nn.Module:
    model = Small()
    fully_shard(model.first, mesh=init_device_mesh("cpu", (1,)))
    return fully_shard(model, mesh=replicas_of_shards())


def part_sharded() -> nn.Module:
    model = Small()
    fully_shard(model.first)
    return model


def quantised_and_sharded() -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = Small()
    model.first = bitsandbytes.nn.Linear4bit(3, 4, bias=False, quant_type="nf4").to("cpu")
    fully_shard(model.first)
    return fully_shard(model)


def with_hook_on_buckets() -> nn.Module:
    model = DistributedDataParallel(Small())
    model.register_comm_hook(None, fp16_compress_hook)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "CPU offload": (
        lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "with CPUOffloadPolicy does not work",
    ),
    "replicas alone": (
        lambda: replicate_with_fsdp(Small(), mesh=replicas_of_shards()["replicas"]),
        "with a mesh that is not of ranks with shards",
    ),
    "two meshes": (part_replicated, "fully_shard over several meshes of ranks"),
    "tensor parallel": (tensor_parallel, "that is not fully_shard's"),
    "tensor parallel and sharded": (tensor_parallel_and_sharded, "tensor-parallel parameters"),
    "ignored parameters": (with_ignored, r"last\.weight is trained and not sharded"),
    "quantised": (quantised_and_sharded, "Linear4bit loses the scales of its weight under fully"),
    "part": (part_sharded, r"last\.weight is trained and not sharded"),
    "FSDP1": (
        lambda: FullyShardedDataParallel(Small(), device_id=torch.device("cpu")),
        "FullyShardedDataParallel does not work",
    ),
    "replicate()": (lambda: replicate(Small()), r"replicate\(\) does not work with clipping"),
    "a hook on buckets": (with_hook_on_buckets, r"register_comm_hook\(\) does not work"),
    "static graph": (
        lambda: DistributedDataParallel(Small(), static_graph=True),
        "with static_graph does not work",
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_models_that_are_distributed_otherwise(what) -> None:
    build, told = MODELS[what]
    with pytest.raises((UnsupportedError, ValueError), match=told):
        BookKeeping(build(), 1.0)


def test_resharding_onto_fewer_ranks(monkeypatch) -> None:
    """As on four ranks, which the slow tests have."""
    monkeypatch.setattr(FSDPParamGroup, "_use_post_forward_mesh", True)
    with pytest.raises(UnsupportedError, match="with a number for reshard_after_forward does not"):
        BookKeeping(sharded(), 1.0)


def test_distributed_data_parallel_that_the_clipping_does_not_know() -> None:
    model = Small()
    BookKeeping(model, 1.0)
    later = DistributedDataParallel(model)
    with pytest.raises(UnsupportedError, match="make the Clipping of the DistributedDataParallel"):
        later(torch.ones(2, 3))
    with pytest.raises(UnsupportedError, match="DistributedDataParallel does not work"):
        BookKeeping(nn.Sequential(DistributedDataParallel(Small())), 1.0)


def test_the_sample_of_a_batch_without_samples_leaves_nothing_even_if_it_is_not_finite(way) -> None:
    model = sharded()
    clipping = way(model, 1.0)
    clipping.backward(model(torch.full((1, 3), torch.nan)).sum(1)[:0])
    assert not any(p.grad.to_local().any() for p in model.parameters())
    assert clipping.sample_norms.shape == (0,)


def test_per_layer_clipping_and_check() -> None:
    with pytest.raises(UnsupportedError, match="per-layer clipping does not work with several"):
        PerLayerClipping(sharded(), 1.0)
    with pytest.raises(ValueError, match="check the model before fully_shard"):
        BookKeeping(sharded(), 1.0).check(lambda x: x, torch.ones(2, 3))


def hold_back(model, clipping):
    model.set_requires_gradient_sync(False)
    reduce_by_itself(model, clipping)


def reduce_by_itself(model, clipping):
    with clipping.disabled():
        squares(model, X).sum().backward()


def use_outside(model, _):
    getattr(model, "module", model).outside = True


def end_by_itself(model, _):
    squares(model, X).sum().backward()


def of_kinds(name, change, message):
    """A change that replicas and shards refuse alike."""
    return {
        f"{name}, {kind.__name__}": (lambda kind=kind: kind(Small()), change, message)
        for kind in (DistributedDataParallel, fully_shard)
    }


LATER = {
    **of_kinds("another use", use_outside, r"last\.weight was used outside of its layer"),
    **of_kinds("another backward", end_by_itself, r"call backward\(losses\) of its Clipping"),
    "gradients that FSDP reduced": (sharded, reduce_by_itself, "has a gradient, such as"),
    "16 bits": (
        sharded,
        lambda model, _: model.to(torch.bfloat16),
        r"became torch\.bfloat16 after this clipping",
    ),
    "no losses of a run of the model": (
        sharded,
        lambda _, clipping: clipping.backward(torch.zeros(0)),
        r"run it on any sample and pass losses\[:0\]",
    ),
    "gradients that FSDP holds": (sharded, hold_back, "FSDP holds a gradient that is not clipped"),
    "a hook of FSDP": (
        sharded,
        lambda model, _: model.set_all_reduce_hook(lambda _: None),
        "with set_all_reduce_hook does not work",
    ),
    "sharding": (Small, lambda model, _: fully_shard(model), "replaced"),
    "DDP that communicates by itself": (
        lambda: DistributedDataParallel(Small()),
        lambda model, _: setattr(model, "require_backward_grad_sync", True),
        r"require_backward_grad_sync.* was turned on",
    ),
}


def train_after(change, model, clipping) -> None:
    """Clip a batch after a change, which may be a backward that is none."""
    change(model, clipping)
    x = X.to(next(model.parameters()).dtype)
    clipping.backward(squares(model, x).float())


@pytest.mark.parametrize(("what", "way"), [*itertools.product(LATER, FLAT)])
def test_what_changes_after_the_clipping_was_made(what, way) -> None:
    build, change, message = LATER[what]
    model = build()
    clipping = way(model, 1.0)
    private(clipping, model, noise_multiplier=1.0)
    with pytest.raises((RuntimeError, UnsupportedError), match=message):
        train_after(change, model, clipping)

    assert is_clear(model) or "FSDP" in what


def test_ddp_communicates_again_once_its_clipping_is_removed() -> None:
    model = DistributedDataParallel(Small())
    clipping = BookKeeping(model, 1.0)
    assert clipping.check(lambda x: squares(model, x), torch.randn(3, 3)).samples == 3
    clipping.remove()
    squares(model, X).sum().backward()
    assert model.require_backward_grad_sync
    assert all(p.grad is not None for p in model.parameters())


def test_no_sync_changes_nothing() -> None:
    model = DistributedDataParallel(Small())
    clipping, found = BookKeeping(model, 1.0), []
    for sync in (nullcontext, model.no_sync):
        with sync():
            clipping.backward(squares(model, X))
        found.append(gradients(model))
        model.zero_grad()
    assert torch.equal(*found)


def test_ddp_communicates_where_its_clipping_could_not_be_made() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with pytest.raises(UnsupportedError, match="mixes samples"):
        BookKeeping(model, 1.0)
    assert model.require_backward_grad_sync


class Mixing(nn.Module):
    """Layers between which samples and tokens trade places, or are mixed, or backward fails."""

    way = "apart"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.first(x)
        if self.way == "turned":
            h = self.second(h.transpose(0, 1)).transpose(0, 1)
        if self.way == "mixed":
            h = h - h.mean(0)
        if self.way == "failing":
            h.register_hook(lambda _: 1 / 0)
        return self.last(h).sum((1, 2))


def test_a_refused_batch_verifies_nothing_on_ranks_with_shards(way) -> None:
    model = fully_shard(Mixing())
    clipping = way(model, 1.0)
    model.way = "turned"
    with pytest.raises(UnsupportedError, match="saw 5 samples, and there are 3 losses"):
        clipping.backward(model(torch.randn(3, 5, 3)))
    with pytest.raises(UnsupportedError, match="saw another axis than samples first"):
        clipping.backward(model(torch.randn(5, 5, 3)))


def test_a_loss_that_contains_a_gradient_is_refused() -> None:
    model = fully_shard(Mixing())
    x = torch.randn(3, 5, 3, requires_grad=True)
    clipping = BookKeeping(model, 1.0)
    with pytest.raises(UnsupportedError, match="under fully_shard no gradient"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="under fully_shard no gradient"):
        clipping.backward(torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum((1, 2)))


def test_batches_of_one_sample_verify_nothing_on_ranks_with_shards() -> None:
    model = fully_shard(Mixing())
    clipping = BookKeeping(model, 1.0)
    for _ in range(TRIES + 1):
        clipping.backward(model(torch.randn(1, 5, 3)))
        model.zero_grad()
    model.way = "mixed"
    with pytest.raises(UnsupportedError, match="code after it mixes samples"):
        clipping.backward(model(torch.randn(4, 5, 3)))


def test_ranks_compare_the_size_of_buckets() -> None:
    sizes = []
    for megabytes in (25, 0.005):
        model = DistributedDataParallel(Small(), bucket_cap_mb=megabytes)
        clipping = BookKeeping(model, 1.0)
        sizes.append(private(clipping, model)._settings_of_ranks())
        if megabytes == 25:
            state = private(clipping, model).state_dict(exact=True)
    differing = [name for name, value in sizes[0].items() if sizes[1][name] != value]
    assert differing == ["what is reduced together, or the line of correlated noise,"]
    with pytest.raises(ValueError, match="sums reduced together '1048576 26214400'"):
        private(clipping, model).load_state_dict(state, exact=True)


def test_after_a_backward_that_failed_halfway_old_parameters_are_not_trained() -> None:
    model = fully_shard(Mixing())
    clipping = BookKeeping(model, 1.0)
    model.way = "failing"
    with pytest.raises(ZeroDivisionError):
        clipping.backward(model(torch.randn(2, 5, 3)))
    model.way = "apart"
    with pytest.raises(RuntimeError, match=r"failed halfway.*from a checkpoint"):
        clipping.backward(model(torch.randn(2, 5, 3)))
