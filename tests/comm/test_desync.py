"""One rank fails, or the ranks make different collectives: all ranks raise soon, with the reason, and no data is mixed up.

The groups' time-out is 40 s. A test's ranks must all have answered long before.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import util
from multiprocessing.connection import wait

import pool
import pytest
import torch

SECONDS = 25


def ask(world, function, *args, gone=()):
    """The answer of each rank: (kind, value). The ranks are started for this call, because it breaks their groups."""
    ranks = pool.Pool(world)
    ranks._start()
    try:
        for pipe in ranks._pipes:
            pipe.send((__name__, function, args, {}))
        answers = dict.fromkeys(gone, ("died", None))
        waiting = {pipe: rank for rank, pipe in enumerate(ranks._pipes) if rank not in gone}
        end = time.monotonic() + SECONDS
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} still wait after {SECONDS} s; the others: {answers}"
            for pipe in ready:
                answers[waiting.pop(pipe)] = pipe.recv()
        for rank, (kind, value) in answers.items():
            assert kind != "error", f"rank {rank}: {value}"
        return [answers[rank][1] for rank in range(world)]
    finally:
        ranks.stop()


def mesh(*shape):
    from shardtensor import set_fault_notice
    from torch.distributed.device_mesh import init_device_mesh

    set_fault_notice(True)
    return init_device_mesh("cpu", shape)


def cut(rows=6, mesh_=None, start=0.0):
    import torch.distributed as dist
    from shardtensor import Shard, distribute_tensor

    whole = torch.arange(start, start + 2.0 * rows).reshape(rows, 2)
    x = distribute_tensor(whole, mesh_ or mesh(dist.get_world_size()), [Shard(0)], src_data_rank=None)
    if mesh_ is None:  # so that the first moves, before which the ranks compare notes, are over
        x.full_tensor()
        x.sum(0).full_tensor()
    return x, whole


def me():
    import torch.distributed as dist

    return dist.get_rank()


def outcome(run):
    """The error's text, or the result as a list."""
    try:
        return run().tolist()
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def after(seconds, condition):
    """Waits for the others to have done something, on this rank only."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def count_of_failures():
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    return store.add("shardtensor/faults/1/count", 0)


class Fails:
    """A listener that raises before the nth collective, on one rank."""

    def __init__(self, nth, rank):
        self.left = nth if me() == rank else -1

    def __enter__(self):
        from shardtensor import _C

        _C.set_comm_listener(self)

    def __exit__(self, *_):
        from shardtensor import _C

        _C.set_comm_listener(None)

    def __call__(self, kind, *_):
        self.left -= 1
        if self.left == 0:
            return "out of memory, as it were"
        return None


# ---- a rank fails and lives on ----


def bad_index():
    from torch.nn import functional as F

    x, _ = cut(6)
    table = torch.randn(5, 3)
    from shardtensor import Replicate, Shard, distribute_tensor

    weight = distribute_tensor(table, x.device_mesh, [Replicate()], src_data_rank=None)
    rows = distribute_tensor(torch.tensor([0, 1, 2, 3, 4, 99]), x.device_mesh, [Shard(0)], src_data_rank=None)
    looked = outcome(lambda: F.embedding(rows, weight).to_local())
    if me() == 2:  # it has row 99; it does not come to the next collective
        after(SECONDS, lambda: count_of_failures() >= 3)
        return looked
    return outcome(x.full_tensor)


def test_a_rank_that_fails_in_a_kernel_is_named_by_the_others():
    texts = ask(3, "bad_index")
    assert "index out of range" in texts[2]
    assert "in aten::embedding on [5, 3] R on cpu mesh (3), [6] S(0) on cpu mesh (3), rank 2" in texts[2]
    for text in texts[:2]:
        assert text.startswith("DistBackendError") and "rank 2 failed in aten::embedding" in text and "index out of range" in text
        assert "step all_gather along mesh dim 0" in text and "process groups" in text


def one_step(come_back):
    x, _ = cut(6)
    y, _ = cut(6, x.device_mesh, start=100.0)
    with Fails(1, rank=1):
        first = outcome(x.full_tensor)
    if me() == 1 and not come_back:
        after(SECONDS, lambda: count_of_failures() >= 2)
        return first, None
    return first, outcome(y.full_tensor)


@pytest.mark.parametrize("world", [2, 3])
def test_the_next_collective_of_a_rank_that_failed_is_not_taken_for_the_others_present_one(world):
    for rank, (first, second) in enumerate(ask(world, "one_step", True)):
        assert "out of memory, as it were" in first, (rank, first)
        assert "DistBackendError" in second, (rank, second)


def test_a_rank_that_failed_before_its_collective_and_does_not_come_is_named():
    for rank, (first, _) in enumerate(ask(2, "one_step", False)):
        assert "out of memory, as it were" in first
        assert rank == 1 or "rank 1 failed in redistribute: from S(0)" in first


def between_steps():
    from shardtensor import Shard, distribute_tensor

    grid = mesh(2, 2)
    whole = torch.arange(35000.0).reshape(500, 70)
    x, y = (distribute_tensor(t, grid, [Shard(0), Shard(1)], src_data_rank=None) for t in (whole, -whole))
    with Fails(2, rank=3):
        first = outcome(x.full_tensor)
    second = outcome(y.full_tensor)
    return first, second, (-whole).tolist()


def test_a_rank_that_fails_between_two_steps_of_a_move():
    answers = ask(4, "between_steps")
    assert "out of memory" in answers[3][0]
    for rank, (first, second, right) in enumerate(answers):
        assert "DistBackendError" in second or second == right, (rank, second)
        assert isinstance(first, str) or rank != 3
    assert sum("DistBackendError" in str(second) for _, second, _ in answers) >= 2


def in_a_hook(kind):
    x, _ = cut(6)
    x = x.detach().requires_grad_()
    y = x * 2

    def hook(grad):
        if me() == 0:
            raise kind("the user's hook")

    y.register_hook(hook)
    w = torch.ones(2, 2)
    from shardtensor import Replicate, distribute_tensor

    w = distribute_tensor(w, x.device_mesh, [Replicate()], src_data_rank=None).requires_grad_()
    out = (y @ w).sum()
    first = "no error"
    try:
        out.backward()
        w.grad.full_tensor()
    except BaseException as e:
        first = f"{type(e).__name__}: {e}"
    return first, outcome(lambda: cut(6, x.device_mesh)[0].full_tensor())


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_hook_that_raises_on_one_rank(kind):
    answers = ask(2, "in_a_hook", kind)
    assert "the user's hook" in answers[0][0]
    for first, second in answers:
        assert "DistBackendError" in first or "DistBackendError" in second, answers
    assert any("rank 0 failed in backward" in text for text in answers[1])


def before_scatter():
    from shardtensor import Shard, distribute_tensor

    x, _ = cut(6)
    if me() == 0:
        failed = outcome(lambda: x.view(7))  # all ranks would raise; only this one calls it
        with Fails(1, rank=0):
            failed += outcome(lambda: distribute_tensor(torch.ones(9, 2), x.device_mesh, [Shard(0)]).to_local())
        after(SECONDS, lambda: count_of_failures() >= 2)
        return failed
    return outcome(lambda: distribute_tensor(torch.ones(9, 2), x.device_mesh, [Shard(0)]).to_local())


def test_ranks_that_wait_for_messages_are_told():
    texts = ask(2, "before_scatter")
    assert "out of memory" in texts[0]
    assert "DistBackendError" in texts[1] and "rank 0 failed" in texts[1]


# ---- no fault ----


def alike():
    x, whole = cut(6)
    texts = [outcome(lambda: x @ x)]
    with Fails(1, rank=me()):
        texts.append(outcome(x.full_tensor))
    return texts, outcome(x.full_tensor), whole.tolist()


def test_what_all_ranks_raise_alike_breaks_nothing():
    for texts, got, right in ask(3, "alike"):
        assert all(text.startswith(("RuntimeError", "DistError")) for text in texts), texts
        assert got == right


def alike_on_a_grid():
    """Each rank hears of failures of ranks that are not in its groups."""
    from shardtensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(24.0).reshape(6, 4)
    x = distribute_tensor(whole, mesh(2, 2), [Replicate(), Shard(1)], src_data_rank=None)
    got = []
    for _ in range(4):
        for _ in range(20):
            x.full_tensor()
        text = outcome(lambda: torch.gather(x, 0, torch.full_like(x, 7, dtype=torch.long)).to_local())
        got.append(outcome(x.full_tensor))
    return text, got, whole.tolist()


def test_ranks_that_fail_alike_again_and_again_find_each_other():
    for text, got, right in ask(4, "alike_on_a_grid"):
        assert "index 7 is out of bounds" in text
        assert got == [right] * 4


def alone():
    x, whole = cut(6)
    if me() == 1:
        outcome(lambda: torch.linalg.cholesky(-torch.eye(2)) + x.view(5))
        outcome(lambda: torch.gather(x, 1, torch.full_like(x, 7, dtype=torch.long)).to_local())
    got = outcome(x.full_tensor)
    return got, whole.tolist(), outcome((x * 2).full_tensor), (whole * 2).tolist()


def test_a_rank_that_fails_alone_and_comes_back_goes_on():
    for got, right, twice, right_twice in ask(3, "alone"):
        assert got == right and twice == right_twice


def late():
    x, whole = cut(6)
    if me() == 0:
        time.sleep(1.5)
    return outcome(x.full_tensor), whole.tolist()


def test_a_rank_that_is_only_late_is_waited_for():
    for got, right in ask(3, "late"):
        assert got == right


# ---- ranks that disagree about a tensor ----


def cut_alone():
    """A move that sends nothing asks nothing of the others, the first of its kind either: rank 0 does it alone."""
    from shardtensor import Replicate, Shard, ShardTensor

    x = ShardTensor.from_local(torch.arange(5.0), mesh(torch.distributed.get_world_size()), [Replicate()])
    return outcome(lambda: x.redistribute(placements=[Shard(0)]).to_local()) if me() == 0 else None


def test_a_move_that_sends_nothing_needs_no_other_rank():
    assert ask(2, "cut_alone") == [[0.0, 1.0, 2.0], None]


def unequal(how):
    from shardtensor import Partial, Shard, ShardTensor

    here = mesh(torch.distributed.get_world_size())
    if how == "rows":
        x = ShardTensor.from_local(torch.ones(2 + me(), 3), here, [Shard(0)])
    elif how == "summands":
        x = ShardTensor.from_local(torch.ones(2 + me(), 3), here, [Partial()]) * 2
    else:
        x = ShardTensor.from_local(torch.ones(2, 3, dtype=(torch.float32, torch.float64)[me() % 2]), here, [Shard(0)])
    try:
        return (x + 1 if how == "rows" else x).full_tensor().tolist()
    except ValueError as e:
        return str(e)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["rows", "summands", "dtype"])
def test_ranks_that_disagree_about_a_tensor_all_raise_at_its_first_move(world, how):
    for text in ask(world, "unequal", how):
        assert "the ranks disagree about the tensor" in text and 'sharding_shapes="infer"' in text
        assert "rank 0" in text and "\n  rank 1" in text and "test_desync.py:" in text


def later_unequal(path):
    """What is said of means over pieces that from_local took to be equal: they are, one rank takes one more, they are not."""
    from shardtensor import Shard, ShardTensor, set_fault_notice

    here = mesh(torch.distributed.get_world_size())
    set_fault_notice(True, compare_every=0.05)

    def mean_of(n):
        return ShardTensor.from_local(torch.full((n, 6), 1.0 + me()), here, [Shard(0)]).mean().full_tensor().item()

    said = []
    for sizes in ((4, 4, 4), (4, 4, 4), (4, 3, 3)):
        if len(said) == 1 and me() == 0:
            ShardTensor.from_local(torch.ones(2, 6), here, [Shard(0)])
        if len(said) == 2 and me() == 1:
            ShardTensor.from_local(torch.ones(2, 6), here, [Shard(0)])
        with open(f"{path}/{me()}-{len(said)}", "w+") as errors:
            before = os.dup(2)
            os.dup2(errors.fileno(), 2)
            means = [mean_of(sizes[me()])]
            for _ in range(48):
                time.sleep(0.01)
                means.append(mean_of(4))
            os.dup2(before, 2)
            errors.seek(0)
            said.append((means[0], errors.read().count("from_local was given pieces of different sizes")))
    return said


@pytest.mark.parametrize("world", [2, 3])
def test_pieces_that_later_are_not_equal_are_told_of(tmp_path, world):
    answers = ask(world, "later_unequal", str(tmp_path))
    equal, unequal = {2: (1.5, (4 + 6) / 7), 3: (2.0, (4 + 6 + 9) / 10)}[world]
    for said in answers:
        assert [mean for mean, _ in said[:2]] == [equal] * 2 and [told for _, told in said[:2]] == [0, 0], said
        assert abs(said[2][0] - unequal) > 0.05, said  # each rank divides by the size that it assumes for the whole
    assert 1 <= sum(said[2][1] for said in answers) <= world, answers  # one each: the next rank may agree


# ---- ranks that part, and ranks that die ----


def other_programs():
    x, _ = cut(6000)
    if me() == 0:
        return outcome(x.sum(0).full_tensor)
    outcome(lambda: torch.gather(x, 1, torch.full_like(x, 7, dtype=torch.long)).to_local())  # this script then goes another way
    return outcome(x.full_tensor)


def test_ranks_that_part_after_an_error_name_both_collectives():
    for text in ask(2, "other_programs"):
        assert "DistBackendError" in text
        assert "all_reduce along mesh dim 0, rank 0" in text and "all_gather along mesh dim 0, rank 1" in text
        assert text.count("test_desync.py:") >= 2, text


def swapped():
    """Two collectives in another order on rank 0, at once after one that all make: nothing waits, and the data fit."""
    from shardtensor import set_fault_notice

    x, whole = cut(6)
    y = x.to(torch.int32)
    y.full_tensor()
    set_fault_notice(True, compare_every=0.05)
    x.full_tensor()
    got = [outcome(v.full_tensor) for v in ((y, x) if me() == 0 else (x, y))]
    end = time.monotonic() + 5
    while not isinstance(later := outcome(x.sum(0).full_tensor), str) and time.monotonic() < end:
        pass
    return got != [whole.tolist(), whole.tolist()], str(later)


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_that_were_taken_for_each_other_are_noticed_soon(world):
    answers = ask(world, "swapped")
    assert any(wrong for wrong, _ in answers)
    assert all(text.startswith("DistBackendError") for _, text in answers), answers
    assert any("have made different collectives among their first" in text for _, text in answers), answers


def read_on_one_rank():
    x, _ = cut(6000)
    norm = torch.linalg.vector_norm(x)
    norm.full_tensor()
    if me() == 0:
        return outcome(lambda: torch.tensor(norm.item()))  # no sum: nothing reduces it ahead
    time.sleep(1)
    return outcome(x.full_tensor)


def test_a_value_read_on_one_rank_alone_while_the_others_compute():
    for text in ask(3, "read_on_one_rank"):
        assert "DistBackendError" in text, text
        assert "all_reduce along mesh dim 0, rank 0" in text or "rank 1 failed" in text or "rank 2 failed" in text
        assert "all_gather along mesh dim 0" in text


def killed():
    x, _ = cut(6)
    if me() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(x.full_tensor)


def test_a_killed_rank_is_named():
    texts = ask(3, "killed", gone=(2,))
    for text in texts[:2]:
        assert "DistBackendError" in text and "no sign of life from rank 2" in text, text


def switched_off():
    from shardtensor import set_fault_notice

    x, whole = cut(6)
    set_fault_notice(False)
    with Fails(1, rank=me()):
        outcome(x.full_tensor)
    return outcome(x.full_tensor), whole.tolist(), count_of_failures()


def test_it_can_be_switched_off():
    for got, right, told in ask(2, "switched_off"):
        assert got == right and told == 0


ALONE = {
    "mean": lambda x: (x * 100).mean(),
    "mean of the same": lambda x: x.mean(),
    "repr": lambda x: repr(x.mean()),
    "loss": lambda x: torch.nn.functional.mse_loss(x, x * 2),
    "integers": lambda x: (x > 3).sum(),
    "in a function": lambda x: mean_in_a_function(x),
}


def mean_in_a_function(x):
    return x.mean()


def reducing_ahead(rows):
    from shardtensor import set_reduce_ahead

    set_reduce_ahead(True)
    return cut(rows)


def made_on_one_rank(how):
    x, whole = reducing_ahead(7)
    if me() == 0:
        made = ALONE[how](x)
        del made
    out = []
    for i in range(3):
        out.append(outcome(lambda: torch.tensor(mean_in_a_function(x + i).item())))  # noqa: B023
    return out, [(whole + i).mean().item() for i in range(3)]


@pytest.mark.parametrize("how", ALONE)
def test_a_sum_that_one_rank_makes_alone_is_not_added_to_another(how):
    for rank, (got, _) in enumerate(ask(3, "made_on_one_rank", how)):
        assert all("DistBackendError" in str(text) for text in got), (rank, got)
        assert "have not made the same sums of no dims" in got[0] and "test_desync.py:" in got[0], got[0]


MOVES = {
    "gather": lambda x: x.full_tensor().sum(),
    "gather of many": lambda x: x.flatten().repeat(1000).full_tensor().sum(),
    "maximum": lambda x: torch.tensor(x.max().item()),
    "sums of columns": lambda x: x.flatten().repeat(1000).view(1000, -1).sum(0).full_tensor().sum(),
}


def moves_after_one_alone(how):
    x, whole = reducing_ahead(7)
    if me() == 0:
        x.mean()
    out = [outcome(lambda: MOVES[how](x)) for _ in range(3)]
    start = time.monotonic()
    mean = outcome(lambda: torch.tensor(x.mean().item()))
    times = 1000 if how in ("gather of many", "sums of columns") else 1
    want = whole.max() if how == "maximum" else whole.sum() * times
    return out, [want.item()] * 3, mean, time.monotonic() - start


@pytest.mark.parametrize("how", MOVES)
def test_moves_do_not_meet_a_sum_that_one_rank_made_alone(how):
    """Each is right, or the ranks have noticed that they have parted: on a slow machine perhaps at the first."""
    for got, want, mean, seconds in ask(3, "moves_after_one_alone", how):
        assert all("DistBackendError" in str(value) or value == pytest.approx(want[0]) for value in got)
        assert "DistBackendError" in str(mean) and seconds < 5 * pool._PATIENCE, (mean, seconds)


def dropped_at_once():
    """The sums that meet another are dropped; all that follow differ too."""
    x, _ = reducing_ahead(7)
    if me() == 0:
        x.mean()
    for i in range(20):
        mean = (x + i).mean()
    return outcome(lambda: torch.tensor(mean.item()))


def test_later_sums_differ_too():
    for text in ask(2, "dropped_at_once"):
        assert "have not made the same sums of no dims" in str(text)


def other_lines():
    """What is legal: all ranks make the same, and some read it."""
    x, whole = reducing_ahead(7)
    for i in range(40):
        mean = (x + i).mean()
        if i % 3 == me():
            assert mean.item() == pytest.approx((whole + i).mean().item())
    return mean.item(), (whole + 39).mean().item()


def test_sums_that_all_ranks_make_are_right():
    for got, want in ask(3, "other_lines"):
        assert got == pytest.approx(want)


def drawn_alone(then):
    x, _ = reducing_ahead(6)
    if me() == 0:
        return outcome(lambda: torch.rand_like(x).to_local())
    if then == "scalar":
        return outcome(lambda: torch.tensor(x.mean().item()))
    return outcome(x.full_tensor)


@pytest.mark.parametrize("then", ["move", "scalar"])
def test_a_rank_that_draws_alone_ends_nobodys_process(then):
    texts = ask(3, "drawn_alone", then)
    assert all("DistBackendError" in str(text) for text in texts), texts
    assert any("first random op" in text for text in texts), texts


def ends_with_a_move_in_flight(how):
    """Rank 0 has started a sum that the others never make."""
    import torch.distributed as dist

    x, _ = reducing_ahead(6)
    if me() == 0:
        x.mean()
        start = time.monotonic()
        if how == "destroy":
            dist.destroy_process_group()
        else:
            try:
                raise ValueError
            except ValueError:
                dist.destroy_process_group()
        return time.monotonic() - start
    time.sleep(6)
    return 0


@pytest.mark.parametrize(("how", "most"), [("destroy", 4), ("while an exception is on its way", 1.5)])
def test_the_end_of_a_rank_waits_only_a_little(how, most):
    assert ask(2, "ends_with_a_move_in_flight", how)[0] < most * pool._PATIENCE


LEAVES_LATER = """
import sys
import torch
from shardtensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]).sum().item()
sys.stdin.read()
"""


def test_an_ordinary_end_is_quiet_after_the_stores_host_has_left():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    where["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    ranks = [
        subprocess.Popen([sys.executable, "-c", LEAVES_LATER], env=os.environ | where | {"RANK": str(rank)}, text=True,
                         stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:  # rank 0, which keeps the store, has gone when rank 1 ends
            _, said = rank.communicate("", timeout=SECONDS * pool._PATIENCE)
            assert (rank.returncode, said) == (0, "")
    finally:
        for rank in ranks:
            rank.kill()


def another_thread_goes_on():
    """One thread of rank 0 fails and does not come back; another one goes on, in another group."""
    import threading

    grid = mesh(2, 2)
    from shardtensor import Replicate, Shard, distribute_tensor

    along = [distribute_tensor(torch.ones(4, 4), grid, p, src_data_rank=None) for p in ([Shard(0), Replicate()], [Replicate(), Shard(0)])]
    for x in along:
        x.full_tensor()
    rows = distribute_tensor(torch.tensor([99, 0, 0, 0]), grid, [Shard(0), Replicate()], src_data_rank=None)
    table = distribute_tensor(torch.ones(5, 3), grid, [Replicate()] * 2, src_data_rank=None)
    if me() == 0:
        failed = threading.Thread(target=lambda: outcome(lambda: torch.nn.functional.embedding(rows, table)))
        failed.start()
        failed.join()
        assert count_of_failures() == 1
    stop = time.monotonic() + 4
    other = outcome(along[1].full_tensor) if me() in (0, 1) else None
    if me() == 0:
        while time.monotonic() < stop:
            time.sleep(0.1)
        return other
    return other, outcome(along[0].full_tensor) if me() == 2 else None


def test_a_thread_that_goes_on_elsewhere_does_not_answer_for_one_that_failed():
    answers = ask(4, "another_thread_goes_on")
    assert "rank 0 failed" in str(answers[2][1]), answers


def refused_alike():
    from shardtensor import Partial, Replicate, Shard, ShardTensor

    grid, out = mesh(2, 2), []
    for reduce in ("product", "max"):
        piece = torch.ones(1 - me() // 2, 2, dtype=torch.complex64)
        x = ShardTensor.from_local(piece, grid, [Shard(0), Partial(reduce)], shape=(1, 2), stride=(2, 1))
        out.append(outcome(x.full_tensor))
    whole = ShardTensor.from_local(torch.ones(2, 2), grid, [Shard(0), Replicate()]).sum().full_tensor()  # the groups work
    out.append(whole.item())
    return out


def test_what_cannot_be_reduced_is_refused_also_where_the_piece_is_empty():
    answers = ask(4, "refused_alike")
    for texts in answers:
        assert all("can be reduced over ranks only by sum or avg" in text for text in texts[:2]), texts
        assert texts[2] == 8


def many_errors():
    import torch.distributed as dist

    x, _whole = cut(6)
    for _ in range(600):
        outcome(lambda: x @ x)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # a rank that waits for another asks what has failed there
    told = sum(len(store.get(f"shardtensor/faults/1/{n}")) > 0 for n in range(2 * 600))
    dist.barrier()  # the next failure of one rank takes away its oldest
    with Fails(1, rank=1):
        first = outcome(x.full_tensor)
    return told, first, outcome(x.full_tensor)


def test_only_the_last_errors_are_kept():
    for told, first, second in ask(2, "many_errors"):
        assert told == 2 * 256
        assert "out of memory" in first
        assert "DistBackendError" in second


# ---- one rank does what it cannot do alone ----


def only_here(others):
    """Rank 0 gathers a tensor; the others do something else."""
    import torch.distributed as dist

    x, _ = cut(6)
    if me() == 0:
        return outcome(x.full_tensor)
    if others == "wait at a barrier":
        try:
            dist.barrier()
        except RuntimeError:  # rank 0 has gone
            return None
    elif others == "have destroyed their groups":
        dist.destroy_process_group()
        time.sleep(2)
    elif others == "have raised":
        sys.excepthook(ValueError, ValueError("the user's"), None)
    elif others == "have ended":
        util._run_finalizers(0)  # as at the end of a process that multiprocessing has started
        os._exit(0)
    return None


def is_gone(rank, others):
    return rank > 0 and others in ("have ended", "wait at a barrier")


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ("wait at a barrier", "rank 1: torch.distributed.barrier()"),
        ("have destroyed their groups", "rank 1 has destroyed its process groups"),
        ("have raised", "rank 1 failed in its script: ValueError: the user's"),
        ("have ended", "rank 1 has ended its script"),
    ],
)
def test_what_one_rank_cannot_do_alone_raises_there(others, reason):
    text = ask(2, "only_here", others, gone=[rank for rank in range(2) if is_gone(rank, others)])[0]
    assert text.startswith("DistBackendError: all_gather along mesh dim 0, rank 0") and reason in text


def along_another_mesh_dim():
    from shardtensor import Replicate, Shard, distribute_tensor

    grid = mesh(2, 2)
    whole = torch.arange(1600.0).reshape(40, 40)
    x, y = (distribute_tensor(whole, grid, [p, Shard(1)], src_data_rank=None) for p in (Shard(0), Replicate()))
    x.full_tensor(), y.full_tensor()  # a transfer between all ranks, and a gather along the second mesh dim
    got = outcome((x if me() == 0 else y).full_tensor)
    time.sleep(1)
    return got


def test_ranks_that_wait_for_each_other_along_different_mesh_dims():
    texts = ask(4, "along_another_mesh_dim")
    assert all("DistBackendError" in str(text) for text in texts[:2]), texts
    assert any("the ranks wait for each other. Rank" in str(text) for text in texts[:2]), texts
    assert texts[2] == texts[3] and len(texts[2]) == 40, texts  # they had all they needed


def late_at_a_barrier():
    import torch.distributed as dist

    x, whole = cut(6)
    work = dist.barrier(async_op=True) if me() == 0 else None
    if me() == 2:
        time.sleep(1)
    if me() > 0:
        dist.barrier()
    got = outcome(x.full_tensor)
    if work:
        work.wait()
    if me() == 1:
        time.sleep(1)
    dist.barrier()
    return got, whole.tolist(), outcome((x * 2).full_tensor)


def test_a_barrier_that_all_reach_is_no_fault():
    for got, right, twice in ask(3, "late_at_a_barrier"):
        assert got == right and "Error" not in str(twice)


def late_after_a_fork():
    x, whole = cut(6)
    if me() == 0:
        child = os.fork()
        if child == 0:  # as a worker of a DataLoader begins and ends
            util._run_after_forkers()
            sys.excepthook(ValueError, ValueError("the worker's"), None)
            util._run_finalizers(0)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(1)
    return outcome(x.full_tensor), whole.tolist()


def test_the_end_of_a_child_is_not_the_end_of_its_rank():
    for got, right in ask(2, "late_after_a_fork"):
        assert got == right


# ---- after a fault ----


def made_anew(store):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    x, whole = cut(6)
    with Fails(1, rank=1):
        first = outcome(x.full_tensor)
    if me() == 1:
        after(SECONDS, lambda: count_of_failures() >= dist.get_world_size())
    rank, world = me(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    old = outcome(x.full_tensor)
    here = init_device_mesh("cpu", (world,))
    y, _ = cut(6, here)
    return first, old, outcome(y.full_tensor), outcome((y @ y.T).full_tensor), whole.tolist(), (whole @ whole.T).tolist()


def test_process_groups_can_be_made_anew_after_a_fault(tmp_path):
    for first, old, got, product, right, right_product in ask(3, "made_anew", str(tmp_path / "store")):
        assert "out of memory" in first
        assert old == got == right and product == right_product


def store_that_changes(path):
    import torch.distributed as dist

    rank, world = me(), dist.get_world_size()
    file = dist.FileStore(path, world)

    class Deleting(dist.Store):  # its methods are called from C++
        """Another rank deletes what it waits for just after this one has found it."""

        def check(self, keys):
            return any("/rank/" in key for key in keys) or file.check(keys)

        def clone(self):
            return self

    def to_file(name):
        return lambda _, *args: getattr(file, name)(*args)

    for name in ("set", "get", "add", "wait", "compare_set", "delete_key", "set_timeout"):
        setattr(Deleting, name, to_file(name))
    store = Deleting()  # kept: else C++ has no methods to call
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    x, whole = cut(6, mesh(world))
    x.full_tensor()
    if rank == 1:
        time.sleep(1)
    return outcome(x.full_tensor), whole.tolist()


def test_what_another_rank_deletes_meanwhile_is_not_waited_for(tmp_path):
    assert all(got == right for got, right in ask(2, "store_that_changes", str(tmp_path / "store")))


def parted(path):
    from oracle import checking

    x, whole = cut(6)
    torch.manual_seed(5)
    torch.nn.functional.dropout(x, 0.5)
    if me() == 1:
        torch.rand(1)
    torch.nn.functional.dropout(x, 0.5)
    if me() == 0:
        time.sleep(0.6)
    with open(f"{path}/{me()}", "w") as errors:  # warnings of C++ go past Python's
        before = os.dup(2)
        os.dup2(errors.fileno(), 2)
        got = outcome(x.full_tensor)
        os.dup2(before, 2)
    with checking(True):
        checked = outcome(lambda: torch.nn.functional.dropout(x, 0.5).to_local())
        torch.manual_seed(6)  # all alike again
        cured = outcome(lambda: (torch.nn.functional.dropout(x, 0.0) + x).to_local()), outcome(lambda: x.clone().uniform_().to_local())
    return got, whole.tolist(), checked, cured


def test_random_generators_that_have_parted_are_noticed(tmp_path):
    for got, right, checked, cured in ask(2, "parted", str(tmp_path)):
        assert got == right
        assert "the default random generators of the ranks along mesh dim 0 differ" in checked, checked
        assert not any(isinstance(c, str) for c in cured), cured
    assert any("default random generators differ" in (tmp_path / str(rank)).read_text() for rank in range(2))
