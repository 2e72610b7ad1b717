"""Tied parameters (an embedding's and its head's) are one parameter before and after a model is distributed.

Weights are small integers, so that sums are exact in any order and gradients equal those of one process exactly.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import shardtensor
import torch
from oracle import mesh_here
from pool import on_ranks
from shardtensor import Replicate, Shard, distribute_module, distribute_tensor, implicit_replication, init_device_mesh
from shardtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch import nn
from torch.distributed.fsdp import fully_shard

WORDS, FEATURES = 7, 4
TOKENS = torch.tensor([[0, 6, 3, 3], [5, 2, 0, 1]])


class Language(nn.Module):
    """As GPT-2: the head's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORDS, FEATURES, dtype=torch.float64)
        self.up = nn.Linear(FEATURES, 5, dtype=torch.float64)
        self.down = nn.Linear(5, FEATURES, dtype=torch.float64)
        self.head = nn.Linear(FEATURES, WORDS, bias=False, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape))
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))))


class Translation(nn.Module):
    """As T5: two embeddings and a head with one weight."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Language(), Language()
        self.decoder.wte.weight = self.decoder.head.weight = self.encoder.wte.weight

    def forward(self, tokens):
        return self.encoder(tokens) + self.decoder(tokens.flip(1))


def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def pair(model=Language):
    """A distributed-to-be model and its plain twin."""
    torch.manual_seed(0)
    plain = model()
    ours = copy.deepcopy(plain)
    assert len(list(ours.parameters())) == len(list(plain.parameters()))
    return ours, plain


def check_tied(ours, plain):
    """The same parameters are tied in both; the optimizer gets each once."""
    names = [sorted(n for n, q in plain.named_parameters(remove_duplicate=False) if q is p) for p in plain.parameters()]
    held = dict(ours.named_parameters(remove_duplicate=False))
    assert all(len({id(held[name]) for name in tied}) == 1 for tied in names)
    (group,) = torch.optim.SGD(ours.parameters(), lr=0.25).param_groups
    assert [tuple(p.shape) for p in group["params"]] == [tuple(p.shape) for p in plain.parameters()]


def check_trains(ours, plain, entering=lambda tokens: tokens):
    """Outputs, gradients and the parameters after a step are those of one process, to the bit."""
    out, want = ours(entering(TOKENS)), plain(TOKENS)
    assert torch.equal(full(out), want)
    out.square().sum().backward()
    want.square().sum().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(full(a.grad), b.grad), name
    for model in (ours, plain):
        torch.optim.SGD(model.parameters(), lr=0.25).step()
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(full(a.data), b.data), name


def by_hand(cuts):
    """A partition_fn that cuts the named weights along a dim."""
    def partition(name, module, mesh):
        if name in cuts:
            cut = distribute_tensor(module.weight.detach(), mesh, [Shard(cuts[name])])
            module.register_parameter("weight", nn.Parameter(cut))

    return partition


def replicated(tokens):
    return distribute_tensor(tokens, mesh_here(), [Replicate()])


PARTITIONS = {
    "none": None,
    "both": {"wte": 0, "head": 0},
    "both, columns": {"wte": 1, "head": 1},
    "first alone": {"wte": 0},
    "second alone": {"head": 1},
    "neither": {"up": 0},
}


@on_ranks(2, 3)
@pytest.mark.parametrize("cuts", PARTITIONS.values(), ids=PARTITIONS)
def test_distribute_module(cuts):
    ours, plain = pair()
    distribute_module(ours, mesh_here(), cuts and by_hand(cuts))
    check_tied(ours, plain)
    dim = (cuts or {}).get("wte", (cuts or {}).get("head"))
    assert ours.head.weight.placements == (Replicate() if dim is None else Shard(dim),)
    check_trains(ours, plain, entering=replicated)


@on_ranks(2)
def test_one_module_holds_it_twice():
    module = nn.Linear(3, 4)
    module.also = module.weight
    distribute_module(module, mesh_here(), by_hand({"": 0}))
    assert module.also is module.weight and module.weight.placements == (Shard(0),)


@on_ranks(2)
def test_untied_on_purpose():
    """A partition_fn may make two parameters of one."""
    def partition(name, module, mesh):
        by_hand({"wte": 0})(name, module, mesh)
        if name == "head":
            module.weight = nn.Parameter(module.weight.detach().clone())

    ours = distribute_module(Language(), mesh_here(), partition)
    assert (ours.wte.weight.placements, ours.head.weight.placements) == ((Shard(0),), (Replicate(),))


def rows(prefix=""):
    """A plan that cuts the vocabulary, on the embedding's and the head's side."""
    return {
        f"{prefix}wte": RowwiseParallel(input_layouts=Replicate()),
        f"{prefix}up": ColwiseParallel(),
        f"{prefix}down": RowwiseParallel(),
        f"{prefix}head": ColwiseParallel(output_layouts=Replicate()),
    }


@on_ranks(2, 3)
@pytest.mark.parametrize(("model", "prefix"), [("Language", ""), ("Translation", "*.")])
def test_parallelize_module(model, prefix):
    ours, plain = pair(globals()[model])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_module(ours, mesh_here(), rows(prefix))
    check_tied(ours, plain)
    assert {p.placements for name, p in ours.named_parameters() if "wte" in name or "head" in name} == {(Shard(0),)}
    check_trains(ours, plain)


@on_ranks(2, 3)
def test_replicated_by_a_style():
    plain = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3)).double()
    plain[1].weight = plain[0].weight
    ours = copy.deepcopy(plain)
    parallelize_module(ours, mesh_here(), {"*": SequenceParallel(sequence_dim=0)})
    check_tied(ours, plain)
    x = torch.randn(5, 3, dtype=torch.float64)
    ours(distribute_tensor(x, mesh_here(), [Replicate()])).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(full(ours[1].weight.grad), plain[1].weight.grad)


@on_ranks(2)
def test_under_torchs_names():
    with shardtensor.replace_dtensor():
        from torch.distributed.tensor.parallel import parallelize_module

        ours, plain = pair()
        parallelize_module(ours, mesh_here(), rows())
    check_tied(ours, plain)
    check_trains(ours, plain)


def half_a_plan(left_out):
    """One end has a style: both ends are the ShardTensor, and a warning names the end that takes no plain tensors any more."""
    ours, plain = pair()
    plan = rows()
    del plan[left_out]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(ours, mesh_here(), plan)
    (warning,) = caught
    assert warning.filename == __file__
    check_tied(ours, plain)
    with pytest.raises(RuntimeError, match=r"plain torch\.Tensor"):
        ours(TOKENS)
    with implicit_replication():
        check_trains(ours, plain)
    return str(warning.message)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("left_out", ["wte", "head"])
def test_half_a_plan(pools, world, left_out):
    names = {"wte": "'wte.weight' (Embedding)", "head": "'head.weight' (Linear)"}
    other = names["head" if left_out == "wte" else "wte"]
    said = pools(world).run(half_a_plan, left_out)
    assert len(set(said)) == 1 and f"{other} and {names[left_out]} are one tied parameter" in said[0]


def conflicts(how):
    model, mesh = Language(), mesh_here()
    with pytest.raises(ValueError) as error:
        if how == "parallelize_module":
            parallelize_module(model, mesh, rows() | {"wte": ColwiseParallel()})
        else:
            distribute_module(model, mesh, by_hand({"wte": 1, "head": 0}))
    return str(error.value)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["parallelize_module", "distribute_module"])
def test_a_conflict_is_said_on_all_ranks(pools, world, how):
    said = pools(world).run(conflicts, how)
    for rank, text in enumerate(said):
        assert text.startswith(f"{how}: 'wte.weight' (Embedding) and 'head.weight' (Linear) are one tied parameter")
        assert f"wte.weight is to be S(1) on cpu mesh ({world})" in text and f"head.weight S(0) on cpu mesh ({world})" in text
        assert "Give both the same placements" in text and text.endswith(f"(rank {rank})")


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2)], ids=str)
@on_ranks(of=lambda shape: shape[0] * shape[1])
def test_fully_shard(shape):
    """FSDP2 over tensor parallelism: the ends of the tie are in the root's group."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    ours, plain = pair()
    parallelize_module(ours, mesh["tp"], rows())
    fully_shard(ours.up, mesh=mesh["dp"])
    fully_shard(ours, mesh=mesh["dp"])
    check_tied(ours, plain)
    check_trains(ours, plain)
    check_tied(ours, plain)
    assert ours.wte.weight is ours.head.weight


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("together", [True, False])
@on_ranks(2)
def test_fully_shard_in_groups(together, shape):
    """One group keeps both ends of a tie; two groups make two parameters, as of DTensors."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    ours, plain = pair()
    parallelize_module(ours, mesh["tp"], rows())
    if together:
        fully_shard([ours.wte, ours.head], mesh=mesh["dp"])
        fully_shard(ours, mesh=mesh["dp"])
        check_tied(ours, plain)
        check_trains(ours, plain)
        return
    fully_shard(ours.wte, mesh=mesh["dp"])
    with pytest.warns(UserWarning, match=r"'weight' of a Linear is tied to 'weight' of a \w*Embedding.*fully_shard\(\[module_a, module_b\]\)"):
        fully_shard(ours, mesh=mesh["dp"])
    plain.head.weight = nn.Parameter(plain.wte.weight.detach().clone())
    check_tied(ours, plain)
    check_trains(ours, plain)
