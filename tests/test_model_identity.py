"""Whose state it is: adapters, models that come and go, and weights that change in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from server import Local, Reply, Server, wait_until_written

TEXT = (
    "Monday: the Aurora left with timber. Tuesday: fog, nobody moved. Wednesday: the Petrel came "
    "in with herring and a torn sail. Which ship had a torn sail?"
)
PATHS = pytest.mark.parametrize("path", [{}, {"seed": 7}], ids=["batched", "sequential"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one architecture, a hybrid one, and two adapters for the first."""
    root = tmp_path_factory.mktemp("models")
    return {
        "a": tiny.save(root / "a", "qwen3"),
        "b": tiny.save(root / "b", "qwen3", seed=5),
        "hybrid": tiny.save(root / "hybrid", "lfm2"),
        "one": tiny.save_adapter(root / "one", 1, "qwen3"),
        "two": tiny.save_adapter(root / "two", 2, "qwen3"),
    }


def is_miss(reply: Reply) -> bool:
    return reply.n_cached == 0


def is_hit(reply: Reply) -> bool:
    return reply.n_cached == reply.n_prompt - 1


def uncached(folder: Path, **more: Any) -> str:
    """What a server without a cache answers."""
    with Local(folder, "none", "--prompt-cache-bytes", "0") as server:
        return server.chat(TEXT, **more).text


# ---- adapters


@PATHS
def test_adapters_of_one_model_never_share(
    folders: dict[str, Path], tmp_path: Path, path: dict[str, int]
) -> None:
    """An adapter changes keys and values: the state of another one gives nonsense."""
    model = {"model": str(folders["a"]), **path}
    choices = [{}, *({"adapters": str(folders[name])} for name in ("one", "two"))]
    with Local(folders["a"], "none", "--prompt-cache-bytes", "0") as server:
        right = [server.chat(TEXT, **model, **choice).text for choice in choices]
    assert len(set(right)) == 3
    with Local(folders["a"], tmp_path / "cache") as server:
        new = [server.chat(TEXT, **model, **choice) for choice in choices]
        known = [server.chat(TEXT, **model, **choice) for choice in choices]
    with Local(folders["a"], tmp_path / "cache") as server:
        restarted = [server.chat(TEXT, **model, **choice) for choice in choices]
    assert [[r.text for r in replies] for replies in (new, known, restarted)] == [right] * 3
    assert all(map(is_miss, new))
    assert all(map(is_hit, [*known, *restarted]))


def test_the_servers_own_adapter_is_part_of_its_model(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Started with another --adapter-path, it must not find what it stored before."""
    found = []
    for name in ("one", "two", "one"):
        flags = ("--adapter-path", str(folders[name]))
        with Local(folders["a"], tmp_path / "cache", *flags) as server:
            found.append(server.chat(TEXT))
    assert is_miss(found[0])
    assert is_miss(found[1])
    assert is_hit(found[2])
    assert found[0].text == found[2].text != found[1].text


def test_an_adapter_trained_on_in_place_is_another_one(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Training writes to the same folder again and again."""
    adapter = tiny.save_adapter(tmp_path / "adapter", 1, "qwen3")
    flags = ("--adapter-path", str(adapter))
    with Local(folders["a"], tmp_path / "cache", *flags) as server:
        before = server.chat(TEXT)
    trained = tiny.save_adapter(tmp_path / "trained", 8, "qwen3")
    (trained / "adapters.safetensors").replace(adapter / "adapters.safetensors")
    with Local(folders["a"], tmp_path / "cache", *flags) as server:
        after = server.chat(TEXT)
    assert is_miss(after)
    assert after.text != before.text


# ---- models that come and go


@pytest.fixture(scope="module")
def swapped(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Reply]]:
    """Replies of each model in turn, in one server, swapped back and forth, and after kill -9."""
    root = tmp_path_factory.mktemp("swapped")
    names = ("a", "b", "hybrid")
    found: dict[str, list[Reply]] = {name: [] for name in names}
    with Server(folders["a"], root / "cache", root / "log") as server:
        for name in (*names, *names):
            found[name].append(server.chat(TEXT, model=str(folders[name])))
        wait_until_written(root / "cache")
        server.kill()
    with Server(folders["b"], root / "cache", root / "log") as server:
        for name in names:
            found[name].append(server.chat(TEXT, model=str(folders[name])))
    return found


@pytest.mark.parametrize("name", ["a", "b", "hybrid"])
def test_a_models_prompts_wait_for_it_to_come_back(
    folders: dict[str, Path], swapped: dict[str, list[Reply]], name: str
) -> None:
    """Clients of two models take turns: each swap, and each restart, would start cold."""
    first, again, restarted = swapped[name]
    assert is_miss(first)
    assert is_hit(again)
    assert is_hit(restarted)
    assert {r.text for r in swapped[name]} == {uncached(folders[name])}


def test_models_in_one_directory_answer_each_in_its_own_words(
    swapped: dict[str, list[Reply]],
) -> None:
    """If they all answered alike, a hit in another's state would go unnoticed."""
    assert len({replies[0].text for replies in swapped.values()}) == 3


def test_a_model_that_fails_to_load_costs_the_others_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """It takes the place of the one in memory, which has to be loaded and found again."""
    empty = tmp_path / "empty"
    empty.mkdir()
    with Local(folders["a"], tmp_path / "cache") as server:
        first = server.chat(TEXT)
        assert server.post({"messages": [], "model": str(empty)}).status == 400
        body = {"messages": [{"role": "user", "content": TEXT}], "model": str(empty)}
        assert server.post(body).status == 404
        again = server.chat(TEXT)
    assert is_hit(again)
    assert again.text == first.text


# ---- weights that change in place


@PATHS
def test_new_weights_under_an_old_name_find_nothing(tmp_path: Path, path: dict[str, int]) -> None:
    """Same path, same sizes: the old state would answer for the new model."""
    model = tiny.save(tmp_path / "model", "qwen3")
    with Local(model, tmp_path / "cache") as server:
        old = server.chat(TEXT, **path)
        assert is_hit(server.chat(TEXT, **path))
    tiny.save(model, "qwen3", seed=4, part=0.3)
    with Local(model, tmp_path / "cache") as server:
        new = server.chat(TEXT, **path)
        known = server.chat(TEXT, **path)
    assert is_miss(new)
    assert is_hit(known)
    assert new.text == known.text == uncached(model, **path)
    assert new.text != old.text


def test_one_tensor_retrained_finds_nothing(tmp_path: Path) -> None:
    """The smallest change that there is, and the answer is another one."""
    model = tiny.save(tmp_path / "model", "qwen3")
    with Local(model, tmp_path / "cache") as server:
        server.chat(TEXT)
    path = str(model / "model.safetensors")
    weights = mx.load(path)
    name = "model.layers.1.self_attn.v_proj.weight"
    weights[name] = weights[name] * -1.0
    mx.eval(weights)
    mx.save_safetensors(path, weights)
    with Local(model, tmp_path / "cache") as server:
        reply = server.chat(TEXT)
    assert is_miss(reply)
    assert reply.text == uncached(model)


def test_weights_that_change_under_a_server_are_never_mixed(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The old ones are in memory until the model is loaded again; either way the answer is
    that of the weights in use.
    """
    model = tiny.save(tmp_path / "model", "qwen3")
    names = {"model": str(model)}
    with Local(model, tmp_path / "cache") as server:
        old = server.chat(TEXT, **names)
        tiny.save(model, "qwen3", seed=4, part=0.3)
        # Whose state it would be is unknown: a miss, and nothing is stored.
        replaced = server.chat(TEXT, **names)
        server.chat(TEXT, model=str(folders["b"]))
        new = server.chat(TEXT, **names)
        known = server.chat(TEXT, **names)
    assert replaced.text == old.text
    assert is_miss(replaced)
    assert is_miss(new)
    assert is_hit(known)
    assert new.text == known.text == uncached(model)


@pytest.mark.parametrize("dtypes", [(mx.bfloat16, mx.float32), (mx.float16, mx.bfloat16)])
def test_another_dtype_under_an_old_name_finds_nothing(
    tmp_path: Path, dtypes: tuple[mx.Dtype, mx.Dtype]
) -> None:
    """Upstream's batches cast in silence: state of another precision would enter the answer."""
    model = tmp_path / "model"
    for dtype in dtypes:
        tiny.save(model, "qwen3", dtype=dtype)
        with Local(model, tmp_path / "cache") as server:
            first, again = server.chat(TEXT), server.chat(TEXT)
        assert is_miss(first)
        assert is_hit(again)
        assert first.text == again.text == uncached(model)


def test_another_draft_model_finds_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its layers' state is part of what is stored."""
    target, drafts = folders["a"], (folders["a"], folders["b"])
    with Local(target, tmp_path / "cache") as server:
        right = server.chat(TEXT).text
        for draft in drafts:
            first, again = (server.chat(TEXT, draft_model=str(draft)) for _ in range(2))
            assert is_miss(first)
            assert is_hit(again)
            assert first.text == again.text == right
