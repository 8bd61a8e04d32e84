"""Checkpoints of leaves that are cut over a tensor axis: whole leaves in the files, the same bits at any degree."""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import sliced_states as sliced
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_turns, in_turns

import fzero as fz
from fzero.checkpoint import manifest
from fzero.state.sharded import map_trees
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks


def saved(rank: int, folder: str, leaves: sliced.Shapes, over: sliced.Over, policy: str, beside: bool) -> Any:
    dtype = torch.float64 if policy == "float64" else torch.float32
    step = sliced.step_over(over, leaves, sliced.POLICIES[policy])
    state = sliced.trained(step, sliced.params(leaves, dtype), keeps_grads=beside)
    if beside:
        fz.save_async(folder, state, extra={"seen": 3}).wait()
    else:
        fz.save(folder, state, extra={"seen": 3})
    return sliced.whole(state)


def loaded(rank: int, folder: str, leaves: sliced.Shapes, over: sliced.Over | None, policy: str, lossy: bool) -> Any:
    state = fz.load(folder, sliced.step_over(over, leaves, sliced.POLICIES[policy]), lossy=lossy)
    assert state.step == 2
    return sliced.whole(state)


@st.composite
def moves(draw: st.DrawFn, blocks: bool = False) -> tuple[sliced.Shapes, sliced.Over, sliced.Over | None]:
    leaves = draw(sliced.shapes(blocks=blocks))
    overs = sliced.overs(leaves, blocks=blocks)
    return leaves, draw(overs), draw(st.one_of(st.none(), overs))


def check(move: Any, policy: str, beside: bool = False, **run: Any) -> None:
    leaves, first, second = move
    with tempfile.TemporaryDirectory() as folder:
        want, *others = run_ranks(
            functools.partial(saved, folder=folder, leaves=leaves, over=first, policy=policy, beside=beside),
            first.ranks,
            **run,
        )
        for other in others:
            sliced.same_bits(other, want)
        load = functools.partial(loaded, folder=folder, leaves=leaves, over=second, policy=policy, lossy=False)
        for got in run_ranks(load, second.ranks if second is not None else 1, **run):
            sliced.same_bits(got, want)


@pytest.mark.usefixtures("hazards")
@given(move=moves(), policy=st.sampled_from(sliced.ELEMENTWISE), beside=st.booleans())
def test_saved_in_any_cut_and_loaded_in_any_other(move: Any, policy: str, beside: bool) -> None:
    check(move, policy, beside)


@pytest.mark.usefixtures("hazards")
@given(move=moves(blocks=True), policy=st.sampled_from(["8-bit", "4-bit"]))
def test_blocks_that_stay_together_are_loaded_to_the_bit(move: Any, policy: str) -> None:
    check(move, policy)


LEAVES = ((6, 5), (7,), (3, 4))
CUT = (sliced.Cut(1), sliced.Cut(None), sliced.Cut(0))
OVERS = (sliced.Over(1, 2, 0, CUT), sliced.Over(2, 2, 3, CUT), sliced.Over(2, 2, 4, CUT), sliced.Over(2, 2, 1, CUT))


@in_turns(8, "on processes, as on threads")
@pytest.mark.parametrize("over", OVERS)
def test_on_real_processes(over: sliced.Over) -> None:
    check((LEAVES, over, sliced.Over(1, 3, 0, (sliced.Cut(0), sliced.Cut(0), sliced.Cut(None)))), "exact", True)
    other = sliced.Over(2, 2, 3, (sliced.Cut(0), sliced.Cut(0), sliced.Cut(None)))
    check((LEAVES, over, other), "compact24", over.stage == 3, backend="processes")


def copies_that_differ(rank: int, folder: str, over: sliced.Over, odd: int, swaps: bool) -> Any:
    """Whether a leaf that is not cut is another one on a rank, and what savers and fz.convert say of it."""
    step, differs = sliced.step_over(over, LEAVES, None), False
    state = sliced.trained(step, sliced.params(LEAVES))

    def changed(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0) if swaps else x + 1

    if rank == odd:
        moments = map_trees(
            lambda tree: tree.over({name: own.clone() for name, own in tree.buffers.items()}), state.moments
        )
        own = moments.mu["blocks.0.w1"]
        differs = not torch.equal(own, changed(own))  # of some cuts it has none of the leaf
        own.copy_(changed(own))
        state = state.replace(moments=moments)
    said = list[str]()
    for save in (
        lambda: fz.save(folder, state),
        lambda: fz.compat.save_dcp(folder, state),
        lambda: fz.convert(state, sliced.step_over(None, LEAVES, None)),
    ):
        try:
            save()
        except (OSError, ValueError) as error:
            said.append(str(error))
        else:
            said.append("")
    return differs, said


@in_turns(4)
@pytest.mark.parametrize(("swaps", "over"), by_turns([False, True], OVERS))
def test_copies_that_differ_over_the_tensor_axis_are_refused_on_every_rank(
    tmp_path: Path, over: sliced.Over, swaps: bool
) -> None:
    for odd in range(over.ranks):
        fn = functools.partial(copies_that_differ, folder=str(tmp_path), over=over, odd=odd, swaps=swaps)
        found = run_ranks(fn, over.ranks)
        refused = found[odd][0]
        for _, said in found:
            assert all(("different values of moments.mu" in words) == refused for words in said), said


def loads_in_part(rank: int, folder: str, over: sliced.Over | None) -> Any:
    """A leaf of another shape and one more: what is there is loaded, the rest is what `like` has."""
    like = {name: torch.full_like(x, 7.0) for name, x in sliced.params(LEAVES).items()}
    like |= {"blocks.0.w1": torch.full((4,), 7.0, dtype=torch.float64)}
    step = sliced.step_over(over, LEAVES, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sliced.whole(fz.load(folder, step, like=like, lenient=True))[:2]


def test_some_leaves_are_loaded_and_others_not(tmp_path: Path) -> None:
    fn = functools.partial(saved, folder=str(tmp_path), leaves=LEAVES, over=OVERS[1], policy="float64", beside=False)
    params, moments, *_ = run_ranks(fn, 4)[0]
    want = {**params, "blocks.0.w1": torch.full((4,), 7.0, dtype=torch.float64)}
    for over in (None, *OVERS):
        for got, kept in run_ranks(
            functools.partial(loads_in_part, folder=str(tmp_path), over=over), over.ranks if over else 1
        ):
            assert_trees_equal(got, want)
            assert_trees_equal(kept.mu, {**moments.mu, "blocks.0.w1": torch.zeros(4, dtype=torch.float64)})


def restored(rank: int, folder: str, over: sliced.Over) -> Any:
    kept = fz.Checkpoints(folder, keep=2)
    step = sliced.step_over(over, LEAVES, None)
    found = kept.restore(step)
    state = step.init(sliced.params(LEAVES)) if found is None else found[0]
    for _ in range(3):
        state, _ = step(state, torch.ones(2))
        kept.save_async(state, extra={"seen": state.step}).wait()
    return sliced.whole(state), None if found is None else found[1]


def test_the_last_checkpoints_of_runs_of_other_degrees(tmp_path: Path) -> None:
    first = run_ranks(functools.partial(restored, folder=str(tmp_path), over=OVERS[1]), 4)
    assert all(extra is None for _, extra in first)
    newest = sorted(tmp_path.iterdir())[-1]
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="newer ones are damaged"):
        second = run_ranks(functools.partial(restored, folder=str(tmp_path), over=OVERS[0]), 2)
    assert all(extra == {"seen": 2} for _, extra in second)
    assert len(list(tmp_path.iterdir())) == 2


def test_scales_of_other_elements_are_rounded_only_where_it_is_asked_for(tmp_path: Path) -> None:
    leaves = ((5, 30), (40,))
    over, other = (sliced.Over(1, 2, 0, (sliced.Cut(dim), sliced.Cut(None))) for dim in (0, 1))
    want = run_ranks(
        functools.partial(saved, folder=str(tmp_path), leaves=leaves, over=over, policy="8-bit", beside=False), 2
    )[0]
    for second in (other, None):
        ranks = second.ranks if second is not None else 1
        load = functools.partial(loaded, folder=str(tmp_path), leaves=leaves, over=second, policy="8-bit")

        def refused(rank: int, load: Any = load) -> None:
            with pytest.raises(
                ValueError, match=r"state.moments.mu of leaf 'blocks.0.w0' is stored as 8-bit, with a scale"
            ):
                load(rank, lossy=False)

        run_ranks(refused, ranks)
        for got in run_ranks(functools.partial(load, lossy=True), ranks):
            sliced.same_bits(got[0], want[0])
            assert_trees_close(got[1].mu, want[1].mu, rtol=0.05, atol=1e-3)


def test_a_checkpoint_of_before_there_were_slices(tmp_path: Path) -> None:
    step = sliced.step_over(None, LEAVES, None)
    state = sliced.trained(step, sliced.params(LEAVES))
    fz.save(tmp_path, state)
    path = tmp_path / "manifest.json"
    fields = json.loads(path.read_text())["checkpoint"] | {"version": 2}
    for leaf in fields["leaves"]:
        assert leaf.pop("sliced") is None
    for file in fields["files"]:
        file["pieces"] = [piece[:7] for piece in file["pieces"]]
    body = f'"checkpoint": {json.dumps(fields)}}}\n'.encode()
    path.write_bytes(manifest._head(body) + body)
    sliced.same_bits(sliced.whole(fz.load(tmp_path, step)), sliced.whole(state))


@in_turns(3)
@pytest.mark.parametrize("over", OVERS)
def test_each_element_is_written_once(tmp_path: Path, over: sliced.Over) -> None:
    save = functools.partial(saved, folder=str(tmp_path), leaves=LEAVES, over=over, policy="float64", beside=False)
    run_ranks(save, over.ranks)
    found = manifest.read_manifest(str(tmp_path))
    written: dict[tuple[int, int], int] = {}
    for piece in [piece for file in found.files for piece in file.pieces]:
        where = piece.item, piece.leaf
        written[where] = written.get(where, 0) + piece.stop - piece.start
    for number, kept in enumerate(found.items):
        for leaf in kept.formats:
            assert written[number, leaf] == torch.Size(LEAVES[leaf]).numel()
    assert {piece.leaf for file in found.files for piece in file.pieces if piece.rank} == {0, 2}


def test_what_a_module_says_of_its_params_is_kept(tmp_path: Path) -> None:
    """A plan of styles cuts by it, also where a checkpoint is loaded without `like`."""
    _, params = fz.functional(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Embedding(6, 4)))
    step = fz.train_step(lambda p, x: sum(w.sum() for w in p.values()) * x, fz.sgd(0.1))
    fz.save(tmp_path, step.init(params))
    found = fz.gather(fz.load(tmp_path, step).params)
    assert params.hints and found.hints == params.hints
